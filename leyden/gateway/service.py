"""The gateway without HTTP: rollouts, attempts, keys and calls, and the background work that keeps them honest."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from leyden.errors import PreflightError
from leyden.gateway import keys
from leyden.gateway.attempts import Call, LiveAttempt, LiveAttempts
from leyden.gateway.calls import CallMaker, Counters
from leyden.gateway.dialects.base import Answer, Asked, Choice, Message, ModelRequest, Refers
from leyden.gateway.engines.client import EngineClient
from leyden.gateway.engines.probe import Probes
from leyden.gateway.engines.registry import EngineRegistry
from leyden.gateway.errors import Conflict, Forbidden, Refused, StoreUnavailable, Unauthorized
from leyden.gateway.generation import Generator
from leyden.gateway.keys import Action, KeyKind, Principal, Target
from leyden.gateway.lifecycle import Phase, name_attempt
from leyden.gateway.options import GatewayOptions, engine_key
from leyden.gateway.pause import Pause
from leyden.gateway.renderer import ModelRenderer
from leyden.gateway.signals import Signal, wait_until
from leyden.gateway.store.address import shown
from leyden.gateway.store.base import Store, open_store
from leyden.gateway.store.records import Changed, Ended, KeyOwner, StoredCall
from leyden.gateway.takings import Takings
from leyden.schema import (
    TERMINAL_STATES,
    AttemptRef,
    Claim,
    ClaimRequest,
    EngineModel,
    Heartbeat,
    HeartbeatReply,
    OutcomeReport,
    PhaseReport,
    RegisteredEngine,
    Rollout,
    RolloutCreate,
    StatusPatch,
    TerminalPage,
)

log = logging.getLogger("leyden.gateway")

_PATTERN = re.compile(r"[*?\[]")
MAX_CALLS = 8192
"""Calls held at once. Each costs a connection and its request in memory."""
COUNT_EVERY = 64
"""Calls after which those held are counted again: it takes a look at every attempt."""
FOLLOW_SECONDS = 10.0
TAKE_OVER_TRIES = 50
TAKE_OVER_SECONDS = 5.0
"""How long a repeated request waits to learn whether the gateway that recorded its answer delivers it."""
SWEEP_SECONDS = 0.5
LAG_SECONDS = 0.1


class Gateway:
    """Open with `await Gateway.open(options)`; `close` when done."""

    def __init__(self, options: GatewayOptions, store: Store, renderer: ModelRenderer, key: str) -> None:
        self.options = options
        self.store = store
        self.renderer = renderer
        self.engines = EngineRegistry(options.model_name)
        self.pause = Pause(store)
        self.counters = Counters()
        self.live = LiveAttempts(store, renderer, self._revive)
        self.started_at = time.time()
        self.loop_lag = 0.0
        self.fault: str | None = None
        """Why the gateway can't be trusted any more: a background task ended."""
        self._admin = keys.digest(key)
        self._queue = Signal()
        self._terminal = Signal()
        self._takings = Takings()
        self._client = EngineClient(engine_key(options))
        self.probes = Probes(self._client, lambda: renderer.encode("1 2 3 4").tolist(), self.engines.lengths)
        self._generator = Generator(
            engines=self.engines,
            client=self._client,
            probes=self.probes,
            pause=self.pause,
            request_timeout=options.request_timeout_seconds,
        )
        self._maker = CallMaker(
            store=store,
            renderer=renderer,
            generator=self._generator,
            counters=self.counters,
        )
        self._background: list[asyncio.Task[None]] = []
        self._watching: set[asyncio.Task[None]] = set()
        """Calls whose clients went away, until they are done."""
        self._following = asyncio.Event()
        self._full = False
        """Whether `MAX_CALLS` was reached when calls were last counted."""

    @classmethod
    async def open(cls, options: GatewayOptions, key: str) -> Gateway:
        """Open the store and load the tokenizer; `key` is the admin's.

        Raises:
            PreflightError: with one sentence.
        """
        store = await asyncio.to_thread(open_store, options.store)
        try:
            renderer = await asyncio.to_thread(ModelRenderer, options.model_folder)
            gateway = cls(options, store, renderer, key)
            await gateway.pause.load()
            await store.renew_all(time.time())
            await gateway._take_engines()
        except BaseException:
            store.close()
            raise
        for work in (gateway._sweep(), gateway._measure_lag(), gateway._follow()):
            task = asyncio.create_task(work)
            task.add_done_callback(gateway._background_ended)
            gateway._background.append(task)
        try:
            await asyncio.wait_for(gateway._following.wait(), FOLLOW_SECONDS)
        except TimeoutError:
            await gateway.close()
            raise PreflightError(f"the store {shown(options.store)} gives no notifications (LISTEN)") from None
        return gateway

    async def close(self) -> None:
        for task in [*self._background, *self._watching]:
            task.cancel()
        await asyncio.gather(*self._background, *self._watching, return_exceptions=True)
        for live in self.live.all():
            self.live.leave(live.info.rollout_id, live.info.attempt_id, Phase.ENDED)
        await self.probes.close()
        self._client.close()
        self.renderer.close()
        await asyncio.to_thread(self.store.close)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.fault = f"background work ended: {task.exception()!r}"
            log.critical("%s; restart the gateway", self.fault)

    # -- keys ----------------------------------------------------------------------------------------------------------

    async def identify(self, key: str | None) -> tuple[Principal, KeyOwner | None]:
        """Who holds this key.

        Raises:
            Unauthorized: nobody.
        """
        if key is None:
            raise Unauthorized("a key is needed: send Authorization: Bearer KEY or x-api-key: KEY")
        digest = keys.digest(key)
        if keys.same(digest, self._admin):
            return Principal(KeyKind.ADMIN), None
        owner = await self.store.key_owner(digest)
        if owner is None:
            raise Unauthorized("this key isn't known here")
        return Principal(KeyKind(owner.kind), owner.rollout_id, owner.attempt_id), owner

    async def authorize(self, key: str | None, action: Action, target: Target | None = None) -> Principal:
        """Identify and check rights; an attempt's own write that comes after its end is counted on it."""
        principal, owner = await self.identify(key)
        try:
            keys.authorize(
                principal, action, target, owner.phase if owner else None, owner.has_grader if owner else False
            )
        except Conflict:
            if owner is not None and owner.phase is Phase.ENDED:
                await self.store.count_late(owner.rollout_id, owner.attempt_id)
            raise
        return principal

    # -- rollouts ------------------------------------------------------------------------------------------------------

    async def create(self, items: Sequence[RolloutCreate], idempotency_key: str | None) -> list[Rollout]:
        out = await self.store.create_rollouts(items, idempotency_key)
        self._queue.notify()
        return out

    async def claim(self, request: ClaimRequest, gone: Callable[[], Awaitable[bool]]) -> list[Claim]:
        """Lease work, waiting for some if there is none. A controller that hung up meanwhile (`gone`) gets none."""
        deadline = time.monotonic() + request.wait_seconds
        while True:
            ticket = self._queue.ticket()
            claims = await self.store.claim(request)
            if claims or time.monotonic() >= deadline:
                return claims
            due = await self.store.next_due()
            soon = deadline if due is None else min(deadline, time.monotonic() + max(0.0, due - time.time()))
            await wait_until(ticket, soon)
            if await gone():
                return []

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Renew leases; for `wait_seconds`, wait for an attempt of this controller to be taken away."""
        with self._takings.watch(beat.controller_id) as taken:
            reply = await self.store.heartbeat(beat)
            if reply.lost or beat.wait_seconds == 0:
                return reply
            return HeartbeatReply(lost=await taken.wait(beat.wait_seconds))

    async def terminal(self, after: int, limit: int, wait_seconds: float, run: str | None) -> TerminalPage:
        """Ended rollouts from `after` on, waiting for one if there is none."""
        deadline = time.monotonic() + wait_seconds
        while True:
            ticket = self._terminal.ticket()
            page = await self.store.terminal(after, limit, run)
            if page.items or not await wait_until(ticket, deadline):
                return page

    async def patch(self, rollout_id: str, status: StatusPatch) -> Rollout:
        change = await self.store.patch(rollout_id, status)
        self._takings.note(change.ended)
        return self._changed(change)

    async def delete(self, rollout_id: str) -> None:
        self._take(await self.store.delete(rollout_id))

    async def report_phase(self, rollout_id: str, attempt_id: str, report: PhaseReport) -> None:
        await self.store.report_phase(rollout_id, attempt_id, report)
        self.live.leave(rollout_id, attempt_id, Phase.GRADING)

    async def report_outcome(self, rollout_id: str, attempt_id: str, report: OutcomeReport) -> Rollout:
        return self._changed(await self.store.report_outcome(rollout_id, attempt_id, report))

    async def release(self, controller_id: str) -> int:
        ended = await self.store.release(controller_id)
        self._take(ended)
        return len(ended)

    def _take(self, ended: Sequence[Ended]) -> None:
        """Attempts that ended without a word of their controllers."""
        self._takings.note(ended)
        self._ended(ended)

    def _changed(self, change: Changed) -> Rollout:
        self._ended(change.ended)
        if change.rollout.status.state in TERMINAL_STATES:
            self._terminal.notify()
        return change.rollout

    def _ended(self, ended: Sequence[Ended]) -> None:
        for item in ended:
            self.live.leave(item.rollout_id, item.attempt_id, Phase.ENDED, deleted=item.deleted)
        if any(e.requeued for e in ended):
            self._queue.notify()
        if any(not e.requeued for e in ended):
            self._terminal.notify()

    # -- engines -------------------------------------------------------------------------------------------------------

    async def register(self, models: Sequence[EngineModel]) -> None:
        """Take in engines or new versions of them; engines that aren't known yet are asked what they can do."""
        await self.store.upsert_models(models)
        await self._take_engines()
        new = {m.endpoint: m for m in models}
        await asyncio.gather(*(self.probes.learn(m) for m in new.values()))

    async def _take_engines(self) -> None:
        self.engines.set(await self.store.models())
        endpoints = {m.endpoint for m in self.engines.all()}
        self.probes.keep(endpoints)
        self._client.keep(endpoints)
        for engine in self.engines.all():
            self.probes.begin(engine)

    def registered(self) -> list[RegisteredEngine]:
        """The engines, with what is known about each."""
        out = []
        for engine in self.engines.all():
            queue = self.engines.queue(engine)
            out.append(
                RegisteredEngine(
                    **engine.model_dump(),
                    capability=self.probes.known.get(engine.endpoint),
                    running=queue.running,
                    waiting=queue.waiting,
                )
            )
        return out

    async def remove_engines(self, model: str | None = None, endpoint: str | None = None) -> None:
        """Forget engines: those of a model, at an endpoint, or all. Calls that they work on go on."""
        await self.store.remove_models(model, endpoint)
        await self._take_engines()

    def max_model_len(self) -> int | None:
        engine = self.engines.max_model_len()
        return engine if engine is not None else self.renderer.max_model_len

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def attempt_for_call(self, key: str | None, target: Target | None) -> LiveAttempt:
        """The attempt that a model call belongs to: the key's own, or the one that the path names."""
        digest = keys.digest(key) if key is not None and target is None else None
        known = self.live.by_key(digest) if digest is not None else None
        if known is not None:
            return known
        principal = await self.authorize(key, Action.MODEL_CALL, target)
        if principal.kind is KeyKind.ADMIN and target is None:
            raise Forbidden("the admin key names no attempt: use /proxy/rollout/ID/attempt/A/mode/train/openai/v1")
        rollout_id = target.rollout_id if target else principal.rollout_id or ""
        attempt_id = (target.attempt_id if target else principal.attempt_id) or ""
        live = await self.live.get(rollout_id, attempt_id)
        if live.phase is not Phase.AGENT:
            await self.store.count_late(rollout_id, attempt_id)
            who = name_attempt(rollout_id, attempt_id)
            raise Conflict(f"{who} takes no more model calls: its agent phase has ended")
        if digest is not None:
            self.live.note_key(digest, live)
        return live

    async def model_names(self, principal: Principal, target: Target | None) -> list[str]:
        """The served model, and names that the run's routes lead elsewhere."""
        rollout_id = target.rollout_id if target else principal.rollout_id
        attempt_id = (target.attempt_id if target else None) or principal.attempt_id
        names = [self.options.model_name]
        if rollout_id is not None and attempt_id is not None:
            info = await self.store.attempt_info(rollout_id, attempt_id)
            names += [r.match for r in info.capture.routes if not _PATTERN.search(r.match)]
        return list(dict.fromkeys(names))

    async def referred(self, live: LiveAttempt, refers: Refers) -> tuple[dict[str, Message], Asked | None]:
        """What the named calls of the attempt said, and what the one that is continued was asked.

        Answers are in memory, as is what the last calls were asked; for an older one its request alone is read.
        """
        names = [*refers.answers, *([refers.continued] if refers.continued is not None else [])]
        nodes = {name: live.forest.nodes.get(name) for name in names}
        answers = {n: node.answer for n, node in nodes.items() if node is not None and node.finish_reason != "error"}
        if refers.continued is None or refers.continued not in answers:
            return answers, None
        asked = live.asked.get(refers.continued)
        if asked is None:
            info = live.info
            asked = await self.store.asked(info.rollout_id, info.attempt_id, refers.continued)
        return answers, asked

    async def count_tokens(self, live: LiveAttempt, request: ModelRequest) -> int:
        """How many tokens the prompt of this request has. Nothing is recorded."""
        return len((await self._maker.prompt(live, request)).ids)

    async def begin_call(self, live: LiveAttempt, request: ModelRequest, dialect: str, fingerprint: bytes) -> Call:
        """Start a call, or take over the one that an identical request left behind.

        Raises:
            Refused: too many calls are under way.
        """
        self.counters.requests += 1
        while (left_behind := live.take_over(fingerprint)) is not None:
            if await self._is_left_behind(live, left_behind):
                self.counters.replayed += 1
                return left_behind
        if self._full or self.counters.requests % COUNT_EVERY == 0:
            self._full = sum(len(a.calls) for a in self.live.all()) >= MAX_CALLS
        if self._full:
            raise Refused(f"the gateway already holds {MAX_CALLS} calls; try again later", status=503)
        call_id = uuid.uuid4().hex
        seq = live.take_seq()
        task = asyncio.create_task(self._maker.make(live, request, dialect, call_id, fingerprint, seq))
        call = Call(call_id, fingerprint, int(time.time()), task)
        live.calls.add(call)
        return call

    async def _is_left_behind(self, live: LiveAttempt, call: Call) -> bool:
        """Whether nobody gets this answer elsewhere. Where another gateway recorded it, it may be on its way there."""
        if not self.store.shared or not call.task.done():
            return True
        for _ in range(TAKE_OVER_TRIES):
            taken = await self.store.take_over(call.call_id)
            if taken:
                return True
            if taken is False:
                break
            await asyncio.sleep(TAKE_OVER_SECONDS / TAKE_OVER_TRIES)
        live.drop(call)
        return False

    def abandon(self, live: LiveAttempt, call: Call) -> None:
        """The client went away: keep the call for a while, in case it comes back for it."""

        def count() -> None:
            self.counters.abandoned += 1

        live.orphan(call, self.options.replay_grace_seconds, count)
        if self.store.shared and call.recorded_at is None and call.expiry is not None:
            watch = asyncio.create_task(self._tell_abandoned(call))
            self._watching.add(watch)
            watch.add_done_callback(self._watching.discard)

    async def _tell_abandoned(self, call: Call) -> None:
        """Let other gateways know, once it is recorded, that the client of an answer went away without it."""
        await asyncio.wait({call.task})
        if call.expiry is not None and not call.failed():
            try:
                await self.store.abandon([c.call_id for c in call.task.result().choices])
            except StoreUnavailable as e:
                log.warning("call %s was left by its client, which others can't be told: %s", call.call_id, e.message)

    async def delivered(self, live: LiveAttempt, call: Call) -> None:
        """The client has the whole answer."""
        live.calls.discard(call)
        ids = [c.call_id for c in call.task.result().choices]
        nodes = [node for i in ids if (node := live.forest.nodes.get(i)) is not None]
        for node in nodes:
            node.delivered = True
        try:
            await self.store.mark_delivered(live.info.rollout_id, live.info.attempt_id, ids)
        except StoreUnavailable as e:
            # A later call that continues this one proves its delivery, and is then marked together with it.
            for node in nodes:
                node.delivered = False
            log.error("call %s was delivered but couldn't be marked so: %s", call.call_id, e.message)

    def _revive(self, live: LiveAttempt, stored: StoredCall) -> None:
        """Let a client that never got this recorded answer fetch it by asking again, after a restart or elsewhere."""
        if stored.response is None or stored.requested.get("n", 1) != 1:
            return
        said = stored.response
        choice = Choice(
            call_id=stored.call_id,
            text=said.get("content") or "",
            reasoning=said.get("reasoning_content"),
            tool_calls=said.get("tool_calls") or [],
            finish_reason="length" if stored.finish_reason == "length" else "stop",
            completion_tokens=len(np.frombuffer(stored.response_ids, "<i4")),
        )
        answer = Answer(
            call_id=stored.call_id,
            created=int(stored.started_at),
            model=stored.model,
            choices=[choice],
            prompt_tokens=len(np.frombuffer(stored.prompt_ids, "<i4")),
        )

        async def known() -> Answer:
            return answer

        call = Call(
            stored.call_id,
            stored.fingerprint,
            answer.created,
            asyncio.create_task(known()),
            recorded_at=min(stored.ended_at, time.time()),
        )
        live.calls.add(call)
        self.abandon(live, call)

    # -- background ----------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """End attempts whose lease ran out, and let go of idle ones."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                due = await self.store.next_expiry()
                if due is not None and due <= time.time():
                    self._take(await self.store.expire(time.time()))
                await self._forget()
            except StoreUnavailable as e:
                log.error("can't end expired attempts: %s", e.message)
            self.live.drop_idle()

    async def _forget(self) -> None:
        """End what was abandoned, delete what ended long ago: a little in each sweep."""
        days = self.options.retention_days
        if days is not None:
            before = time.time() - days * 24 * 3600
            self._ended(await self.store.end_abandoned(before))
            await self.store.delete_old(before)

    async def _follow(self) -> None:
        """Do here what other gateways on the same store changed."""
        try:
            async for note in self.store.notes():
                self._following.set()
                try:
                    await self._take_in(note)
                except StoreUnavailable as e:
                    log.error("can't follow what other gateways changed: %s", e.message)
        finally:
            self._following.set()

    async def _take_in(self, note: list[str]) -> None:
        """Act on a note of `Store.notes`; the empty one may stand for any."""
        match note:
            case ["left", rollout_id, attempt_id, phase, *deleted]:
                self.live.leave(rollout_id, attempt_id, Phase(phase), deleted=bool(deleted))
            case ["taken", controller_id, rollout_id, attempt_id]:
                self._takings.add(controller_id, AttemptRef(rollout_id=rollout_id, attempt_id=attempt_id))
            case []:
                await self.live.check()
        what = note[0] if note else None
        if what in (None, "queue"):
            self._queue.notify()
        if what in (None, "terminal"):
            self._terminal.notify()
        if what in (None, "models"):
            await self._take_engines()
        if what in (None, "meta"):
            await self.pause.load()

    async def _measure_lag(self) -> None:
        """How late the event loop runs what is due: the worst of the last few seconds, decaying."""
        while True:
            due = time.monotonic() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.loop_lag = max(time.monotonic() - due, self.loop_lag * 0.95)

    async def stats(self) -> dict[str, Any]:
        out = await self.store.stats()
        live = self.live.all()
        return {
            **out,
            "in_flight": sum(len(a.calls) for a in live),
            "at_engines": self.pause.inflight,
            "waiting_for_engines": self.engines.waiting(),
            "waiting_for_taker": sum(len(o) for a in live for o in a.orphans.values()),
            "live_attempts": len(live),
            "since_start": {
                "started_at": self.started_at,
                "requests": self.counters.requests,
                "replayed": self.counters.replayed,
                "abandoned": self.counters.abandoned,
                "nan_logprobs": self.counters.nan_logprobs,
                "engine_retries": self._generator.tries.retries,
                "engine_aborts": self._generator.tries.aborts,
            },
            "loop_lag_seconds": round(self.loop_lag, 4),
        }

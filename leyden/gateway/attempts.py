"""What the gateway holds in memory of running attempts: conversations, calls under way, answers waiting for a taker.

Everything here can be rebuilt from the store, and is dropped when an attempt ends or has been idle for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from leyden.gateway.canonical import request_keys
from leyden.gateway.conversation import Forest, Link, Request
from leyden.gateway.dialects.base import Answer, Asked
from leyden.gateway.errors import NotFound
from leyden.gateway.lifecycle import Phase
from leyden.gateway.memory import Memory
from leyden.gateway.renderer import ModelRenderer
from leyden.gateway.store.base import Store
from leyden.gateway.store.raw import message_ref
from leyden.gateway.store.records import AttemptInfo, StoredCall
from leyden.schema import CallKind

IDLE_SECONDS = 900
"""An attempt without calls for so long leaves memory; its next call brings it back."""

MAX_LIVE = 4096
"""Attempts kept in memory; of more, idle ones leave and are loaded again when they are needed."""


ASKED_KEPT = 8
"""Conversations that are continued by naming their last call, and that begin alike, share their messages."""


@dataclass(slots=True, eq=False)
class Call:
    """A request under way, or an answer whose client went away and may come back for it."""

    call_id: str
    fingerprint: bytes
    created: int
    task: asyncio.Task[Answer]
    expiry: asyncio.TimerHandle | None = None
    recorded_at: float | None = None
    """When it was recorded, if it comes from the store: by this gateway before a restart, or by another one."""

    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclass(slots=True, eq=False)
class LiveAttempt:
    """A running attempt. `end` is final."""

    info: AttemptInfo
    forest: Forest = field(default_factory=Forest)
    bodies: Memory[list[bytes]] = field(default_factory=Memory)
    """Values of request bodies of late, and their hashes."""
    asked: OrderedDict[str, Asked] = field(default_factory=OrderedDict)
    """By call: what the last few were asked whose clients may name them instead of sending that again."""
    kinds: dict[str, str] = field(default_factory=dict)
    """By call: what it was for."""
    main_session: str | None = None
    """Session that the harness named with the first main call."""
    seen: int = 0
    """Ordinal up to which the attempt's recorded calls are here."""
    next_seq: int = 0
    phase: Phase = Phase.AGENT
    key_hash: bytes | None = None
    """Of the agent key that is remembered for it."""
    deleted: bool = False
    calls: set[Call] = field(default_factory=set)
    orphans: dict[bytes, list[Call]] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def recorded(self, seq: int, first: int, last: int) -> None:
        """Note where this gateway's own call was put."""
        self.next_seq = max(self.next_seq, seq + 1)
        if first == self.seen + 1:
            self.seen = last

    def note_asked(self, call_id: str, asked: Asked) -> None:
        """Keep what a call was asked for clients that go on by naming it."""
        self.asked[call_id] = asked
        if len(self.asked) > ASKED_KEPT:
            self.asked.popitem(last=False)

    def take_seq(self) -> int:
        self.next_seq += 1
        return self.next_seq - 1

    def take_over(self, fingerprint: bytes) -> Call | None:
        """The call that an identical request began, if its client is gone and the grace time isn't over."""
        waiting = self.orphans.pop(fingerprint, [])
        while waiting:
            call = waiting.pop()
            if call.expiry is not None:
                call.expiry.cancel()
                call.expiry = None
            if not call.failed():
                if waiting:
                    self.orphans[fingerprint] = waiting
                return call
            self.drop(call)
        return None

    def orphan(self, call: Call, grace: float, on_abort: Callable[[], None]) -> None:
        """Keep a call whose client went away for `grace` seconds, then abort it."""
        if self.phase is not Phase.AGENT or call.failed():
            self.drop(call)
            return
        self.orphans.setdefault(call.fingerprint, []).append(call)

        def expire() -> None:
            waiting = self.orphans.get(call.fingerprint, [])
            if call not in waiting:
                return
            waiting.remove(call)
            if not waiting:
                del self.orphans[call.fingerprint]
            if not call.task.done():
                on_abort()
            self.drop(call)

        call.expiry = asyncio.get_running_loop().call_later(grace, expire)

    def drop(self, call: Call) -> None:
        """Forget a call, ending its work if it still runs."""
        self.calls.discard(call)
        call.task.cancel()
        if call.task.done() and not call.task.cancelled():
            call.task.exception()  # Read, so that an answer nobody came for isn't reported as an unseen error.

    def leave(self, phase: Phase, *, deleted: bool = False) -> None:
        """The agent phase is over: whatever its calls still do is aborted at once."""
        self.phase = phase
        self.deleted = deleted
        for waiting in self.orphans.values():
            for call in waiting:
                if call.expiry is not None:
                    call.expiry.cancel()
        self.orphans.clear()
        for call in list(self.calls):
            self.drop(call)


class LiveAttempts:
    """The running attempts that had calls lately, by (rollout, attempt)."""

    def __init__(
        self, store: Store, renderer: ModelRenderer, revive: Callable[[LiveAttempt, StoredCall], None]
    ) -> None:
        self._store = store
        self._renderer = renderer
        self._revive = revive
        self._live: dict[tuple[str, str], LiveAttempt] = {}
        self._loading: dict[tuple[str, str], asyncio.Task[LiveAttempt]] = {}
        self._by_key: dict[bytes, LiveAttempt] = {}
        """By the hash of an agent key that was checked."""
        self._left: dict[tuple[str, str], Phase] = {}
        """Attempts that left their agent phase while they were being loaded."""

    def __len__(self) -> int:
        return len(self._live)

    def peek(self, rollout_id: str, attempt_id: str) -> LiveAttempt | None:
        return self._live.get((rollout_id, attempt_id))

    def all(self) -> list[LiveAttempt]:
        return list(self._live.values())

    def by_key(self, key_hash: bytes) -> LiveAttempt | None:
        """The attempt of an agent key that was checked before, while it is in its agent phase.

        Only one gateway knows of every end at once; where others share the store, each call asks the store.
        """
        live = None if self._store.shared else self._by_key.get(key_hash)
        if live is None or live.phase is not Phase.AGENT:
            return None
        live.used = time.monotonic()
        return live

    def note_key(self, key_hash: bytes, live: LiveAttempt) -> None:
        """Remember that this agent key, just checked, is `live`'s."""
        if live.phase is Phase.AGENT and self.peek(live.info.rollout_id, live.info.attempt_id) is live:
            self._by_key[key_hash] = live
            live.key_hash = key_hash

    async def get(self, rollout_id: str, attempt_id: str) -> LiveAttempt:
        """The attempt, brought back from the store if need be. Concurrent callers share one loading."""
        key = (rollout_id, attempt_id)
        live = self._live.get(key)
        if live is None:
            loading = self._loading.get(key)
            if loading is None:
                loading = self._loading[key] = asyncio.create_task(self._load(rollout_id, attempt_id))
                loading.add_done_callback(lambda _: self._forget_loading(key))
            live = await asyncio.shield(loading)
        elif self._store.shared:
            await self._load_new(live)
        live.used = time.monotonic()
        return live

    def _forget_loading(self, key: tuple[str, str]) -> None:
        self._loading.pop(key, None)
        self._left.pop(key, None)

    async def _load(self, rollout_id: str, attempt_id: str) -> LiveAttempt:
        info = await self._store.attempt_info(rollout_id, attempt_id)
        live = LiveAttempt(info, phase=info.phase)
        if info.phase is Phase.AGENT:
            await self._load_new(live)
            live.phase = self._left.pop((rollout_id, attempt_id), live.phase)
        if live.phase is Phase.AGENT:
            self._live[rollout_id, attempt_id] = live
        return live

    async def _load_new(self, live: LiveAttempt) -> None:
        """Take in the calls that were recorded since the last time, by whichever gateway."""
        async with live.loading:
            stored = await self._store.attempt_calls(live.info.rollout_id, live.info.attempt_id, after=live.seen)
            if not stored:
                return
            own = {c.call_id for c in live.calls}
            new = [c for c in stored if c.call_id.partition("-")[0] not in own and c.call_id not in live.forest.nodes]
            await self._renderer.run(lambda: grow(live.forest, new))
            live.kinds.update((c.call_id, c.kind) for c in new)
            live.seen = max(c.ordinal for c in stored)
            live.next_seq = max(live.next_seq, max(c.seq for c in stored) + 1)
            for call in new:
                if not call.delivered and call.untrainable is None:
                    self._revive(live, call)

    def leave(self, rollout_id: str, attempt_id: str, phase: Phase, *, deleted: bool = False) -> None:
        """Note that an attempt left its agent phase, or was deleted."""
        key = (rollout_id, attempt_id)
        if key in self._loading:
            self._left[key] = phase
        live = self._let_go(key)
        if live is not None:
            live.leave(phase, deleted=deleted)

    def _let_go(self, key: tuple[str, str]) -> LiveAttempt | None:
        live = self._live.pop(key, None)
        if live is not None and live.key_hash is not None:
            self._by_key.pop(live.key_hash, None)
        return live

    async def check(self) -> None:
        """Ask the store which attempts are still in their agent phase, after news may have been missed."""
        for rollout_id, attempt_id in list(self._live):
            try:
                phase = (await self._store.attempt_info(rollout_id, attempt_id)).phase
            except NotFound:
                phase = Phase.ENDED
            if phase is not Phase.AGENT:
                self.leave(rollout_id, attempt_id, phase)

    def drop_idle(self) -> None:
        """Let go of attempts without calls: those that have been idle for long, and the idlest of too many."""
        limit = time.monotonic() - IDLE_SECONDS
        idle = sorted((live.used, key) for key, live in self._live.items() if not live.calls)
        for i, (used, key) in enumerate(idle):
            if used < limit or i < len(self._live) - MAX_LIVE:
                self._let_go(key)


def grow(forest: Forest, stored: list[StoredCall]) -> None:
    """Add recorded calls to the forest of their attempt."""
    left = {c.call_id: c for c in stored}
    order: list[StoredCall] = []

    def place(call: StoredCall) -> None:
        chain = [call]
        while (base := chain[-1].base) is not None and base in left:
            chain.append(left[base])
        for item in reversed(chain):
            if left.pop(item.call_id, None) is not None:
                order.append(item)

    for call in stored:
        place(call)
    for call in order:
        base = forest.nodes.get(call.base) if call.base else None
        parent = forest.nodes.get(call.parent) if call.parent else None
        known, same = forest.requests.match(call.messages, call.tools)
        keys = request_keys(call.messages, call.tools, known.made.keys if known else None, same)
        before = known.made.hashes[:same] if known else []
        hashes = [*before, *(message_ref(m).hash for m in call.messages[len(before) :])]
        forest.requests.keep(call.messages, Request(keys, hashes), call.tools)
        forest.add(
            call.call_id,
            call.seq,
            keys,
            Link(base, call.base_len if base else 0, parent, call.break_reason, call.break_index),
            np.frombuffer(call.prompt_ids, "<i4").astype(np.int32),
            np.frombuffer(call.response_ids, "<i4").astype(np.int32),
            call.response,
            call.finish_reason,
            hashes,
            call.raw_hashes,
            delivered=call.delivered,
            summary=call.kind == CallKind.SUMMARY,
        )

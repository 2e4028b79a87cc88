"""Making one model call: plan the prompt, wait for the gate, ask an engine, check, record, and only then answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from leyden.gateway.attempts import LiveAttempt
from leyden.gateway.classify import classify, session
from leyden.gateway.conversation import BREAK_COMPACTION, BREAK_HISTORY, BREAK_TOOLS, Link, Plan
from leyden.gateway.dialects.base import Answer, Asked, Choice, ModelRequest, TokenLogprob
from leyden.gateway.engines.client import EngineTimeout
from leyden.gateway.engines.integrity import Sample, empty_sample
from leyden.gateway.engines.protocol import Ask, Chat, Said
from leyden.gateway.engines.registry import route
from leyden.gateway.errors import Conflict, Gone, Refused
from leyden.gateway.generation import Generator
from leyden.gateway.lifecycle import ENGINE_FAILED
from leyden.gateway.prompting import HASH_MICROS, make_prompt, remember
from leyden.gateway.renderer import ModelRenderer, Parsed, Prompt
from leyden.gateway.sampling import effective as effective_sampling
from leyden.gateway.store.base import Store
from leyden.gateway.store.raw import RawRequest, message_ref, raw_request, refs, share, values_of
from leyden.gateway.store.records import CallCommit, MessageRef
from leyden.schema import CallKind, CaptureConfig, EngineModel, ModelRoute

log = logging.getLogger("leyden.gateway")

PARSE_MICROS = 0.5
"""To take a token of an answer apart."""
TOKEN_MICROS = 5.0
"""To write a token of an answer with its log-probability."""
MAX_RUNS_WARNED = 1000


@dataclass(slots=True)
class Counters:
    """Since the gateway started."""

    requests: int = 0
    replayed: int = 0
    abandoned: int = 0
    nan_logprobs: int = 0
    _warned: dict[str | None, None] = field(default_factory=dict)

    def first_of_run(self, run: str | None) -> bool:
        if run in self._warned:
            return False
        if len(self._warned) >= MAX_RUNS_WARNED:
            self._warned.pop(next(iter(self._warned)))
        self._warned[run] = None
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMaker:
    """Everything that a call needs. `make` is run as a task of its own, so that a lost client doesn't stop it."""

    store: Store
    renderer: ModelRenderer
    generator: Generator
    counters: Counters

    async def make(
        self, live: LiveAttempt, request: ModelRequest, dialect: str, call_id: str, fingerprint: bytes, seq: int
    ) -> Answer:
        """Generate, record durably, answer.

        Raises:
            Refused: nothing was generated, or it couldn't be recorded. Failures after the prompt was ready are recorded
                as calls that must not be trained.
        """
        started = time.time()
        where = route(live.info.capture.routes, self.generator.engines.served_model, request.model)
        by_engine = self._by_engine(live.info.capture, request, where)
        prompt = await make_prompt(
            self.renderer, live.forest, request, live.info.capture, hold=True, by_engine=by_engine
        )
        try:
            return await self._answered(
                live, request, dialect, call_id, fingerprint, seq, started, prompt, where, by_engine
            )
        finally:
            live.forest.release(prompt.plan)

    async def prompt(self, live: LiveAttempt, request: ModelRequest) -> Prompt:
        """The token ids that an engine would read for this request now."""
        return await make_prompt(self.renderer, live.forest, request, live.info.capture)

    async def _answered(
        self,
        live: LiveAttempt,
        request: ModelRequest,
        dialect: str,
        call_id: str,
        fingerprint: bytes,
        seq: int,
        started: float,
        prompt: Prompt,
        where: ModelRoute,
        by_engine: bool,
    ) -> Answer:
        engine_len = self.generator.engines.max_model_len(where.model)
        limit = engine_len if engine_len is not None or by_engine else self.renderer.max_model_len
        kind = _kind(live, request, prompt.plan)
        if kind is CallKind.SUMMARY and prompt.reason in (BREAK_TOOLS, BREAK_HISTORY):
            prompt = replace(prompt, reason=BREAK_COMPACTION)  # It is what the tools or earlier messages went for.
        relation = self.renderer.relate(prompt.plan, prompt.ids, prompt.reason)
        job = _Job(
            live, request, dialect, call_id, fingerprint, seq, started, prompt.plan, prompt, {}, relation, kind, where
        )
        try:
            used = effective_sampling(live.info.sampling, request.max_tokens, len(prompt.ids), limit)
            job = replace(job, effective=used)
            results = await self._samples(job, by_engine)
        except Refused as e:
            await self._record_failure(job, e)
            raise
        said = [s for s, _ in results]
        samples = [(s.sample, engine) for s, engine in results]
        if by_engine:
            job = self._as_rendered(job, said)
        tokens = sum(len(s.ids) for s, _ in samples)
        parsed = await self.renderer.run(lambda: [self._parse(job, s) for s in said], micros=tokens * PARSE_MICROS)
        await self._record(job, samples, parsed)
        return await self.renderer.run(
            lambda: self._answer(job, [s for s, _ in samples], parsed),
            micros=tokens * TOKEN_MICROS if request.logprobs else 0,
        )

    async def _samples(self, job: _Job, by_engine: bool) -> list[tuple[Said, EngineModel]]:
        """As many samples as were asked for; when one fails, the others are given up."""
        sample, rollout_id, model = self.generator.sample, job.live.info.rollout_id, job.route.model
        asks = [self._ask(job, by_engine, f"{job.call_id}-{i}") for i in range(job.request.n)]
        if len(asks) == 1:
            return [await sample(rollout_id, model, asks[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(sample(rollout_id, model, ask)) for ask in asks]
        except* Refused as errors:
            raise _first(errors) from None
        return [t.result() for t in tasks]

    def _by_engine(self, capture: CaptureConfig, request: ModelRequest, where: ModelRoute) -> bool:
        """Whether the engine renders and parses: when the run says so, for images, and for models of other makes."""
        if request.prompt is not None:
            return False
        if capture.mode == "engine" or request.has_images():
            return True
        engines = self.generator.engines
        return where.model != engines.served_model and any(e.kind != "leyden" for e in engines.serving(where.model))

    def _ask(self, job: _Job, by_engine: bool, request_id: str) -> Ask:
        request = job.request
        chat = None
        if by_engine:
            chat = Chat(
                messages=request.messages,
                tools=request.tools,
                tool_choice=request.tool_choice,
                tool_name=request.tool_name,
                parallel_tool_calls=request.parallel_tool_calls,
            )
        return Ask(
            prompt=job.prompt.ids,
            effective=job.effective,
            stop=request.stop,
            stop_token_ids=self.renderer.stop_token_ids,
            request_id=request_id,
            response_format=request.response_format,
            chat=chat,
            trained=job.route.trained,
        )

    def _as_rendered(self, job: _Job, said: list[Said]) -> _Job:
        """The job with the prompt that the engine says it read; siblings read the same."""
        ids = said[0].prompt if said[0].prompt is not None else job.prompt.ids
        for other in said[1:]:
            if other.prompt is None or not np.array_equal(other.prompt, ids):
                other.sample.untrainable = other.sample.untrainable or "prompt differs: siblings read other prompts"
        prompt = replace(job.prompt, ids=ids)
        return replace(job, prompt=prompt, relation=self.renderer.relate(job.plan, ids, job.prompt.reason))

    def _parse(self, job: _Job, said_: Said) -> Parsed:
        request, sample = job.request, said_.sample
        if said_.message is not None:
            own = said_.message
            return Parsed(own["content"], own["reasoning_content"], own["tool_calls"])
        if not len(sample.ids):
            return Parsed(sample.text, None, [])
        stop = _stop_sequence(request, sample)
        if request.prompt is not None:
            return Parsed(self.renderer.text(sample.ids, stop), None, [])
        tools = request.tools if request.tool_choice != "none" else None
        said = self.renderer.parse(job.prompt.ids, sample.ids, tools, stop, job.prompt.forced)
        if not request.parallel_tool_calls:
            # As engines do: the client gets the first call. The tokens stay as they were sampled.
            said.tool_calls = said.tool_calls[:1]
        return said

    def _answer(self, job: _Job, samples: list[Sample], parsed: list[Parsed]) -> Answer:
        choices = []
        for i, (sample, said) in enumerate(zip(samples, parsed, strict=True)):
            logprobs = None
            if job.request.logprobs and len(sample.logprobs) == len(sample.ids):
                texts = self.renderer.token_texts(sample.ids)
                values = [None if np.isnan(x) else float(x) for x in sample.logprobs]
                logprobs = [TokenLogprob(t, x) for t, x in zip(texts, values, strict=True)]
            choices.append(
                Choice(
                    call_id=_sibling_id(job.call_id, i),
                    text=said.text,
                    reasoning=said.reasoning,
                    tool_calls=said.tool_calls,
                    finish_reason=_finish(sample),
                    completion_tokens=len(sample.ids),
                    stop_sequence=_stop_sequence(job.request, sample),
                    logprobs=logprobs,
                )
            )
        return Answer(
            call_id=job.call_id,
            created=int(job.started),
            model=job.request.model,
            choices=choices,
            prompt_tokens=len(job.prompt.ids),
        )

    async def _record(self, job: _Job, samples: list[tuple[Sample, EngineModel]], parsed: list[Parsed]) -> None:
        """Commit the siblings and add them to the forest."""
        stored = await self.renderer.run(job.stored, micros=job.new_chars() * HASH_MICROS)
        ended = time.time()
        commits = []
        for i, ((sample, engine), said) in enumerate(zip(samples, parsed, strict=True)):
            self.counters.nan_logprobs += sample.nan_logprobs
            if not job.route.trained:
                sample.untrainable = None  # `left_out` says why; what is missing is no fault.
            if sample.untrainable is not None and job.left_out(sample) is None:
                self._warn(job, sample.untrainable)
            commits.append(job.commit(_sibling_id(job.call_id, i), sample, said, engine, stored, ended))
        recorded = await self.store.commit_calls(commits)
        job.live.recorded(recorded.seq, recorded.first, recorded.last)
        hashes = [r.hash for r in stored.messages]
        raw_hashes = stored.raw.hashes()
        job.live.bodies.keep(stored.values, [r.hash for r in stored.raw.refs])
        messages = remember(job.live.forest, job.request, job.prompt, hashes)
        if job.request.may_be_continued:
            job.live.note_asked(job.call_id, Asked(messages, job.request.instructed))
        if job.relation.parent is not None:
            job.relation.parent.delivered = True
        for commit, (sample, _), said in zip(commits, samples, parsed, strict=True):
            job.live.kinds[commit.call_id] = job.kind
            job.live.forest.add(
                commit.call_id,
                recorded.seq,
                job.plan.keys,
                job.relation,
                job.prompt.ids,
                sample.ids,
                said.message(),
                sample.finish_reason,
                hashes,
                raw_hashes,
                summary=job.kind is CallKind.SUMMARY,
            )

    async def _record_failure(self, job: _Job, error: Refused) -> None:
        """Keep a trace of a call that got no answer. It has no conversation after it and is never trained."""
        kind = "timeout" if isinstance(error, EngineTimeout) else ENGINE_FAILED
        if error.status < 500:
            kind = "engine refused" if error.overflow is None else "prompt too long"
        sample = empty_sample(f"{kind}: {error.message}")
        if error.overflow is None:  # Harnesses count on those: they compact their history and go on.
            self._warn(job, f"{kind}: {error.message}")
        stored = await self.renderer.run(job.stored)
        try:
            await self.store.commit_calls([job.commit(job.call_id, sample, None, None, stored, time.time())])
        except Refused as e:
            log.warning("the failed call %s couldn't be recorded: %s", job.call_id, e.message)

    def _warn(self, job: _Job, reason: str) -> None:
        info = job.live.info
        where = f"call {job.call_id} of rollout {info.rollout_id} attempt {info.attempt_id}"
        if self.counters.first_of_run(info.run):
            log.error("first call of run %s that can't be trained: %s: %s", info.run, where, reason)
        else:
            log.info("untrainable: %s: %s", where, reason)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A request's messages and body as the store keeps them. The first `shared` messages are those of its base."""

    messages: list[MessageRef]
    shared: int
    raw: RawRequest
    values: list[Any]
    """Of the body, in the order of `raw.refs`."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One request on its way."""

    live: LiveAttempt
    request: ModelRequest
    dialect: str
    call_id: str
    fingerprint: bytes
    seq: int
    started: float
    plan: Plan
    prompt: Prompt
    effective: dict[str, Any]
    relation: Link
    kind: CallKind
    route: ModelRoute

    def new_chars(self) -> int:
        """About how many characters of the request aren't shared with an earlier call: its messages and its body."""
        return 2 * 4 * (len(self.prompt.ids) - self.relation.base_len)

    def stored(self) -> _Stored:
        """The request as the store keeps it."""
        base = self.relation.base
        # Taken once: the base sheds them when another call continues it meanwhile.
        of_base, raw_of_base = (base.request_hashes, base.raw_hashes) if base else ([], b"")
        known, same = self.live.forest.requests.match(self.request.messages, self.request.tools)
        before = known.made.hashes[:same] if known else []
        messages = refs(self.request.messages, before, b"".join(of_base))
        shared = 0
        for ours, theirs in zip(messages, of_base, strict=False):
            if ours.hash != theirs:
                break
            shared += 1
        head, fields, values = values_of(self.request.body)
        body, same = self.live.bodies.match(values)
        raw = raw_request(head, fields, refs(values, body.made[:same] if body else [], raw_of_base))
        return _Stored(messages, shared, share(raw, base.call_id, raw_of_base) if base else raw, values)

    def left_out(self, sample: Sample) -> str | None:
        """Why the run doesn't train a call like this one."""
        capture = self.live.info.capture
        if not self.route.trained:
            return f"route: model {self.route.model} isn't trained"
        if self.kind not in capture.train_kinds:
            return f"kind: {self.kind}"
        if sample.finish_reason == "length" and not capture.train_truncated:
            return "truncated: the answer was cut off by its limit"
        return None

    def commit(
        self,
        call_id: str,
        sample: Sample,
        parsed: Parsed | None,
        engine: EngineModel | None,
        stored: _Stored,
        ended: float,
    ) -> CallCommit:
        base, parent, shared = self.relation.base, self.relation.parent, stored.shared
        effective = {**self.effective, **({"stop": self.request.stop} if self.request.stop else {})}
        return CallCommit(
            call_id=call_id,
            rollout_id=self.live.info.rollout_id,
            attempt_id=self.live.info.attempt_id,
            seq=self.seq,
            dialect=self.dialect,
            base=base.call_id if base else None,
            base_len=self.relation.base_len,
            prompt_suffix=self.prompt.ids[self.relation.base_len :].astype("<i4").tobytes(),
            response_ids=sample.ids.astype("<i4").tobytes(),
            logprobs=sample.logprobs.astype("<f4").tobytes(),
            versions=sample.versions.astype("<i4").tobytes(),
            finish_reason=sample.finish_reason,
            parent=parent.call_id if parent else None,
            arrived=parent.call_id if parent and not parent.delivered else None,
            break_reason=self.relation.break_reason,
            break_index=self.relation.break_index,
            untrainable=sample.untrainable or self.left_out(sample),
            kind=self.kind,
            images=[image_reference(url) for url in self.request.images()],
            routed_experts=sample.routed_experts,
            routed_format=sample.routed_format,
            requested=self.request.requested,
            effective=effective,
            started_at=self.started,
            ended_at=ended,
            engine=engine.endpoint if engine else None,
            model=engine.model if engine else self.request.model,
            request_base=base.call_id if base and shared else None,
            request_base_len=shared,
            request_suffix=stored.messages[shared:],
            tools=message_ref(self.request.tools) if self.request.tools else None,
            response=parsed.message() if parsed else None,
            fingerprint=self.fingerprint,
            raw=stored.raw,
        )


def _kind(live: LiveAttempt, request: ModelRequest, plan: Plan) -> CallKind:
    kind = classify(request, live.kinds.get(plan.node.call_id) if plan.node else None, live.main_session)
    if kind is CallKind.MAIN and live.main_session is None:
        live.main_session = session(request.headers)
    return kind


def image_reference(url: str) -> str:
    """What a call keeps of an image: the address, or for one that came with the request the hash of its data URL."""
    return f"sha256:{hashlib.sha256(url.encode()).hexdigest()}" if url.startswith("data:") else url


def _sibling_id(call_id: str, index: int) -> str:
    return call_id if index == 0 else f"{call_id}-{index}"


def _stop_sequence(request: ModelRequest, sample: Sample) -> str | None:
    return sample.stop_reason if isinstance(sample.stop_reason, str) and request.stop else None


def _finish(sample: Sample) -> Literal["stop", "length"]:
    return "length" if sample.finish_reason == "length" else "stop"


def _first(errors: BaseExceptionGroup[Refused]) -> Refused:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Refused)
    return error


def closed_error(live: LiveAttempt) -> Refused:
    """What a client hears whose call was ended together with its attempt."""
    info = live.info
    if live.deleted:
        return Gone(f"rollout {info.rollout_id} was deleted while this call was running")
    return Conflict(f"attempt {info.attempt_id} of rollout {info.rollout_id} ended while this call was running")

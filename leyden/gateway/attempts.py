"""What the gateway holds in memory of running attempts: conversations, calls under way, answers waiting for a taker.

Everything here can be rebuilt from the store, and is dropped when an attempt ends or has been idle for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from leyden.gateway.conversation import Forest, Link, request_keys
from leyden.gateway.dialects.base import Answer
from leyden.gateway.lifecycle import Phase
from leyden.gateway.renderer import ModelRenderer
from leyden.gateway.store.base import Store
from leyden.gateway.store.raw import message_ref
from leyden.gateway.store.records import AttemptInfo, StoredCall

IDLE_SECONDS = 900
"""An attempt without calls for so long leaves memory; its next call brings it back."""


@dataclass(slots=True, eq=False)
class Call:
    """A request under way, or an answer whose client went away and may come back for it."""

    call_id: str
    fingerprint: bytes
    created: int
    task: asyncio.Task[Answer]
    expiry: asyncio.TimerHandle | None = None

    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclass(slots=True, eq=False)
class LiveAttempt:
    """A running attempt. `end` is final."""

    info: AttemptInfo
    forest: Forest = field(default_factory=Forest)
    raw_hashes: dict[str, bytes] = field(default_factory=dict)
    """By call: the hashes of its request body, of which a later call stores only what is new."""
    next_seq: int = 0
    phase: Phase = Phase.AGENT
    calls: set[Call] = field(default_factory=set)
    orphans: dict[bytes, list[Call]] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)

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

    def leave(self, phase: Phase) -> None:
        """The agent phase is over: whatever its calls still do is aborted at once."""
        self.phase = phase
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

    def __len__(self) -> int:
        return len(self._live)

    def peek(self, rollout_id: str, attempt_id: str) -> LiveAttempt | None:
        return self._live.get((rollout_id, attempt_id))

    def all(self) -> list[LiveAttempt]:
        return list(self._live.values())

    async def get(self, rollout_id: str, attempt_id: str) -> LiveAttempt:
        """The attempt, brought back from the store if need be. Concurrent callers share one loading."""
        key = (rollout_id, attempt_id)
        live = self._live.get(key)
        if live is None:
            loading = self._loading.get(key)
            if loading is None:
                loading = self._loading[key] = asyncio.create_task(self._load(rollout_id, attempt_id))
                loading.add_done_callback(lambda _: self._loading.pop(key, None))
            live = await asyncio.shield(loading)
        live.used = time.monotonic()
        return live

    async def _load(self, rollout_id: str, attempt_id: str) -> LiveAttempt:
        info = await self._store.attempt_info(rollout_id, attempt_id)
        live = LiveAttempt(info, phase=info.phase)
        if info.phase is Phase.AGENT:
            stored = await self._store.attempt_calls(rollout_id, attempt_id)
            live.forest = await self._renderer.run(lambda: rebuild(stored))
            live.raw_hashes = {c.call_id: c.raw_hashes for c in stored}
            live.next_seq = max((c.seq for c in stored), default=-1) + 1
            for call in stored:
                if not call.delivered and call.untrainable is None:
                    self._revive(live, call)
            self._live[rollout_id, attempt_id] = live
        return live

    def leave(self, rollout_id: str, attempt_id: str, phase: Phase) -> None:
        """Note that an attempt left its agent phase."""
        live = self._live.pop((rollout_id, attempt_id), None)
        if live is not None:
            live.leave(phase)

    def drop_idle(self) -> None:
        limit = time.monotonic() - IDLE_SECONDS
        for key, live in list(self._live.items()):
            if live.used < limit and not live.calls:
                del self._live[key]


def rebuild(stored: list[StoredCall]) -> Forest:
    """The forest of an attempt from its recorded calls."""
    forest = Forest()
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
        forest.add(
            call.call_id,
            call.seq,
            request_keys(call.messages, call.tools),
            Link(base, call.base_len if base else 0, parent, call.break_reason, call.break_index),
            np.frombuffer(call.prompt_ids, "<i4").astype(np.int32),
            np.frombuffer(call.response_ids, "<i4").astype(np.int32),
            call.response,
            call.finish_reason,
            [message_ref(m).hash for m in call.messages],
            delivered=call.delivered,
        )
    return forest

"""Running a batch of rollouts through the gateway: create, wait with a watchdog, fetch what was recorded."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

from leyden.client import LeydenClient
from leyden.errors import RunError
from leyden.hooks import Hooks
from leyden.schema import (
    TERMINAL_STATES,
    Outcome,
    Rollout,
    RolloutCreate,
    RolloutDetail,
    RolloutState,
    TerminalItem,
    Trajectory,
)
from leyden.training.schedule import common_reason, failed, stuck_sentence

POLL_SECONDS = 20.0
"""Length of one long poll; the watchdog looks at least this often."""

CREATE_AT_ONCE = 256
FETCH_AT_ONCE = 16
REDONE_AT_MOST = 50
"""Interruptions after which a rollout that never got through isn't run again."""
REASONS_LOOKED_AT = 32
"""Failed rollouts whose reasons are fetched to name the most common one."""


class Rollouts:
    """One run's rollouts at a gateway. Remembers the cursor into the list of ended ones between batches."""

    def __init__(self, client: LeydenClient, run: str, stuck_after_seconds: float, hooks: Hooks | None = None) -> None:
        self._client = client
        self._run = run
        self._stuck_after = stuck_after_seconds
        self._hooks = hooks
        self._after = 0
        self.resumed = False
        """Whether the next batch may be one that an earlier process left unfinished."""

    async def run(self, wanted: Sequence[RolloutCreate], ended: Callable[[TerminalItem], None]) -> list[TerminalItem]:
        """Create and wait for all; `ended` is called once for each. Returns them in the order of `wanted`.

        In the first batch of a resumed run, a rollout that had already ended for no fault of its agent's (the
        interruption took its engine or controller) is run again under an id of its own.

        Raises:
            RunError: nothing ended for `stuck_after_seconds`; says what is being waited for.
        """
        done: dict[str, TerminalItem] = {}
        current = [c.rollout_id or "" for c in wanted]
        wanted = [await self._hooks.enqueue(w) for w in wanted] if self._hooks else list(wanted)
        for again in range(1, REDONE_AT_MOST + 1):
            lost = await self._create(wanted, done)
            if not self.resumed or not lost or again == REDONE_AT_MOST:
                break
            for i in (i for i, rollout_id in enumerate(current) if rollout_id in lost):
                first = current[i].rpartition(".i")[0] if again > 1 else current[i]
                current[i] = f"{first}.i{again}"
                wanted[i] = wanted[i].model_copy(update={"rollout_id": current[i]})
        self.resumed = False
        pending = set(current) - set(done)
        for rollout_id in current:
            if rollout_id in done:
                ended(done[rollout_id])

        def take(item: TerminalItem) -> None:
            if item.rollout_id in pending:
                pending.remove(item.rollout_id)
                done[item.rollout_id] = item
                if self._hooks:
                    self._hooks.ended(self._client, item)
                ended(item)

        last = time.monotonic()
        while pending:
            left = self._stuck_after - (time.monotonic() - last)
            if left <= 0:
                raise RunError(await self._stuck(pending))
            before = len(pending)
            page = await self._client.terminal(self._after, wait_seconds=min(POLL_SECONDS, left), run=self._run)
            self._after = page.next_after
            for item in page.items:
                take(item)
            if len(pending) < before:
                last = time.monotonic()
        return [done[rollout_id] for rollout_id in current]

    async def _create(self, wanted: Sequence[RolloutCreate], done: dict[str, TerminalItem]) -> set[str]:
        """Create what isn't there; note what has ended in `done`. Returns the ids that ended `infra` or `cancelled`."""
        lost: set[str] = set()
        for start in range(0, len(wanted), CREATE_AT_ONCE):
            for rollout in await self._client.create_rollouts(list(wanted[start : start + CREATE_AT_ONCE])):
                if rollout.status.state in TERMINAL_STATES:
                    done[rollout.rollout_id] = _terminal(rollout)
                    if rollout.status.outcome in (Outcome.INFRA, Outcome.CANCELLED):
                        lost.add(rollout.rollout_id)
        return lost

    async def trajectories(self, ids: Sequence[str]) -> list[Trajectory]:
        """What was recorded for each rollout, in order."""
        gate = asyncio.Semaphore(FETCH_AT_ONCE)

        async def fetch(rollout_id: str) -> Trajectory:
            async with gate:
                return await self._client.trajectory(rollout_id)

        return list(await asyncio.gather(*(fetch(i) for i in ids)))

    async def used_before(self) -> int:
        """Rollouts that this run name has at the gateway."""
        return (await self._client.page(run=self._run, limit=1)).total

    async def failure(self, items: Sequence[TerminalItem], fault: str) -> RunError:
        """The error for a useless step: its most common reason, an example, and how to look at it."""
        reasons: dict[str, str] = {}
        for item in [i for i in items if failed(i)][:REASONS_LOOKED_AT]:
            detail = await self._client.rollout(item.rollout_id)
            status = detail.rollout.status
            reasons[item.rollout_id] = status.error_message or f"outcome {item.outcome or 'unknown'}, no reason given"
        reason, example = common_reason(reasons)
        return RunError(f"{fault}, mostly: {reason} (example: leyden show {example})")

    async def _stuck(self, pending: set[str]) -> str:
        by_state: Counter[str] = Counter()
        oldest: RolloutDetail | None = None
        for rollout_id in sorted(pending)[:200]:
            detail = await self._client.rollout(rollout_id)
            by_state[detail.rollout.status.state.value] += 1
            if detail.rollout.status.state == RolloutState.RUNNING and (
                oldest is None or _running_since(detail) < _running_since(oldest)
            ):
                oldest = detail
        return stuck_sentence(self._stuck_after, len(pending), by_state, oldest)


def _running_since(detail: RolloutDetail) -> float:
    return detail.attempt_details[-1].started_at if detail.attempt_details else detail.rollout.status.created_at


def _terminal(rollout: Rollout) -> TerminalItem:
    status = rollout.status
    return TerminalItem(
        rollout_id=rollout.rollout_id,
        state=status.state,
        is_train=rollout.is_train,
        outcome=status.outcome,
        reward=status.reward,
        calls=status.calls,
        metadata=rollout.metadata,
    )

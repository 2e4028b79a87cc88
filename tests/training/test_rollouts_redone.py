"""Rollouts that an interrupted run lost to its infrastructure are run again; what an agent did is taken as it is."""

from __future__ import annotations

from typing import Any, cast

from leyden.client import LeydenClient
from leyden.schema import (
    Outcome,
    Rollout,
    RolloutConfig,
    RolloutCreate,
    RolloutState,
    RolloutStatus,
    TerminalItem,
    TerminalPage,
)
from leyden.training.rollouts import Rollouts


class Gateway:
    """Rollouts known so far by outcome; what is new ends ok when asked for."""

    def __init__(self, known: dict[str, Outcome]) -> None:
        self.known = known
        self.created: list[str] = []

    async def create_rollouts(self, items: list[RolloutCreate]) -> list[Rollout]:
        out = []
        for item in items:
            name = item.rollout_id or ""
            outcome = self.known.get(name)
            if outcome is None and name not in self.created:
                self.created.append(name)
            state = {None: RolloutState.QUEUING, Outcome.OK: RolloutState.SUCCEEDED}.get(outcome, RolloutState.FAILED)
            status = RolloutStatus(state=state, outcome=outcome, created_at=0, updated_at=0)
            out.append(Rollout(rollout_id=name, input=None, config=RolloutConfig(), status=status))
        return out

    async def terminal(self, after: int, **_: Any) -> TerminalPage:
        items = [
            TerminalItem(rollout_id=r, state=RolloutState.SUCCEEDED, outcome=Outcome.OK) for r in self.created[after:]
        ]
        return TerminalPage(items=items, next_after=len(self.created), total_terminal=len(self.created))


async def test_only_infrastructure_failures_are_run_again() -> None:
    known = {
        "a": Outcome.OK,
        "b": Outcome.AGENT_ERROR,
        "c": Outcome.INFRA,
        "d": Outcome.CANCELLED,
        "e": Outcome.INFRA,
        "e.i1": Outcome.INFRA,
    }
    gateway = Gateway(dict(known))
    seen: list[str] = []
    rollouts = Rollouts(cast(LeydenClient, gateway), "run", 5)
    rollouts.resumed = True
    ended = await rollouts.run(
        [RolloutCreate(input=None, rollout_id=r) for r in "abcdef"], lambda item: seen.append(item.rollout_id)
    )
    assert [i.rollout_id for i in ended] == ["a", "b", "c.i1", "d.i1", "e.i2", "f"]
    assert [i.outcome for i in ended] == [Outcome.OK, Outcome.AGENT_ERROR, *[Outcome.OK] * 4]
    assert sorted(seen) == sorted(i.rollout_id for i in ended)
    again = await rollouts.run([RolloutCreate(input=None, rollout_id="c")], lambda _: None)
    assert [i.rollout_id for i in again] == ["c"]
    assert set(gateway.created) == {"c.i1", "d.i1", "e.i2", "f"}

"""Short fault runs; `make faults` and `make faults-controller` are the long ones."""

from __future__ import annotations

import pytest

from tests.faults import controllers
from tests.faults.run import main


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_nothing_acknowledged_is_lost_or_doubled_when_gateways_are_killed(store: str) -> None:
    (result,) = await main(5, 16, [store])
    assert result.kills >= 5 and result.calls > 50 and result.events > 50 and result.repeated > 0
    assert (result.lost, result.doubled, result.unexpected) == ([], [], [])


async def test_every_rollout_ends_once_and_nothing_leaks_when_controllers_are_killed() -> None:
    result = await controllers.main(4, 24)
    assert result.kills == 4
    assert (result.lost, result.mixed, result.leaked) == ([], [], [])

"""The fuzz run, shortened."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.run import Fuzz


async def test_nothing_that_is_sent_breaks_the_gateway(tmp_path: Path) -> None:
    tally = await Fuzz(tmp_path, tmp_path / "failures", seed=1).run(600)
    assert tally.requests - tally.by_document == 600 and tally.by_document > 100
    assert tally.wrong == []
    assert tally.server_errors == tally.hangs == 0
    assert tally.statuses[200] > 50 and tally.engine_faults > 0

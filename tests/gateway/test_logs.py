"""Logs of attempts at the gateway: sent in pieces by their controller, read by the admin."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from leyden.errors import GatewayError
from leyden.gateway.store import logs
from leyden.schema import LogPiece, LogText, Outcome, OutcomeReport
from tests.gateway.conftest import World


def piece(data: bytes, start: int = 0, *, controller: str = "c1", **more: Any) -> LogPiece:
    return LogPiece(controller_id=controller, start=start, data=base64.b64encode(data), **more)


async def test_pieces_become_one_log_in_any_repetition(world: World) -> None:
    claim = await world.claim()
    rollout = claim.rollout.rollout_id
    sent = [piece(b"one\n"), piece(b"one\n"), piece(b"e\ntwo\xff", 2), piece(b"", 8), piece(b"!", 8, last=True)]
    for one in sent:
        await world.admin.append_log(rollout, "0", one)
    assert await world.admin.log(rollout, "0") == LogText(b"one\ntwo\xff!", 9, True)
    assert await world.admin.log(rollout, "0", start=5) == LogText(b"wo\xff!", 9, True)
    assert await world.admin.log(rollout, "0", start=9) == LogText(b"", 9, True)
    assert await world.admin.log(rollout, "0", part="grader") == LogText(b"", 0, False)


async def test_a_log_grows_until_its_last_piece_also_after_the_attempts_end(world: World) -> None:
    claim = await world.claim()
    rollout = claim.rollout.rollout_id
    await world.admin.append_log(rollout, "0", piece(b"early"))
    assert await world.admin.log(rollout, "0") == LogText(b"early", 5, False)
    await world.admin.outcome(rollout, "0", OutcomeReport(controller_id="c1", outcome=Outcome.TIMEOUT, log_tail="x"))
    await world.admin.append_log(rollout, "0", piece(b", late", 5, last=True))
    assert await world.admin.log(rollout, "0") == LogText(b"early, late", 11, True)
    assert (await world.admin.rollout(rollout)).attempt_details[0].late_writes == 0


async def test_a_long_log_is_read_piece_by_piece(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_READ", 1000)
    claim = await world.claim()
    whole = bytes(range(256)) * 20
    for start in range(0, len(whole), 700):
        part = whole[start : start + 700]
        await world.admin.append_log(
            claim.rollout.rollout_id, "0", piece(part, start, last=start + 700 >= len(whole), part="grader")
        )
    read, complete = b"", False
    while not complete:
        text = await world.admin.log(claim.rollout.rollout_id, "0", part="grader", start=len(read))
        assert 0 < len(text.data) <= 1000
        read, complete = read + text.data, text.complete
        assert text.next_start == len(read)
    assert read == whole


@pytest.mark.parametrize(
    "attempt,one,status,words",
    [
        ("0", piece(b"x", controller="c2"), 409, "is controller c1's, not c2's"),
        ("0", piece(b"x", 3), 409, "has 0 bytes; a piece from 3 on leaves a gap"),
        ("1", piece(b"x"), 404, "has no attempt 1"),
    ],
)
async def test_what_is_no_piece_of_it_is_refused(
    world: World, attempt: str, one: LogPiece, status: int, words: str
) -> None:
    claim = await world.claim()
    with pytest.raises(GatewayError, match=words) as refused:
        await world.admin.append_log(claim.rollout.rollout_id, attempt, one)
    assert refused.value.status == status
    assert (await world.admin.log(claim.rollout.rollout_id, "0")).data == b""


async def test_a_deleted_rollouts_log_is_gone(world: World) -> None:
    claim = await world.claim()
    rollout = claim.rollout.rollout_id
    await world.admin.append_log(rollout, "0", piece(b"secret words"))
    await world.admin.delete(rollout)
    for asking in (world.admin.log(rollout, "0"), world.admin.append_log(rollout, "0", piece(b"more"))):
        with pytest.raises(GatewayError) as gone:
            await asking
        assert gone.value.status == 404
    left = await world.gateway.store.db.read(lambda db: db.execute("SELECT count(*) FROM logs").fetchone()[0])
    assert left == 0

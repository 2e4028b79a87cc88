"""Logs on their way to the gateway, with a gateway that fails as told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from leyden.client import LeydenClient
from leyden.controller import uploads as module
from leyden.controller.uploads import Uploads
from leyden.errors import GatewayError
from leyden.schema import LogPiece


class Gateway:
    """Keeps logs by rollout; answers with `fails` first."""

    def __init__(self) -> None:
        self.logs: dict[str, bytes] = {}
        self.whole: set[str] = set()
        self.asked = 0
        self.fails: dict[str, int] = {}

    async def append_log(self, rollout_id: str, attempt_id: str, piece: LogPiece) -> None:
        self.asked += 1
        if rollout_id in self.fails:
            raise GatewayError("as told", self.fails[rollout_id])
        assert piece.start == len(self.logs.get(rollout_id, b"")) and rollout_id not in self.whole
        self.logs[rollout_id] = self.logs.get(rollout_id, b"") + piece.data
        if piece.last:
            self.whole.add(rollout_id)


@pytest.fixture
def sending(tmp_path: Path) -> tuple[Uploads, Gateway, Any]:
    gateway, uploads = Gateway(), Uploads()

    async def send() -> None:
        await uploads.send(cast(LeydenClient, gateway), "c1")

    return uploads, gateway, send


async def test_what_is_new_is_sent_and_the_end_once(
    sending: tuple[Uploads, Gateway, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 10)
    uploads, gateway, send = sending
    log = tmp_path / "a"
    log.write_bytes(b"")
    uploads.opened("a", "0", "agent", log)
    await send()
    assert gateway.asked == 0
    log.write_bytes(b"x" * 25)
    await send()
    assert gateway.logs == {"a": b"x" * 25} and not gateway.whole
    log.write_bytes(b"x" * 25 + b"y" * 10)
    uploads.closed(log)
    await send()
    assert gateway.logs == {"a": b"x" * 25 + b"y" * 10} and gateway.whole == {"a"}
    asked = gateway.asked
    await send()
    assert gateway.asked == asked


async def test_an_end_without_anything_new_is_still_told(sending: tuple[Uploads, Gateway, Any], tmp_path: Path) -> None:
    uploads, gateway, send = sending
    log = tmp_path / "a"
    log.write_bytes(b"all")
    uploads.opened("a", "0", "agent", log)
    await send()
    uploads.closed(log)
    await send()
    assert gateway.logs == {"a": b"all"} and gateway.whole == {"a"}


async def test_an_empty_log_costs_no_request(sending: tuple[Uploads, Gateway, Any], tmp_path: Path) -> None:
    uploads, gateway, send = sending
    (tmp_path / "a").write_bytes(b"")
    uploads.opened("a", "0", "agent", tmp_path / "a")
    uploads.closed(tmp_path / "a")
    await send()
    assert gateway.asked == 0


@pytest.mark.parametrize("status,sent_in_the_end", [(0, {"a", "b"}), (503, {"a", "b"}), (404, {"b"}), (409, {"b"})])
async def test_a_gateway_that_fails_is_told_later_and_one_that_refuses_never(
    sending: tuple[Uploads, Gateway, Any], tmp_path: Path, status: int, sent_in_the_end: set[str]
) -> None:
    uploads, gateway, send = sending
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
        uploads.opened(name, "0", "agent", tmp_path / name)
        uploads.closed(tmp_path / name)
    gateway.fails["a"] = status
    await send()
    gateway.fails.clear()
    await send()
    assert gateway.whole == sent_in_the_end


async def test_a_log_that_is_gone_holds_up_no_other(sending: tuple[Uploads, Gateway, Any], tmp_path: Path) -> None:
    uploads, gateway, send = sending
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
        uploads.opened(name, "0", "agent", tmp_path / name)
    (tmp_path / "a").unlink()
    await send()
    assert gateway.logs == {"b": b"b"}

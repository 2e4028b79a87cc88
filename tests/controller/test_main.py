"""The controller as the process that it is in production: killed, stopped, without a gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.controller.cgroups import own_groups
from leyden.schema import Outcome
from tests.controller.conftest import alive, none_alive, until
from tests.controller.fake import ADMIN_KEY, FakeGateway, make_claim

PROGRAM = """
import sys
from pathlib import Path
from leyden.config import ControllerConfig
from leyden.controller.main import ControllerOptions, serve
sys.exit(serve(ControllerOptions(gateway_url=sys.argv[1], work_dir=Path(sys.argv[2]), base_dir=Path(sys.argv[2]),
    controller_id="c", config=ControllerConfig(concurrency=8, lease_seconds=3), start_patience=0.5)))
"""

# Leaves a sleeper in a session of its own, without the attempt's environment, whose parent is gone.
SHED = "env -i setsid sh -c 'sleep 600.{mark} & :' & sleep 600.{mark}"


@asynccontextmanager
async def serving(url: str, folder: Path, key: str = ADMIN_KEY) -> AsyncIterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(  # noqa: ASYNC220  (signals go to it, waits go through a thread)
        [sys.executable, "-c", PROGRAM, url, str(folder)],
        env=os.environ | {"LEYDEN_ADMIN_KEY": key},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        await asyncio.to_thread(process.communicate, None, 30)


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, 30)


def below(process: subprocess.Popen[bytes]) -> psutil.Process:
    """The controller proper, under its guard."""
    (child,) = psutil.Process(process.pid).children()
    return child


def agent(command: Any) -> dict[str, Any]:
    return {"agent": {"command": command}}


@pytest.fixture
def mark() -> str:
    return str(uuid.uuid4().int)


def kill_controller(process: subprocess.Popen[bytes]) -> None:
    below(process).kill()


def kill_guard(process: subprocess.Popen[bytes]) -> None:
    process.kill()


@pytest.mark.parametrize("kill", [kill_controller, kill_guard])
async def test_a_killed_controller_leaves_no_agent(
    gateway: FakeGateway, tmp_path: Path, mark: str, kill: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    async with serving(gateway.url, tmp_path) as process:
        gateway.enqueue(*(make_claim(f"r{i}", {}, agent(SHED.format(mark=mark))) for i in range(3)))
        await until(lambda: len(alive(mark)) >= 3 * 3)
        controller = below(process)
        kill(process)
        assert await none_alive(mark)
        await until(lambda: not controller.is_running() or controller.status() == psutil.STATUS_ZOMBIE)
        assert await ended(process) in (128 + signal.SIGKILL, -signal.SIGKILL)


async def test_a_killed_controller_leaves_no_control_group(gateway: FakeGateway, tmp_path: Path, mark: str) -> None:
    limited = {"agent": {"command": f"sleep 600.{mark}", "limits": {"memory_mb": 100, "processes": 20}}}
    async with serving(gateway.url, tmp_path) as process:
        gateway.enqueue(make_claim("r", {}, limited))
        await until(lambda: alive(mark))
        controller = below(process)
        own = own_groups()
        folders = [folder for folder in (own.v2, *own.v1.values()) if folder is not None]
        kill_controller(process)
        await ended(process)
        assert [g for folder in folders for g in folder.glob(f"leyden-{controller.pid}-*")] == []
    assert alive(mark) == []


async def test_sigterm_stops_it_cleanly(gateway: FakeGateway, tmp_path: Path, mark: str) -> None:
    async with serving(gateway.url, tmp_path) as process:
        gateway.enqueue(*(make_claim(f"r{i}", {}, agent(SHED.format(mark=mark))) for i in range(3)))
        await until(lambda: len(alive(mark)) >= 3 * 3)
        process.terminate()
        assert await ended(process) == 0
    assert {r.outcome for r in gateway.outcomes.values()} == {Outcome.INFRA}
    assert {r.reason for r in gateway.outcomes.values()} == {"controller stopped"}
    assert len(gateway.outcomes) == 3
    assert alive(mark) == []


async def test_orphans_that_shed_everything_are_ended_and_reaped(
    gateway: FakeGateway, tmp_path: Path, mark: str
) -> None:
    shed = SHED.format(mark=mark).rpartition("&")[0] + "& sleep 0.3"
    async with serving(gateway.url, tmp_path) as process:
        gateway.enqueue(*(make_claim(f"r{i}", {}, agent(shed)) for i in range(4)))
        for i in range(4):
            assert (await gateway.outcome(f"r{i}")).outcome is Outcome.OK
        assert await none_alive(mark)
        await until(lambda: below(process).children() == [])


async def test_no_gateway_is_one_sentence(tmp_path: Path) -> None:
    async with serving("http://127.0.0.1:9", tmp_path) as process:
        _, err = await asyncio.to_thread(process.communicate, None, 30)
    assert process.returncode == 5
    lines = err.decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("leyden controller: can't reach the gateway at http://127.0.0.1:9 ")


async def test_a_wrong_key_is_one_sentence(gateway: FakeGateway, tmp_path: Path) -> None:
    async with serving(gateway.url, tmp_path, key="wrong") as process:
        _, err = await asyncio.to_thread(process.communicate, None, 30)
    assert process.returncode == 5
    expected = "leyden controller: POST /api/controllers/c/restarted: unknown key (HTTP 401)\n"
    assert err.decode() == expected


async def test_no_key_is_one_sentence(gateway: FakeGateway, tmp_path: Path) -> None:
    async with serving(gateway.url, tmp_path, key="") as process:
        _, err = await asyncio.to_thread(process.communicate, None, 30)
    assert process.returncode == 2
    expected = "leyden controller: the controller needs the gateway's admin key: set LEYDEN_ADMIN_KEY\n"
    assert err.decode() == expected


async def test_a_proxy_in_the_environment_is_not_used_for_the_gateway(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    ask = "import os, urllib.request as u; u.urlopen(os.environ['LEYDEN_EVENT_URL'].split('/api')[0] + '/healthz')"
    async with serving(gateway.url, tmp_path):
        gateway.enqueue(make_claim("r", {}, agent(["python", "-c", ask])))
        report = await gateway.outcome("r")
    assert report.outcome is Outcome.OK, report.reason

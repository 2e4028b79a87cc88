"""The sandbox and the limits for a controller that isn't root's and has no control groups."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from leyden.controller.sandbox import check_sandbox
from leyden.errors import PreflightError

NOBODY = 65534

PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from leyden.client import LeydenClient
from leyden.config import ControllerConfig
from leyden.controller.local import LocalBackend, LocalOptions
from leyden.controller.main import Controller, ControllerOptions
from leyden.controller.processes import ProcessTable
from leyden.controller.sandbox import check_sandbox
from tests.controller.fake import ADMIN_KEY, FakeGateway, make_claim

AGENT = '''
import os, urllib.request as u
key = {"Authorization": "Bearer k", "Content-Type": "application/json"}
u.urlopen(u.Request(os.environ["LEYDEN_EVENT_URL"], b'{"event_type": "reward", "data": {"value": 1}}', key))
print(os.getuid(), [p for p in os.listdir("/proc") if p.isdigit()], flush=True)
if os.environ.get("EAT"):
    import time
    x = b"x" * 90_000_000
    time.sleep(20)
'''

async def main(folder: Path) -> None:
    check_sandbox()
    (folder / "agent.py").write_text(AGENT)
    agent = {"command": [sys.executable, "agent.py"], "sandbox": "bubblewrap", "timeout_seconds": 60}
    hungry = {**agent, "env": {"EAT": "1"}, "limits": {"memory_mb": 64}}
    async with FakeGateway() as gateway, LeydenClient(gateway.url, ADMIN_KEY, patience=20) as client:
        options = ControllerOptions(gateway_url=gateway.url, admin_key=ADMIN_KEY, work_dir=folder / "w",
                                    config=ControllerConfig(lease_seconds=3))
        backend = LocalBackend(LocalOptions(gateway.url, folder, folder / "w"), ProcessTable())
        controller = Controller(options, backend, client)
        task = asyncio.create_task(controller.run())
        gateway.enqueue(make_claim("well", {}, {"agent": agent}), make_claim("hungry", {}, {"agent": hungry}))
        for name in ("well", "hungry"):
            report = await gateway.outcome(name)
            print(report.outcome, report.reason, report.log_tail)
        print(os.getuid(), len(gateway.events))
        controller.stop()
        await task

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="leyden-"))
    os.chown(made, NOBODY, NOBODY)
    yield made
    shutil.rmtree(made)


def user_python() -> tuple[str, dict[str, str]] | None:
    """A Python of this version that an ordinary user may execute, and an environment in which it finds our packages."""
    here = Path(__file__).parents[2]
    packages = [p for p in sys.path if p.endswith("site-packages")]
    env = {"PYTHONPATH": os.pathsep.join([str(here), *packages]), "PATH": "/usr/bin:/bin"}
    asks = f"import sys, pydantic, aiohttp, orjson, tests; assert sys.version_info[:2] == {sys.version_info[:2]}"
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            subprocess.run(
                [python, "-c", asks],
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
                env=env,
                cwd="/",
                check=True,
                timeout=60,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return python, env
    return None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else; the other tests cover the rest")
async def test_an_ordinary_user_has_sandboxes_and_limits(folder: Path) -> None:
    try:
        check_sandbox()
    except PreflightError as e:
        pytest.skip(str(e))
    found = await asyncio.to_thread(user_python)
    if found is None:
        pytest.skip("an ordinary user can't execute this Python, nor read its packages")
    python, env = found
    done = await asyncio.to_thread(
        subprocess.run,
        [python, "-W", "ignore", "-c", PROGRAM, str(folder)],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line for line in done.stdout.splitlines() if line and "[info" not in line]
    assert lines == [
        "ok None 1000 ['1', '2']",
        "agent_error the agent was killed: out of memory (limit 64 MB); last line of its log: '1000 ['1', '2']' "
        "1000 ['1', '2']",
        f"{NOBODY} 2",
    ], done.stderr

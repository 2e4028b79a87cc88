"""Agents that misbehave: each is ended with all that it started, classified, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyden.controller import local
from leyden.controller.cgroups import Cgroups, Hierarchies
from leyden.controller.logfile import log_path
from leyden.schema import Outcome, OutcomeReport
from tests.controller.conftest import alive, until
from tests.controller.fake import FakeGateway, make_claim

Running = Callable[..., Any]
MB = 1024 * 1024


@pytest.fixture(params=["groups", "no groups"])
def control_groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the control groups that this machine allows, and with none, as an ordinary user often has it."""
    if request.param == "no groups":
        monkeypatch.setattr(local, "Cgroups", lambda: Cgroups(Hierarchies()))
    return request.param


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *words]


async def outcome_beside_another(
    gateway: FakeGateway, running: Running, command: Any, limits: dict[str, Any] | None = None, **config: Any
) -> OutcomeReport:
    """The outcome of an agent, while an agent of another attempt runs and has to end well."""
    mark, beside = uuid.uuid4().hex, f"beside-{uuid.uuid4().hex}"
    agent = {"command": command, "timeout_seconds": 60, "env": {"MARK": mark}, "limits": limits or {}}
    async with running(**config):
        neighbour = {"agent": {"command": "echo up; while ! test -e go; do sleep 0.05; done; echo well"}}
        gateway.enqueue(make_claim(beside, {}, neighbour), make_claim("bad", {}, {"agent": agent}))
        report = await gateway.outcome("bad")
        assert alive(mark) == [], "reported while something of it still ran"
        assert (beside, "0") not in gateway.outcomes
        await until(lambda: alive(beside))
        (Path(f"/proc/{alive(beside)[0]}/cwd") / "go").touch()
        assert (await gateway.outcome(beside)).outcome is Outcome.OK
    return report


# Daemons in sessions of their own, twice forked, ignoring TERM; one has shed its environment too, one is stopped.
DAEMONS = """
import ctypes, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = [sys.executable, "-c", "import time; time.sleep(600)", os.environ["MARK"]]
for env in (None, {}):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.execve(sleeper[0], sleeper, dict(os.environ) if env is None else env)
        os._exit(0)
    os.wait()
os.kill(subprocess.Popen(sleeper, start_new_session=True).pid, signal.SIGSTOP)
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
"""


@pytest.mark.parametrize("end,outcome", [("pass", Outcome.OK), ("os.abort()", Outcome.AGENT_ERROR)])
async def test_daemons_that_ignore_term_are_gone(
    gateway: FakeGateway, running: Running, control_groups: str, end: str, outcome: Outcome
) -> None:
    report = await outcome_beside_another(gateway, running, python(DAEMONS + end), {"processes": 50}, exclusive=True)
    assert report.outcome is outcome


async def test_100_megabytes_of_output_are_cut(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    code = """
        import sys
        line = "x" * 999 + "\\n"
        for _ in range(100):
            sys.stdout.write(line * 1000)
        print("the end")
    """
    report = await outcome_beside_another(gateway, running, python(code), log_bytes=200_000)
    assert report.outcome is Outcome.OK
    log = log_path(tmp_path / "work" / "logs", "bad", "0")
    assert log.stat().st_size < 201_000 and log.read_text().endswith("the end\n")


async def test_an_agent_that_eats_memory_is_killed_for_it(
    gateway: FakeGateway, running: Running, control_groups: str
) -> None:
    code = """
        import time
        print("hungry", flush=True)
        eaten = []
        while True:
            eaten.append(b"x" * 4_000_000)
            time.sleep(0.005)
    """
    report = await outcome_beside_another(gateway, running, python(code), {"memory_mb": 80})
    assert report.outcome is Outcome.AGENT_ERROR
    assert report.reason == "the agent was killed: out of memory (limit 80 MB); last line of its log: 'hungry'"


async def test_memory_that_a_child_eats_counts_though_the_agent_exits_0(
    gateway: FakeGateway, running: Running, control_groups: str
) -> None:
    child = "import time; x = b'x' * 150_000_000; time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    report = await outcome_beside_another(gateway, running, python(code), {"memory_mb": 80})
    assert report.outcome is Outcome.AGENT_ERROR
    assert report.reason == "the agent was killed: out of memory (limit 80 MB); it logged nothing"


async def test_memory_within_the_limit_is_fine(gateway: FakeGateway, running: Running, control_groups: str) -> None:
    code = "import os, time; x = b'x' * 60_000_000; os.fork(); os.fork(); time.sleep(0.5)"
    report = await outcome_beside_another(gateway, running, python(code), {"memory_mb": 120})
    assert report.outcome is Outcome.OK, report.reason


async def test_an_agent_that_fills_its_disk_quota_is_killed_for_it(gateway: FakeGateway, running: Running) -> None:
    code = """
        import os, time
        for i in range(1000):
            os.makedirs(f"d/{i}")
            open(f"d/{i}/f", "wb").write(b"x" * 1_000_000)
            time.sleep(0.02)
    """
    report = await outcome_beside_another(gateway, running, python(code), {"disk_mb": 20})
    assert report.outcome is Outcome.AGENT_ERROR
    assert report.reason == "the agent was killed: its workspace grew over its limit of 20 MB; it logged nothing"


async def test_filling_the_disk_quota_quickly_doesnt_pay(gateway: FakeGateway, running: Running) -> None:
    code = "for i in range(3): open(str(i), 'wb').write(b'x' * 9_000_000)"
    report = await outcome_beside_another(gateway, running, python(code), {"disk_mb": 20})
    assert report.outcome is Outcome.AGENT_ERROR
    assert report.reason is not None and "its workspace grew over its limit of 20 MB" in report.reason


async def test_a_file_can_be_no_larger_than_allowed(gateway: FakeGateway, running: Running) -> None:
    code = """
        try:
            open("f", "wb", 0).write(b"x" * 3_000_000)
            open("f", "ab", 0).write(b"x")
        except OSError as e:
            print(e.strerror)
    """
    report = await outcome_beside_another(gateway, running, python(code), {"file_mb": 1})
    assert (report.outcome, report.log_tail) == (Outcome.OK, "File too large\n")


async def test_an_agent_that_dies_of_a_large_file_is_told_why(gateway: FakeGateway, running: Running) -> None:
    report = await outcome_beside_another(gateway, running, "exec yes >f", {"file_mb": 1})
    assert report.outcome is Outcome.AGENT_ERROR
    expected = "the agent was killed: it wrote a file larger than file_mb allows (1 MB); it logged nothing"
    assert report.reason == expected


async def test_a_fork_bomb_is_contained(gateway: FakeGateway, running: Running, control_groups: str) -> None:
    code = """
        import os, sys, time
        end = time.monotonic() + 20  # should it ever get away
        failed = False
        for _ in range(200):
            try:
                if os.fork() == 0:
                    time.sleep(max(0, end - time.monotonic()))
                    os._exit(0)
            except OSError as e:
                print(e.strerror, flush=True)
                sys.exit(9)
            time.sleep(0.01)
        time.sleep(10)
    """
    report = await outcome_beside_another(gateway, running, python(code), {"processes": 20})
    assert report.outcome is Outcome.AGENT_ERROR
    if control_groups == "groups" and "pids" in Cgroups().enforces:
        assert (report.exit_code, report.log_tail) == (9, "Resource temporarily unavailable\n")
    else:
        assert report.reason is not None
        assert "processes and threads (limit 20)" in report.reason


async def test_a_grader_over_its_limit_is_infra_and_no_reward(gateway: FakeGateway, running: Running) -> None:
    grader = {"command": python("x = b'x' * 200_000_000; import time; time.sleep(2)"), "limits": {"memory_mb": 64}}
    async with running():
        gateway.enqueue(make_claim("r", {}, {"agent": {"command": ["true"]}, "grader": grader}))
        report = await gateway.outcome("r")
    assert report.outcome is Outcome.INFRA
    assert report.reason == "the grader was killed: out of memory (limit 64 MB); it logged nothing"
    assert gateway.events == []


async def test_no_control_group_is_left(gateway: FakeGateway, running: Running) -> None:
    await outcome_beside_another(gateway, running, python(DAEMONS), {"processes": 50, "memory_mb": 200})
    groups = Cgroups()
    made = [groups.make(memory_bytes=1 << 30, processes=10)]
    folders = [f for group in made if group is not None for f in group.folders]
    left = [f for folder in folders for f in folder.parent.glob(f"leyden-{os.getpid()}-*") if f != folder]
    for group in made:
        if group is not None:
            groups.release(group)
    await asyncio.sleep(0)
    assert left == []

"""Agents from a fork server: the same as agents that an interpreter was started for, only sooner."""

from __future__ import annotations

import json
import os
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from leyden.controller.commands import Command
from leyden.controller.warm import Program, python_program
from leyden.schema import Outcome, OutcomeReport
from tests.controller.conftest import alive, none_alive, until
from tests.controller.fake import FakeGateway, make_claim

Running = Callable[..., Any]

SAY = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": globals().get("__file__"), "cwd": os.getcwd(),
    "env": {k: v for k, v in os.environ.items() if k not in ("LEYDEN_KEY", "_")}, "warm": "fractions" in sys.modules,
    "session": os.getsid(0) == os.getpid(), "fds": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "stdin": sys.stdin.read(), "main": sys.modules["__main__"].__dict__ is globals(), "parent": os.getppid(),
}))
"""


def write(folder: Path, text: str, name: str = "agent.py") -> list[str]:
    (folder / name).write_text(textwrap.dedent(text))
    return ["python", name]


def warm(command: Any, **more: Any) -> dict[str, Any]:
    return {"agent": {"command": command, "preload": ["fractions"], **more}}


def own_module(folder: Path, text: str) -> tuple[dict[str, Any], str]:
    """A warm agent whose fork server is told from those of tests beside this one by a module that only it imports."""
    name = f"only_{uuid.uuid4().hex}"
    write(folder, "", f"{name}.py")
    command = write(folder, text.replace("MODULE", name))
    return {"agent": {"command": command, "preload": [name], "env": {"PYTHONPATH": str(folder)}}}, name


async def outcome_of(gateway: FakeGateway, running: Running, config: dict[str, Any]) -> OutcomeReport:
    rollout_id = f"r-{uuid.uuid4().hex}"
    async with running():
        gateway.enqueue(make_claim(rollout_id, {"q": "why?"}, config))
        return await gateway.outcome(rollout_id)


@pytest.mark.parametrize("how", ["file", "code", "module"])
async def test_a_warm_agent_sees_what_a_cold_one_sees(
    gateway: FakeGateway, running: Running, tmp_path: Path, how: str
) -> None:
    write(tmp_path, SAY)
    # A workspace has no modules of its own: -m finds it through the environment.
    command = {"file": ["python", "agent.py"], "code": ["python", "-c", SAY], "module": ["python", "-m", "agent"]}[how]
    command = [*command, "--question", "{{ input.q }}"]
    env = {"PYTHONPATH": str(tmp_path), "ASKED": "{{ input.q }}"}
    said: list[dict[str, Any]] = []
    async with running(keep_workspaces="all"):
        for preload in ([], ["fractions"]):
            # One after the other under one name: paths are the same then.
            config = {"agent": {"command": command, "env": env, "preload": preload}}
            gateway.outcomes.clear()
            gateway.enqueue(make_claim("same", {"q": "why?"}, config))
            report = await gateway.outcome("same")
            assert report.outcome is Outcome.OK and report.log_tail is not None, report.log_tail
            said.append(json.loads(report.log_tail))
    cold, hot = said
    assert (cold.pop("warm"), hot.pop("warm")) == (False, True)
    assert hot == cold
    assert hot["parent"] == os.getpid() and hot["session"] and hot["fds"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("body", "outcome", "code", "last"),
    [
        ("import sys; print('bye'); sys.exit(3)", Outcome.AGENT_ERROR, 3, "bye"),
        ("raise RuntimeError('no luck')", Outcome.AGENT_ERROR, 1, "RuntimeError: no luck"),
        ("import os; os.kill(os.getpid(), 11)", Outcome.AGENT_ERROR, None, None),
        ("import sys; sys.exit('said why')", Outcome.AGENT_ERROR, 1, "said why"),
        ("import atexit; atexit.register(print, 'at exit')", Outcome.OK, 0, "at exit"),
        ("import threading as t; t.Timer(0.2, print, ['late']).start()", Outcome.OK, 0, "late"),
        ("import os, time; os._exit(75)", Outcome.INFRA, 75, None),
    ],
)
async def test_ends_are_those_of_any_agent(
    gateway: FakeGateway, running: Running, tmp_path: Path, body: str, outcome: Outcome, code: int, last: str | None
) -> None:
    report = await outcome_of(gateway, running, warm(write(tmp_path, body)))
    assert (report.outcome, report.exit_code) == (outcome, code)
    assert ((report.log_tail or "").splitlines() or [None])[-1] == last
    assert "fork_server" not in (report.log_tail or "")


async def test_agents_do_not_meet(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    text = """
        import fractions, os, random, re
        assert not hasattr(fractions, "mark"), "another agent was here"
        fractions.mark = os.environ["LEYDEN_KEY"]
        found = set()
        with open("/proc/self/mem", "rb", 0) as memory:
            for line in open("/proc/self/maps"):
                begin, end = (int(n, 16) for n in line.split()[0].split("-"))
                if " rw" in line and not line.rstrip().endswith("]") or "[heap]" in line:
                    memory.seek(begin)
                    found.update(re.findall(b"agent-r[0-9]+-0", memory.read(end - begin)))
        assert os.environ["LEYDEN_KEY"].encode() in found
        print(random.random(), len(found))
    """
    config = warm(write(tmp_path, text))
    async with running():
        gateway.enqueue(*(make_claim(f"r{i}", {}, config) for i in range(12)))
        reports = [await gateway.outcome(f"r{i}") for i in range(12)]
    assert {r.outcome for r in reports} == {Outcome.OK}, reports[0].log_tail
    drawn = [(r.log_tail or "").split() for r in reports]
    assert len({d[0] for d in drawn}) == 12 and {d[1] for d in drawn} == {"1"}


async def test_timeouts_and_daemons_end_with_their_whole_tree(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    mark = str(uuid.uuid4().int)
    text = f"""
        import os, signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["setsid", "sleep", "600.{mark}"])
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        time.sleep(600)
    """
    report = await outcome_of(gateway, running, warm(write(tmp_path, text), timeout_seconds=1))
    assert report.outcome is Outcome.TIMEOUT
    assert not alive(mark)


async def test_the_server_ends_with_its_controller(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    config, name = own_module(tmp_path, "pass")
    await outcome_of(gateway, running, config)
    assert await none_alive(name)


@pytest.mark.parametrize(
    ("module", "text", "words"),
    [
        (
            "threads_x",
            "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True).start()",
            "1 th",
        ),
        ("broken_x", "raise ValueError('no')", "can't import broken_x: ValueError: no"),
        ("children_x", "import subprocess\nsubprocess.Popen(['sleep', '5'])", "started processes"),
        ("torch", "class cuda:\n    is_initialized = staticmethod(lambda: True)", "initialised CUDA"),
    ],
)
async def test_what_is_not_safe_to_fork_starts_cold_and_says_so_once(
    gateway: FakeGateway, running: Running, tmp_path: Path, module: str, text: str, words: str
) -> None:
    write(tmp_path, text, f"{module}.py")
    config = {
        "agent": {
            "command": write(tmp_path, "import sys; print(sorted(sys.modules))"),
            "preload": [module],
            "env": {"PYTHONPATH": str(tmp_path)},
        }
    }
    with structlog.testing.capture_logs() as logs:
        async with running():
            gateway.enqueue(*(make_claim(f"r{i}", {}, config) for i in range(3)))
            for i in range(3):
                report = await gateway.outcome(f"r{i}")
                assert report.outcome is Outcome.OK
                assert f"'{module}'" not in (report.log_tail or "")
    (why,) = [entry["why"] for entry in logs if entry["event"] == "agents start cold"]
    assert words in why


async def test_a_server_that_was_killed_is_started_again(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    config, module = own_module(tmp_path, "import sys; print('MODULE' in sys.modules)")
    async with running():
        for name in ("first", "second", "third"):
            gateway.enqueue(make_claim(name, {}, config))
            report = await gateway.outcome(name)
            assert report.outcome is Outcome.OK
            if name == "first":
                (server,) = alive(module)
                os.kill(server, 9)
                await until(lambda: not alive(module))
    assert report.log_tail == "True\n"  # The second may have met the dead one, and started cold.


async def test_a_class_agent_starts_warm_too(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    write(tmp_path, "import sys\nclass A:\n    def run(self): print('fractions' in sys.modules)", "module_x.py")
    report = await outcome_of(gateway, running, {"local": {"agent_class": "module_x:A", "preload": ["fractions"]}})
    assert (report.outcome, report.log_tail) == (Outcome.OK, "True\n")


def test_only_plain_python_commands_are_programs() -> None:
    def of(*argv: str) -> Program | None:
        return python_program(Command(list(argv), ""))

    assert of("/x/python3.11", "a.py", "b") == Program("/x/python3.11", "file", "a.py", ("a.py", "b"))
    assert of("python", "-c", "pass", "b") == Program("python", "code", "pass", ("-c", "b"))
    assert of("python", "-m", "mod", "b") == Program("python", "module", "mod", ("-m", "b"))
    for argv in (["python"], ["python", "-u", "a.py"], ["python", "-c"], ["node", "a.js"], ["python2", "a.py"]):
        assert of(*argv) is None
    assert python_program(Command(["python", "a.py"], "", shell=True)) is None

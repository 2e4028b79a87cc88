"""Agents and graders as real processes, against the fake gateway."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyden.controller.logfile import log_path
from leyden.schema import Outcome, OutcomeReport
from tests.controller.conftest import alive, none_alive, until
from tests.controller.fake import ADMIN_KEY, FakeGateway, make_claim

Running = Callable[..., Any]


def script(tmp_path: Path, text: str, name: str = "agent.py") -> list[str]:
    (tmp_path / name).write_text(textwrap.dedent(text))
    return ["python", name]


async def outcome_of(
    gateway: FakeGateway,
    running: Running,
    config: dict[str, Any],
    *,
    task: Any = None,
    base: Path | None = None,
    **settings: Any,
) -> tuple[str, OutcomeReport]:
    rollout_id = f"r-{uuid.uuid4().hex}"
    async with running(base, **settings):
        gateway.enqueue(make_claim(rollout_id, task if task is not None else {"q": 1}, config))
        return rollout_id, await gateway.outcome(rollout_id)


def agent(command: list[str] | str, **more: Any) -> dict[str, Any]:
    return {"agent": {"command": command, **more}}


# -- what an exit means ------------------------------------------------------------------------------------------------


async def test_exit_0_is_ok(gateway: FakeGateway, running: Running) -> None:
    _, report = await outcome_of(gateway, running, agent(["true"]))
    assert (report.outcome, report.reason, report.exit_code, report.controller_id) == (Outcome.OK, None, 0, "c1")


async def test_a_crash_is_the_agents_and_its_last_line_is_in_the_reason(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    command = script(tmp_path, "print('working', flush=True)\nraise RuntimeError('no luck')")
    _, report = await outcome_of(gateway, running, agent(command))
    assert (report.outcome, report.exit_code) == (Outcome.AGENT_ERROR, 1)
    assert report.reason == "the agent exited with code 1; last line of its log: 'RuntimeError: no luck'"
    assert report.log_tail is not None and report.log_tail.startswith("working\nTraceback")


async def test_a_signal_is_named(gateway: FakeGateway, running: Running) -> None:
    _, report = await outcome_of(gateway, running, agent("kill -SEGV $$"))
    assert (report.outcome, report.exit_code, report.signal) == (Outcome.AGENT_ERROR, None, 11)
    assert report.reason == "the agent was killed by SIGSEGV; it logged nothing"


async def test_exit_75_is_infra(gateway: FakeGateway, running: Running) -> None:
    _, report = await outcome_of(gateway, running, agent("exit 75;"))
    assert (report.outcome, report.exit_code) == (Outcome.INFRA, 75)


@pytest.mark.parametrize("command", [["no-such-program-x", "1"], "no-such-program-x 1", ["./no-such-program-x"]])
async def test_a_command_that_is_not_there_is_infra(gateway: FakeGateway, running: Running, command: Any) -> None:
    _, report = await outcome_of(gateway, running, agent(command))
    assert report.outcome is Outcome.INFRA
    assert report.reason is not None and report.reason.startswith("agent.command: command not found: ")
    assert "no-such-program-x" in report.reason


async def test_a_shell_that_finds_no_command_is_infra(gateway: FakeGateway, running: Running) -> None:
    _, report = await outcome_of(gateway, running, agent("no-such-program-x | cat; no-such-program-x"))
    assert (report.outcome, report.exit_code) == (Outcome.INFRA, 127)
    assert report.reason is not None and "no-such-program-x" in report.reason


async def test_a_file_that_is_not_executable_is_infra(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("x")
    _, report = await outcome_of(gateway, running, agent(["./tool"]))
    assert report.outcome is Outcome.INFRA
    assert report.reason == "can't start the agent's command './tool': Permission denied"


async def test_a_missing_field_fails_only_its_rollout(gateway: FakeGateway, running: Running) -> None:
    config = agent(["echo", "{{ input.question }}"])
    async with running():
        gateway.enqueue(make_claim("bad", {"q": 1}, config), make_claim("good", {"question": "why?"}, config))
        bad, good = await gateway.outcome("bad"), await gateway.outcome("good")
    assert bad.outcome is Outcome.INFRA
    expected = "the task has no field 'question', which the template of agent.command[1] needs: '{{ input.question }}'"
    assert bad.reason == expected
    assert (good.outcome, good.log_tail) == (Outcome.OK, "why?\n")


# -- time --------------------------------------------------------------------------------------------------------------


async def test_an_agent_that_never_exits_and_ignores_term_is_a_timeout(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    command = script(
        tmp_path,
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("still here", flush=True)
        while True:
            time.sleep(1)
        """,
    )
    rollout_id, report = await outcome_of(gateway, running, agent(command, timeout_seconds=1.5))
    assert report.outcome is Outcome.TIMEOUT
    assert report.reason == "the agent ran longer than 1.5 s; last line of its log: 'still here'"
    assert report.signal == 9
    assert not alive(rollout_id)


async def test_term_comes_before_kill(gateway: FakeGateway, running: Running) -> None:
    command = "trap 'echo goodbye; exit 3' TERM; while :; do sleep 0.05; done"
    _, report = await outcome_of(gateway, running, agent(command, timeout_seconds=0.5))
    assert (report.outcome, report.exit_code) == (Outcome.TIMEOUT, 3)
    assert report.log_tail is not None and report.log_tail.count("goodbye") == 1


async def test_the_attempts_limit_holds_for_the_agent_too(gateway: FakeGateway, running: Running) -> None:
    config = {**agent(["sleep", "60"]), "timeout_seconds": 0.5}
    _, report = await outcome_of(gateway, running, config)
    assert (report.outcome, report.reason) == (Outcome.TIMEOUT, "the agent ran longer than 0.5 s; it logged nothing")


# -- nothing is left ---------------------------------------------------------------------------------------------------

DAEMON = """
    import os, subprocess, sys, time
    mark = sys.argv[1]
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", mark]
    # In the agent's own group; in a new session; double-forked into a new session.
    subprocess.Popen(sleeper)
    subprocess.Popen(sleeper, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sleeper[0], sleeper)
        os._exit(0)
    # A group of its own within the session, with an empty environment.
    subprocess.Popen(sleeper, env={}, process_group=0)
    end = sys.argv[2]
    if end == "hang":
        time.sleep(600)
    sys.exit(int(end))
"""


@pytest.mark.parametrize(
    "end,outcome", [("0", Outcome.OK), ("4", Outcome.AGENT_ERROR), ("hang", Outcome.TIMEOUT)], ids=str
)
async def test_whatever_an_agent_forked_is_gone_with_it(
    gateway: FakeGateway, running: Running, tmp_path: Path, end: str, outcome: Outcome
) -> None:
    mark = uuid.uuid4().hex
    command = [*script(tmp_path, DAEMON), mark, end]
    async with running():
        gateway.enqueue(make_claim("r", {}, agent(command, timeout_seconds=2)))
        report = await gateway.outcome("r")
        assert report.outcome is outcome
        # Reported only after the whole tree was gone: nothing to wait for here.
        assert alive(mark) == []


async def test_other_attempts_are_unaffected_by_an_end(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    async with running():
        gateway.enqueue(
            make_claim("stays", {}, agent(f"setsid sleep 600 {'0 ' * 1}& echo {mark} up; sleep 601")),
            make_claim("goes", {}, agent([*script(tmp_path, DAEMON), mark, "0"])),
        )
        await gateway.outcome("goes")
        assert len(alive("stays")) >= 2
        assert "stays" not in {r for r, _ in gateway.outcomes}
    assert await none_alive("stays")


async def test_a_process_that_keeps_moving_is_caught(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    command = script(
        tmp_path,
        """
        import os, time
        # Bounded: should it ever get away, it must not take a core for good.
        end = time.monotonic() + 20
        log = os.open("HOPS", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if os.fork() == 0:
            os.setsid()
            while time.monotonic() < end:
                if os.fork():
                    os._exit(0)
                os.setsid()
                os.write(log, b".")
        time.sleep(0.2)
        """.replace("HOPS", str(tmp_path / "hops")),
    )
    async with running():
        gateway.enqueue(make_claim("hops", {}, agent(command)))
        assert (await gateway.outcome("hops")).outcome is Outcome.OK
        hops = (tmp_path / "hops").stat().st_size
        await asyncio.sleep(0.5)
        assert (tmp_path / "hops").stat().st_size == hops > 10


# -- the log -----------------------------------------------------------------------------------------------------------


async def test_20_megabytes_of_output_neither_block_nor_fill_the_disk(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    command = script(
        tmp_path,
        """
        import sys
        print("first line")
        for i in range(10):
            sys.stdout.write("o" * 1_000_000 + "\\n")
            sys.stdout.flush()
            sys.stderr.write("e" * 1_000_000 + "\\n")
        print("last line é")
        """,
    )
    rollout_id, report = await outcome_of(gateway, running, agent(command, timeout_seconds=60), log_bytes=100_000)
    assert report.outcome is Outcome.OK
    log = log_path(tmp_path / "work" / "logs", rollout_id, "0").read_bytes()
    assert 90_000 < len(log) < 101_000
    assert log.startswith(b"first line\n") and log.endswith("last line é\n".encode())
    assert b"bytes left out here" in log
    assert report.log_tail is not None and report.log_tail.endswith("last line é\n")
    assert len(report.log_tail.encode()) <= 4096


async def test_logs_of_attempts_are_not_mixed(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    async with running():
        claims = [make_claim(f"r{i}", {"i": i}, agent("for x in 1 2 3; do echo {{ input.i }}; done")) for i in range(4)]
        gateway.enqueue(*claims)
        for i in range(4):
            await gateway.outcome(f"r{i}")
    for i in range(4):
        assert log_path(tmp_path / "work" / "logs", f"r{i}", "0").read_text() == f"{i}\n" * 3


# -- environment, folders ----------------------------------------------------------------------------------------------

DUMP = "import json, os; print(json.dumps([dict(os.environ), os.getcwd()]))"


async def test_an_agents_environment_is_as_documented(
    gateway: FakeGateway, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "LEYDEN_ADMIN_KEY",
        "AGL_KEY",
        "OPENAI_ORG",
        "ANTHROPIC_MODEL",
        "GOOGLE_GENAI_USE_VERTEXAI",
        "HF_TOKEN",
        "aws_secret",
        "DB_PASSWORD",
    ):
        monkeypatch.setenv(name, "leak")
    monkeypatch.setenv("HARMLESS", "kept")
    config = agent(["python", "-c", DUMP], env={"TASK": "{{ input.q }}!", "OPENAI_API_BASE": "mine"})
    rollout_id, report = await outcome_of(gateway, running, config, task={"q": "a 'b'\n\"c\" {x}"})
    assert report.log_tail is not None
    env, cwd = json.loads(report.log_tail)
    key, events = f"agent-{rollout_id}-0", f"{gateway.url}/api/rollouts/{rollout_id}/attempt/0/events"
    told = {
        "OPENAI_BASE_URL": f"{gateway.url}/openai/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": f"{gateway.url}/anthropic",
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "GOOGLE_GEMINI_BASE_URL": f"{gateway.url}/gemini",
        "GEMINI_API_KEY": key,
        "LEYDEN_ROLLOUT_ID": rollout_id,
        "LEYDEN_ATTEMPT_ID": "0",
        "LEYDEN_EVENT_URL": events,
        "LEYDEN_KEY": key,
        "LEYDEN_MODEL": "tiny",
        "AGL_OPENAI_BASE_URL": f"{gateway.url}/openai/v1",
        "AGL_EVENT_URL": events,
        "AGL_KEY": key,
        "TASK": "a 'b'\n\"c\" {x}!",
        "OPENAI_API_BASE": "mine",
    }
    prefixes = ("LEYDEN_", "AGL_", "OPENAI_", "ANTHROPIC_", "GOOGLE_", "GEMINI_")
    assert {k: v for k, v in env.items() if k.startswith(prefixes) or k == "TASK"} == told
    assert env["HARMLESS"] == "kept"
    assert "leak" not in env.values() and ADMIN_KEY not in env.values()
    inherited = {k for k in os.environ if k in env}
    assert set(env) - inherited - set(told) <= {"PATH", "NO_PROXY", "no_proxy", "LC_CTYPE"}
    assert Path(cwd).name == f"{rollout_id}.0"


async def test_an_env_name_of_leydens_is_refused(gateway: FakeGateway, running: Running) -> None:
    _, report = await outcome_of(gateway, running, agent(["true"], env={"LEYDEN_KEY": "x"}))
    assert report.outcome is Outcome.INFRA and report.reason is not None
    assert report.reason.startswith("agent.env.LEYDEN_KEY: names that begin with LEYDEN_")


async def test_files_of_the_run_are_found_from_a_fresh_workspace(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    base = tmp_path / "example"
    base.mkdir()
    command = script(base, "import os, sys, helper; print(os.listdir(), helper.x, sys.argv[1:], sys.prefix)")
    (base / "helper.py").write_text("x = 'helped'")
    (base / "notes.txt").write_text("")
    config = agent([*command, "notes.txt", "{{ input.name }}", "train"])
    _, report = await outcome_of(gateway, running, config, task={"name": "notes.txt"}, base=base)
    expected = f"[] helped {[str(base / 'notes.txt'), 'notes.txt', 'train']} {sys.prefix}\n"
    assert report.log_tail == expected


async def test_a_plain_string_is_its_words(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    script(tmp_path, "import sys; print(sys.argv[1:])")
    config = agent("python agent.py --q={{ input.q }} {{ input.q }}")
    _, report = await outcome_of(gateway, running, config, task={"q": "a b; $(c)"})
    assert report.log_tail == "['--q=a b; $(c)', 'a b; $(c)']\n"


async def test_a_given_directory_is_where_the_agent_runs(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "agent.py").write_text("import os; print(os.getcwd())")
    _, report = await outcome_of(gateway, running, agent(["python", "agent.py"], directory="there"))
    assert report.log_tail == f"{tmp_path / 'there'}\n"


async def test_a_missing_directory_is_infra(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    _, report = await outcome_of(gateway, running, agent(["true"], directory="nowhere"))
    assert report.outcome is Outcome.INFRA
    assert report.reason == f"can't start the agent: its folder {str(tmp_path / 'nowhere')!r} doesn't exist"


async def test_an_agent_lightning_class_runs(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(
        textwrap.dedent(
            """
            import os
            class Plain:
                def run(self):
                    print(os.environ["Q"], os.environ["N"], os.environ["WHO"], os.environ["AGL_KEY"])
            class Later:
                async def run(self):
                    print("async")
            not_a_class = 1
            """
        )
    )
    env_map = {"Q": "input.items.0.q", "N": "input.items", "WHO": "me"}
    task = {"items": [{"q": "é?"}]}
    local = {"agent_class": "my_agent.Plain", "env_map": env_map}
    rollout_id, report = await outcome_of(gateway, running, {"local": local}, task=task)
    assert report.log_tail == f'é? [{{"q": "é?"}}] me agent-{rollout_id}-0\n'
    _, report = await outcome_of(gateway, running, {"local": {"agent_class": "my_agent:Later"}})
    assert report.log_tail == "async\n"
    _, report = await outcome_of(gateway, running, {"local": {"agent_class": "my_agent:not_a_class"}})
    assert report.outcome is Outcome.AGENT_ERROR
    _, report = await outcome_of(gateway, running, {"local": local}, task={"items": []})
    expected = "the task has no field '0', which the path 'input.items.0.q' in local.env_map needs"
    assert (report.outcome, report.reason) == (Outcome.INFRA, expected)


@pytest.mark.parametrize("policy,kept", [("all", {"good", "bad"}), ("failed", {"bad"}), ("none", set())])
async def test_workspaces_are_kept_as_said(
    gateway: FakeGateway, running: Running, tmp_path: Path, policy: str, kept: set[str]
) -> None:
    async with running(keep_workspaces=policy):
        gateway.enqueue(
            make_claim("good", {}, agent("mkdir d; echo 1 >d/f; chmod 0 d")),
            make_claim("bad", {}, agent("echo 1 >f; exit 1")),
        )
        await gateway.outcome("good")
        await gateway.outcome("bad")
    names = {p.name.removesuffix(".0") for p in (tmp_path / "work" / "workspaces").iterdir()}
    assert names == kept


# -- the grader --------------------------------------------------------------------------------------------------------


def graded(grader: Any, command: Any = ("true",), **more: Any) -> dict[str, Any]:
    return {**agent(list(command)), "grader": {"command": grader, **more}}


@pytest.mark.parametrize(
    "printed,value",
    [("0.5", 0.5), ("-1", -1.0), ("1e-3", 0.001), ('{"reward": 1, "parts": {"a": 2}}', 1.0), ("log\n 0.25 ", 0.25)],
)
async def test_a_graders_last_line_is_the_reward(
    gateway: FakeGateway, running: Running, printed: str, value: float
) -> None:
    code = f"import sys; print({printed!r}); print('warning at exit', file=sys.stderr)"
    rollout_id, report = await outcome_of(gateway, running, graded(["python", "-c", code]))
    assert report.outcome is Outcome.OK
    assert [e["data"]["value"] for e in gateway.events] == [value]
    assert gateway.event_keys == [f"grader-{rollout_id}-0"]
    assert [what for what, _ in gateway.log if what != "claim"] == ["phase", "event", "outcome"]


@pytest.mark.parametrize(
    "code,reason",
    [
        ("print('done')", "grader printed no number (exit code 0): last line was 'done'"),
        ("print('NaN')", "grader printed no number (exit code 0): last line was 'NaN'"),
        ("print('1e999')", "grader printed no number (exit code 0): last line was '1e999'"),
        ("print('{\"reward\": true}')", "grader printed no number (exit code 0): last line was '{\"reward\": true}'"),
        ("pass", "grader printed no number (exit code 0): it printed nothing and posted no reward"),
        ("print(1); raise KeyError('x')", "the grader exited with code 1; last line of its log: 'KeyError: 'x''"),
        ("import os; os.abort()", "the grader was killed by SIGABRT; it logged nothing"),
        ("import time; time.sleep(60)", "the grader didn't end within its time; it logged nothing"),
    ],
)
async def test_a_failing_grader_is_infra_and_never_a_reward(
    gateway: FakeGateway, running: Running, code: str, reason: str
) -> None:
    config = graded(["python", "-c", code], timeout_seconds=1.5 if "sleep" in code else 60)
    _, report = await outcome_of(gateway, running, config)
    assert report.outcome is Outcome.INFRA
    assert (report.reason or "").replace("last line of its log: 'KeyError: 'x''", "K") == reason.replace(
        "last line of its log: 'KeyError: 'x''", "K"
    )
    assert gateway.events == []


async def test_a_missing_grader_is_infra(gateway: FakeGateway, running: Running) -> None:
    _, report = await outcome_of(gateway, running, graded(["no-such-grader"]))
    assert (report.outcome, report.reason) == (Outcome.INFRA, "grader.command: command not found: 'no-such-grader'")


async def test_a_grader_may_post_its_reward_itself(gateway: FakeGateway, running: Running) -> None:
    code = (
        "import os, json, urllib.request as u; r = u.Request(os.environ['LEYDEN_EVENT_URL'], method='POST',"
        " data=json.dumps({'event_type': 'reward', 'data': {'value': 2.5}}).encode(), headers={'Content-Type':"
        " 'application/json', 'Authorization': 'Bearer ' + os.environ['LEYDEN_KEY']}); u.urlopen(r)"
    )
    rollout_id, report = await outcome_of(gateway, running, graded(["python", "-c", code]))
    assert (report.outcome, gateway.rewards) == (Outcome.OK, {rollout_id: 2.5})
    assert len(gateway.events) == 1


async def test_a_grader_sees_the_workspace_the_task_and_its_own_key_only(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    command = script(
        tmp_path,
        """
        import json, os
        env = dict(os.environ)
        task, log = json.load(open(env["LEYDEN_TASK_FILE"])), open(env["LEYDEN_AGENT_LOG"]).read()
        answer = open("answer.txt").read()
        print(json.dumps({"reward": 1, "reason": "fine", "env": env, "seen": [task, log, answer, os.listdir()],
                          "task_file": env["LEYDEN_TASK_FILE"]}))
        """,
        "grade.py",
    )
    config = graded(command, ["sh", "-c", "echo 42 >answer.txt; echo said; env | grep -c grader-"])
    config["grader"]["env"] = {"WANT": "{{ input.want }}"}
    config["agent"]["command"] = "echo 42 >answer.txt; echo said; env | grep grader- || true"
    rollout_id, report = await outcome_of(gateway, running, config, task={"want": "42"})
    assert report.outcome is Outcome.OK, report.reason
    data = gateway.events[0]["data"]
    assert data["seen"] == [{"want": "42"}, "said\n", "42\n", ["answer.txt"]]
    env = data["env"]
    key = f"grader-{rollout_id}-0"
    ours = {k: v for k, v in env.items() if k.startswith(("LEYDEN_", "AGL_", "OPENAI_", "ANTHROPIC_"))}
    assert ours == {
        "LEYDEN_ROLLOUT_ID": rollout_id,
        "LEYDEN_ATTEMPT_ID": "0",
        "LEYDEN_EVENT_URL": f"{gateway.url}/api/rollouts/{rollout_id}/attempt/0/events",
        "LEYDEN_KEY": key,
        "LEYDEN_TASK_FILE": data["task_file"],
        "LEYDEN_AGENT_LOG": str(log_path(tmp_path / "work" / "logs", rollout_id, "0")),
        "LEYDEN_AGENT_EXIT_CODE": "0",
    }
    assert env["WANT"] == "42"
    assert f"agent-{rollout_id}-0" not in env.values()
    assert "workspaces" not in Path(data["task_file"]).parts
    assert list((tmp_path / "work" / "tasks").iterdir()) == []
    assert (data["source"], data["reason"]) == ("grader", "fine")


async def test_no_grader_after_a_failed_agent(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    _, report = await outcome_of(gateway, running, graded(["touch", str(ran)], ["false"]))
    assert report.outcome is Outcome.AGENT_ERROR
    assert not ran.exists() and ("phase", "r") not in gateway.log


async def test_the_agents_tree_is_gone_before_the_grader_starts(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    mark = uuid.uuid4().hex
    lines = "(p.info['cmdline'] or () for p in psutil.process_iter(['cmdline']))"
    count = f"import psutil; print(sum({mark!r} in ' '.join(line) for line in {lines}))"
    # The counting process has the mark on its own command line: 1 means that nothing else has.
    _, report = await outcome_of(
        gateway, running, graded(["python", "-c", count], [*script(tmp_path, DAEMON), mark, "0"])
    )
    assert report.outcome is Outcome.OK, report.reason
    assert gateway.events[0]["data"]["value"] == 1.0


# -- leases, stops, a gateway in trouble -------------------------------------------------------------------------------


async def test_a_lost_attempt_is_killed_and_not_reported(gateway: FakeGateway, running: Running) -> None:
    async with running():
        gateway.enqueue(make_claim("gone", {}, agent("setsid sleep 600 & sleep 601")))
        await until(lambda: len(alive("agent-gone-0")) >= 2)
        gateway.lost.add(("gone", "0"))
        assert await none_alive("agent-gone-0")
        gateway.enqueue(make_claim("next", {}, agent(["true"])))
        await gateway.outcome("next")
    assert ("gone", "0") not in gateway.outcomes


async def test_a_stop_ends_attempts_as_infra(gateway: FakeGateway, running: Running) -> None:
    async with running() as controller:
        gateway.enqueue(make_claim("stopped", {}, agent(["sleep", "600"])))
        await until(lambda: alive("agent-stopped-0"))
        controller.stop()
        report = await gateway.outcome("stopped")
    assert (report.outcome, report.reason) == (Outcome.INFRA, "controller stopped")
    assert not alive("agent-stopped-0")
    assert gateway.restarts == ["c1", "c1"]


async def test_reports_survive_a_gateway_restart(gateway: FakeGateway, running: Running) -> None:
    gateway.fail_times = {"phase": 2, "events": 2, "outcome": 2, "claims": 2}
    _, report = await outcome_of(gateway, running, graded(["echo", "1"]))
    assert report.outcome is Outcome.OK
    assert len(gateway.events) == 1


@pytest.mark.parametrize("route", ["phase", "events", "outcome"])
async def test_a_409_drops_the_attempt(gateway: FakeGateway, running: Running, route: str, tmp_path: Path) -> None:
    async with running(concurrency=1):
        gateway.refuse = {(route, "r"): 409}
        gateway.enqueue(make_claim("r", {}, graded(["echo", "1"])), make_claim("next", {}, agent(["true"])))
        await gateway.outcome("next")
    assert ("r", "0") not in gateway.outcomes
    assert not (tmp_path / "work" / "workspaces" / "r.0").exists()


async def test_freed_slots_are_claimed_at_once_and_never_more(gateway: FakeGateway, running: Running) -> None:
    peak = 0
    async with running(concurrency=3):
        gateway.enqueue(*(make_claim(f"q{i}", {}, agent(["sleep", "0.1"])) for i in range(12)))
        while len(gateway.outcomes) < 12:
            peak = max(peak, len(gateway.held) - len(gateway.outcomes))
            await asyncio.sleep(0.01)
    assert peak == 3
    assert all(int(n) <= 3 for what, n in gateway.log if what == "claim")

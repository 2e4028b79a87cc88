from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from leyden.errors import RunError
from leyden.supervisor import Supervisor
from tests.controller.conftest import alive, none_alive, until

SLEEP = "import sys, time; print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
DAEMON = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]], start_new_session=True)
print("up", flush=True)
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
time.sleep(600)
"""


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


def says_up(parts: Supervisor, name: str):
    async def ready() -> bool:
        return b"up" in parts.log_path(name).read_bytes()

    return ready


async def up(parts: Supervisor, name: str, argv: list[str]) -> None:
    await parts.start(name, argv, None, says_up(parts, name), 30)


async def test_the_result_comes_through_and_nothing_is_left(tmp_path: Path, mark: str) -> None:
    async def work() -> int:
        return 42

    async with Supervisor(tmp_path) as parts:
        await up(parts, "a", python(SLEEP, mark))
        await up(parts, "b", python(DAEMON, mark))
        assert await parts.run_until_failure_or(work()) == 42
        assert len(alive(mark)) == 3
    assert alive(mark) == []
    assert (tmp_path / "a.log").read_text() == "up\n"


async def test_a_part_that_ignores_term_is_killed(tmp_path: Path, mark: str) -> None:
    parts = Supervisor(tmp_path, stop_seconds=0.3)
    await up(parts, "stubborn", python(STUBBORN, mark))
    await parts.stop()
    assert alive(mark) == []


async def test_parts_stop_in_reverse_order(tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = f"""
import signal, sys, time
def stop(*_):
    open({str(order)!r}, "a").write(sys.argv[1])
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
while True:
    time.sleep(1)
"""
    async with Supervisor(tmp_path) as parts:
        for name in "abc":
            await up(parts, name, python(code, name))
    assert order.read_text() == "cba"


async def test_a_part_that_dies_ends_the_run_with_its_own_sentence(tmp_path: Path, mark: str) -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    parts = Supervisor(tmp_path)
    await up(parts, "gateway", python(DAEMON, mark))
    # The last words of an earlier run's log aren't this part's.
    parts.log_path("engine").write_text("old words\n")
    await parts.start("engine", python("import sys, time; time.sleep(0.3); sys.exit('no memory for 3 layers')", mark))
    with pytest.raises(RunError) as e:
        await parts.run_until_failure_or(work())
    assert str(e.value) == "the engine ended unexpectedly with exit code 1: no memory for 3 layers"
    assert cancelled.is_set()
    assert alive(mark) == []


async def test_exit_0_is_a_failure_too_and_its_daemon_goes(tmp_path: Path, mark: str) -> None:
    parts = Supervisor(tmp_path)
    await parts.start("engine", python(DAEMON, mark, "0"))
    with pytest.raises(RunError, match="the engine ended unexpectedly with exit code 0: up"):
        await parts.run_until_failure_or(asyncio.sleep(600))
    assert alive(mark) == []


async def test_of_a_traceback_the_last_line_is_shown(tmp_path: Path) -> None:
    parts = Supervisor(tmp_path)
    await parts.start("engine", python("raise OSError('disk gone')"))
    with pytest.raises(RunError) as e:
        await parts.run_until_failure_or(asyncio.sleep(600))
    assert str(e.value) == "the engine ended unexpectedly with exit code 1: OSError: disk gone"


async def test_a_part_that_dies_before_it_is_ready(tmp_path: Path, mark: str) -> None:
    parts = Supervisor(tmp_path)
    await up(parts, "first", python(SLEEP, mark))
    with pytest.raises(RunError, match="the second was killed by SIGKILL"):
        await up(parts, "second", ["sh", "-c", "kill -9 $$"])
    assert alive(mark) == []


async def test_a_part_that_is_never_ready(tmp_path: Path, mark: str) -> None:
    async def never() -> bool:
        return False

    parts = Supervisor(tmp_path)
    with pytest.raises(RunError, match=r"the engine wasn't ready within 1 s; its log ends with:\nup"):
        await parts.start("engine", python(SLEEP, mark), None, never, 1)
    assert alive(mark) == []


async def test_a_part_that_cannot_start_stops_the_others(tmp_path: Path, mark: str) -> None:
    parts = Supervisor(tmp_path)
    await up(parts, "first", python(SLEEP, mark))
    with pytest.raises(RunError, match=r"can't start the second \(/no/such\)"):
        await parts.start("second", ["/no/such"])
    assert alive(mark) == []


async def test_the_works_own_error_comes_through(tmp_path: Path, mark: str) -> None:
    async def work() -> None:
        raise KeyError("mine")

    parts = Supervisor(tmp_path)
    await up(parts, "a", python(SLEEP, mark))
    with pytest.raises(KeyError, match="mine"):
        await parts.run_until_failure_or(work())
    assert alive(mark) == []


async def test_parts_may_become_ready_together(tmp_path: Path, mark: str) -> None:
    async def never() -> bool:
        return False

    parts = Supervisor(tmp_path)
    for name in "ab":
        await parts.start(name, python(SLEEP, mark))
    await parts.wait_ready({name: says_up(parts, name) for name in "ab"}, timeout=30)
    with pytest.raises(RunError, match=r"the b wasn't ready within 0\.5 s"):
        await parts.wait_ready({"a": says_up(parts, "a"), "b": never}, timeout=0.5)
    assert alive(mark) == []


async def test_a_foreground_part_ends_the_run_with_its_own_exit_code(
    tmp_path: Path, mark: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with Supervisor(tmp_path) as parts:
        await up(parts, "a", python(SLEEP, mark))
        assert await parts.run_foreground("trainer", python("print('seen')")) == 0
        assert capfd.readouterr().out == "seen\n"
        assert len(alive(mark)) == 1
        assert await parts.run_foreground("trainer", python("import sys; sys.exit(7)")) == 7
        with pytest.raises(RunError, match="the trainer was killed by SIGKILL") as e:
            await parts.run_foreground("trainer", python("import os; os.kill(os.getpid(), 9)"))
        assert e.value.exit_code == 128 + 9
        assert alive(mark) == []


async def test_a_foreground_part_does_not_outlive_the_others(tmp_path: Path, mark: str) -> None:
    parts = Supervisor(tmp_path)
    await parts.start("engine", python("import sys, time; time.sleep(0.5); sys.exit('gone')"))
    with pytest.raises(RunError, match="the engine ended unexpectedly with exit code 1: gone"):
        await parts.run_foreground("trainer", python(SLEEP, mark))
    assert alive(mark) == []


PROGRAM = """
import asyncio, signal, sys
from pathlib import Path
from leyden.errors import RunError
from leyden.supervisor import Supervisor

async def main():
    async with Supervisor(Path(sys.argv[1])) as parts:
        for name in ("a", "b"):
            await parts.start(name, [sys.executable, "-c", sys.argv[2], sys.argv[3]])
        await parts.run_until_failure_or(asyncio.sleep(600))

signal.signal(signal.SIGINT, signal.default_int_handler)  # A background job's children start with it ignored.
try:
    asyncio.run(main())
except RunError as e:
    sys.exit(e.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("signum,code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
async def test_a_signal_stops_everything(tmp_path: Path, mark: str, signum: int, code: int) -> None:
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path), SLEEP, mark]
    process = subprocess.Popen(argv, start_new_session=True)  # noqa: ASYNC220  (waited for in a thread)
    try:
        await until(lambda: all((tmp_path / f"{name}.log").exists() for name in "ab"))
        await until(lambda: all((tmp_path / f"{name}.log").read_text() for name in "ab"))
        assert len(psutil.Process(process.pid).children()) == 2
        os.kill(process.pid, signum)
        assert await asyncio.to_thread(process.wait, 30) == code
        assert await none_alive(mark)
    finally:
        process.kill()

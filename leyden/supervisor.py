"""Several programs under one parent: started one after another, watched together, ended together.

    async with Supervisor(run_dir / "logs") as parts:
        await parts.start("gateway", [...], env, ready=probe, ready_timeout=30)
        await parts.start("controller", [...], env, ready=probe, ready_timeout=30)
        result = await parts.run_until_failure_or(train())

Whatever ends the block (the result, a part's failure, an exception, Ctrl-C, SIGTERM), the parts and all that they
started are gone after it. Should this process be killed, the kernel kills the parts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from leyden.controller.processes import (
    Exited,
    become_subreaper,
    children,
    descendants,
    kill,
    kill_group,
    read_stat,
    reap,
    spawn,
)
from leyden.errors import RunError

T = TypeVar("T")

STOP_SECONDS = 15.0
"""Longest that a part may take to stop after TERM: more than the controller's own graceful stop."""

_MARKER = "LEYDEN_PART"
_GONE_WITHIN = 3.0
_SHOWN_LINES = 5
_READ_FROM_LOG = 16 * 1024


@dataclass(eq=False)
class _Part:
    name: str
    process: subprocess.Popen[bytes]
    exited: Exited
    log: Path | None
    """None when its output is this process's own."""
    log_start: int
    marker: bytes


class Supervisor:
    """Owns the parts of a run. Use from the main thread, as an async context manager, or call `stop` yourself."""

    def __init__(self, log_dir: Path, *, stop_seconds: float = STOP_SECONDS) -> None:
        self._log_dir = log_dir
        self._stop_seconds = stop_seconds
        self._parts: list[_Part] = []
        become_subreaper()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    def log_path(self, name: str) -> Path:
        """Where a part's output goes; later starts of the same name append."""
        return self._log_dir / f"{name}.log"

    async def start(
        self,
        name: str,
        argv: list[str],
        env: Mapping[str, str] | None = None,
        ready: Callable[[], Awaitable[bool]] | None = None,
        ready_timeout: float = 60.0,
    ) -> None:
        """Start a part and wait until `ready` says so. `env` is its whole environment; None means this process's own.

        Raises:
            RunError: the part can't be started, ended, or isn't ready in time, or another part ended meanwhile. All
                parts are stopped.
        """
        log = self.log_path(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            await self._spawn(name, argv, env, log, file.tell(), file.fileno(), file.fileno())
        if ready is not None:
            await self.wait_ready({name: ready}, timeout=ready_timeout)

    async def wait_ready(
        self,
        probes: Mapping[str, Callable[[], Awaitable[bool]]],
        *,
        timeout: float = 60.0,  # noqa: ASYNC109  (the error has to name the part)
    ) -> None:
        """Wait until every probe, by the name of its part, says so.

        Raises:
            RunError: as for `start`.
        """
        parts = {part.name: part for part in self._parts}

        async def all_ready() -> None:
            deadline = time.monotonic() + timeout
            for name, probe in probes.items():
                await self._until_ready(parts[name], probe, deadline, timeout)

        await self._watch(all_ready())

    async def run_foreground(self, name: str, argv: list[str], env: Mapping[str, str] | None = None) -> int:
        """Run one more part whose output is this process's own, to its end, as long as the others keep running.

        Returns its exit code: why it isn't 0, the part has said itself.

        Raises:
            RunError: a signal ended it, or another part ended. All are stopped.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        part = await self._spawn(name, argv, env, None, 0, 1, 2)

        async def finish() -> None:
            await part.exited.future

        await self._watch(finish(), besides=part)
        error = self._failure(part)
        await self._end(part)
        if part.process.returncode < 0:
            await self.stop()
            raise error
        return part.process.returncode

    async def run_until_failure_or(self, awaitable: Coroutine[Any, Any, T]) -> T:
        """The result of `awaitable`, as long as every part keeps running.

        Raises:
            RunError: a part ended, or SIGTERM came. `awaitable` is cancelled and all parts are stopped.
        """
        return await self._watch(awaitable)

    async def stop(self) -> None:
        """Stop all parts, last started first: TERM, then KILL after the limit, with everything that they started."""
        while self._parts:
            await self._end(self._parts[-1])

    async def _spawn(
        self,
        name: str,
        argv: list[str],
        env: Mapping[str, str] | None,
        log: Path | None,
        log_start: int,
        stdout: int,
        stderr: int,
    ) -> _Part:
        value = f"{name}.{secrets.token_hex(8)}"
        own = dict(os.environ if env is None else env) | {_MARKER: value}
        try:
            process = spawn(argv, env=own, cwd=Path.cwd(), stdout=stdout, stderr=stderr)
        except (OSError, ValueError, subprocess.SubprocessError) as e:
            await self.stop()
            raise RunError(f"can't start the {name} ({argv[0]}): {e}") from e
        part = _Part(name, process, Exited(process.pid), log, log_start, f"{_MARKER}={value}".encode())
        self._parts.append(part)
        return part

    async def _watch(self, work: Coroutine[Any, Any, T], besides: _Part | None = None) -> T:
        loop = asyncio.get_running_loop()
        term = loop.create_future()
        try:
            loop.add_signal_handler(signal.SIGTERM, lambda: term.done() or term.set_result(None))
            handled = True
        except (ValueError, RuntimeError):
            handled = False
        task = loop.create_task(work)
        try:
            watched = [part for part in self._parts if part is not besides]
            futures = {part.exited.future for part in watched}
            await asyncio.wait({task, term, *futures}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            failed = next((part for part in watched if part.exited.future.done()), None)
            error = RunError("stopped by SIGTERM") if failed is None else self._failure(failed)
            if failed is None:
                error.exit_code = 128 + signal.SIGTERM
            raise error
        except BaseException:
            await _cancelled(task)
            await self.stop()
            raise
        finally:
            task.cancel()
            term.cancel()
            if handled:
                loop.remove_signal_handler(signal.SIGTERM)

    async def _until_ready(
        self, part: _Part, ready: Callable[[], Awaitable[bool]], deadline: float, seconds: float
    ) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                while not await ready():  # noqa: ASYNC110  (a probe is all there is to ask)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            said = _last_lines(part)
            raise RunError(
                f"the {part.name} wasn't ready within {seconds:g} s" + (f"; its log ends with:\n{said}" if said else "")
            ) from None

    def _failure(self, part: _Part) -> RunError:
        """The sentence for a part that ended. Reaps its first process, whose children are found by their marker."""
        kill_group(part.process.pid, signal.SIGKILL)
        code = part.process.poll()
        if code is not None and code < 0:
            why = " (often the kernel's doing, when memory runs out)" if -code == signal.SIGKILL else ""
            error = RunError(
                f"the {part.name} was killed by {_signal_name(-code)}{why}" + (f"; log: {part.log}" if part.log else "")
            )
            error.exit_code = 128 - code if part.log is None else error.exit_code
            return error
        how = f"ended unexpectedly with exit code {code}"
        if part.log is None:
            error = RunError(f"the {part.name} {how}")
            error.exit_code = 1 if code is None else code if code > 0 else 128 - code
            return error
        said = _last_lines(part)
        if not said:
            return RunError(f"the {part.name} {how} and logged nothing ({part.log})")
        if "\n" not in said:
            return RunError(f"the {part.name} {how}: {said}")
        return RunError(f"the {part.name} {how}; the end of {part.log}:\n{said}")

    async def _end(self, part: _Part) -> None:
        try:
            await self._stop_part(part)
        finally:
            # Here with everything dead already, or because the wait itself was cancelled: then there is no time.
            self._kill_part(part)
            part.exited.close()
            self._parts.remove(part)

    async def _stop_part(self, part: _Part) -> None:
        if part.process.returncode is None:
            kill(part.process.pid, signal.SIGTERM)
            await asyncio.wait({part.exited.future}, timeout=self._stop_seconds)
        deadline = time.monotonic() + _GONE_WITHIN
        while not self._kill_part(part) and time.monotonic() < deadline:  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(0.01)

    def _kill_part(self, part: _Part) -> bool:
        """One round of KILL for a part and everything below or left by it. True when nothing is left."""
        leader = part.process.pid
        members: list[int] = []
        if part.process.returncode is None:
            # Stopped first, so that nothing is forked between the listing and the kill.
            kill_group(leader, signal.SIGSTOP)
            members = descendants(leader)
            kill_group(leader, signal.SIGKILL)
        own = children(os.getpid())
        members += [pid for pid in own if pid != leader and self._left_by(part, pid)]
        for pid in list(members):
            members += descendants(pid)
        for pid in members:
            kill(pid, signal.SIGKILL)
        left = part.process.poll() is None
        for pid in members:
            left |= not reap(pid) if pid in own else read_stat(pid) is not None
        return not left

    def _left_by(self, part: _Part, pid: int) -> bool:
        stat = read_stat(pid)
        if stat is None:
            return False
        if part.process.pid in (stat.session, stat.group):
            return True
        try:
            return part.marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it is over; its own exception, if any, isn't what ends the run."""
    task.cancel()
    await asyncio.wait({task}, timeout=STOP_SECONDS)
    if task.done() and not task.cancelled():
        task.exception()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_lines(part: _Part) -> str:
    """What a part said last. Of a traceback only its last line: that one is for people."""
    if part.log is None:
        return ""
    with part.log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(part.log_start, end - _READ_FROM_LOG))
        lines = [line.rstrip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        return lines[-1]
    return "\n".join(lines[-_SHOWN_LINES:])

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
    log: Path
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
        value = f"{name}.{secrets.token_hex(8)}"
        own = dict(os.environ if env is None else env) | {_MARKER: value}
        with log.open("ab") as file:
            try:
                process = spawn(argv, env=own, cwd=Path.cwd(), stdout=file.fileno(), stderr=file.fileno())
            except (OSError, ValueError, subprocess.SubprocessError) as e:
                await self.stop()
                raise RunError(f"can't start the {name} ({argv[0]}): {e}") from e
            part = _Part(name, process, Exited(process.pid), log, file.tell(), f"{_MARKER}={value}".encode())
        self._parts.append(part)
        if ready is not None:
            await self._watch(self._until_ready(part, ready, ready_timeout))

    async def run_until_failure_or(self, awaitable: Coroutine[Any, Any, T]) -> T:
        """The result of `awaitable`, as long as every part keeps running.

        Raises:
            RunError: a part ended, or SIGTERM came. `awaitable` is cancelled and all parts are stopped.
        """
        return await self._watch(awaitable)

    async def stop(self) -> None:
        """Stop all parts, last started first: TERM, then KILL after the limit, with everything that they started."""
        while self._parts:
            part = self._parts[-1]
            try:
                await self._stop_part(part)
            finally:
                # Here with everything dead already, or because the wait itself was cancelled: then there is no time.
                self._kill_part(part)
                part.exited.close()
                self._parts.remove(part)

    async def _watch(self, work: Coroutine[Any, Any, T]) -> T:
        loop = asyncio.get_running_loop()
        term = loop.create_future()
        try:
            loop.add_signal_handler(signal.SIGTERM, lambda: term.done() or term.set_result(None))
            handled = True
        except (ValueError, RuntimeError):
            handled = False
        task = loop.create_task(work)
        try:
            watched = {part.exited.future for part in self._parts}
            await asyncio.wait({task, term, *watched}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            failed = next((part for part in self._parts if part.exited.future.done()), None)
            error = RunError("stopped by SIGTERM") if failed is None else await self._failure(failed)
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

    async def _until_ready(self, part: _Part, ready: Callable[[], Awaitable[bool]], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not await ready():  # noqa: ASYNC110  (a probe is all there is to ask)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            said = _last_lines(part)
            raise RunError(
                f"the {part.name} wasn't ready within {seconds:g} s" + (f"; its log ends with:\n{said}" if said else "")
            ) from None

    async def _failure(self, part: _Part) -> RunError:
        """The sentence for a part that ended. Reaps it."""
        code = part.process.poll()
        if code is not None and code < 0:
            how = f"was killed by {_signal_name(-code)}"
        else:
            how = f"ended unexpectedly with exit code {code}"
        said = _last_lines(part)
        if not said:
            return RunError(f"the {part.name} {how} and logged nothing ({part.log})")
        if "\n" not in said:
            return RunError(f"the {part.name} {how}: {said}")
        return RunError(f"the {part.name} {how}; the end of {part.log}:\n{said}")

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
    with part.log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(part.log_start, end - _READ_FROM_LOG))
        lines = [line.rstrip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        return lines[-1]
    return "\n".join(lines[-_SHOWN_LINES:])

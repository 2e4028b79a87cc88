"""Limits of one step: what the kernel is told to keep, and the watch over what it can't.

| limit | with a control group | without |
|---|---|---|
| memory | kept by the kernel, a kill by it ends the step | watched: resident memory of all processes |
| processes | kept by the kernel: fork fails | watched |
| CPU | kept by the kernel | the step is bound to so many cores, rounded up |
| size of a file | kept by the kernel (RLIMIT_FSIZE) | the same |
| size of the workspace | watched; no single file can be larger | the same |
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Literal

from leyden.controller.cgroups import Cgroups, Group
from leyden.schema import ResourceLimits

MB = 1024 * 1024
EVERY = 0.1
"""Seconds between two looks at a watched step."""
SHARE = 10
"""A look may take one part in so many of the time: a large workspace is looked at more rarely."""
_SACRIFICE = "500"
"""Put to /proc/PID/oom_score_adj: when the machine runs out of memory, agents go before what watches over them."""

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""A process that was killed, and a shell whose command was."""

_turn = count()


class Confinement:
    """What one step is put under. Use: `enter` in the child, `watch` beside it, `judge` after it, then `close`."""

    def __init__(self, limits: ResourceLimits, groups: Cgroups, workspace: Path) -> None:
        self._limits = limits
        self._groups = groups
        self._workspace = workspace
        self._bytes = None if limits.memory_mb is None else limits.memory_mb * MB
        self.group: Group | None = None
        if limits != ResourceLimits():
            self.group = groups.make(memory_bytes=self._bytes, processes=limits.processes, cpus=limits.cpus)
        enforced = self.group.enforced if self.group is not None else frozenset()
        self._watch_memory = limits.memory_mb is not None and "memory" not in enforced
        self._watch_count = limits.processes is not None and "pids" not in enforced
        self._cores = _some_cores(limits.cpus) if limits.cpus is not None and "cpu" not in enforced else None
        sizes = [size for size in (limits.file_mb, limits.disk_mb) if size is not None]
        self._file_bytes = min(sizes) * MB if sizes else None
        self._ooms = groups.foreign_oom_kills()

    def enter(self, pid: int = 0) -> None:
        """Put a new child under the limits, the calling process for 0. System calls only.

        Raises:
            OSError: the kernel refused; the child must not go on.
        """
        if self.group is not None:
            self.group.enter(pid)
        if self._limits != ResourceLimits():
            Path(f"/proc/{pid or 'self'}/oom_score_adj").write_text(_SACRIFICE)
        if self._cores is not None:
            os.sched_setaffinity(pid, self._cores)
        if self._file_bytes is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            most = self._file_bytes if hard == resource.RLIM_INFINITY else min(hard, self._file_bytes)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))

    @property
    def needed(self) -> bool:
        """Whether there is anything to enter."""
        return self.group is not None or self._limits != ResourceLimits()

    @property
    def watched(self) -> bool:
        """Whether there is anything to watch for."""
        return self._limits.memory_mb is not None or self._watch_count or self._limits.disk_mb is not None

    async def watch(self, pids: Callable[[], list[int]]) -> str:
        """Until a limit is exceeded; returns which, as the end of the sentence "the agent was killed: …"."""
        pause = EVERY
        while True:
            await asyncio.sleep(pause)
            started = time.monotonic()
            why = self._exceeded(pids) or await asyncio.to_thread(self._disk)
            if why is not None:
                return why
            pause = max(EVERY, SHARE * (time.monotonic() - started))

    def judge(self, code: int) -> tuple[Literal["exited", "limit", "machine"], str | None]:
        """What an exit by itself was, now that all processes are gone, and why. `code` is -n for signal n."""
        if code == -signal.SIGXFSZ and self._file_bytes is not None:
            name = "file_mb" if self._limits.file_mb is not None else "disk_mb"
            return "limit", f"it wrote a file larger than {name} allows ({self._file_bytes // MB} MB)"
        if why := self._oom() or self._disk():
            return "limit", why
        if code in _KILLED and self._groups.foreign_oom_kills() > self._ooms:
            return "machine", "the machine ran out of memory"
        return "exited", None

    def close(self) -> None:
        if self.group is not None:
            self._groups.release(self.group)
            self.group = None

    def _exceeded(self, pids: Callable[[], list[int]]) -> str | None:
        if why := self._oom():
            return why
        if not self._watch_memory and not self._watch_count:
            return None
        found = pids()
        if self._watch_count and self._limits.processes is not None:
            running = sum(map(_threads, found))
            if running > self._limits.processes:
                return f"it had {running} processes and threads (limit {self._limits.processes})"
        # What is shared counts once per process at first, exactly only when that is too much.
        if self._bytes is not None and self._watch_memory and sum(map(_resident, found)) > self._bytes:
            if sum(map(_proportional, found)) > self._bytes:
                return self._out_of_memory()
        return None

    def _oom(self) -> str | None:
        return self._out_of_memory() if self.group is not None and self.group.oom_kills() else None

    def _out_of_memory(self) -> str:
        return f"out of memory (limit {self._limits.memory_mb} MB)"

    def _disk(self) -> str | None:
        limit = self._limits.disk_mb
        if limit is None or disk_usage(self._workspace, limit * MB) <= limit * MB:
            return None
        return f"its workspace grew over its limit of {limit} MB"


def disk_usage(folder: Path, enough: int) -> int:
    """Bytes on disk of all files below a folder; the count ends once it is over `enough`."""
    total = 0
    todo = [os.fspath(folder)]
    while todo and total <= enough:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    try:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
                    except OSError:
                        continue
        except OSError:
            continue
    return total


def _some_cores(cpus: float) -> set[int]:
    """So many of the cores that this process may use, rounded up, others for each step."""
    usable = sorted(os.sched_getaffinity(0))
    first = next(_turn)
    return {usable[(first + i) % len(usable)] for i in range(min(math.ceil(cpus), len(usable)))}


def _threads(pid: int) -> int:
    return max(1, _number(pid, "status", "Threads:"))


def _resident(pid: int) -> int:
    return 1024 * (_number(pid, "status", "RssAnon:") + _number(pid, "status", "RssShmem:"))


def _proportional(pid: int) -> int:
    """Its memory with what it shares divided among those that share it; files mapped from disk left out."""
    found = _number(pid, "smaps_rollup", "Pss_Anon:") + _number(pid, "smaps_rollup", "Pss_Shmem:")
    return 1024 * found or _resident(pid)


def _number(pid: int, file: str, name: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    except OSError:
        pass
    return 0

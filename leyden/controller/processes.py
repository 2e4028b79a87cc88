"""Processes of attempts: started in a session of their own, watched without threads, ended with their whole tree.

The kernel keeps the tree findable: the controller is a child subreaper, so whatever a process of an attempt forked and
left behind becomes the controller's own child. Each direct child is then an attempt's first process or an orphan, and
an orphan belongs to an attempt by its control group, its session or process group, or by what it inherited in its
environment. One that shed all of these is known by elimination (`exclusive`): first processes are subreapers too, so an
orphan comes from an attempt whose first process has ended; nor can it be older than that attempt.

Linux only. Processes must be started from a thread that lives as long as the controller (the main one): the kernel
kills them when that thread ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import structlog

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

CHASE_SECONDS = 0.3
"""How long a tree's end is pursued without a pause: what forks and ends all the time must be met between the two."""

GONE_WITHIN = 2.0
"""Seconds in which a killed tree is given up as unkillable (a process stuck in the kernel)."""

# A kernel may be built without it; then all of /proc is read.
_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()

_log = structlog.get_logger()


def become_subreaper() -> None:
    """Make orphaned descendants children of this process."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "can't become a child subreaper")


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Get `signum` when `parent` ends, or end now when it has ended already. For a new child, before anything else."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def spawn(
    argv: list[str],
    *,
    env: dict[str, str],
    cwd: Path | str,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int] = (),
    enter: Callable[[], None] | None = None,
    subreaper: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own that is killed when this process ends.

    As a child subreaper, what it forks and leaves behind stays below it for as long as it runs. `enter` is called in
    the child before the program, and may make system calls only.

    Raises:
        OSError: the program or the folder isn't there, isn't executable, or the arguments are too long.
        ValueError: an argument or a variable holds a NUL character.
    """
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent)
        if subreaper:
            become_subreaper()
        if enter is not None:
            enter()

    return subprocess.Popen(
        argv,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=True,
        # Only system calls between fork and exec: nothing that another thread's lock could block.
        preexec_fn=prepare,
    )


class Exited:
    """Tells when a child has exited, without reaping it: until then its process group can't be another's."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._fd, self._on_exit)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._fd)
        if not self.future.done():
            self.future.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self.future.cancel()

    async def wait(
        self, seconds: float | None, stop: asyncio.Event, limit: asyncio.Future[str] | None = None
    ) -> Literal["exited", "timeout", "stopped", "limit"]:
        """Wait for the exit, for `stop`, for a limit to be exceeded, or for the time to be over, whichever is first."""
        stopping = asyncio.ensure_future(stop.wait())
        ends: set[asyncio.Future[Any]] = {self.future, stopping}
        if limit is not None:
            ends.add(limit)
        try:
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if limit is not None and limit.done() and not limit.cancelled() and limit.exception() is None:
            return "limit"
        if self.future.done():
            return "exited"
        return "stopped" if stop.is_set() else "timeout"


@dataclass(frozen=True, slots=True)
class Stat:
    """Of /proc/PID/stat."""

    state: str
    parent: int
    group: int
    session: int
    started: int
    """Clock ticks since boot."""


def read_stat(pid: int) -> Stat | None:
    """None when there is no such process (any more)."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may hold anything.
    fields = raw[raw.rindex(b")") + 2 :].split()
    return Stat(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def children(pid: int) -> list[int]:
    """Direct children of a process, zombies included."""
    if not _LISTS_CHILDREN:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(int(name)) == pid]
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
        except OSError:
            continue
    return found


def _parent(pid: int) -> int | None:
    stat = read_stat(pid)
    return stat.parent if stat else None


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, as they are now; those that fork meanwhile may be missed."""
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children(todo.pop())
        found += below
        todo += below
    return found


def kill(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


def kill_group(group: int, signum: int) -> None:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        pass


def reap(pid: int) -> bool:
    """Collect a child's exit if it has ended. True when nothing is left of it."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


class Leader(Protocol):
    """The first process of a tree."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> Any: ...

    def poll(self) -> int | None: ...


class Forked:
    """A process that a fork server made, which is, or will be, a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """-n for signal n. 255 when nobody knows."""

    def kill(self) -> None:
        kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """Reap it if it has ended."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # Not handed over yet, or gone.
                self.returncode = None if read_stat(self.pid) is not None else 255
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class KillableGroup(Protocol):
    """A control group, as far as ending its processes goes."""

    def kill(self) -> None: ...

    def pids(self) -> list[int]: ...


@dataclass(eq=False)
class Tree:
    """The processes of one attempt."""

    markers: frozenset[bytes]
    group: KillableGroup | None = None
    wrapped: bool = False
    """Its first process only wraps the attempt's own, and would end them without grace if it got TERM itself."""
    leaders: dict[int, Leader] = field(default_factory=dict)
    started: int = 0
    """Start of its first process, in clock ticks."""
    killed: set[int] = field(default_factory=set)
    """Processes that got SIGKILL and aren't known to be gone. As zombies they show nothing to know them by."""


class ProcessTable:
    """All trees of a controller. Make one per process.

    With `exclusive`, this process has no children but attempts': orphans that no attempt owns are ended too, as soon as
    no attempt that is old enough to have started them is left.
    """

    def __init__(self, *, exclusive: bool = False) -> None:
        self._trees: set[Tree] = set()
        self._leaders: dict[int, Tree] = {}
        self._exclusive = exclusive
        self._strangers: set[int] = set()
        """Zombies among our children that show nothing to know them by."""
        become_subreaper()

    def add(self, markers: frozenset[bytes], *, group: KillableGroup | None = None, wrapped: bool = False) -> Tree:
        tree = Tree(markers, group, wrapped)
        self._trees.add(tree)
        return tree

    def start(
        self,
        tree: Tree,
        argv: list[str],
        *,
        env: dict[str, str],
        cwd: Path | str,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
        enter: Callable[[], None] | None = None,
    ) -> subprocess.Popen[bytes]:
        """`spawn` as a process of `tree`."""
        process = spawn(argv, env=env, cwd=cwd, stdout=stdout, stderr=stderr, pass_fds=pass_fds, enter=enter)
        self.adopt(tree, process)
        return process

    def adopt(self, tree: Tree, process: Leader) -> None:
        """Make a process one of `tree`'s first."""
        tree.leaders[process.pid] = process
        self._leaders[process.pid] = tree
        stat = read_stat(process.pid)
        tree.started = tree.started or (stat.started if stat else 0)

    def exempt(self, pid: int) -> None:
        """A child of this process, in a session of its own, that is no attempt's and isn't to be ended."""
        self._leaders[pid] = Tree(frozenset())

    def unexempt(self, pid: int) -> None:
        self._leaders.pop(pid, None)

    async def end(self, tree: Tree, *, grace: float = 0.0) -> None:
        """End all processes of a tree and reap them: TERM, then KILL after `grace` seconds (0: KILL at once)."""
        if grace > 0:
            if not tree.wrapped:
                for pid in tree.leaders:
                    kill_group(pid, signal.SIGTERM)
            for pid in self.members(tree):
                stat = read_stat(pid)
                if stat is None or pid in tree.leaders:
                    continue
                if tree.wrapped or stat.group not in tree.leaders:
                    kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while time.monotonic() < deadline and self._alive(tree):  # noqa: ASYNC110  (nothing signals an orphan's end)
                await asyncio.sleep(0.01)
        deadline = time.monotonic() + GONE_WITHIN
        pause = 0.001
        # One listing can miss a process whose elder sibling ends just then; two empty ones in a row can't.
        empty = 0
        while empty < 2:
            empty = empty + 1 if self.kill_now(tree) else 0
            if empty:
                continue
            if time.monotonic() > deadline:
                _log.warning("processes don't die of SIGKILL", pids=self.members(tree))
                break
            await asyncio.sleep(pause if time.monotonic() > deadline - GONE_WITHIN + CHASE_SECONDS else 0)
            pause = min(pause * 2, 0.05)
        self._forget(tree)

    def abandon(self, tree: Tree) -> None:
        """End a tree without waiting, if it hasn't been ended: for an owner that is itself being cancelled."""
        if tree not in self._trees:
            return
        for _ in range(50):
            if self.kill_now(tree):
                break
            time.sleep(0.002)
        self._forget(tree)

    def kill_now(self, tree: Tree) -> bool:
        """One round of SIGKILL and reaping. True when nothing of the tree is left."""
        if tree.group is not None:
            tree.group.kill()
        for pid, process in tree.leaders.items():
            # Not reaped yet: its group is still its own. A group gets the signal at once, however fast it forks.
            if process.returncode is None:
                kill_group(pid, signal.SIGKILL)
        members: list[int] = []
        for pid in self._each_member(tree):
            # Killed before the next one is looked at: a process that forks and ends all the time is gone otherwise.
            kill(pid, signal.SIGKILL)
            members.append(pid)
        tree.killed.update(members)
        # A zombie without an owner that wasn't there before may be the trace of one that forks and ends all the time.
        strangers = {pid for pid in children(os.getpid()) if self._is_stranger(pid, tree)}
        left = bool(strangers - self._strangers)
        self._strangers = strangers
        for process in tree.leaders.values():
            left |= process.poll() is None
        own = set(children(os.getpid()))
        for pid in members:
            if pid in tree.leaders:
                continue
            if reap(pid) if pid in own else read_stat(pid) is None:
                tree.killed.discard(pid)
            else:
                left = True
        return not left

    def tidy(self) -> None:
        """Reap orphans that ended by themselves, and end those that no running attempt can own."""
        if not self._exclusive:
            return
        for pid in children(os.getpid()):
            if pid in self._leaders:
                continue
            stat = read_stat(pid)
            if stat is None or reap(pid):
                continue
            if self._owner(pid, stat) is None and not self._suspects(stat):
                for below in [pid, *descendants(pid)]:
                    kill(below, signal.SIGKILL)

    def members(self, tree: Tree) -> list[int]:
        """Processes of a tree, zombies included except reaped leaders."""
        return list(self._each_member(tree))

    def _each_member(self, tree: Tree) -> Iterator[int]:
        """The same one by one, newest first."""
        grouped = set(tree.group.pids()) if tree.group is not None else set[int]()
        yield from grouped
        for pid in reversed(children(os.getpid())):
            if pid in grouped:
                continue
            owner = tree if pid in tree.killed else self._leaders.get(pid)
            if owner is None:
                stat = read_stat(pid)
                if stat is None:
                    continue
                owner = self._owner(pid, stat)
                if owner is None and self._exclusive and self._suspects(stat) <= {tree}:
                    owner = tree
            if owner is tree:
                yield pid
                yield from (below for below in descendants(pid) if below not in grouped)

    def _is_stranger(self, pid: int, tree: Tree) -> bool:
        if pid in self._leaders or pid in tree.killed:
            return False
        stat = read_stat(pid)
        return stat is not None and stat.state == "Z" and self._owner(pid, stat) is None

    def _alive(self, tree: Tree) -> bool:
        for pid in self.members(tree):
            stat = read_stat(pid)
            if stat is not None and stat.state != "Z":
                return True
        return False

    def _owner(self, pid: int, stat: Stat) -> Tree | None:
        """The attempt that an orphan comes from."""
        owner = self._leaders.get(stat.session) or self._leaders.get(stat.group)
        if owner is not None:
            return owner
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return None
        return next((tree for tree in self._trees if tree.markers.issubset(environ)), None)

    def _forget(self, tree: Tree) -> None:
        self._trees.discard(tree)
        for pid in tree.leaders:
            self._leaders.pop(pid, None)

    def _suspects(self, stat: Stat) -> set[Tree]:
        """Attempts that may have started an orphan that none owns: old enough, and their first process has ended."""
        return {tree for tree in self._trees if 0 < tree.started <= stat.started and _leaderless(tree)}


def _leaderless(tree: Tree) -> bool:
    """Whether its first process has ended."""
    pid, process = next(iter(tree.leaders.items()))
    stat = read_stat(pid) if process.returncode is None else None
    return stat is None or stat.state in "ZX"

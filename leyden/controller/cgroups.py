"""Control groups: the kernel's limits for all processes of a step together, and the surest way to end them.

Both versions are used, as far as this process may make groups below its own: version 2 for its `cgroup.kill` and, where
controllers are delegated, for limits; version 1 for limits where a controller is attached there. Groups are always made
below the group that this process was started in, so whatever limits hold for it go on holding for agents.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import structlog

from leyden.controller.processes import descendants, read_stat

Controller = Literal["memory", "pids", "cpu"]
CONTROLLERS: tuple[Controller, ...] = ("memory", "pids", "cpu")
CPU_PERIOD = 100_000
"""Microseconds over which CPU time is shared out."""

_PREFIX = "leyden-"
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """This process's own groups. `v1` is by controller."""

    v2: Path | None = None
    v1: Mapping[str, Path] = field(default_factory=dict)


def own_groups() -> Hierarchies:
    return locate(_read(Path("/proc/self/mountinfo")), _read(Path("/proc/self/cgroup")))


def locate(mountinfo: str, cgroup: str) -> Hierarchies:
    """From the texts of /proc/self/mountinfo and /proc/self/cgroup."""
    paths: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    v2: Path | None = None
    v1: dict[str, Path] = {}
    for line in mountinfo.splitlines():
        mount, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        fields = mount.split(" ")
        if kind == "cgroup2" and "" in paths:
            v2 = _below(fields[4], fields[3], paths[""])
        elif kind == "cgroup":
            for name in options.split(" ")[-1].split(","):
                if name in CONTROLLERS and name in paths:
                    v1[name] = _below(fields[4], fields[3], paths[name])
    return Hierarchies(v2, v1)


def _below(mount: str, root: str, path: str) -> Path:
    """Where the group `path` is found, in a mount that shows the groups below `root`."""
    relative = os.path.relpath(path, root)
    return Path(mount) if relative.startswith("..") else Path(mount) / relative


def settings(
    version: Literal[1, 2], memory_bytes: int | None, processes: int | None, cpus: float | None
) -> dict[Controller, dict[str, str]]:
    """The files of a group that set limits, by controller, in the order in which they have to be written.

    Swap is no way round a memory limit. Files that begin with `?` needn't be there.
    """
    found: dict[Controller, dict[str, str]] = {}
    if memory_bytes is not None:
        found["memory"] = (
            {"memory.max": str(memory_bytes), "?memory.swap.max": "0", "?memory.oom.group": "1"}
            if version == 2
            else {"memory.limit_in_bytes": str(memory_bytes), "?memory.memsw.limit_in_bytes": str(memory_bytes)}
        )
    if processes is not None:
        found["pids"] = {"pids.max": str(processes)}
    if cpus is not None:
        quota = max(1000, int(cpus * CPU_PERIOD))
        found["cpu"] = (
            {"cpu.max": f"{quota} {CPU_PERIOD}"}
            if version == 2
            else {"cpu.cfs_period_us": str(CPU_PERIOD), "cpu.cfs_quota_us": str(quota)}
        )
    return found


class Group:
    """One step's group, in as many hierarchies as needed."""

    def __init__(self, v2: Path | None, v1: Mapping[Controller, Path], enforced: frozenset[Controller]) -> None:
        self.v2 = v2
        self._v1 = v1
        self.enforced = enforced
        """Controllers whose limit the kernel keeps."""
        folders: list[Path] = [v2] if v2 is not None else []
        self.folders = folders + [folder for folder in dict.fromkeys(v1.values()) if folder != v2]

    def enter(self, pid: int = 0) -> None:
        """Move a process in, the calling one for 0. Made for a new child: only system calls.

        Raises:
            OSError: the kernel refused.
        """
        for folder in self.folders:
            (folder / "cgroup.procs").write_bytes(b"%d" % pid)

    def kill(self) -> None:
        """SIGKILL to all at once, where the kernel can."""
        if self.v2 is not None:
            _write(self.v2 / "cgroup.kill", "1")

    def pids(self) -> list[int]:
        for folder in self.folders:
            try:
                return [int(pid) for pid in (folder / "cgroup.procs").read_bytes().split()]
            except OSError:
                continue
        return []

    def oom_kills(self) -> int:
        """How many processes the kernel has killed because the group reached its memory limit."""
        if "memory" in self._v1:
            return _counter(self._v1["memory"] / "memory.oom_control", "oom_kill")
        if self.v2 is not None and "memory" in self.enforced:
            return _counter(self.v2 / "memory.events", "oom_kill")
        return 0

    def remove(self) -> bool:
        """Delete the group. False while something is in it."""
        for folder in list(self.folders):
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                continue
            self.folders.remove(folder)
        return not self.folders


class Cgroups:
    """Makes groups below this process's own. Without the right to, it makes none."""

    def __init__(self, own: Hierarchies | None = None) -> None:
        own = own or own_groups()
        self._v2: Path | None = None
        delegated: frozenset[str] = frozenset()
        if own.v2 is not None:
            self._v2, delegated = _v2_parent(own.v2, [c for c in CONTROLLERS if c not in own.v1])
        self._v1 = {c: own.v1[c] for c in CONTROLLERS if c in own.v1 and os.access(own.v1[c], os.W_OK)}
        if self._v1:
            # A file system mounted read-only says W_OK to root.
            self._v1 = {c: folder for c, folder in self._v1.items() if _can_make(folder)}
        self.enforces: frozenset[Controller] = frozenset(c for c in CONTROLLERS if c in self._v1 or c in delegated)
        self._delegated = delegated
        self._count = 0
        self._live: set[Group] = set()
        self._leaving: list[Group] = []
        self._past_ooms = 0
        remove_groups(own)

    def make(
        self, *, memory_bytes: int | None = None, processes: int | None = None, cpus: float | None = None
    ) -> Group | None:
        """A new group with these limits as far as the kernel can keep them; None when no group can be made."""
        self._count += 1
        name = f"{_PREFIX}{os.getpid()}-{self._count}"
        made: list[Path] = []
        v1: dict[Controller, Path] = {}
        v2 = self._v2 / name if self._v2 is not None else None
        enforced: set[Controller] = set()
        try:
            if v2 is not None:
                v2.mkdir()
                made.append(v2)
                wanted = settings(2, memory_bytes, processes, cpus)
                enforced |= {c for c, files in wanted.items() if c in self._delegated and _apply(v2, files)}
            for controller, files in settings(1, memory_bytes, processes, cpus).items():
                if controller not in self._v1:
                    continue
                folder = self._v1[controller] / name
                if folder not in made:
                    folder.mkdir()
                    made.append(folder)
                if _apply(folder, files):
                    v1[controller] = folder
                    enforced.add(controller)
            if not made:
                return None
            group = Group(v2, v1, frozenset(enforced))
        except OSError as e:
            for folder in made:
                folder.rmdir()
            _log.warning("can't make a control group", why=str(e))
            return None
        self._live.add(group)
        return group

    def release(self, group: Group) -> None:
        """Be done with a group whose processes are gone."""
        self._past_ooms += group.oom_kills()
        self._live.discard(group)
        if not group.remove():
            self._leaving.append(group)

    def tidy(self) -> None:
        """Delete groups that couldn't be deleted yet."""
        self._leaving = [group for group in self._leaving if not group.remove()]

    def foreign_oom_kills(self) -> int:
        """How many processes the kernel has killed for lack of memory, those of our groups' own limits left out."""
        everywhere = _counter(Path("/proc/vmstat"), "oom_kill")
        return everywhere - self._past_ooms - sum(group.oom_kills() for group in self._live)


def remove_groups(own: Hierarchies, pid: int | None = None) -> None:
    """Delete empty groups that a controller left behind: the process `pid`, or any that is no more."""
    for folder in {*([own.v2] if own.v2 else []), *own.v1.values()}:
        try:
            left = [f for f in folder.iterdir() if f.name.startswith(_PREFIX)]
        except OSError:
            continue
        for group in left:
            maker = group.name.removeprefix(_PREFIX).partition("-")[0]
            if maker == str(pid) or (pid is None and not Path(f"/proc/{maker}").exists()):
                try:
                    # Refused when anything lives in it: then it's somebody's after all.
                    group.rmdir()
                except OSError:
                    pass


def _v2_parent(own: Path, wanted: Iterable[str]) -> tuple[Path | None, frozenset[str]]:
    """Where groups of version 2 can be made, and which of the wanted controllers they have there.

    A group that holds processes can't hand controllers down, the root excepted. So where controllers are to be had only
    that way, this process and those that belong to it move to a group of their own.
    """
    if not _can_make(own):
        return None, frozenset()
    wanted = [c for c in wanted if c in _read(own / "cgroup.controllers").split()]
    missing = [c for c in wanted if c not in _read(own / "cgroup.subtree_control").split()]
    if missing and not _enable(own, missing):
        present = {int(pid) for pid in _read(own / "cgroup.procs").split()}
        if present <= _family(present):
            home = own / f"{_PREFIX}{os.getpid()}-0"
            try:
                home.mkdir(exist_ok=True)
                for pid in present:
                    (home / "cgroup.procs").write_text(str(pid))
            except OSError:
                return own, frozenset()
            _enable(own, missing)
    enabled = _read(own / "cgroup.subtree_control").split()
    return own, frozenset(c for c in wanted if c in enabled)


def _family(group: set[int]) -> set[int]:
    """This process, its ancestors within the group, and all that descends from them."""
    top = os.getpid()
    while (stat := read_stat(top)) is not None and stat.parent in group:
        top = stat.parent
    return {top, *descendants(top)}


def _enable(folder: Path, controllers: Iterable[str]) -> bool:
    return _write(folder / "cgroup.subtree_control", " ".join(f"+{c}" for c in controllers))


def _can_make(folder: Path) -> bool:
    probe = folder / f"{_PREFIX}{os.getpid()}-probe"
    try:
        probe.mkdir()
        entrance = os.open(probe / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        os.close(entrance)
    except OSError:
        return False
    finally:
        try:
            probe.rmdir()
        except OSError:
            pass
    # Who moves a process needs the right to write where it comes from too.
    return os.access(folder / "cgroup.procs", os.W_OK)


def _apply(folder: Path, files: Mapping[str, str]) -> bool:
    done = [_write(folder / name.lstrip("?"), value) or name.startswith("?") for name, value in files.items()]
    return all(done)


def _write(path: Path, text: str) -> bool:
    try:
        # Opened without O_CREAT: a file that isn't there mustn't be made where this isn't a cgroup file system.
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, text.encode())
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _counter(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from leyden.controller.cgroups import Cgroups, Hierarchies, locate, own_groups, remove_groups, settings
from leyden.controller.processes import spawn

HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
"""


def test_groups_of_both_versions_are_found() -> None:
    found = locate(HYBRID, "9:name=systemd:/x\n4:memory:/job/1\n1:cpu,cpuacct:/\n0::/user.slice\n")
    assert found == Hierarchies(
        Path("/sys/fs/cgroup/unified/user.slice"),
        {"cpu": Path("/sys/fs/cgroup/cpu,cpuacct"), "memory": Path("/sys/fs/cgroup/memory/job/1")},
    )


def test_in_a_container_the_mount_shows_a_part_of_the_tree() -> None:
    mounts = "50 40 0:30 /docker/abc /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n"
    assert locate(mounts, "0::/docker/abc/worker\n").v2 == Path("/sys/fs/cgroup/worker")


def test_no_control_groups_are_none() -> None:
    assert locate("22 1 0:20 / / rw - ext4 /dev/sda rw\n", "") == Hierarchies()


def test_limits_are_written_as_each_version_wants_them() -> None:
    assert settings(2, 1000, 5, 0.5) == {
        "memory": {"memory.max": "1000", "?memory.swap.max": "0", "?memory.oom.group": "1"},
        "pids": {"pids.max": "5"},
        "cpu": {"cpu.max": "50000 100000"},
    }
    assert settings(1, 1000, None, 2)["cpu"] == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "200000"}
    assert settings(1, None, None, None) == {}


def test_without_the_right_to_make_groups_there_are_none(tmp_path: Path) -> None:
    groups = Cgroups(Hierarchies(tmp_path / "no-such-folder", {"memory": tmp_path / "nor-this"}))
    assert groups.enforces == frozenset()
    assert groups.make(memory_bytes=1 << 20) is None


@pytest.fixture
def groups() -> Iterator[Cgroups]:
    found = Cgroups()
    probe = found.make()
    if probe is None or probe.v2 is None:
        pytest.skip("this machine lets nobody make control groups of version 2")
    found.release(probe)
    yield found
    found.tidy()


def run(code: str, groups: Cgroups, **limits: int) -> tuple[int, int]:
    """Exit code and kills for lack of memory, of Python code in a group of its own."""
    group = groups.make(**limits)  # pyright: ignore[reportArgumentType]
    assert group is not None
    process = spawn([sys.executable, "-c", code], env={}, cwd="/", stdout=2, stderr=2, enter=group.enter)
    code_ = process.wait(30)
    killed = group.oom_kills()
    groups.release(group)
    return code_, killed


def test_a_group_is_killed_at_once_and_leaves_nothing(groups: Cgroups) -> None:
    group = groups.make()
    assert group is not None and group.v2 is not None
    shed = ["env", "-i", "sh", "-c", "setsid sleep 600 & sleep 601"]
    process = spawn(shed, env=dict(os.environ), cwd="/", stdout=2, stderr=2, enter=group.enter)
    while len(group.pids()) < 3 or process.pid not in group.pids():
        assert process.poll() is None
    group.kill()
    assert process.wait(10) == -signal.SIGKILL
    while group.pids():
        pass
    folder = group.v2
    groups.release(group)
    groups.tidy()
    assert not folder.exists()


def test_memory_is_limited_and_a_kill_is_counted(groups: Cgroups) -> None:
    if "memory" not in groups.enforces:
        pytest.skip("no memory controller is delegated to this process")
    before = groups.foreign_oom_kills()
    assert run("x = bytearray(200 << 20)", groups, memory_bytes=64 << 20) == (-signal.SIGKILL, 1)
    assert run("x = bytearray(20 << 20)", groups, memory_bytes=64 << 20) == (0, 0)
    assert groups.foreign_oom_kills() == before


def test_the_number_of_processes_is_limited(groups: Cgroups) -> None:
    if "pids" not in groups.enforces:
        pytest.skip("no process controller is delegated to this process")
    code = """
import os, signal
made = []
try:
    while len(made) < 20:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        made.append(pid)
except BlockingIOError:
    pass
for pid in made:
    os.kill(pid, 9)
os._exit(len(made))
"""
    assert run(code, groups, processes=8)[0] == 7


def test_groups_of_a_dead_controller_are_deleted_but_never_one_in_use(groups: Cgroups) -> None:
    own = own_groups()
    assert own.v2 is not None
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = own.v2 / f"leyden-{dead.pid}-1"
    left.mkdir()
    mine = groups.make()
    assert mine is not None and mine.v2 is not None
    remove_groups(own)
    assert not left.exists() and mine.v2.exists()
    groups.release(mine)

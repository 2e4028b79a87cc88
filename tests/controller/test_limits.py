from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from leyden.controller.cgroups import Cgroups, Hierarchies
from leyden.controller.limits import MB, Confinement, disk_usage
from leyden.controller.processes import spawn
from leyden.schema import ResourceLimits
from tests.controller.test_cgroups import groups, run

__all__ = ["groups"]
NONE = Cgroups(Hierarchies())


def confined(limits: ResourceLimits, code: str, workspace: Path) -> str:
    """What Python code prints under limits that no control group keeps."""
    confinement = Confinement(limits, NONE, workspace)
    read, write = os.pipe()
    process = spawn([sys.executable, "-c", code], env={}, cwd="/", stdout=write, stderr=2, enter=confinement.enter)
    os.close(write)
    with open(read) as out:
        text = out.read()
    assert process.wait(30) == 0
    confinement.close()
    return text


def test_without_control_groups_cpus_are_cores(tmp_path: Path) -> None:
    code = "import os; print(len(os.sched_getaffinity(0)))"
    assert confined(ResourceLimits(cpus=0.5), code, tmp_path) == "1\n"
    usable = len(os.sched_getaffinity(0))
    assert confined(ResourceLimits(cpus=1000), code, tmp_path) == f"{usable}\n"


def test_agents_go_before_the_controller_when_memory_is_short(tmp_path: Path) -> None:
    code = "print(open('/proc/self/oom_score_adj').read().strip())"
    assert confined(ResourceLimits(memory_mb=500), code, tmp_path) == "500\n"


def test_the_size_of_a_workspace_is_what_it_takes_on_disk(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "f").write_bytes(b"x" * MB)
    with open(tmp_path / "sparse", "wb") as f:
        f.truncate(100 * MB)
    (tmp_path / "loop").symlink_to(tmp_path)
    assert MB <= disk_usage(tmp_path, 1 << 40) < 2 * MB
    assert disk_usage(tmp_path / "not-there", 1) == 0


def test_a_kill_by_the_machine_is_told_from_one_for_the_own_limit(groups: Cgroups, tmp_path: Path) -> None:
    if "memory" not in groups.enforces:
        pytest.skip("no memory controller is delegated to this process")
    mine = Confinement(ResourceLimits(memory_mb=64), groups, tmp_path)
    assert mine.judge(-signal.SIGKILL) == ("exited", None)
    # Another step's own limit isn't the machine's trouble.
    assert run("x = bytearray(200 << 20)", groups, memory_bytes=64 * MB)[1] == 1
    assert mine.judge(-signal.SIGKILL) == ("exited", None)
    # A kill that none of our groups explains is.
    assert run("x = bytearray(200 << 20)", Cgroups(), memory_bytes=64 * MB)[1] == 1
    assert mine.judge(-signal.SIGKILL) == ("machine", "the machine ran out of memory")
    assert mine.judge(137) == ("machine", "the machine ran out of memory")
    assert mine.judge(0) == ("exited", None)
    mine.close()

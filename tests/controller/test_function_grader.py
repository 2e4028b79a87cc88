"""Graders that are Python functions."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyden.controller.commands import check_function
from leyden.controller.sandbox import check_sandbox
from leyden.errors import PreflightError
from leyden.schema import GraderSpec, Outcome, OutcomeReport
from tests.controller.fake import FakeGateway, make_claim

Running = Callable[..., Any]


async def graded_by(
    gateway: FakeGateway, running: Running, grader: dict[str, Any], command: Any = ("true",)
) -> tuple[str, OutcomeReport]:
    rollout_id = f"r-{uuid.uuid4().hex}"
    config = {"agent": {"command": command if isinstance(command, str) else list(command)}, "grader": grader}
    async with running():
        gateway.enqueue(make_claim(rollout_id, {"want": "42"}, config))
        return rollout_id, await gateway.outcome(rollout_id)


FUNCTIONS = """
import json, pathlib
from decimal import Decimal

def check(task, workspace):
    assert isinstance(workspace, pathlib.Path)
    return float((workspace / "answer.txt").read_text() == task["want"])

async def later(log, exit_code):
    print("a note of its own")
    return {"reward": Decimal("0.25"), "reason": log.strip(), "exit": exit_code}

class Rubric:
    @staticmethod
    def all(**given):
        return {"reward": len(given), "names": sorted(given)}

def yes(): return True
def text(): return "1"
def nothing(): return None
def endless(): return float("inf")
def broken(task): return task["no such field"]
"""


@pytest.mark.parametrize(
    "function,value,more",
    [
        ("rubrics.checks:check", 1.0, {}),
        ("rubrics.checks:later", 0.25, {"reason": "said", "exit": 0}),
        ("rubrics.checks:Rubric.all", 4.0, {"names": ["exit_code", "log", "task", "workspace"]}),
    ],
)
@pytest.mark.parametrize("sandbox", ["none", "bubblewrap"])
async def test_a_function_may_be_the_grader(
    gateway: FakeGateway,
    running: Running,
    tmp_path: Path,
    function: str,
    value: float,
    more: dict[str, Any],
    sandbox: str,
) -> None:
    if sandbox != "none":
        try:
            check_sandbox()
        except PreflightError as e:
            pytest.skip(str(e))
    (tmp_path / "rubrics").mkdir()
    (tmp_path / "rubrics" / "checks.py").write_text(FUNCTIONS)
    # What the agent writes into its workspace is no module of the grader's.
    command = (
        "printf 42 >answer.txt; echo said; mkdir rubrics; for f in rubrics/__init__ json; do echo 1/0 >$f.py; done"
    )
    rollout_id, report = await graded_by(gateway, running, {"function": function, "sandbox": sandbox}, command)
    assert report.outcome is Outcome.OK, report
    (event,) = gateway.events
    assert event["data"] == {"value": value, "source": "grader", **more}
    assert gateway.event_keys == [f"grader-{rollout_id}-0"]


@pytest.mark.parametrize(
    "function,reason",
    [
        ("yes", "TypeError: checks:yes gave True as the reward, which isn't a number"),
        ("text", "TypeError: checks:text gave '1' as the reward, which isn't a number"),
        ("nothing", "grader printed no number (exit code 0): it printed nothing and posted no reward"),
        ("endless", "grader printed no number (exit code 0): last line was "),
        ("broken", "KeyError: 'no such field'"),
        ("missing", "has no attribute 'missing'"),
    ],
)
async def test_a_function_that_gives_no_number_is_infra_and_never_a_reward(
    gateway: FakeGateway, running: Running, tmp_path: Path, function: str, reason: str
) -> None:
    (tmp_path / "checks.py").write_text(FUNCTIONS)
    _, report = await graded_by(gateway, running, {"function": f"checks:{function}"})
    assert report.outcome is Outcome.INFRA
    assert reason in (report.reason or "")
    assert gateway.events == []


def test_a_graders_function_is_looked_for_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "checks.py").touch()
    for found in ("checks:f", "json:loads", "os.path:join"):
        check_function(found, tmp_path, "grader")
    with pytest.raises(
        PreflightError, match=r"grader.function: there is no module 'cheks' in .*, and none is installed"
    ):
        check_function("cheks:f", tmp_path, "grader")


@pytest.mark.parametrize("spec", [{}, {"command": "x", "function": "a:b"}, {"function": "a"}, {"function": "a:b; rm"}])
def test_a_grader_is_either_a_command_or_a_function(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="function"):
        GraderSpec.model_validate(spec)

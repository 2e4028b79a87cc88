"""Loading tasks, their order, and the schedule's pure decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leyden.config import RunConfig
from leyden.errors import ConfigError
from leyden.schema import Outcome, RolloutState, TerminalItem
from leyden.training.schedule import (
    Progress,
    common_reason,
    is_validation_step,
    step_fault,
    stuck_sentence,
    training_rollouts,
    validation_rollouts,
)
from leyden.training.tasks import Task, TaskOrder, check_disjoint, load_run_tasks, load_tasks


def config(**extra: Any) -> RunConfig:
    raw = {"name": "run", "model": "m", "agent": {"command": "a", "timeout_seconds": 10}, "data": {"train": "t.jsonl"}}
    return RunConfig.model_validate({**raw, **extra})


def test_ids_are_the_rows_own_or_index_and_content(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"data_id": "x", "q": 1}\n\n{"id": 7, "q": 2}\n{"q": 3}\n"plain"\n')
    tasks = load_tasks(str(file), 0)
    assert [t.task_id for t in tasks[:2]] == ["x", "7"]
    assert tasks[2].task_id.startswith("2-") and tasks[3].input == "plain"
    assert load_tasks("t.jsonl", 0, tmp_path) == tasks


def test_functions_get_the_seed(tmp_path: Path) -> None:
    (tmp_path / "d.py").write_text("def rows(seed):\n    return [{'n': seed + i} for i in range(2)]\n")
    assert [t.input for t in load_tasks(f"{tmp_path}/d.py:rows", 5)] == [{"n": 5}, {"n": 6}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", "{}\n{", "t.jsonl line 2 isn't valid JSON"),
        ("t.json", "{}", "must hold a JSON list of rows, not dict"),
        ("t.jsonl", "", "holds no tasks"),
        ("t.jsonl", '{"id": 1}\n{"id": "1"}', "rows 0 and 1 .* have the same id '1'"),
        ("t.jsonl", '{"id": [1]}', "row 0 has a 'id' that is neither"),
        ("t.csv", "a", "is none of: a .jsonl file"),
        ("t.jsonl", None, "can't read the tasks in .*t.jsonl: No such file"),
    ],
)
def test_bad_sources_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_tasks(name, 0, tmp_path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1/0", "d.py:rows failed: ZeroDivisionError"),
        ("return [{'a': object()}]", "row 0 can't be written as JSON"),
        ("return [{'a': float('nan')}]", "row 0 can't be written as JSON"),
    ],
)
def test_faults_of_the_users_function_are_one_sentence(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "d.py").write_text(f"def rows(seed):\n    {body}\n")
    with pytest.raises(ConfigError, match=message):
        load_tasks("d.py:rows", 0, tmp_path)


def test_heldout_rows_must_not_be_trained_on(tmp_path: Path) -> None:
    train = [Task("a", {"id": 1, "q": 1}), Task("b", {"id": 2, "q": 2})]
    check_disjoint(train, [Task("c", {"id": 1, "q": 3})])
    with pytest.raises(ConfigError, match=r"held-out row 1 \(d\) is also training row 1 \(b\)"):
        check_disjoint(train, [Task("c", {"q": 3}), Task("d", {"id": 9, "q": 2})])
    (tmp_path / "t.json").write_text(json.dumps([{"q": i} for i in range(3)]))
    (tmp_path / "h.json").write_text(json.dumps([{"q": i} for i in (8, 9, 1)]))
    data = {"train": str(tmp_path / "t.json"), "heldout": str(tmp_path / "h.json")}
    assert len(load_run_tasks(config(data=data, validation={"tasks": 2}))[1]) == 2
    assert load_run_tasks(config(data=data, validation={"tasks": 0}))[1] == []
    with pytest.raises(ConfigError, match="held-out row 2"):
        load_run_tasks(config(data=data))


def test_each_epoch_holds_every_task_once_in_a_new_order() -> None:
    order = TaskOrder(7, seed=3)
    epochs = [[order.at(e * 7 + i) for i in range(7)] for e in range(3)]
    assert all(sorted(e) == list(range(7)) for e in epochs) and epochs[0] != epochs[1]
    assert [t for s in range(3) for t in order.step(s, 4)] == [*epochs[0], *epochs[1]][:12]
    assert TaskOrder(7, seed=4).step(0, 7) != epochs[0]
    assert TaskOrder(3, seed=0, shuffle=False).step(1, 2) == [2, 0]


def test_rollouts_have_ids_that_are_a_function_of_their_place() -> None:
    c = config(training={"rollouts_per_task": 2}, grader={"command": "g", "timeout_seconds": 5})
    made = training_rollouts(c, 12, [Task("x", 1), Task("y", 2)], ".r3")
    assert [m.rollout_id for m in made] == [f"run.00012.{t:03d}.{s:03d}.r3" for t in (0, 1) for s in (0, 1)]
    assert [(m.input, m.metadata.group, m.metadata.task_id) for m in made if m.metadata] == [
        *[(1, "00012.000", "x")] * 2,
        *[(2, "00012.001", "y")] * 2,
    ]
    assert made[0].config is not None and made[0].config.timeout_seconds == 45
    held = validation_rollouts(c, 3, [Task("x", 1)])
    assert held[0].rollout_id == "run.val00003.0000" and not held[0].is_train
    assert held[0].config is not None and held[0].config.sampling == c.validation.sampling


def test_validation_steps() -> None:
    c = config(training={"steps": 7}, validation={"every": 3})
    assert [s for s in range(8) if is_validation_step(c, s)] == [0, 3, 6, 7]
    assert [s for s in range(11) if is_validation_step(config(), s)] == [0, 10]


def test_only_lost_steps_are_replayed() -> None:
    running = Progress().starting(4)
    assert running.resumed_at(4) == running and running.suffix(4) == ""
    replay = Progress().starting(6).resumed_at(4)
    assert [replay.suffix(s) for s in (4, 6, 7)] == [".r1", ".r1", ""]
    # Another crash in the first replayed step takes its rollouts up; one step later they are lost again.
    assert Progress(4, 1, 6).resumed_at(4).suffix(4) == ".r1"
    assert replay.starting(5).resumed_at(4).suffix(4) == ".r2"


def item(outcome: Outcome) -> TerminalItem:
    state = RolloutState.SUCCEEDED if outcome == Outcome.OK else RolloutState.FAILED
    return TerminalItem(rollout_id="r", state=state, outcome=outcome)


def test_what_makes_a_step_useless() -> None:
    ok, error, infra = item(Outcome.OK), item(Outcome.AGENT_ERROR), item(Outcome.INFRA)
    assert step_fault([ok, error, error], 0.5) is None
    assert step_fault([error, error], 0.5) == "all 2 rollouts failed"
    assert step_fault([ok, infra], 0.5) is None
    assert step_fault([ok, infra, infra], 0.5) == "67% of 3 rollouts ended by infrastructure failures (limit 50%)"


def test_reasons_that_differ_in_numbers_are_one() -> None:
    reasons = {"a": "no module x", "b": "port 17 in use", "c": "port 18 in use"}
    assert common_reason(reasons) == ("port 17 in use", "b")


def test_a_run_without_a_controller_says_so() -> None:
    text = stuck_sentence(900, 8, {"queuing": 8}, None)
    assert text.startswith("no rollout has ended for 900 s while 8 are awaited (8 queuing); none is running")

"""Checkpoints on disk and the run's record."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from leyden.errors import RunError
from leyden.training import checkpoint as module
from leyden.training.checkpoint import MARKER, CheckpointState, checkpoints, latest, save_checkpoint
from leyden.training.curve import draw_curve
from leyden.training.metrics import MetricsLog, cut_records, read_records


def save(folder: Path, step: int, text: str = "x", keep: int = 2, needed: int = 1) -> Path:
    state = CheckpointState(step, step, 0, "h", "run")
    return save_checkpoint(folder, state, lambda f: _write(f, text), keep=keep, needed_bytes=needed)


def _write(folder: Path, text: str) -> None:
    (folder / "data").write_text(text)


def test_the_newest_few_are_kept_and_incomplete_ones_do_not_count(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for step in (1, 2, 10):
        save(tmp_path, step)
    assert [c.state.step for c in checkpoints(tmp_path)] == [2, 10]
    newest = save(tmp_path, 11)
    (newest / MARKER).unlink()
    found = latest(tmp_path)
    assert found is not None and found.state.step == 10
    save(tmp_path, 11, "again")
    assert (newest / "data").read_text() == "again"


def test_a_fault_while_writing_leaves_the_previous_one(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def fail(folder: Path) -> None:
        _write(folder, "half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, CheckpointState(2, 2, 0, "h", "run"), fail, keep=1, needed_bytes=1)
    assert [c.name for c in (tmp_path / "checkpoints").iterdir()] == ["step-00001"]


def test_too_little_room_is_said_before_writing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda _: 400_000_000)
    with pytest.raises(RunError, match=r"a checkpoint needs about 1.60 GB in .*checkpoints, where 0.40 GB are free"):
        save(tmp_path, 1, needed=1_600_000_000)
    assert latest(tmp_path) is None


def test_records_after_the_checkpoint_are_cut(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write({"kind": "validation", "step": 0, "reward_mean": 0.1})
        for step in range(3):
            log.write({"kind": "step", "step": step, "reward_mean": math.nan, "deep": {"a": 1.5}, "ok": True})
        log.write({"kind": "validation", "step": 3, "reward_mean": 0.2})
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"kind": "step", "st')
    assert len(read_records(tmp_path)) == 5
    assert cut_records(tmp_path, 2) == 2
    assert [(r["kind"], r["step"]) for r in read_records(tmp_path)] == [("validation", 0), ("step", 0), ("step", 1)]
    assert read_records(tmp_path)[1] == {"kind": "step", "step": 0, "reward_mean": None, "deep": {"a": 1.5}, "ok": True}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_a_curve_needs_a_reward(tmp_path: Path) -> None:
    assert not draw_curve([{"kind": "step", "step": 0, "reward_mean": None}], tmp_path / "c.png", "t")
    assert not (tmp_path / "c.png").exists()
    assert draw_curve([{"kind": "validation", "step": 0, "reward_mean": 0.5}], tmp_path / "c.png", "t")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")

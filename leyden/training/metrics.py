"""The run's record: `metrics.jsonl`, one line a step, and TensorBoard files of the same numbers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from leyden.training.checkpoint import write_atomically

FILE = "metrics.jsonl"


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """All complete records; a line that a crash cut short is left out."""
    path = run_dir / FILE
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def cut_records(run_dir: Path, step: int) -> int:
    """Keep what belongs to the first `step` steps and validation up to there. Returns how many records went.

    So a resumed run, which makes the others again, records each once.
    """
    records = read_records(run_dir)
    kept = [r for r in records if (r["step"] < step if r["kind"] == "step" else r["step"] <= step)]
    if (run_dir / FILE).exists():
        write_atomically(run_dir / FILE, "".join(_line(r) for r in kept))
    return len(records) - len(kept)


class MetricsLog:
    """Appends records; each is on disk when `write` returns. Use as a context manager."""

    def __init__(self, run_dir: Path, step: int = 0) -> None:
        """`step` is where this process goes on: TensorBoard hides what an earlier one plotted from there."""
        self._step = step
        self._path = run_dir / FILE
        self._folder = run_dir / "tensorboard"
        self._board: Any = None

    def __enter__(self) -> Self:
        from torch.utils.tensorboard import SummaryWriter

        self._file = self._path.open("a")
        self._board = SummaryWriter(str(self._folder), purge_step=self._step or None, flush_secs=10)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
        self._board.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. `kind` is "step" or "validation", `step` its number; other numbers are plotted."""
        self._file.write(_line(record))
        self._file.flush()
        os.fsync(self._file.fileno())
        for name, value in _numbers(record):
            self._board.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        self._board.flush()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN: unknown numbers are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _numbers(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in record.items():
        if isinstance(value, Mapping):
            found += _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            if key not in ("step", "time"):
                found.append((prefix + key, float(value)))
    return found

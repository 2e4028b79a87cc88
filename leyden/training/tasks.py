"""Tasks: loading rows, stable ids, the seeded order of epochs.

The order is a pure function of (seed, position), so a resumed run goes on exactly where it stopped without storing it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from leyden.config import RunConfig
from leyden.errors import ConfigError


@dataclass(frozen=True)
class Task:
    """One dataset row. `input` is the row as given; `task_id` stays the same between runs."""

    task_id: str
    input: Any


@dataclass(frozen=True)
class TaskOrder:
    """An endless sequence of task indexes: epoch after epoch, each a permutation seeded by (seed, epoch)."""

    count: int
    seed: int
    shuffle: bool = True

    def at(self, position: int) -> int:
        """Index of the task at a position (0-based, over all epochs)."""
        epoch, offset = divmod(position, self.count)
        return _permutation(self.count, self.seed, epoch)[offset] if self.shuffle else offset

    def step(self, step: int, size: int) -> list[int]:
        """Indexes of the `size` tasks of a step; a step may span epochs."""
        return [self.at(p) for p in range(step * size, (step + 1) * size)]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)


def load_tasks(source: str, seed: int, base: Path | None = None) -> list[Task]:
    """Rows of a `.jsonl` or `.json` file, or of `file.py:function` called as `function(seed)`.

    A row's id is its `data_id` or `id`; without either, its index and a hash of its content. `base` is the folder that
    relative paths start from.

    Raises:
        ConfigError: the source can't be read, holds no rows, or two rows have one id.
    """
    rows = _rows(source, seed, base or Path.cwd())
    if not rows:
        raise ConfigError(f"{source} holds no tasks")
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for index, row in enumerate(rows):
        task_id = _task_id(source, index, row)
        if task_id in seen:
            raise ConfigError(f"{source}: rows {seen[task_id]} and {index} (from 0) have the same id {task_id!r}")
        seen[task_id] = index
        tasks.append(Task(task_id, row))
    return tasks


def load_run_tasks(config: RunConfig) -> tuple[list[Task], list[Task]]:
    """A run's training tasks and the held-out ones that validation uses (none when validation is off).

    Raises:
        ConfigError: as `load_tasks` and `check_disjoint`.
    """
    train = load_tasks(config.data.train, config.seed)
    if config.data.heldout is None or config.validation.tasks == 0:
        return train, []
    heldout = load_tasks(config.data.heldout, config.seed)[: config.validation.tasks]
    check_disjoint(train, heldout)
    return train, heldout


def check_disjoint(train: Sequence[Task], heldout: Sequence[Task]) -> None:
    """Refuse held-out tasks that are trained on. Rows are compared by content, ids left aside.

    Raises:
        ConfigError: naming the first held-out row that is also a training row.
    """
    known = {_content(t.input): i for i, t in enumerate(train)}
    for i, task in enumerate(heldout):
        if (j := known.get(_content(task.input))) is not None:
            raise ConfigError(
                f"held-out row {i} ({task.task_id}) is also training row {j} ({train[j].task_id}), counted from 0: "
                "validation would measure what was trained on"
            )


def _rows(source: str, seed: int, base: Path) -> list[Any]:
    file, colon, function = source.rpartition(":")
    if colon and file.endswith(".py"):
        return _called(base / file, function, source, seed)
    path = base / source
    if path.suffix not in (".jsonl", ".json"):
        raise ConfigError(f"data source {source!r} is none of: a .jsonl file, a .json file, file.py:function")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"can't read the tasks in {path}: {getattr(e, 'strerror', None) or e}") from e
    if path.suffix == ".jsonl":
        return [_parsed(line, f"{path} line {n}") for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    rows = _parsed(text, str(path))
    if not isinstance(rows, list):
        raise ConfigError(f"{path} must hold a JSON list of rows, not {type(rows).__name__}")
    return rows


def _called(path: Path, name: str, source: str, seed: int) -> list[Any]:
    if not path.is_file():
        raise ConfigError(f"can't read the tasks of {source}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"leyden_tasks_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"can't load {path} as a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        rows = list(getattr(module, name)(seed))
    except Exception as e:
        # The user's own code: any fault in it is theirs to read, in one sentence.
        raise ConfigError(f"{source} failed: {type(e).__name__}: {e}") from e
    for index, row in enumerate(rows):
        try:
            json.dumps(row, allow_nan=False)
        except (TypeError, ValueError) as e:
            raise ConfigError(f"{source}: row {index} can't be written as JSON: {e}") from e
    return rows


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(f"{where} isn't valid JSON: {e.msg} at column {e.colno}") from e


def _task_id(source: str, index: int, row: Any) -> str:
    if isinstance(row, dict):
        for key in ("data_id", "id"):
            if (given := row.get(key)) is not None:
                if not isinstance(given, str | int):
                    raise ConfigError(f"{source}: row {index} has a {key!r} that is neither text nor a whole number")
                return str(given)
    return f"{index}-{hashlib.sha256(_content(row).encode()).hexdigest()[:12]}"


def _content(row: Any) -> str:
    if isinstance(row, dict):
        row = {k: v for k, v in row.items() if k not in ("data_id", "id")}
    return json.dumps(row, sort_keys=True, ensure_ascii=False)

"""What a person sees of a run: a live bar and the last steps on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from leyden.training.step import describe

SHOWN = 10
"""Steps in the live table."""


class Display:
    """Use as a context manager around the run."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._records: deque[Mapping[str, Any]] = deque(maxlen=SHOWN)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._bar.add_task("starting", total=None)
        self._live = Live(self._view(), console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._bar.update(self._task, visible=False)
            self._live.update(self._view(), refresh=True)
            self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def phase(self, text: str, total: int | None = None) -> None:
        """What is going on now, with `total` parts to come."""
        self._bar.reset(self._task, description=text, total=total)

    def advance(self) -> None:
        self._bar.advance(self._task)

    def record(self, record: Mapping[str, Any]) -> None:
        if self._live is None or record["kind"] == "validation":
            self.note(describe(record))
        if record["kind"] == "step":
            self._records.append(record)
            if self._live is not None:
                self._live.update(self._view())

    def _view(self) -> Group:
        table = Table("step", "reward", "constant", "loss", "ratio max", "tokens", "rollouts s", "update s", box=None)
        for r in self._records:
            reward = r["reward_mean"]
            table.add_row(
                f"{r['step']}/{self._steps}",
                "-" if reward is None else f"{reward:.3f}",
                f"{r['constant_groups']}/{r['groups']}",
                "skipped" if r["skipped"] else f"{r['loss']:.4f}",
                f"{r['ratio_max']:.2f}" if r.get("ratio_max") is not None else "-",
                str(r["trained_tokens"]),
                f"{r['seconds']['rollouts']:.1f}",
                f"{r['seconds']['update']:.1f}",
            )
        return Group(table, self._bar)

"""The picture of a run: reward of each training step and of the held-out set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_curve(records: Sequence[dict[str, Any]], path: Path, title: str) -> bool:
    """Write a PNG of `metrics.jsonl` records to `path`; False when there is nothing to draw.

    A step's reward was earned by the weights before its update, so step s stands at x = s (updates made before), the
    same scale as validation after s steps.
    """
    steps = [(r["step"], r["reward_mean"]) for r in records if r["kind"] == "step" and r["reward_mean"] is not None]
    held = [
        (r["step"], r["reward_mean"]) for r in records if r["kind"] == "validation" and r["reward_mean"] is not None
    ]
    if not steps and not held:
        return False
    # The figure class directly, without pyplot: no global state, no display, usable from any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if steps:
        axes.plot(
            [s for s, _ in steps], [r for _, r in steps], marker="o", markersize=3, label="training, mean of a step"
        )
    if held:
        axes.plot([s for s, _ in held], [r for _, r in held], "s--", color="tab:red", label="held-out")
    axes.set_xlabel("updates made")
    axes.set_ylabel("reward")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return True

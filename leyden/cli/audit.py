"""`leyden audit`: recompute recorded log-probs with the training engine and compare."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from leyden.cli.reader import find_run, open_reader


def audit(
    run: Annotated[Path | None, typer.Option("--run", help="the run's folder; default: the newest under runs/")] = None,
    calls: Annotated[int, typer.Option(min=1, help="recorded training calls to recompute, picked at random")] = 50,
    seed: Annotated[int, typer.Option()] = 0,
    bound: Annotated[float, typer.Option(help="largest difference that passes")] = 1e-3,
) -> None:
    """Recompute log-probs of recorded calls under their recorded version. Fails above the bound."""
    from leyden.config import load_run
    from leyden.training.torch.audit import audit_calls

    run_dir = find_run(run)
    name = load_run(run_dir / "run.yaml").name

    async def work() -> int:
        async with open_reader(run_dir, None) as reader:
            report = await audit_calls(reader, name, run_dir, calls, seed)
        by_version = ", ".join(f"{n} of version {v}" for v, n in sorted(report.calls_by_version.items()))
        print(f"recomputed {report.calls} calls ({by_version}); worst: {report.worst_call} of {report.worst_rollout}")
        print(
            f"audit: calls={report.calls} tokens={report.tokens} max_dlogp={report.max_difference:.3g} "
            f"mean_dlogp={report.mean_difference:.3g} bound={bound:g}"
        )
        return 0 if report.calls and report.max_difference <= bound else 1

    raise typer.Exit(asyncio.run(work()))

"""`leyden rows`: training rows, made again from the record."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from leyden.cli.export import Gateway, Run, StoreOption
from leyden.cli.reader import Reader, all_rollouts, find_run, open_reader
from leyden.errors import RunError
from leyden.schema import TERMINAL_STATES
from leyden.training.rows import build_rows, total_digest


def rebuild(
    run: Run = None,
    gateway: Gateway = None,
    store: StoreOption = None,
    step: Annotated[int | None, typer.Option(help="only this training step")] = None,
    max_row_tokens: Annotated[int, typer.Option(min=16, help="as in the run file")] = 8192,
) -> None:
    """Build the rows of all ended training rollouts again and print a digest of each, and of all.

    Equal digests are equal rows, to the last bit. With a run's folder they are compared to those that were trained.
    """

    async def work() -> dict[str, str]:
        async with open_reader(run, gateway, store) as reader:
            return await digests(reader, step=step, max_row_tokens=max_row_tokens, show=True)

    found = asyncio.run(work())
    trained = {} if gateway or store else trained_digests(find_run(run), step)
    differing = sorted(r for r, d in trained.items() if found.get(r) != d)
    if differing:
        shown = ", ".join(differing[:5])
        raise RunError(f"{len(differing)} of {len(trained)} trained rollouts have other rows now: {shown}")
    print(f"rows rebuild: rollouts={len(found)} compared={len(trained)} digest={total_digest(found)}")


async def digests(
    reader: Reader, *, step: int | None = None, max_row_tokens: int, show: bool = False
) -> dict[str, str]:
    """The digest of each ended training rollout's rows."""
    found: dict[str, str] = {}
    ended = [str(s) for s in TERMINAL_STATES]
    async for rollout in all_rollouts(reader, state_in=ended, step=step, is_train=True):
        trajectory = await reader.trajectory(rollout.rollout_id)
        _, report = build_rows(trajectory, max_row_tokens=max_row_tokens)
        found[rollout.rollout_id] = report.digest
        if show:
            print(f"{rollout.rollout_id} rows={report.rows} tokens={report.trained_tokens} digest={report.digest}")
    return found


def trained_digests(run_dir: Path, step: int | None) -> dict[str, str]:
    """Digests of the rows that the run's trainer built."""
    from leyden.training.metrics import read_records

    out: dict[str, str] = {}
    for record in read_records(run_dir):
        if step is None or record.get("step") == step:
            out.update(record.get("row_digests", {}))
    return out

"""`leyden logs`: what an attempt's agent and grader printed, wherever they ran."""

from __future__ import annotations

import asyncio
import codecs
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from leyden.cli.inspect import Gateway, Run
from leyden.cli.reader import Reader, find_run, open_reader
from leyden.controller.logfile import log_path
from leyden.errors import ConfigError
from leyden.schema import Attempt, LogPart, RolloutDetail, RolloutState

LOOK_SECONDS = 0.5
LATE_SECONDS = 3.0
"""How long after an attempt's end its log may still be on its way. One that printed nothing never comes."""

ACTIVE = (RolloutState.QUEUING, RolloutState.RUNNING)
PARTS: tuple[LogPart, ...] = ("agent", "grader")
_PICTURES = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {0x7F: 0x2421}


def logs(
    rollout: Annotated[str, typer.Argument(help="the rollout's id")],
    run: Run = None,
    gateway: Gateway = None,
    attempt: Annotated[str | None, typer.Option(help="default: the last attempt")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the attempt has ended")] = False,
) -> None:
    """Print all that an attempt's agent and grader printed (as far as it was kept)."""

    async def work() -> None:
        async with open_reader(run, gateway) as reader:
            folder = find_run(run) if gateway is None else None
            await _print(reader, rollout, attempt, folder, follow)

    asyncio.run(work())


async def _print(reader: Reader, rollout: str, attempt: str | None, run_dir: Path | None, follow: bool) -> None:
    detail = await reader.rollout(rollout)
    while (found := _attempt(detail, attempt)) is None and follow and detail.rollout.status.state in ACTIVE:
        # It waits for a controller.
        await asyncio.sleep(LOOK_SECONDS)
        detail = await reader.rollout(rollout)
    graded = detail.rollout.config.grader is not None
    if found is None:
        which = "no attempt yet" if attempt is None else f"no attempt {attempt}"
        raise ConfigError(f"{rollout} has {which}")
    if not follow and run_dir is not None and _print_files(run_dir, rollout, found.attempt_id):
        return
    parts = [_Part(reader, rollout, found.attempt_id, part) for part in (PARTS if graded else PARTS[:1])]
    ended_at: float | None = None
    while True:
        for part in parts:
            await part.print_new()
        if found.ended_at is not None:
            ended_at = ended_at or time.monotonic()
        late = ended_at is not None and time.monotonic() > ended_at + LATE_SECONDS
        whole = ended_at is not None and all(p.complete for p in parts)
        if not follow or late or whole:
            break
        await asyncio.sleep(LOOK_SECONDS)
        # Before the log is looked at: what was printed at the end is then found by this look.
        found = _attempt(await reader.rollout(rollout), found.attempt_id) or found
    if not any(p.start for p in parts) and found.log_tail:
        # Its controller sent no log, or not yet.
        _show(found.log_tail)
    elif not any(p.start for p in parts):
        print(f"attempt {found.attempt_id} of {rollout} has printed nothing", file=sys.stderr)


def _attempt(detail: RolloutDetail, wanted: str | None) -> Attempt | None:
    attempts = {a.attempt_id: a for a in detail.attempt_details}
    last = detail.rollout.status.last_attempt_id
    return attempts.get(wanted if wanted is not None else last or "")


def _print_files(run_dir: Path, rollout: str, attempt: str) -> bool:
    """Print the logs that a controller of this run keeps here, if it does."""
    agent = log_path(run_dir / "rollouts" / "logs", rollout, attempt)
    grader = agent.with_suffix(".grader.log")
    if not agent.is_file():
        return False
    _show(agent.read_text("utf-8", "replace"))
    if grader.is_file():
        _heading(grader.stat().st_size)
        _show(grader.read_text("utf-8", "replace"))
    return True


@dataclass
class _Part:
    """One of an attempt's logs, printed as it grows."""

    reader: Reader
    rollout: str
    attempt: str
    name: LogPart
    start: int = 0
    complete: bool = False
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    async def print_new(self) -> None:
        while not self.complete:
            text = await self.reader.log(self.rollout, self.attempt, part=self.name, start=self.start)
            if text.data and not self.start and self.name == "grader":
                _heading(len(text.data))
            _show(self._decoder.decode(text.data, text.complete))
            self.start, self.complete = text.next_start, text.complete
            if not text.data:
                return


def _heading(size: int) -> None:
    if size:
        _show("--- grader ---\n")


def _show(text: str) -> None:
    """Print text of an agent's: on a terminal without what would steer it."""
    sys.stdout.write(text.translate(_PICTURES) if sys.stdout.isatty() else text)
    sys.stdout.flush()

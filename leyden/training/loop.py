"""The training loop (synchronous schedule): rollouts, rows, update, publish, record, checkpoint, step after step.

The order within a step decides what a crash costs: a step is recorded once its weights are published and is done
once its checkpoint is complete. A restarted run goes on at the newest checkpoint, publishes its weights before any
rollout, and takes up the interrupted step's rollouts where they stand.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from leyden.client import LeydenClient
from leyden.config import RunConfig
from leyden.errors import RunError
from leyden.hooks import Hooks
from leyden.schema import TerminalItem
from leyden.training.checkpoint import (
    Checkpoint,
    CheckpointState,
    config_hash,
    latest,
    save_checkpoint,
    write_atomically,
)
from leyden.training.curve import draw_curve
from leyden.training.display import Display
from leyden.training.metrics import MetricsLog, cut_records, read_records
from leyden.training.rollouts import Rollouts
from leyden.training.schedule import (
    Progress,
    is_validation_step,
    step_fault,
    training_rollouts,
    validation_rollouts,
)
from leyden.training.step import nothing_to_train, reward_summary, rows_summary, step_advantages, step_rows
from leyden.training.tasks import TaskOrder, load_run_tasks
from leyden.training.torch.policy import Policy, UpdateReport
from leyden.training.torch.publish import EngineHandle, HttpEngine, probe, publish, weights_folder

PROGRESS = "progress.json"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Summary:
    """A finished run, also kept as `summary.json`. `checkpoint` is the trained model as a Hugging Face folder too; None
    when no step was made. The held-out figures are mean rewards."""

    run: str
    steps: int
    version: int
    heldout_before: float | None
    heldout_after: float | None
    heldout_tasks: int
    seconds: float
    run_dir: Path
    checkpoint: Path | None
    curve: Path | None


async def train(
    config: RunConfig,
    client: LeydenClient,
    engine: EngineHandle,
    run_dir: Path,
    resume: bool,
    console: Console,
    *,
    model: Path | None = None,
) -> Summary:
    """Run `config.training.steps` steps and return where everything is.

    Args:
        client: open client of the gateway, with its admin key.
        engine: serves `config.model` (any version: it is given the right weights first).
        resume: go on at the newest checkpoint in `run_dir`, or start when there is none.
        model: folder of the model; default `config.model`.

    Raises:
        LeydenError: in one sentence; everything recorded so far is kept, and `resume` goes on from there.
    """
    await asyncio.to_thread(run_dir.mkdir, parents=True, exist_ok=True)
    found = latest(run_dir)
    if found is not None and not resume:
        raise RunError(f"{run_dir} already holds a run: add --resume to go on with it, or set another output_dir")
    started = time.monotonic()
    with Display(console, config.training.steps) as display:
        if found is not None and _finished(config, run_dir, found):
            display.note(f"run {config.name} is finished ({found.state.step} steps); nothing to resume")
        else:
            async with AsyncExitStack() as stack:
                hooks = None
                if config.hooks is not None:
                    file, seconds = Path(config.hooks.file), config.hooks.timeout_seconds
                    hooks = await stack.enter_async_context(Hooks(file, seconds, display.note))
                loop = _Loop(config, client, engine, run_dir, display, hooks)
                await loop.prepare(model or Path(config.model), found, resume)
                with MetricsLog(run_dir, loop.step) as log:
                    await loop.run(log)
        summary = await asyncio.to_thread(_summarise, config, run_dir, time.monotonic() - started)
        write_atomically(run_dir / SUMMARY, json.dumps(asdict(summary), default=str, indent=1))
    for line in summary_lines(summary):
        console.print(line, highlight=False, markup=False)
    return summary


class _Loop:
    """One process's part of a run: holds the policy, the position, and the services."""

    def __init__(
        self,
        config: RunConfig,
        client: LeydenClient,
        engine: EngineHandle,
        run_dir: Path,
        display: Display,
        hooks: Hooks | None,
    ) -> None:
        self.config = config
        self.client = client
        self.engine = engine
        self.run_dir = run_dir
        self.display = display
        self.rollouts = Rollouts(client, config.name, config.training.stuck_after_seconds, hooks)
        self.train, self.heldout = load_run_tasks(config)
        self.order = TaskOrder(len(self.train), config.seed, config.data.shuffle)
        self.progress = Progress()
        self.step = 0
        self.version = 0
        self.policy: Policy

    async def prepare(self, model: Path, found: Checkpoint | None, resume: bool) -> None:
        """Load the policy at its checkpoint, if any, and see that the engine serves exactly these weights."""
        config = self.config
        if (path := self.run_dir / PROGRESS).exists() and resume:
            self.progress = Progress(**json.loads(path.read_text()))
        if found is None and not resume and (used := await self.rollouts.used_before()):
            raise RunError(
                f"the gateway already has {used} rollouts of a run named {config.name!r}: give this run another name"
            )
        self.display.phase("loading the model")
        self.policy = await asyncio.to_thread(
            Policy.load, model, config.training, temperature=config.sampling.temperature, seed=config.seed
        )
        if found is None:
            cut_records(self.run_dir, 0 if resume else -1)
            if resume:
                self.display.note(f"nothing to resume in {self.run_dir}: starting at step 0")
        else:
            await asyncio.to_thread(self.policy.restore, found.folder)
            self.step, self.version = found.state.step, found.state.version
            cut = cut_records(self.run_dir, self.step)
            again = f", {cut} later records are made again" if cut else ""
            self.display.note(f"resuming at step {self.step} with version {self.version} ({found.folder.name}{again})")
            if found.state.config_hash != config_hash(config):
                self.display.note("note: settings that change the numbers differ from those of the checkpoint")
        self.progress = self.progress.resumed_at(self.step)
        self.rollouts.resumed = resume
        if config.sampling.top_p < 1 or config.sampling.top_k > 0:
            self.display.note(
                "note: with top_p or top_k the recorded log-probs are of the cut distribution, the policy's are of the "
                "whole one: importance ratios start below 1 by the share cut off"
            )
        await self._serve_current()

    async def run(self, log: MetricsLog) -> None:
        steps = self.config.training.steps
        while True:
            if is_validation_step(self.config, self.step):
                await self._validate(log)
            if self.step >= steps:
                return
            await self._one_step(log)

    async def _serve_current(self) -> None:
        """Publish the current weights unless the engine proves that it serves them under the right version."""
        if await self.engine.version() == self.version and await probe(self.policy, self.engine) < 1e-3:
            await self._announce()
        else:
            await self._publish()

    async def _publish(self) -> float:
        """Returns the seconds that it took."""
        started = time.monotonic()
        self.display.phase(f"publishing version {self.version}")
        await publish(self.policy, self.engine, self.run_dir, self.version)
        await self._announce()
        return time.monotonic() - started

    async def _announce(self) -> None:
        await self.client.register_models([self.engine.announce(self.version)])

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def _one_step(self, log: MetricsLog) -> None:
        step, started = self.step, time.monotonic()
        self.progress = self.progress.starting(step)
        write_atomically(self.run_dir / PROGRESS, json.dumps(asdict(self.progress)))
        if await self.engine.version() not in (self.version, None):
            # An engine that was restarted in between serves the weights that it was started with.
            self.display.note("the engine came back with other weights: publishing again")
            await self._publish()
        ended = await self._run_rollouts(step)
        if (fault := step_fault(ended, self.config.training.max_infra_share)) is not None:
            raise await self.rollouts.failure(ended, f"step {step}: {fault}")
        waited = time.monotonic()
        advantages = step_advantages(self.config, ended)
        for name in advantages.refused:
            self.display.note(f"reward of {name} isn't a finite number: the rollout is left out")
        trajectories = await self.rollouts.trajectories(list(advantages.advantages))
        rows = step_rows(self.config, advantages, trajectories, self.version)
        del trajectories
        fetched = time.monotonic()
        skipped = nothing_to_train(rows)
        report = UpdateReport()
        if skipped is None:
            self.display.phase(f"step {step}: updating on {len(rows.items)} rows")
            report = await asyncio.to_thread(self.policy.update, rows.items)
            if report.refused is not None:
                skipped = f"update refused: {report.refused}"
        updated = time.monotonic()
        before = self.version
        published = 0.0
        if report.optimizer_steps:
            self.version += 1
            published = await self._publish()
        record = {
            "kind": "step",
            "step": step,
            "version": before,
            "time": time.time(),
            **reward_summary(self.config, ended),
            **rows_summary(rows),
            **_update_summary(report),
            "skipped": skipped,
            "seconds": {
                "rollouts": waited - started,
                "generating": rows.generating_seconds,
                "rows": fetched - waited,
                "update": updated - fetched,
                "publish": published,
                "total": time.monotonic() - started,
            },
        }
        log.write(record)
        self.display.record(record)
        self.step = step + 1
        if self.step % self.config.training.checkpoint_every == 0 or self.step == self.config.training.steps:
            await self._checkpoint()

    async def _run_rollouts(self, step: int) -> list[TerminalItem]:
        tasks = [self.train[i] for i in self.order.step(step, self.config.training.tasks_per_step)]
        wanted = training_rollouts(self.config, step, tasks, self.progress.suffix(step))
        self.display.phase(f"step {step}: rollouts", len(wanted))
        return await self.rollouts.run(wanted, lambda _: self.display.advance())

    async def _checkpoint(self) -> None:
        self.display.phase(f"checkpoint after {self.step} steps")
        state = CheckpointState(self.step, self.version, self.config.seed, config_hash(self.config), self.config.name)
        published = weights_folder(self.run_dir, self.version)
        weights = published if (published / "model.safetensors").exists() else None
        await asyncio.to_thread(
            save_checkpoint,
            self.run_dir,
            state,
            lambda folder: self.policy.save(folder, weights),
            keep=self.config.training.keep_checkpoints,
            needed_bytes=self.policy.checkpoint_bytes() - (self.policy.weight_bytes() if weights else 0),
        )

    # -- validation ----------------------------------------------------------------------------------------------------

    async def _validate(self, log: MetricsLog) -> None:
        if not self.heldout or any(r["step"] == self.step for r in _validations(read_records(self.run_dir))):
            return
        started = time.monotonic()
        wanted = validation_rollouts(self.config, self.step, self.heldout, self.progress.suffix(self.step))
        self.display.phase(f"held-out rollouts after {self.step} steps", len(wanted))
        ended = await self.rollouts.run(wanted, lambda _: self.display.advance())
        if (fault := step_fault(ended, self.config.training.max_infra_share)) is not None:
            raise await self.rollouts.failure(ended, f"held-out rollouts: {fault}")
        record = {
            "kind": "validation",
            "step": self.step,
            "version": self.version,
            "time": time.time(),
            **reward_summary(self.config, ended),
            "seconds": {"total": time.monotonic() - started},
        }
        log.write(record)
        self.display.record(record)


def run_trainer(
    config: RunConfig,
    run_dir: Path,
    model: Path,
    gateway_url: str,
    admin_key: str,
    engine_url: str,
    engine_key: str,
    *,
    resume: bool,
) -> Summary:
    """The trainer as a process: connects to gateway and engine by their URLs and runs `train` to its end."""

    async def main() -> Summary:
        async with LeydenClient(gateway_url, admin_key) as client:
            engine = HttpEngine(engine_url, engine_key, config.name)
            return await train(config, client, engine, run_dir, resume, Console(soft_wrap=True), model=model)

    return asyncio.run(main())


def summary_lines(s: Summary) -> list[str]:
    """The end of a run for a person: what was reached and where everything lies."""
    held = ""
    if s.heldout_before is not None and s.heldout_after is not None:
        held = f", held-out reward {s.heldout_before:.3f} before, {s.heldout_after:.3f} after"
    lines = [f"run {s.run}: {s.steps} steps, {s.version} updates, {s.seconds:.0f} s{held}"]
    lines.append(
        f"  rollouts    leyden show ROLLOUT_ID, names start with {s.run}. (records: {s.run_dir / 'metrics.jsonl'})"
    )
    if s.curve is not None:
        lines.append(f"  curve       {s.curve} (TensorBoard: {s.run_dir / 'tensorboard'})")
    if s.checkpoint is not None:
        lines.append(f"  model       {s.checkpoint} (a Hugging Face folder)")
    return lines


def _update_summary(report: UpdateReport) -> dict[str, Any]:
    return {
        "loss": report.losses[0] if report.losses else None,
        "losses": report.losses,
        "grad_norm": report.grad_norms[0] if report.grad_norms else None,
        "learning_rate": report.learning_rate,
        "optimizer_steps": report.optimizer_steps,
        "updated_rows": report.rows,
        "skipped_rows": report.skipped_rows,
        "row_tokens": report.row_tokens,
        "computed_tokens": report.tokens,
        "micro_batches": report.micro_batches,
        **report.stats.metrics(),
    }


def _validations(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in records if r["kind"] == "validation"]


def _finished(config: RunConfig, run_dir: Path, found: Checkpoint) -> bool:
    held = config.data.heldout is not None and config.validation.tasks > 0
    validated = any(r["step"] == found.state.step for r in _validations(read_records(run_dir)))
    return found.state.step >= config.training.steps and (validated or not held)


def _summarise(config: RunConfig, run_dir: Path, seconds: float) -> Summary:
    records = read_records(run_dir)
    curve = run_dir / "curve.png"
    drawn = draw_curve(records, curve, config.name)
    held = _validations(records)
    last = latest(run_dir)
    return Summary(
        run=config.name,
        steps=last.state.step if last else 0,
        version=last.state.version if last else 0,
        heldout_before=held[0]["reward_mean"] if held else None,
        heldout_after=held[-1]["reward_mean"] if len(held) > 1 else None,
        heldout_tasks=held[-1]["rollouts"] if held else 0,
        seconds=seconds,
        run_dir=run_dir,
        checkpoint=last.folder if last else None,
        curve=curve if drawn else None,
    )

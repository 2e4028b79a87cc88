"""The synchronous schedule: what a step creates, when it is complete, what is wrong with it. Pure functions.

Rollout ids are a function of run, step, task and sample, so creating a step's rollouts again is without effect and a
restarted trainer takes up those that are already finished. Steps that a crashed trainer had gone past without keeping
the result are replayed with new rollouts: their ids carry `.r{n}`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leyden.config import RunConfig
from leyden.schema import (
    Outcome,
    RolloutConfig,
    RolloutCreate,
    RolloutDetail,
    RolloutMetadata,
    RolloutState,
    Sampling,
    TerminalItem,
)
from leyden.training.tasks import Task

LAUNCH_SECONDS = 30.0
"""Added to the agent's and grader's own limits for the whole attempt: starting processes isn't the agent's time."""


@dataclass(frozen=True)
class Progress:
    """How far a run has got, kept beside the checkpoints so that a crash shows what was lost.

    `started` is the newest step whose rollouts may exist (-1: none); starting a step means that the ones before it
    are done. Rollouts of steps up to `replay_through` are created under `.r{replays}`.
    """

    started: int = -1
    replays: int = 0
    replay_through: int = -1

    def suffix(self, step: int) -> str:
        return f".r{self.replays}" if step <= self.replay_through else ""

    def starting(self, step: int) -> Progress:
        return Progress(max(step, self.started), self.replays, self.replay_through)

    def resumed_at(self, step: int) -> Progress:
        """The progress of a run that goes on at `step`: where later steps had begun, their weights are lost, so
        that what was sampled from them is not trained again; an interrupted step without a successor is taken up as
        it is."""
        if self.started <= step:
            return self
        return Progress(self.started, self.replays + 1, self.started)


def rollout_config(config: RunConfig, sampling: Sampling) -> RolloutConfig:
    seconds = config.agent.timeout_seconds + (config.grader.timeout_seconds if config.grader else 0) + LAUNCH_SECONDS
    return RolloutConfig(
        timeout_seconds=seconds,
        agent=config.agent,
        grader=config.grader,
        sampling=sampling,
        capture=config.capture,
        retry=config.retry,
    )


def group_name(step: int, task: int) -> str:
    return f"{step:05d}.{task:03d}"


def training_rollouts(config: RunConfig, step: int, tasks: Sequence[Task], suffix: str = "") -> list[RolloutCreate]:
    """The rollouts of a step: `rollouts_per_task` for each of its tasks, task by task."""
    how = rollout_config(config, config.sampling)
    size = config.training.rollouts_per_task
    return [
        RolloutCreate(
            input=task.input,
            is_train=True,
            config=how,
            metadata=RolloutMetadata(
                run=config.name,
                step=step,
                group=group_name(step, t),
                task_id=task.task_id,
                batch_idx=step,
                sample_idx_in_batch=t * size + s,
            ),
            rollout_id=f"{config.name}.{step:05d}.{t:03d}.{s:03d}{suffix}",
        )
        for t, task in enumerate(tasks)
        for s in range(size)
    ]


def validation_rollouts(config: RunConfig, step: int, tasks: Sequence[Task], suffix: str = "") -> list[RolloutCreate]:
    """One rollout for each held-out task, with validation's own sampling."""
    how = rollout_config(config, config.validation.sampling)
    return [
        RolloutCreate(
            input=task.input,
            is_train=False,
            config=how,
            metadata=RolloutMetadata(run=config.name, step=step, task_id=task.task_id, sample_idx_in_batch=i),
            rollout_id=f"{config.name}.val{step:05d}.{i:04d}{suffix}",
        )
        for i, task in enumerate(tasks)
    ]


def is_validation_step(config: RunConfig, step: int) -> bool:
    """Whether held-out rollouts run when `step` steps are done (0: before the first)."""
    every = config.validation.every
    return step in (0, config.training.steps) or (every > 0 and step % every == 0)


def failed(item: TerminalItem) -> bool:
    return item.state == RolloutState.FAILED


def infra_share(items: Sequence[TerminalItem]) -> float:
    return sum(i.outcome == Outcome.INFRA for i in items) / len(items) if items else 0.0


def step_fault(items: Sequence[TerminalItem], max_infra_share: float) -> str | None:
    """What makes a complete step useless, as the start of a sentence; None when it can be trained."""
    if items and all(failed(i) for i in items):
        return f"all {len(items)} rollouts failed"
    share = infra_share(items)
    if share > max_infra_share:
        return f"{share:.0%} of {len(items)} rollouts ended by infrastructure failures (limit {max_infra_share:.0%})"
    return None


def common_reason(reasons: Mapping[str, str]) -> tuple[str, str]:
    """(most common reason, a rollout that shows it) of reasons by rollout id; numbers in them don't tell them apart."""

    def shape(reason: str) -> str:
        return "".join("#" if c.isdigit() else c for c in reason)

    counts = Counter(shape(r) for r in reasons.values())
    top = counts.most_common(1)[0][0]
    rollout = next(i for i, r in reasons.items() if shape(r) == top)
    return reasons[rollout], rollout


def stuck_sentence(seconds: float, waiting: int, by_state: Mapping[str, int], oldest: RolloutDetail | None) -> str:
    """What a run that makes no progress is waiting for."""
    states = ", ".join(f"{n} {state}" for state, n in sorted(by_state.items()) if n) or "no state known"
    text = f"no rollout has ended for {seconds:.0f} s while {waiting} are awaited ({states})"
    if oldest is None:
        return text + "; none is running, so no controller is taking work: is one started and reaching this gateway?"
    last = oldest.attempt_details[-1] if oldest.attempt_details else None
    who = f", attempt {last.attempt_id} held by controller {last.controller_id or 'unknown'}" if last else ""
    name = oldest.rollout.rollout_id
    return f"{text}; the oldest running one is {name}{who} (leyden show {name})"

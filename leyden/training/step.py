"""From a step's ended rollouts to what is trained, and to its record. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from leyden.config import RunConfig
from leyden.schema import Outcome, TerminalItem, Trajectory
from leyden.training.advantages import Advantages, RolloutResult, grpo
from leyden.training.losses import token_weights
from leyden.training.packing import Item
from leyden.training.rows import Row, RowReport, build_rows, dropped_totals


@dataclass
class StepRows:
    """`items` enter the update; `reports` say what was left out, one for each rollout with an advantage."""

    items: list[Item]
    advantages: Advantages
    reports: list[RowReport]
    max_age: int
    mixed_versions: int
    generating_seconds: float
    """Time in which at least one of the step's calls was being answered."""


def step_advantages(config: RunConfig, ended: Sequence[TerminalItem]) -> Advantages:
    t = config.training
    results = [RolloutResult(i.rollout_id, i.metadata.group or i.rollout_id, i.outcome, i.reward) for i in ended]
    return grpo(
        results,
        std=t.advantage_std,
        min_group=t.min_group,
        agent_error=t.agent_error,
        timeout=t.timeout,
        failure_reward=t.failure_reward,
    )


def step_rows(config: RunConfig, advantages: Advantages, trajectories: Sequence[Trajectory], version: int) -> StepRows:
    """Rows of the rollouts that have an advantage, weighted for the whole step.

    `version` is the policy about to be updated; a token's age is how many versions older its sampler was.
    """
    rows: list[Row] = []
    reports: list[RowReport] = []
    for trajectory in trajectories:
        made, report = build_rows(trajectory, max_row_tokens=config.training.max_row_tokens)
        rows += made
        reports.append(report)
    weights = token_weights(rows, advantages.advantages, config.training.loss.normalisation)
    items = [
        Item(r, advantages.advantages[r.rollout_id], weights[r.rollout_id]) for r in rows if r.rollout_id in weights
    ]
    oldest = [int(r.versions[r.mask].min()) for r in rows if r.trained]
    mixed = sum(len(set(r.versions[r.mask].tolist())) > 1 for r in rows)
    return StepRows(
        items, advantages, reports, max((version - o for o in oldest), default=0), mixed, covered(trajectories)
    )


def covered(trajectories: Sequence[Trajectory]) -> float:
    """Seconds covered by the union of all calls' times."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted((c.started_at, c.ended_at) for t in trajectories for c in t.calls):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def nothing_to_train(rows: StepRows) -> str | None:
    """Why a step has no update, with counts; None when it has one."""
    a = rows.advantages
    if not a.advantages:
        why = ", ".join(f"{n} {reason}" for reason, n in sorted(a.excluded.items())) or "no rollout"
        return f"no group has enough valid rollouts ({why})"
    if not rows.items:
        why = ", ".join(f"{n} {reason}" for reason, n in sorted(dropped_totals(rows.reports).items())) or "no calls"
        return f"no trainable call among {len(a.advantages)} rollouts ({why})"
    if all(i.advantage == 0.0 for i in rows.items):
        return f"every group's rewards are equal ({a.constant_groups} of {a.groups} groups)"
    return None


def reward_summary(config: RunConfig, items: Sequence[TerminalItem]) -> dict[str, Any]:
    """Mean, smallest and largest reward over rollouts that show the policy (not `infra`, not `cancelled`).

    Failed agents count with `failure_reward`, whether or not they are trained.
    """
    rewards = []
    for item in items:
        if item.outcome in (Outcome.AGENT_ERROR, Outcome.TIMEOUT):
            rewards.append(config.training.failure_reward)
        elif item.outcome == Outcome.OK and item.reward is not None:
            rewards.append(item.reward)
    return {
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "rewarded": len(rewards),
        "rollouts": len(items),
        "outcomes": dict(Counter(i.outcome.value if i.outcome else "unknown" for i in items)),
        "calls": sum(i.calls for i in items),
    }


def rows_summary(rows: StepRows) -> dict[str, Any]:
    """Counts of a step's groups and rows, and the drop report: totals, and by rollout where something was left out."""
    a = rows.advantages
    incomplete = [r for r in rows.reports if r.dropped or r.over_long_rows or r.broken_links or not r.calls]
    return {
        "groups": a.groups,
        "constant_groups": a.constant_groups,
        "small_groups": a.small_groups,
        "excluded": a.excluded,
        "refused_rewards": a.refused,
        "rows": len(rows.items),
        "row_digests": {r.rollout_id: r.digest for r in rows.reports},
        "trained_tokens": sum(r.trained_tokens for r in rows.reports),
        "trained_calls": sum(r.trained_calls for r in rows.reports),
        "dropped": dropped_totals(rows.reports),
        "breaks": dict(sum((Counter(r.breaks) for r in rows.reports), Counter())),
        "drop_report": [asdict(r) for r in incomplete],
        "over_long_rows": sum(r.over_long_rows for r in rows.reports),
        "truncated_calls": sum(r.truncated for r in rows.reports),
        "broken_links": sum(r.broken_links for r in rows.reports),
        "unknown_logprobs": sum(r.unknown_logprobs for r in rows.reports),
        "max_age": rows.max_age,
        "mixed_version_rows": rows.mixed_versions,
    }


def describe(record: Mapping[str, Any]) -> str:
    """One plain line of a record, for logs."""
    reward = record["reward_mean"]
    shown = "none" if reward is None else f"{reward:.3f}"
    failures = ", ".join(f"{n} {outcome}" for outcome, n in record["outcomes"].items() if outcome != Outcome.OK)
    if failures:
        shown += f" ({failures})"
    if record["kind"] == "validation":
        return f"held-out after {record['step']} steps: reward {shown} over {record['rewarded']} rollouts"
    seconds = record["seconds"]
    text = (
        f"step {record['step']}: reward {shown}, {record['constant_groups']}/{record['groups']} groups constant, "
        f"rollouts {seconds['rollouts']:.1f} s, update {seconds['update']:.1f} s"
    )
    if record["dropped"]:
        text += ", calls left out: " + ", ".join(f"{n} {reason}" for reason, n in sorted(record["dropped"].items()))
    if "images" in record["dropped"]:
        text += " (this trainer reads token ids only; calls with images can't be trained)"
    return f"{text}, not updated: {record['skipped']}" if record["skipped"] else f"{text}, loss {record['loss']:.4f}"

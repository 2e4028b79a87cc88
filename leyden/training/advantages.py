"""Group-relative advantages, in float64 over rollouts (never over rows or turns).

GRPO: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1.2: A_i = (r_i - mean(r)) / std(r). The paper
doesn't say which standard deviation; we use the sample one (n - 1), as TRL and verl do. Without the division it is the
baseline of Dr.GRPO: Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv 2503.20783).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from leyden.schema import Outcome

STD_FLOOR = 1e-6
"""Smallest divisor: rewards that differ by rounding alone must not be blown up to unit advantages."""

SAME = 1e-12
"""Relative spread below which rewards count as equal (sums of the same numbers in another order)."""


@dataclass(frozen=True)
class RolloutResult:
    """How a rollout ended. `group` names the task within the step whose rollouts share a baseline."""

    rollout_id: str
    group: str
    outcome: Outcome | None
    reward: float | None


@dataclass
class Advantages:
    """One advantage per rollout that enters the loss, and why the others don't.

    `rewards` holds the reward used for each rollout with an advantage (`failure_reward` for failed agents);
    `refused` names rollouts whose reward was not a finite number.
    """

    advantages: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    groups: int = 0
    constant_groups: int = 0
    small_groups: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def grpo(
    results: Sequence[RolloutResult],
    *,
    std: bool = True,
    min_group: int = 2,
    agent_error: Literal["reward", "drop"] = "reward",
    timeout: Literal["reward", "drop"] = "reward",
    failure_reward: float = 0.0,
) -> Advantages:
    """Advantages of a step's rollouts against the mean of their own group's valid ones.

    Valid are `ok` rollouts with a finite reward and, by policy, failed agents (`agent_error`, `timeout`) with
    `failure_reward`. Rollouts that ended `infra` or `cancelled` never enter. Groups with fewer than `min_group` (at
    least 2) valid rollouts are left out. A group with one and the same reward gets exactly 0.
    """
    out = Advantages()
    excluded: Counter[str] = Counter()
    groups: dict[str, list[tuple[str, float]]] = defaultdict(list)
    policies = {Outcome.AGENT_ERROR: agent_error, Outcome.TIMEOUT: timeout}
    for r in results:
        if r.outcome is not None and r.outcome in policies:
            if policies[r.outcome] == "drop":
                excluded[r.outcome.value] += 1
            else:
                groups[r.group].append((r.rollout_id, failure_reward))
        elif r.outcome != Outcome.OK:
            excluded[r.outcome.value if r.outcome else "no_outcome"] += 1
        elif r.reward is None:
            excluded["no_reward"] += 1
        elif not math.isfinite(r.reward):
            excluded["non_finite_reward"] += 1
            out.refused.append(r.rollout_id)
        else:
            groups[r.group].append((r.rollout_id, float(r.reward)))
    for members in groups.values():
        if len(members) < max(2, min_group):
            out.small_groups += 1
            excluded["small_group"] += len(members)
            continue
        out.groups += 1
        values = centred([reward for _, reward in members], std=std)
        out.constant_groups += all(v == 0.0 for v in values)
        for (rollout_id, reward), value in zip(members, values, strict=True):
            out.advantages[rollout_id] = value
            out.rewards[rollout_id] = reward
    out.excluded = dict(excluded)
    return out


def centred(rewards: Sequence[float], *, std: bool) -> list[float]:
    """Rewards minus their mean, divided by their sample standard deviation (floored at STD_FLOOR) when `std`.

    Exactly 0.0 for all when the rewards are equal, also where their float mean isn't (seven times 0.2).
    """
    low, high = min(rewards), max(rewards)
    if high - low <= SAME * max(abs(low), abs(high)):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    deltas = [r - mean for r in rewards]
    if not std:
        return deltas
    scale = max(math.sqrt(math.fsum(d * d for d in deltas) / (len(rewards) - 1)), STD_FLOOR)
    return [d / scale for d in deltas]

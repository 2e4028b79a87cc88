"""Group-relative advantages against numbers worked out by hand and numpy's float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.schema import Outcome
from leyden.training.advantages import RolloutResult, centred, grpo


def group(rewards: list[float | None], name: str = "g", outcome: Outcome = Outcome.OK) -> list[RolloutResult]:
    return [RolloutResult(f"{name}{i}", name, outcome, r) for i, r in enumerate(rewards)]


def test_half_precision_traps() -> None:
    """Values that bf16 would round away."""
    assert centred([1, 1, 1, 1.0078125], std=True) == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-9)
    close = centred([0.7500, 0.7505, 0.7510, 0.7515], std=True)
    assert close == pytest.approx([-1.161895, -0.387298, 0.387298, 1.161895], abs=1e-5)


@pytest.mark.parametrize("rewards", [[0.2] * 7, [0.7] * 10, [0.1 + 0.2, 0.3], [0.0] * 3])
def test_equal_rewards_give_exactly_zero(rewards: list[float]) -> None:
    """The float mean of equal non-dyadic rewards isn't that reward."""
    for std in (True, False):
        assert centred(rewards, std=std) == [0.0] * len(rewards)
    assert grpo(group(list(rewards))).constant_groups == 1


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.booleans())
def test_against_numpy(rewards: list[float], std: bool) -> None:
    array = np.array(rewards)
    expected = array - array.mean()
    if std:
        expected = expected / max(array.std(ddof=1), 1e-6)
    got = centred(rewards, std=std)
    assert all(math.isfinite(v) for v in got)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert abs(math.fsum(got)) < 1e-6


def test_one_advantage_a_rollout_and_groups_kept_apart() -> None:
    """Baselines are over rollouts; a rollout's number of turns isn't even known here."""
    out = grpo([*group([1, 0, 1, 0], "a"), *group([5, 5], "b")], std=False)
    assert out.advantages == {"a0": 0.5, "a1": -0.5, "a2": 0.5, "a3": -0.5, "b0": 0.0, "b1": 0.0}
    assert (out.groups, out.constant_groups) == (2, 1)


def test_outcome_policies() -> None:
    mixed = [
        *group([1.0, 0.0], "g"),
        RolloutResult("e", "g", Outcome.AGENT_ERROR, 9.0),
        RolloutResult("t", "g", Outcome.TIMEOUT, None),
        RolloutResult("i", "g", Outcome.INFRA, 1.0),
        RolloutResult("c", "g", Outcome.CANCELLED, 1.0),
        RolloutResult("n", "g", Outcome.OK, None),
        RolloutResult("x", "g", None, 1.0),
    ]
    out = grpo(mixed, failure_reward=-1.0, std=False)
    assert out.rewards == {"g0": 1.0, "g1": 0.0, "e": -1.0, "t": -1.0}
    assert out.advantages == {"g0": 1.25, "g1": 0.25, "e": -0.75, "t": -0.75}
    assert out.excluded == {"infra": 1, "cancelled": 1, "no_reward": 1, "no_outcome": 1}
    dropped = grpo(mixed, agent_error="drop", timeout="drop", std=False)
    assert dropped.advantages == {"g0": 0.5, "g1": -0.5}
    assert dropped.excluded["agent_error"] == dropped.excluded["timeout"] == 1


def test_a_lone_survivor_is_left_out_and_two_are_compared() -> None:
    """Never the raw reward, never normalised alone."""
    lone = grpo([*group([0.7]), *group([None, None], "h")])
    assert lone.advantages == {} and lone.small_groups == 1 and lone.excluded["small_group"] == 1
    assert grpo(group([0.0, 1.0]), min_group=3).advantages == {}
    assert grpo(group([0.0, 1.0]), min_group=1).advantages == pytest.approx(
        {"g0": -math.sqrt(0.5), "g1": math.sqrt(0.5)}
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_rewards_are_refused_by_name(bad: float) -> None:
    out = grpo(group([1.0, bad, 0.0]), std=False)
    assert out.refused == ["g1"] and out.excluded == {"non_finite_reward": 1}
    assert out.advantages == {"g0": 0.5, "g2": -0.5}

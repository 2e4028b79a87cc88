"""The decisions alone, over every order of events that can come."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.controller import reconcile as rc
from leyden.controller.reconcile import Fleet, Limits, StepEnd, begin, parse_reward
from leyden.schema import AgentSpec, GraderSpec, Outcome, RolloutConfig

lines = st.sampled_from(["", "0.5", "-3", "nan", "inf", "1e999", "text", '{"reward": 2}', '{"reward": "2"}', "[1]"])
good_ends = st.builds(StepEnd, st.just("exited"), code=st.just(0), output=lines, last_line=lines)
bad_ends = st.builds(
    StepEnd,
    st.sampled_from(["exited", "exited", "exited", "timeout", "stopped", "not_started"]),
    code=st.sampled_from([0, 0, 0, 1, 75, 127, None]),
    signal=st.none(),
    shell=st.booleans(),
    last_line=lines,
    output=lines,
)
ends = st.one_of(good_ends, good_ends, good_ends, bad_ends)
seconds = st.floats(0.1, 1e5)


def event_for(draw: st.DrawFn, action: rc.Action) -> rc.Event:
    """Something that can come of an action."""
    rejected = st.builds(rc.Rejected, st.just("no"), st.booleans())
    match action:
        case rc.RunAgent():
            usual: st.SearchStrategy[rc.Event] = st.builds(rc.AgentEnded, ends)
        case rc.RunGrader():
            usual = st.builds(rc.GraderEnded, ends)
        case rc.CheckReward():
            usual = st.one_of(st.builds(rc.RewardSeen, st.booleans()), rejected)
        case _:
            usual = st.one_of(st.just(rc.Accepted()), st.just(rc.Accepted()), rejected)
    return draw(st.one_of(usual, usual, usual, usual, st.just(rc.Lost())))


@st.composite
def histories(draw: st.DrawFn) -> tuple[Limits, list[tuple[rc.Action, rc.Event]], rc.Forget]:
    limits = Limits(draw(seconds), draw(seconds), draw(st.none() | seconds))
    now = 100.0
    progress, action = begin(limits, now)
    steps: list[tuple[rc.Action, rc.Event]] = []
    while not isinstance(action, rc.Forget):
        assert len(steps) < 10, "an attempt must end"
        event = event_for(draw, action)
        steps.append((action, event))
        if isinstance(action, rc.RunAgent | rc.RunGrader):
            now += draw(st.floats(0, action.seconds))
        progress, action = rc.advance(progress, event, now)
    assert progress.phase is rc.Phase.DONE
    return limits, steps, action


@settings(max_examples=400)
@given(histories())
def test_invariants(history: tuple[Limits, list[tuple[rc.Action, rc.Event]], rc.Forget]) -> None:
    limits, steps, _ = history
    actions = [a for a, _ in steps]
    reports = [a for a in actions if isinstance(a, rc.ReportOutcome)]
    assert len(reports) <= 1
    lost = any(isinstance(e, rc.Lost) for _, e in steps)
    refused = any(isinstance(e, rc.Rejected) and e.gone and not isinstance(a, rc.ReportOutcome) for a, e in steps)
    if not lost:
        assert len(reports) == (0 if refused else 1)
    for action in actions:
        if isinstance(action, rc.RunGrader):
            assert limits.grader is not None
            assert action.agent.code == 0 and action.agent.kind == "exited"
            assert any(isinstance(a, rc.ReportGrading) and isinstance(e, rc.Accepted) for a, e in steps)
            assert 0 < action.seconds <= limits.attempt
        if isinstance(action, rc.RunAgent):
            assert action.seconds == min(limits.agent, limits.attempt)
        if isinstance(action, rc.PostReward):
            assert math.isfinite(action.value)
            (grader,) = [e for _, e in steps if isinstance(e, rc.GraderEnded)]
            assert (grader.end.kind, grader.end.code) == ("exited", 0)
    for report in reports:
        verdict = report.verdict
        assert (verdict.reason is None) == (verdict.outcome is Outcome.OK)
        posted = any(isinstance(a, rc.PostReward) and isinstance(e, rc.Accepted) for a, e in steps)
        seen = any(isinstance(e, rc.RewardSeen) and e.present for _, e in steps)
        if verdict.outcome is Outcome.OK:
            assert limits.grader is None or posted or seen
        else:
            assert not posted and not seen
        if any(isinstance(a, rc.RunGrader) for a in actions):
            assert verdict.outcome in (Outcome.OK, Outcome.INFRA)
        assert verdict.outcome is not Outcome.CANCELLED


@given(seconds, seconds, seconds, st.floats(0, 1))
def test_agent_and_grader_together_keep_the_attempts_limit(
    attempt: float, agent: float, grader: float, share: float
) -> None:
    progress, action = begin(Limits(attempt, agent, grader), 0.0)
    assert isinstance(action, rc.RunAgent)
    used = action.seconds * share
    progress, action = rc.advance(progress, rc.AgentEnded(StepEnd("exited", code=0)), used)
    progress, action = rc.advance(progress, rc.Accepted(), used)
    if isinstance(action, rc.RunGrader):
        assert used + action.seconds <= attempt * (1 + 1e-12)
    else:
        assert isinstance(action, rc.ReportOutcome) and action.verdict.outcome is Outcome.INFRA


@given(st.floats())
def test_any_float_is_a_reward_exactly_when_finite(value: float) -> None:
    parsed = parse_reward(repr(value))
    assert (parsed is not None) == math.isfinite(value)
    if parsed is not None:
        assert parsed[0] == value


@pytest.mark.parametrize(
    "line",
    ["", "1_000", "0x10", "true", '"1"', "null", '{"reward": null}', '{"reward": false}', '{"reward": "1"}', '{"x": 1}',
     '{"reward": NaN}', '{"reward": 1e999}', "1 2", "reward: 1", "٣"],
)  # fmt: skip
def test_what_is_no_reward(line: str) -> None:
    assert parse_reward(line) is None


def test_what_a_grader_says_beside_its_reward_travels_along_in_the_wires_types() -> None:
    line = '{"reward": 0.5, "reason": ["a"], "message": "m", "value": 9, "call_id": 3, "source": "me", "tests": 4}'
    details = {"source": "grader", "reason": '["a"]', "message": "m", "tests": 4}
    assert parse_reward(line) == (0.5, details)


def test_an_event_that_cannot_come_is_refused() -> None:
    progress, _ = begin(Limits(1, 1), 0)
    with pytest.raises(ValueError, match="RewardSeen can't happen in phase agent"):
        rc.advance(progress, rc.RewardSeen(True), 0)
    progress, _ = rc.advance(progress, rc.Lost(), 0)
    with pytest.raises(ValueError, match="after the attempt was done"):
        rc.advance(progress, rc.Lost(), 0)


def test_limits_come_from_the_config() -> None:
    assert Limits.of(RolloutConfig(timeout_seconds=9)) == Limits(9, 9, None)
    config = RolloutConfig(
        timeout_seconds=9,
        agent=AgentSpec(command="a", timeout_seconds=5),
        grader=GraderSpec(command="g", timeout_seconds=2),
    )
    assert Limits.of(config) == Limits(9, 5, 2)


refs = st.tuples(st.sampled_from("abcdef"), st.sampled_from("01"))


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["admit", "release"]), st.lists(refs, max_size=5))))
def test_a_fleet_starts_nothing_twice_and_has_room_as_it_says(
    limit: int, steps: list[tuple[str, list[tuple[str, str]]]]
) -> None:
    fleet = Fleet(limit)
    running: set[tuple[str, str]] = set()
    for what, some in steps:
        if what == "admit":
            started = fleet.admit(some)
            assert running.isdisjoint(started) and len(set(started)) == len(started)
            running.update(started)
            assert running.issuperset(some)
        else:
            for ref in some:
                fleet.release(ref)
            running.difference_update(some)
        assert fleet.held == running
        assert fleet.room() == max(0, limit - len(running))
        assert set(fleet.lost(some)) == running.intersection(some)
    fleet.stopping = True
    assert fleet.room() == 0


@pytest.mark.parametrize("policy,kept", [("all", "oai-"), ("failed", "ai"), ("none", "")])
def test_workspaces(policy: rc.KeepPolicy, kept: str) -> None:
    cases = {"o": Outcome.OK, "a": Outcome.AGENT_ERROR, "i": Outcome.INFRA, "-": None}
    assert "".join(k for k, outcome in cases.items() if rc.keep_workspace(policy, outcome)) == kept

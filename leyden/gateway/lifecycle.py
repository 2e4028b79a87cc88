"""The life of rollouts and attempts, as plain functions over plain values: no store, no clock, no network.

    queuing ──claim / PATCH running──► running ──ok with reward──► succeeded
       ▲                                  │
       └─ after a while, attempts left ───┴── none left ─────────► failed

An attempt passes through phases: `agent` (its agent may call the model), `grading` (the agent's processes are gone),
`ended`. Each key belongs to one phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from leyden.gateway.errors import Conflict, Invalid
from leyden.schema import TERMINAL_STATES, Outcome, RetryPolicy, RolloutState


class Phase(StrEnum):
    AGENT = "agent"
    GRADING = "grading"
    ENDED = "ended"


ENGINE_FAILED = "engine failed"
"""How the `untrainable` reason of a call begins whose engine gave no answer."""


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """What the store knows about an attempt when it ends."""

    has_grader: bool
    reward: float | None
    delivered_calls: int
    graded: bool = False
    """Its agent has exited 0 and its grader was started."""
    engine_failure: str | None = None
    """Why its last call got no answer from the engine."""
    blamed: str | None = None
    """What its last reward event says went wrong, when it says that the machinery is to blame (`source: infra`)."""


@dataclass(frozen=True, slots=True)
class Ending:
    outcome: Outcome
    reason: str | None


def settle(reported: Outcome, reason: str | None, facts: AttemptFacts) -> Ending:
    """The ending of an attempt whose controller reported `reported`.

    `ok` is questioned: without a delivered call or without a reward there is nothing to learn from it, and it must not
    pass for a success. When a grader fails over an agent that made no call, the agent is the one to look at; an agent
    that failed over an engine that didn't answer isn't. Whoever may give the reward may say that it means nothing.
    """
    if facts.blamed is not None and reported not in (Outcome.INFRA, Outcome.CANCELLED):
        return Ending(Outcome.INFRA, f"the reward was reported as the infrastructure's: {facts.blamed}")
    if reported is Outcome.AGENT_ERROR and facts.engine_failure is not None:
        return Ending(Outcome.INFRA, f"{facts.engine_failure}; then: {reason or 'the agent failed'}")
    if reported is not Outcome.OK and not (reported is Outcome.INFRA and facts.graded):
        return Ending(reported, reason)
    if facts.delivered_calls == 0:
        return Ending(
            Outcome.AGENT_ERROR,
            "made no model call: check that the agent uses OPENAI_BASE_URL and OPENAI_API_KEY",
        )
    if reported is Outcome.INFRA:
        return Ending(reported, reason)
    if facts.reward is None and facts.has_grader:
        detail = f": {reason}" if reason else "; its last line of output must be a number or JSON with a reward key"
        return Ending(Outcome.INFRA, f"grader printed no number{detail}")
    if facts.reward is None:
        return Ending(
            Outcome.AGENT_ERROR,
            "exited 0 without reporting a reward: post a reward event to LEYDEN_EVENT_URL, or configure a grader",
        )
    return Ending(Outcome.OK, reason)


def next_state(outcome: Outcome, attempts: int, retry: RetryPolicy) -> RolloutState:
    """Where a rollout goes when its attempt number `attempts` (from 1) has ended with `outcome`."""
    if outcome is Outcome.OK:
        return RolloutState.SUCCEEDED
    allowed = {Outcome.INFRA: retry.infra, Outcome.AGENT_ERROR: retry.agent_error, Outcome.TIMEOUT: retry.timeout}
    return RolloutState.QUEUING if attempts < allowed.get(outcome, 1) else RolloutState.FAILED


def backoff(attempts: int, retry: RetryPolicy) -> float:
    """Seconds before another attempt when the `attempts`th (from 1) is to be followed by one."""
    # Beyond 2^30 any wait is the longest one; the power itself must not overflow.
    return min(retry.backoff_max_seconds, retry.backoff_seconds * 2.0 ** min(attempts - 1, 30))


@dataclass(frozen=True, slots=True)
class PatchPlan:
    """What a status PATCH does: `start` an attempt, `end` the rollout with `outcome`, or only change details."""

    start: bool = False
    end: RolloutState | None = None
    outcome: Outcome | None = None


def plan_patch(
    rollout_id: str, current: RolloutState, target: RolloutState | None, outcome: Outcome | None, stored: Outcome | None
) -> PatchPlan:
    """Decide a PATCH of a rollout in state `current` whose last outcome is `stored`.

    A repeated PATCH to the state that the rollout already has changes nothing, so it can be retried. A rollout that
    fails before any attempt ran is `cancelled` unless the caller says otherwise: no agent was at fault.

    Raises:
        Conflict: the state machine has no such transition.
        Invalid: `outcome` contradicts the state asked for.
    """
    if target is None or target is current:
        if current in TERMINAL_STATES and (target is None or (outcome is not None and outcome is not stored)):
            raise Conflict(f"rollout {rollout_id} has already {current}; its status can't change any more")
        return PatchPlan()
    if current in TERMINAL_STATES:
        raise Conflict(f"rollout {rollout_id} has already {current}; it can't become {target}")
    if target is RolloutState.QUEUING:
        raise Conflict(f"rollout {rollout_id} is {current}; only the gateway puts rollouts back in the queue")
    if target is RolloutState.RUNNING:
        return PatchPlan(start=True)
    if target is RolloutState.SUCCEEDED:
        if current is RolloutState.QUEUING:
            raise Conflict(f"rollout {rollout_id} is queuing; it can't succeed before it has run")
        if outcome not in (None, Outcome.OK):
            raise Invalid(f"a rollout that succeeded has outcome ok, not {outcome}")
        return PatchPlan(end=target, outcome=Outcome.OK)
    if outcome is Outcome.OK:
        raise Invalid("a rollout that failed can't have outcome ok")
    default = Outcome.CANCELLED if current is RolloutState.QUEUING else Outcome.AGENT_ERROR
    return PatchPlan(end=target, outcome=outcome or default)


def lease_expired(lease_expires_at: float | None, now: float) -> bool:
    """Whether a leased attempt is lost. Attempts without a lease (Agent Lightning clients) never expire."""
    return lease_expires_at is not None and lease_expires_at <= now


def name_attempt(rollout_id: str, attempt_id: str) -> str:
    return f"attempt {attempt_id} of rollout {rollout_id}"


def check_holder(rollout_id: str, attempt_id: str, holder: str | None, controller_id: str, phase: Phase) -> None:
    """Refuse a report about an attempt that isn't (or is no longer) `controller_id`'s.

    Raises:
        Conflict: with a sentence that says why.
    """
    who = name_attempt(rollout_id, attempt_id)
    if phase is Phase.ENDED:
        raise Conflict(f"{who} has ended; this report came too late and was counted")
    if holder != controller_id:
        raise Conflict(f"{who} isn't held by controller {controller_id}")

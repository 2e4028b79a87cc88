"""What the controller decides, as functions over plain data: no clocks, tasks, processes or clients.

An attempt goes `agent → handover → grading → (reward | check) → report → done`. The caller performs the action that it
is given and feeds back the one event that came of it, until the action is `Forget`:

    progress, action = begin(limits, now)
    while not isinstance(action, Forget):
        progress, action = advance(progress, perform(action), now)

Invariants: an outcome is reported at most once, and never after the attempt was lost or refused; the grader runs only
after an agent that exited 0 and after the gateway accepted the handover; a reward is posted only after a grader that
exited 0; the seconds given to agent and grader together never exceed the attempt's own limit.
"""

from __future__ import annotations

import math
import re
import signal as signals
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import orjson

from leyden.schema import Outcome, RolloutConfig

EX_TEMPFAIL = 75
"""An agent that exits with it (sysexits.h) says that the failure was the machinery's, not the policy's."""

SHELL_CANNOT_RUN = frozenset({126, 127})
"""Exit codes with which a shell says that it couldn't execute, or didn't find, the command."""

STOPPED = "controller stopped"

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_QUOTED = 300


StepKind = Literal["exited", "timeout", "stopped", "not_started", "limit", "machine"]
"""`limit`: it was killed for exceeding a limit of its own; `machine`: it was killed and the machine is to blame."""
KeepPolicy = Literal["all", "failed", "none"]


class Phase(StrEnum):
    AGENT = "agent"
    HANDOVER = "handover"
    """The agent's processes are gone; the gateway is asked to open the grader's key."""
    GRADING = "grading"
    REWARD = "reward"
    CHECK = "check"
    """The grader printed nothing; the gateway is asked whether it posted its reward itself."""
    REPORT = "report"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that an attempt may take. `grader` is None when the run has no grader."""

    attempt: float
    agent: float
    grader: float | None = None

    @classmethod
    def of(cls, config: RolloutConfig) -> Limits:
        agent = config.agent.timeout_seconds if config.agent else config.timeout_seconds
        return cls(config.timeout_seconds, agent, config.grader.timeout_seconds if config.grader else None)


@dataclass(frozen=True, slots=True)
class StepEnd:
    """How the agent or the grader ended. All its processes are gone."""

    kind: StepKind
    code: int | None = None
    signal: int | None = None
    reason: str | None = None
    """One sentence, when it couldn't be started; what goes after "killed: " for `limit` and `machine`."""
    shell: bool = False
    last_line: str = ""
    """Last line of its log."""
    output: str = ""
    """Last line of its standard output."""
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome to report."""

    outcome: Outcome
    reason: str | None = None
    code: int | None = None
    signal: int | None = None
    tail: str | None = None


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentEnded:
    end: StepEnd


@dataclass(frozen=True, slots=True)
class GraderEnded:
    end: StepEnd


@dataclass(frozen=True, slots=True)
class Accepted:
    """The gateway took the handover, the reward or the outcome."""


@dataclass(frozen=True, slots=True)
class RewardSeen:
    """Whether the attempt has a reward at the gateway."""

    present: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """The gateway refused the handover, the reward or the outcome (`why`), or couldn't be reached in time.

    `gone` means HTTP 409 or 404: the attempt isn't this controller's any more.
    """

    why: str
    gone: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """A heartbeat said that the attempt isn't this controller's any more; its processes are gone."""


Event = AgentEnded | GraderEnded | Accepted | RewardSeen | Rejected | Lost

# -- actions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunAgent:
    seconds: float


@dataclass(frozen=True, slots=True)
class ReportGrading:
    pass


@dataclass(frozen=True, slots=True)
class RunGrader:
    seconds: float
    agent: StepEnd


@dataclass(frozen=True, slots=True)
class PostReward:
    value: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckReward:
    pass


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing more to do. `why` says so when the outcome wasn't taken."""

    why: str | None = None


Action = RunAgent | ReportGrading | RunGrader | PostReward | CheckReward | ReportOutcome | Forget


@dataclass(frozen=True, slots=True)
class Progress:
    """Where an attempt is."""

    limits: Limits
    started_at: float
    phase: Phase
    agent: StepEnd | None = None
    grader: StepEnd | None = None
    verdict: Verdict | None = None


def begin(limits: Limits, now: float) -> tuple[Progress, Action]:
    """The first action of a claimed attempt."""
    return Progress(limits, now, Phase.AGENT), RunAgent(min(limits.agent, limits.attempt))


def advance(progress: Progress, event: Event, now: float) -> tuple[Progress, Action]:
    """The next action, given what came of the last one.

    Raises:
        ValueError: when `event` can't happen in this phase.
    """
    if progress.phase is Phase.DONE:
        raise ValueError(f"{event} after the attempt was done")
    if isinstance(event, Lost):
        return _forget(progress, "the attempt was taken away by the gateway")
    match progress.phase, event:
        case Phase.AGENT, AgentEnded(end):
            progress = replace(progress, agent=end)
            verdict = agent_verdict(end, progress.limits)
            if verdict.outcome is not Outcome.OK or progress.limits.grader is None:
                return _report(progress, verdict)
            return replace(progress, phase=Phase.HANDOVER), ReportGrading()
        case Phase.HANDOVER, Accepted():
            assert progress.agent is not None and progress.limits.grader is not None
            left = progress.limits.attempt - (now - progress.started_at)
            if left <= 0:
                return _report(progress, _infra(progress, "the attempt's time was over before the grader could start"))
            action = RunGrader(min(progress.limits.grader, left), progress.agent)
            return replace(progress, phase=Phase.GRADING), action
        case Phase.GRADING, GraderEnded(end):
            progress = replace(progress, grader=end)
            fault = grader_fault(end)
            if fault is not None:
                return _report(progress, _infra(progress, fault))
            if not end.output:
                return replace(progress, phase=Phase.CHECK), CheckReward()
            reward = parse_reward(end.output)
            if reward is None:
                return _report(progress, _infra(progress, no_number(end)))
            return replace(progress, phase=Phase.REWARD), PostReward(*reward)
        case Phase.CHECK, RewardSeen(present):
            if present:
                return _report(progress, _ok(progress))
            assert progress.grader is not None
            return _report(progress, _infra(progress, no_number(progress.grader)))
        case Phase.REWARD, Accepted():
            return _report(progress, _ok(progress))
        case Phase.REPORT, Accepted():
            return replace(progress, phase=Phase.DONE), Forget()
        case ((Phase.HANDOVER | Phase.REWARD | Phase.CHECK), Rejected(why, gone)):
            if gone:
                return _forget(progress, why)
            what = {Phase.HANDOVER: "start the grader", Phase.REWARD: "post the reward", Phase.CHECK: "read the reward"}
            return _report(progress, _infra(progress, f"couldn't {what[progress.phase]}: {why}"))
        case Phase.REPORT, Rejected(why):
            return _forget(progress, why)
    raise ValueError(f"{type(event).__name__} can't happen in phase {progress.phase}")


def agent_verdict(end: StepEnd, limits: Limits) -> Verdict:
    """What an agent's end means. `ok` is what its grader, or the gateway, may still overrule."""
    base = Verdict(Outcome.OK, None, end.code, end.signal, end.tail or None)
    match end.kind:
        case "not_started":
            return replace(base, outcome=Outcome.INFRA, reason=end.reason or "the agent couldn't be started")
        case "stopped":
            return replace(base, outcome=Outcome.INFRA, reason=STOPPED)
        case "limit":
            return replace(
                base, outcome=Outcome.AGENT_ERROR, reason=f"the agent was killed: {end.reason}{_saying(end)}"
            )
        case "machine":
            return replace(base, outcome=Outcome.INFRA, reason=f"the agent was killed: {end.reason}")
        case "timeout":
            seconds = min(limits.agent, limits.attempt)
            return replace(
                base, outcome=Outcome.TIMEOUT, reason=f"the agent ran longer than {seconds:g} s{_saying(end)}"
            )
    if end.signal is None and end.code == 0:
        return base
    if end.code == EX_TEMPFAIL:
        reason = f"the agent exited with code 75 (temporary failure){_saying(end)}"
        return replace(base, outcome=Outcome.INFRA, reason=reason)
    if end.shell and end.code in SHELL_CANNOT_RUN:
        reason = f"the shell couldn't run the agent's command (exit code {end.code}){_saying(end)}"
        return replace(base, outcome=Outcome.INFRA, reason=reason)
    return replace(base, outcome=Outcome.AGENT_ERROR, reason=f"the agent {_exit(end)}{_saying(end)}")


def grader_fault(end: StepEnd) -> str | None:
    """Why a grader's end can't give a reward, or None when it exited 0."""
    match end.kind:
        case "not_started":
            return end.reason or "the grader couldn't be started"
        case "stopped":
            return STOPPED
        case "limit" | "machine":
            return f"the grader was killed: {end.reason}{_saying(end)}"
        case "timeout":
            return f"the grader didn't end within its time{_saying(end)}"
    if end.signal is None and end.code == 0:
        return None
    return f"the grader {_exit(end)}{_saying(end)}"


def no_number(end: StepEnd) -> str:
    """The sentence for a grader that exited 0 without a usable reward."""
    if end.output:
        return f"grader printed no number (exit code 0): last line was {_quote(end.output)}"
    return "grader printed no number (exit code 0): it printed nothing and posted no reward"


def parse_reward(line: str) -> tuple[float, dict[str, Any]] | None:
    """The reward in a grader's last line: a finite number, or JSON with a finite number under `reward`.

    Returns the value and the event data that goes with it, or None. Strings and booleans aren't numbers.
    """
    line = line.strip()
    details: dict[str, Any] = {"source": "grader"}
    if _NUMBER.fullmatch(line):
        value: Any = float(line)
    else:
        try:
            parsed = orjson.loads(line)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(parsed, dict):
            return None
        value = parsed.get("reward")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        # The wire's own fields must keep their types; whatever else the grader says travels along.
        reserved = {"reward", "value", "call_id", "source"}
        details |= {k: v for k, v in parsed.items() if k not in reserved}
        for name in ("message", "reason"):
            if name in details and not isinstance(details[name], str):
                details[name] = orjson.dumps(details[name]).decode()
        value = float(value)
    return (value, details) if math.isfinite(value) else None


class Fleet:
    """Which attempts a controller holds, at most `limit` at once. Keys are (rollout id, attempt id)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: set[tuple[str, str]] = set()
        self.stopping = False

    def room(self) -> int:
        """How many attempts may be claimed now."""
        return 0 if self.stopping else max(0, self.limit - len(self.held))

    def admit(self, claimed: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of `claimed` to start now. One that is held already isn't started twice.

        A claim is a lease that was given: all of them start, also if that passes the limit (the gateway gave more than
        asked for) or a stop has begun (its attempt then ends at once as stopped, and is requeued).
        """
        fresh = [ref for ref in dict.fromkeys(claimed) if ref not in self.held]
        self.held.update(fresh)
        return fresh

    def lost(self, refs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of `refs` whose processes have to end now."""
        return [ref for ref in dict.fromkeys(refs) if ref in self.held]

    def release(self, ref: tuple[str, str]) -> None:
        self.held.discard(ref)


def keep_workspace(policy: KeepPolicy, outcome: Outcome | None) -> bool:
    """Whether an attempt's workspace stays. `outcome` is None when the attempt was lost: nobody will look for it."""
    return policy == "all" or (policy == "failed" and outcome is not None and outcome is not Outcome.OK)


def _report(progress: Progress, verdict: Verdict) -> tuple[Progress, Action]:
    return replace(progress, phase=Phase.REPORT, verdict=verdict), ReportOutcome(verdict)


def _forget(progress: Progress, why: str) -> tuple[Progress, Action]:
    return replace(progress, phase=Phase.DONE, verdict=None), Forget(why)


def _ok(progress: Progress) -> Verdict:
    assert progress.agent is not None
    return agent_verdict(progress.agent, progress.limits)


def _infra(progress: Progress, reason: str) -> Verdict:
    """An infra verdict after an agent that went well: exit code and signal are those of the grader, if it ran."""
    end = progress.grader or progress.agent
    assert end is not None and progress.agent is not None
    tail = progress.agent.tail
    if progress.grader is not None and progress.grader.tail:
        tail = f"{tail}\n--- grader ---\n{progress.grader.tail}" if tail else progress.grader.tail
    return Verdict(Outcome.INFRA, reason, end.code, end.signal, tail or None)


def _exit(end: StepEnd) -> str:
    if end.signal is None:
        return f"exited with code {end.code}"
    try:
        name = signals.Signals(end.signal).name
    except ValueError:
        name = f"signal {end.signal}"
    hint = ", perhaps for lack of memory" if end.signal == signals.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _saying(end: StepEnd) -> str:
    return f"; last line of its log: {_quote(end.last_line)}" if end.last_line else "; it logged nothing"


def _quote(line: str) -> str:
    return f"'{line if len(line) <= _QUOTED else line[:_QUOTED] + '…'}'"

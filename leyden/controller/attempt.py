"""Carries one claimed attempt from its start to its reported outcome: performs what `reconcile` decides."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Protocol

import structlog

from leyden.client import LeydenClient
from leyden.controller import reconcile
from leyden.controller.reconcile import KeepPolicy, StepEnd, Verdict
from leyden.errors import GatewayError
from leyden.schema import Claim, EventCreate, Outcome, OutcomeReport, PhaseReport

_GONE = frozenset({404, 409})
_log = structlog.get_logger()


def _once(rollout_id: str, attempt_id: str) -> str:
    """Name of the grader's reward. Hashed: an id alone may be as long as the gateway lets such a name be."""
    return hashlib.sha256(f"{rollout_id}/{attempt_id}/grader".encode()).hexdigest()


class Backend(Protocol):
    """What executes attempts. Steps return when nothing of them runs any more; `stop` ends them early."""

    async def run_agent(self, claim: Claim, model: str | None, seconds: float, stop: asyncio.Event) -> StepEnd: ...

    async def run_grader(self, claim: Claim, agent: StepEnd, seconds: float, stop: asyncio.Event) -> StepEnd: ...

    async def clean(self, claim: Claim, *, keep_workspace: bool) -> None: ...

    def tidy(self) -> None: ...

    def close(self) -> None: ...


class AttemptRun:
    """One attempt in the hands of this controller."""

    def __init__(
        self,
        claim: Claim,
        backend: Backend,
        client: LeydenClient,
        *,
        controller_id: str,
        model: str | None,
        keep_workspaces: KeepPolicy,
    ) -> None:
        self._claim = claim
        self._backend = backend
        self._client = client
        self._controller_id = controller_id
        self._model = model
        self._keep: KeepPolicy = keep_workspaces
        self._stop = asyncio.Event()
        self._lost = False
        self._rollout_id = claim.rollout.rollout_id
        self._attempt_id = claim.attempt_id

    def lose(self) -> None:
        """The attempt isn't ours any more: end its processes, report nothing."""
        self._lost = True
        self._stop.set()

    def stop(self) -> None:
        """The controller stops: end the processes, and report the attempt so that it is tried again."""
        self._stop.set()

    async def run(self) -> None:
        """Until the outcome is reported, or the attempt turns out not to be ours any more."""
        verdict: Verdict | None = None
        try:
            limits = reconcile.Limits.of(self._claim.rollout.config)
            progress, action = reconcile.begin(limits, time.monotonic())
            while not isinstance(action, reconcile.Forget):
                if isinstance(action, reconcile.ReportOutcome):
                    verdict = action.verdict
                event = await self._perform(action)
                if self._lost:
                    event = reconcile.Lost()
                progress, action = reconcile.advance(progress, event, time.monotonic())
            if action.why is not None:
                verdict = None
                _log.warning("attempt dropped", rollout=self._rollout_id, attempt=self._attempt_id, why=action.why)
        except Exception as e:
            # A fault of ours must not leave the rollout waiting for its lease, nor the log without it.
            _log.exception("attempt failed in the controller", rollout=self._rollout_id, attempt=self._attempt_id)
            verdict = Verdict(Outcome.INFRA, f"the controller failed: {type(e).__name__}: {e}")
            await self._perform(reconcile.ReportOutcome(verdict))
        finally:
            keep = reconcile.keep_workspace(self._keep, verdict.outcome if verdict else None)
            await self._backend.clean(self._claim, keep_workspace=keep)

    async def _perform(self, action: reconcile.Action) -> reconcile.Event:
        claim = self._claim
        match action:
            case reconcile.RunAgent(seconds):
                return reconcile.AgentEnded(await self._backend.run_agent(claim, self._model, seconds, self._stop))
            case reconcile.RunGrader(seconds, agent):
                return reconcile.GraderEnded(await self._backend.run_grader(claim, agent, seconds, self._stop))
        try:
            match action:
                case reconcile.ReportGrading():
                    report = PhaseReport(controller_id=self._controller_id, phase="grading")
                    await self._client.phase(self._rollout_id, self._attempt_id, report)
                case reconcile.PostReward(value, details):
                    await self._client.post_event(
                        self._rollout_id,
                        self._attempt_id,
                        EventCreate(event_type="reward", data={"value": value, **details}),
                        key=claim.grader_key,
                        once=_once(self._rollout_id, self._attempt_id),
                    )
                case reconcile.CheckReward():
                    return reconcile.RewardSeen(await self._has_reward())
                case reconcile.ReportOutcome(verdict):
                    outcome = OutcomeReport(
                        controller_id=self._controller_id,
                        outcome=verdict.outcome,
                        reason=verdict.reason,
                        exit_code=verdict.code,
                        signal=verdict.signal,
                        log_tail=verdict.tail,
                    )
                    await self._client.outcome(self._rollout_id, self._attempt_id, outcome)
        except GatewayError as e:
            return reconcile.Rejected(str(e), gone=e.status in _GONE)
        return reconcile.Accepted()

    async def _has_reward(self) -> bool:
        detail = await self._client.rollout(self._rollout_id)
        ours = [a for a in detail.attempt_details if a.attempt_id == self._attempt_id]
        return ours[0].reward is not None if ours else detail.rollout.status.reward is not None

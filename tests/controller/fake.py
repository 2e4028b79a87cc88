"""The part of docs/wire.md that a controller uses, in memory, with knobs for faults."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from aiohttp import web

from leyden.schema import Claim, OutcomeReport, Rollout, RolloutConfig, RolloutState, RolloutStatus

ADMIN_KEY = "admin-secret"


def make_rollout(rollout_id: str, task: Any, config: dict[str, Any]) -> Rollout:
    now = time.time()
    status = RolloutStatus(created_at=now, updated_at=now)
    return Rollout(rollout_id=rollout_id, input=task, config=RolloutConfig(**config), status=status)


def make_claim(rollout_id: str, task: Any, config: dict[str, Any], attempt_id: str = "0") -> Claim:
    grader_key = f"grader-{rollout_id}-{attempt_id}" if config.get("grader") else None
    return Claim(
        rollout=make_rollout(rollout_id, task, config),
        attempt_id=attempt_id,
        agent_key=f"agent-{rollout_id}-{attempt_id}",
        grader_key=grader_key,
    )


class FakeGateway:
    def __init__(self) -> None:
        self.queue: list[Claim] = []
        self.queued = asyncio.Event()
        self.held: dict[tuple[str, str], Claim] = {}
        self.log: list[tuple[str, str]] = []
        """(what, rollout id), in the order of arrival."""
        self.outcomes: dict[tuple[str, str], OutcomeReport] = {}
        self.ended = asyncio.Condition()
        self.events: list[dict[str, Any]] = []
        self.event_keys: list[str] = []
        self.rewards: dict[str, float] = {}
        self.lost: set[tuple[str, str]] = set()
        self.restarts: list[str] = []
        self.refuse: dict[tuple[str, str], int] = {}
        """(route name, rollout id) → HTTP status to answer with."""
        self.fail_times: dict[str, int] = {}
        """Route name → how many times it answers 503 first."""
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> FakeGateway:
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/api/models", self._models),
                web.post("/api/claims", self._claims),
                web.post("/api/heartbeats", self._heartbeats),
                web.post("/api/controllers/{c}/restarted", self._restarted),
                web.post("/api/rollouts/{r}/attempt/{a}/phase", self._phase),
                web.post("/api/rollouts/{r}/attempt/{a}/outcome", self._outcome),
                web.post("/api/rollouts/{r}/attempt/{a}/events", self._events),
                web.get("/api/rollouts/{r}", self._detail),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def enqueue(self, *claims: Claim) -> None:
        self.queue += claims
        self.queued.set()

    async def outcome(self, rollout_id: str, attempt_id: str = "0") -> OutcomeReport:
        async with asyncio.timeout(60), self.ended:
            await self.ended.wait_for(lambda: (rollout_id, attempt_id) in self.outcomes)
        return self.outcomes[rollout_id, attempt_id]

    def _fault(self, name: str, request: web.Request) -> web.Response | None:
        if self.fail_times.get(name, 0) > 0:
            self.fail_times[name] -= 1
            return web.json_response({"detail": "restarting"}, status=503)
        status = self.refuse.get((name, request.match_info.get("r", "")))
        if status is not None:
            return web.json_response({"detail": f"{name} refused"}, status=status)
        return None

    @staticmethod
    def _admin(request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {ADMIN_KEY}":
            raise web.HTTPUnauthorized(text='{"detail": "unknown key"}', content_type="application/json")

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self._admin(request)
        return web.json_response([{"model": "tiny", "endpoint": "http://127.0.0.1:1/v1", "kind": "leyden"}])

    async def _claims(self, request: web.Request) -> web.Response:
        self._admin(request)
        if fault := self._fault("claims", request):
            return fault
        body = await request.json()
        self.log.append(("claim", str(body["limit"])))
        if not self.queue:
            self.queued.clear()
            try:
                await asyncio.wait_for(self.queued.wait(), body["wait_seconds"])
            except TimeoutError:
                pass
        given, self.queue = self.queue[: body["limit"]], self.queue[body["limit"] :]
        for claim in given:
            self.held[claim.rollout.rollout_id, claim.attempt_id] = claim
        return web.json_response([c.model_dump(mode="json") for c in given])

    async def _heartbeats(self, request: web.Request) -> web.Response:
        body = await request.json()
        refs = [(a["rollout_id"], a["attempt_id"]) for a in body["attempts"]]
        lost = [ref for ref in refs if ref in self.lost]
        return web.json_response({"lost": [{"rollout_id": r, "attempt_id": a} for r, a in lost]})

    async def _restarted(self, request: web.Request) -> web.Response:
        self._admin(request)
        self.restarts.append(request.match_info["c"])
        return web.json_response({"released": 0})

    async def _phase(self, request: web.Request) -> web.Response:
        self.log.append(("phase", request.match_info["r"]))
        return self._fault("phase", request) or web.Response(status=204)

    async def _outcome(self, request: web.Request) -> web.Response:
        ref = request.match_info["r"], request.match_info["a"]
        if fault := self._fault("outcome", request):
            return fault
        self.log.append(("outcome", ref[0]))
        report = OutcomeReport.model_validate(await request.json())
        async with self.ended:
            self.outcomes[ref] = report
            self.ended.notify_all()
        rollout = self.held[ref].rollout.model_copy(deep=True)
        rollout.status.state = RolloutState.FAILED
        return web.Response(body=rollout.model_dump_json(), content_type="application/json")

    async def _events(self, request: web.Request) -> web.Response:
        if fault := self._fault("events", request):
            return fault
        body = await request.json()
        rollout_id = request.match_info["r"]
        self.log.append(("event", rollout_id))
        self.events.append(body)
        self.event_keys.append(request.headers.get("Authorization", "").removeprefix("Bearer "))
        self.rewards[rollout_id] = body["data"]["value"]
        event = {**body, "rollout_id": rollout_id, "attempt_id": request.match_info["a"], "timestamp": time.time()}
        return web.Response(body=orjson.dumps(event), content_type="application/json")

    async def _detail(self, request: web.Request) -> web.Response:
        rollout_id = request.match_info["r"]
        claim = next(c for (r, _), c in self.held.items() if r == rollout_id)
        rollout = claim.rollout.model_copy(deep=True)
        rollout.status.reward = self.rewards.get(rollout_id)
        body = {"rollout": rollout.model_dump(mode="json"), "attempts": [claim.attempt_id], "attempt_details": []}
        return web.json_response(body)

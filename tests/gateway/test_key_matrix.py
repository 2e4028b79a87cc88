"""Every route with every kind of key. A route that isn't in these tables fails the test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi.routing import APIRoute

from leyden.gateway.admin import build_admin
from leyden.gateway.agent import AgentApp
from leyden.schema import Outcome, OutcomeReport, PhaseReport
from tests.gateway.conftest import ADMIN, World

OPEN, ALLOWED = "open", "allowed"
"""Answered to anybody; and: whatever comes, it isn't about rights (not 401, 403 or 409)."""

# What each key gets: 401 unknown, 403 never, 409 not any more (or not yet).
#            no key  wrong  another attempt's  own      closed attempt's  grader's (grading)  admin's
MATRIX: dict[str, list[Any]] = {
    "open":       [OPEN,  OPEN,  OPEN,           OPEN,    OPEN,             OPEN,               OPEN],
    "admin":      [401,   401,   403,            403,     403,              403,                ALLOWED],
    "events":     [401,   401,   403,            ALLOWED, 409,              ALLOWED,            ALLOWED],
    "trajectory": [401,   401,   403,            403,     403,              ALLOWED,            ALLOWED],
    # The key alone says whose call it is: another attempt's key makes calls of that attempt.
    "call":       [401,   401,   ALLOWED,        ALLOWED, 409,              403,                403],
    "call path":  [401,   401,   403,            ALLOWED, 409,              403,                ALLOWED],
}  # fmt: skip

ADMIN_ROUTES = {
    "GET /healthz": "open",
    "GET /openapi.json": "admin",
    "POST /api/rollouts": "admin",
    "GET /api/rollouts": "admin",
    "GET /api/rollouts/page": "admin",
    "GET /api/rollouts/terminal": "admin",
    "GET /api/rollouts/{rollout_id}": "admin",
    "PATCH /api/rollouts/{rollout_id}": "admin",
    "DELETE /api/rollouts/{rollout_id}": "admin",
    "GET /api/rollouts/{rollout_id}/events": "admin",
    "POST /api/rollouts/{rollout_id}/attempt/{attempt_id}/events": "events",
    "GET /api/rollouts/{rollout_id}/trajectory": "trajectory",
    "POST /api/claims": "admin",
    "POST /api/heartbeats": "admin",
    "POST /api/controllers/{controller_id}/restarted": "admin",
    "POST /api/rollouts/{rollout_id}/attempt/{attempt_id}/phase": "admin",
    "POST /api/rollouts/{rollout_id}/attempt/{attempt_id}/outcome": "admin",
    "POST /api/rollouts/{rollout_id}/attempt/{attempt_id}/log": "admin",
    "GET /api/rollouts/{rollout_id}/attempt/{attempt_id}/log": "admin",
    "POST /api/models": "admin",
    "GET /api/models": "admin",
    "DELETE /api/models": "admin",
    "POST /proxy/pause": "admin",
    "POST /proxy/resume": "admin",
    "GET /proxy/state": "admin",
    "GET /api/stats": "admin",
}
LAST = ("DELETE", "PATCH")
"""Methods that change what the others need: they come last."""

AGENT_ROUTES = {
    "/openai/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/openai/v1/completions": {"prompt": "x"},
    "/openai/v1/responses": {"input": "x"},
    "/anthropic/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    "/anthropic/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/gemini/v1beta/models/*:generateContent": {"contents": [{"parts": [{"text": "x"}]}]},
    "/gemini/v1beta/models/*:streamGenerateContent": {"contents": [{"parts": [{"text": "x"}]}]},
    "/gemini/v1beta/models/*:countTokens": {"contents": [{"parts": [{"text": "x"}]}]},
}
MODEL_LISTS = ["/openai/v1/models", "/openai/v1/models/m", "/anthropic/v1/models", "/gemini/v1beta/models"]


@dataclass
class Asking:
    """Whoever asks: a key, and the rollout that it asks about."""

    name: str
    key: str | None
    rollout_id: str


async def everybody(world: World) -> list[Asking]:
    own, closed = await world.claim(controller="own"), await world.claim(controller="closed")
    other, graded = await world.claim(controller="other"), await world.claim(grader=True, controller="graded")
    await world.admin.outcome(
        closed.rollout.rollout_id, "0", OutcomeReport(controller_id="closed", outcome=Outcome.TIMEOUT)
    )
    await world.admin.phase(graded.rollout.rollout_id, "0", PhaseReport(controller_id="graded", phase="grading"))
    mine = own.rollout.rollout_id
    return [
        Asking("no key", None, mine),
        Asking("wrong key", "ley-agent-made-up", mine),
        Asking("another attempt's key", other.agent_key, mine),
        Asking("own key", own.agent_key, mine),
        Asking("closed attempt's key", closed.agent_key, closed.rollout.rollout_id),
        Asking("grader's key", graded.grader_key, graded.rollout.rollout_id),
        Asking("admin's key", ADMIN, mine),
    ]


async def check(world: World, asking: Asking, expected: Any, method: str, path: str, body: Any) -> None:
    headers = {"Authorization": f"Bearer {asking.key}"} if asking.key else {}
    async with world.http.request(method, world.url + path, json=body, headers=headers) as answer:
        text, status = (await answer.read()).decode("utf-8", "replace"), answer.status
    where = f"{method} {path} with {asking.name}: {status} {text[:200]}"
    if expected is OPEN:
        assert status < 400, where
    elif expected is ALLOWED:
        assert status not in (401, 403, 409) and status < 500, where
    else:
        assert status == expected, where
    assert asking.key is None or asking.key not in text, where


async def test_every_admin_route_with_every_key(world: World) -> None:
    app = build_admin(world.gateway)
    routes = [(m, r.path) for r in app.routes if isinstance(r, APIRoute) for m in sorted(r.methods or ())]
    assert {f"{m} {p}" for m, p in routes} == set(ADMIN_ROUTES)
    asking = await everybody(world)
    for method, pattern in sorted(routes, key=lambda r: (r[0] in LAST, r[0] == "DELETE", r[1].count("{"), r[1])):
        body: Any = [] if pattern in ("/api/rollouts", "/api/models") else {}
        if pattern.endswith("/events"):
            body = {"event_type": "note"}
        for who, expected in zip(asking, MATRIX[ADMIN_ROUTES[f"{method} {pattern}"]], strict=True):
            path = pattern.replace("{rollout_id}", who.rollout_id).replace("{attempt_id}", "0")
            await check(world, who, expected, method, path.replace("{controller_id}", "nobody"), body)


async def test_every_agent_route_with_every_key(world: World) -> None:
    app = AgentApp(world.gateway)
    families_and_rests = {tuple(path.split("/", 3)[1::2]) for path in AGENT_ROUTES}
    assert {*app._calls, *app._counts} == families_and_rests
    asking = await everybody(world)
    posts = [("POST", p.replace("*", "m"), body) for p, body in AGENT_ROUTES.items()]
    for method, path, body in [*posts, *(("GET", p, None) for p in MODEL_LISTS)]:
        for who, by_key, by_path in zip(asking, MATRIX["call"], MATRIX["call path"], strict=True):
            listing = method == "GET" and who.name == "admin's key"  # The list is no call and needs no attempt.
            await check(world, who, ALLOWED if listing else by_key, method, path, body)
            long = f"/proxy/rollout/{who.rollout_id}/attempt/0/mode/train{path}"
            await check(world, who, by_path, method, long, body)


async def test_an_attempts_key_learns_nothing_about_other_rollouts(world: World) -> None:
    asking = await everybody(world)
    own = asking[3]
    told = []
    for rollout_id in (asking[5].rollout_id, "never-was"):
        headers = {"x-api-key": own.key or ""}
        for method, path in (
            ("GET", f"/api/rollouts/{rollout_id}"),
            ("GET", f"/api/rollouts/{rollout_id}/trajectory"),
            ("POST", f"/api/rollouts/{rollout_id}/attempt/0/events"),
            ("POST", f"/proxy/rollout/{rollout_id}/attempt/0/mode/train/openai/v1/chat/completions"),
        ):
            body = {"event_type": "reward", "data": {"value": 1}}
            async with world.http.request(method, world.url + path, json=body, headers=headers) as answer:
                told.append((answer.status, (await answer.text()).replace(rollout_id, "ID")))
    assert told[: len(told) // 2] == told[len(told) // 2 :] and {status for status, _ in told} == {403}

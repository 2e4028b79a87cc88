"""Who may do what, over every route that the gateway has."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.routing import APIRoute

from leyden.gateway.admin import build_admin
from leyden.gateway.errors import Conflict, Forbidden
from leyden.gateway.keys import Action, KeyKind, Principal, Target, authorize, digest, key_from_headers, mint
from leyden.gateway.lifecycle import Phase
from leyden.schema import Outcome, OutcomeReport, PhaseReport, RolloutPatch, RolloutState, StatusPatch
from tests.gateway.conftest import MakeWorld, World, on_sqlite
from tests.gateway.test_delivery import until

CHAT = "/openai/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x"}]}


async def status_of(world: World, method: str, path: str, key: str | None, body: Any = None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with world.http.request(method, world.url + path, json=body, headers=headers) as answer:
        await answer.read()
        return answer.status


async def test_every_admin_route_is_closed_to_everybody_else(world: World) -> None:
    mine = await world.claim(grader=True)
    app = build_admin(world.gateway)
    routes = [(m, r.path) for r in app.routes if isinstance(r, APIRoute) for m in r.methods or ()]
    assert len(routes) >= 20
    open_to_keys = {("GET", "/healthz"), ("POST", "/api/rollouts/{rollout_id}/attempt/{attempt_id}/events"),
                    ("GET", "/api/rollouts/{rollout_id}/trajectory")}  # fmt: skip
    for method, pattern in routes:
        path = pattern.replace("{rollout_id}", mine.rollout.rollout_id).replace("{attempt_id}", "0")
        path = path.replace("{controller_id}", "c1")
        if (method, pattern) == ("GET", "/healthz"):
            assert await status_of(world, method, path, None) == 200
            continue
        for key in (None, "", "ley-agent-made-up"):
            assert await status_of(world, method, path, key, {}) == 401, (method, path)
        for key in (mine.agent_key, mine.grader_key):
            status = await status_of(world, method, path, key, {})
            if (method, pattern) not in open_to_keys:
                assert status == 403, (method, path, status)
            elif key == mine.agent_key:
                assert status in (403, 422)
    assert await status_of(world, "POST", CHAT, None, BODY) == 401
    assert await status_of(world, "POST", CHAT, "made-up", BODY) == 401
    assert await status_of(world, "POST", CHAT, mine.grader_key, BODY) == 403
    assert await status_of(world, "POST", CHAT, "admin-key-of-the-tests", BODY) == 403


async def test_keys_of_an_attempt_follow_its_phases(world: World) -> None:
    mine, other = await world.claim(grader=True), await world.claim(controller="c2")
    base = f"/api/rollouts/{mine.rollout.rollout_id}"
    post, read = f"{base}/attempt/0/events", f"{base}/trajectory"
    reward = {"event_type": "reward", "data": {"value": 1}}
    assert await status_of(world, "POST", post, mine.agent_key, reward) == 403
    assert await status_of(world, "POST", post, mine.grader_key, reward) == 409
    assert await status_of(world, "GET", read, mine.grader_key) == 200
    assert await status_of(world, "POST", CHAT, mine.agent_key, BODY) == 200
    await world.admin.phase(mine.rollout.rollout_id, "0", PhaseReport(controller_id="c1", phase="grading"))
    assert await status_of(world, "POST", CHAT, mine.agent_key, BODY) == 409
    assert await status_of(world, "POST", post, mine.grader_key, reward) == 200
    assert await status_of(world, "POST", post, other.agent_key, reward) == 403
    assert await status_of(world, "GET", read, other.agent_key) == 403
    theirs = f"/api/rollouts/{other.rollout.rollout_id}"
    assert await status_of(world, "GET", f"{theirs}/trajectory", mine.grader_key) == 403
    assert await status_of(world, "POST", f"{theirs}/attempt/0/events", mine.grader_key, reward) == 403
    assert await status_of(world, "POST", f"{theirs}/attempt/0/events", other.agent_key, reward) == 200
    await world.admin.delete(mine.rollout.rollout_id)
    assert await status_of(world, "POST", CHAT, mine.agent_key, BODY) == 401


@on_sqlite
@pytest.mark.parametrize("end", ["grading", "outcome", "patch", "delete", "lease"])
async def test_a_key_that_is_remembered_ends_with_its_agent_phase(world_maker: MakeWorld, end: str) -> None:
    async with world_maker() as world:
        mine = await world.claim(grader=True, lease=2 if end == "lease" else 30)
        other = await world.claim(controller="c2")
        rollout_id, live = mine.rollout.rollout_id, world.gateway.live
        for claim in (mine, mine, other):
            assert await status_of(world, "POST", CHAT, claim.agent_key, BODY) == 200
        assert live.by_key(digest(mine.agent_key)) is live.peek(rollout_id, "0") is not None
        if end == "grading":
            await world.admin.phase(rollout_id, "0", PhaseReport(controller_id="c1", phase="grading"))
        elif end == "outcome":
            await world.admin.outcome(rollout_id, "0", OutcomeReport(controller_id="c1", outcome=Outcome.TIMEOUT))
        elif end == "patch":
            await world.admin.patch(rollout_id, RolloutPatch(status=StatusPatch(state=RolloutState.FAILED)))
        elif end == "delete":
            await world.admin.delete(rollout_id)
        else:
            await until(lambda: live.by_key(digest(mine.agent_key)) is None, 20)
        assert live.by_key(digest(mine.agent_key)) is None
        assert await status_of(world, "POST", CHAT, mine.agent_key, BODY) == (401 if end == "delete" else 409)
        assert live.by_key(digest(mine.agent_key)) is None
        assert await status_of(world, "POST", CHAT, other.agent_key, BODY) == 200


@pytest.mark.parametrize("kind", [KeyKind.AGENT, KeyKind.GRADER])
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("action", list(Action))
@pytest.mark.parametrize("grader", [True, False])
def test_the_rights_table(kind: KeyKind, phase: Phase, action: Action, grader: bool) -> None:
    def allowed() -> bool:
        try:
            authorize(Principal(kind, "r", "0"), action, Target("r"), phase, grader)
        except (Forbidden, Conflict):
            return False
        return True

    if kind is KeyKind.AGENT:
        right = phase is Phase.AGENT and (action is Action.MODEL_CALL or (action is Action.POST_EVENT and not grader))
    else:
        right = (action is Action.POST_EVENT and phase is Phase.GRADING) or (
            action is Action.READ_TRAJECTORY and phase is not Phase.ENDED
        )
    assert allowed() == right
    with pytest.raises(Forbidden):
        authorize(Principal(kind, "r", "0"), action, Target("r2", "0"), phase, grader)
    authorize(Principal(KeyKind.ADMIN), action, Target("r"), phase, grader)


def test_keys_in_headers() -> None:
    assert key_from_headers([(b"Authorization", b"Bearer abc ")]) == "abc"
    assert key_from_headers([(b"x-api-key", b"abc")]) == "abc"
    assert key_from_headers([(b"authorization", b"Bearer  "), (b"x-api-key", b" ")]) is None
    assert key_from_headers([(b"authorization", b"Basic abc")]) is None
    key = mint(KeyKind.AGENT)
    assert key != mint(KeyKind.AGENT) and len(digest(key)) == 32

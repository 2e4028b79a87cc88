"""What the store keeps, forgets, refuses, and does once, on both databases."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from leyden.errors import GatewayError
from leyden.schema import (
    Outcome,
    OutcomeReport,
    RolloutCreate,
    RolloutPatch,
    RolloutState,
    StatusPatch,
)
from tests.gateway.conftest import ADMIN, MakeWorld, World, on_sqlite
from tests.gateway.scripted_engine import Reply
from tests.gateway.test_delivery import until

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TABLES = "rollouts attempts keys events calls messages message_uses terminal".split()


async def rows(world: World) -> dict[str, int]:
    def count(db: Any) -> dict[str, int]:
        return {t: db.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in TABLES}

    return await world.gateway.store.db.read(count)


async def post(world: World, path: str, body: Any, once: str | None = None) -> tuple[int, Any]:
    headers = {"x-api-key": ADMIN, **({"Idempotency-Key": once} if once else {})}
    async with world.http.post(world.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json(content_type=None)


def as_json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def reward(**data: Any) -> dict[str, Any]:
    return {"event_type": "reward", "data": data}


# -- rewards of calls --------------------------------------------------------------------------------------------------


async def test_each_call_may_have_a_reward_of_its_own(world: World) -> None:
    claim = await world.claim()
    rollout_id = claim.rollout.rollout_id
    path = f"/api/rollouts/{rollout_id}/attempt/0/events"
    ids = [(await world.chat(claim.agent_key, BODY | {"max_tokens": i + 5}))[1]["id"] for i in range(3)]

    async def standing() -> tuple[list[float | None], float | None]:
        found = await world.admin.trajectory(rollout_id)
        return [c.reward for c in found.calls], found.reward

    assert (await post(world, path, reward(per_call={ids[0]: 0.25, ids[1]: 0.5})))[0] == 200
    assert await standing() == ([0.25, 0.5, None], 0.75)  # Without a value of its own, the attempt's is their sum.
    assert (await post(world, path, reward(value=2.0, per_call={ids[1].removeprefix("chatcmpl-"): -1.0})))[0] == 200
    assert await standing() == ([0.25, -1.0, None], 2.0)
    assert (await post(world, path, reward(value=0.5)))[0] == 200
    assert await standing() == ([0.25, -1.0, None], 0.5)
    assert (await post(world, path, reward(value=0.125, call_id=ids[2])))[0] == 200
    assert await standing() == ([0.25, -1.0, 0.125], 0.5)
    assert (await post(world, path, reward(value=3, per_call={})))[0] == 200
    assert await standing() == ([0.25, -1.0, 0.125], 3)


@pytest.mark.parametrize(
    "data",
    [
        {"per_call": {}},
        {"per_call": {"0" * 32: 1.0}},
        {"value": 1.0, "per_call": {"nope": 1.0}},
        {"per_call": {"KNOWN": "0.5"}},
        {"per_call": {"KNOWN": True}},
        {"per_call": {"KNOWN": None}},
        {"per_call": [0.5]},
        {"per_call": {"KNOWN": 0.5, "nope": 0.5}},
        {"value": 1.0, "call_id": "KNOWN", "per_call": {"KNOWN": 1.0}},
        {"call_id": "KNOWN"},
        {},
    ],
)
async def test_rewards_that_name_no_call_or_no_number_change_nothing(world: World, data: dict[str, Any]) -> None:
    claim = await world.claim()
    rollout_id = claim.rollout.rollout_id
    known = (await world.chat(claim.agent_key, BODY))[1]["id"]

    def named(value: Any) -> Any:
        return {known if k == "KNOWN" else k: named(v) for k, v in value.items()} if isinstance(value, dict) else value

    body = {k: known if v == "KNOWN" else named(v) for k, v in data.items()}
    status, answer = await post(world, f"/api/rollouts/{rollout_id}/attempt/0/events", reward(**body))
    assert status == 422 and isinstance(answer["detail"], str)
    found = await world.admin.trajectory(rollout_id)
    assert found.reward is None and found.calls[0].reward is None
    assert await world.admin.events(rollout_id, "reward") == []


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["patch", "outcome"])
async def test_what_comes_after_the_end_is_refused_counted_and_changes_nothing(world: World, end: str) -> None:
    claim = await world.claim()
    rollout_id = claim.rollout.rollout_id
    path = f"/api/rollouts/{rollout_id}/attempt/0/events"
    await world.chat(claim.agent_key, BODY)
    await post(world, path, reward(value=1.0))
    if end == "patch":
        status = StatusPatch(state=RolloutState.SUCCEEDED)
        await world.admin.patch(rollout_id, RolloutPatch(status=status))
    else:
        await world.admin.outcome(rollout_id, "0", OutcomeReport(controller_id="c1", outcome=Outcome.OK))
    before = await world.admin.trajectory(rollout_id, content=True)
    events = await world.admin.events(rollout_id)
    assert (await post(world, path, reward(value=9.0)))[0] == 409
    assert (await post(world, path, reward(per_call={before.calls[0].call_id: 9.0})))[0] == 409
    assert (await world.chat(claim.agent_key, BODY))[0] == 409
    assert (await world.chat(claim.agent_key, {**BODY, "stream": True}))[0] == 409
    assert await world.admin.trajectory(rollout_id, content=True) == before
    assert await world.admin.events(rollout_id) == events
    assert (await world.admin.rollout(rollout_id)).attempt_details[0].late_writes == 4
    assert (await world.admin.stats())["late_writes"] == 4


async def test_an_attempt_that_ends_during_a_call_records_nothing_of_it(world: World) -> None:
    claim = await world.claim()
    rollout_id = claim.rollout.rollout_id
    world.engine.say(Reply(delay=0.3))
    asking = asyncio.create_task(world.chat(claim.agent_key, BODY))
    await until(lambda: world.engine.running)
    await world.admin.outcome(rollout_id, "0", OutcomeReport(controller_id="c1", outcome=Outcome.TIMEOUT))
    assert (await asking)[0] == 409
    await asyncio.sleep(0.4)
    assert (await world.admin.trajectory(rollout_id)).calls == []


# -- once --------------------------------------------------------------------------------------------------------------


async def test_a_request_sent_again_with_its_key_has_one_effect(world: World) -> None:
    items = [{"input": i} for i in range(3)]
    first = await post(world, "/api/rollouts", items, once="k")
    again = await post(world, "/api/rollouts", items, once="k")
    assert first[0] == 201 and [r["rollout_id"] for r in first[1]] == [r["rollout_id"] for r in again[1]]
    assert (await rows(world))["rollouts"] == 3
    assert (await post(world, "/api/rollouts", items[:2], once="k"))[0] == 409
    claim = await world.claim()
    path = f"/api/rollouts/{claim.rollout.rollout_id}/attempt/0/events"
    event = await post(world, path, reward(value=0.5), once="e")
    assert await post(world, path, reward(value=0.5), once="e") == event
    assert (await post(world, path, reward(value=0.7), once="e"))[0] == 409
    assert len(await world.admin.events(claim.rollout.rollout_id, "reward")) == 1


async def test_requests_that_differ_anywhere_never_share_an_answer(world: World) -> None:
    claim = await world.claim()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    bodies = [
        BODY,
        {"messages": [{"role": "user", "content": "y"}]},
        {"messages": [{"role": "system", "content": "s"}, *BODY["messages"]]},
        {**BODY, "tools": [tool]},
        {**BODY, "max_tokens": 7},
        {**BODY, "stop": ["END"]},
        {**BODY, "model": "other"},
    ]
    world.engine.say(*[Reply(f"answer {i}", delay=0.2) for i in range(len(bodies))])
    answers = await asyncio.gather(*[world.chat(claim.agent_key, b) for b in bodies])
    assert len({a[1]["choices"][0]["message"]["content"] for a in answers}) == len(bodies)
    assert len((await world.admin.trajectory(claim.rollout.rollout_id)).calls) == len(bodies)


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        ("/openai/v1/completions", [{"prompt": "A"}, {"prompt": "B"}, {"prompt": [5, 6]}]),
        ("/openai/v1/responses", [{"input": "A"}, {"input": "B"}, {"input": "A", "instructions": "be short"}]),
        (
            "/anthropic/v1/messages",
            [{"messages": [{"role": "user", "content": c}], "max_tokens": 9} for c in "AB"]
            + [{"messages": [{"role": "user", "content": "A"}], "system": "be short", "max_tokens": 9}],
        ),
        (
            "/gemini/v1beta/models/m:generateContent",
            [{"contents": [{"parts": [{"text": c}]}]} for c in "AB"]
            + [{"contents": [{"parts": [{"text": "A"}]}], "systemInstruction": "be short"}],
        ),
    ],
)
async def test_prompts_of_any_dialect_never_share_an_answer(world: World, path: str, bodies: list[Any]) -> None:
    claim = await world.claim()
    world.engine.say(*[Reply(f"answer {i}", delay=0.2) for i in range(3)])
    answers = await asyncio.gather(*[world.chat(claim.agent_key, {"model": "m", **b}, path) for b in bodies])
    assert [status for status, _ in answers] == [200] * 3
    calls = (await world.admin.trajectory(claim.rollout.rollout_id, content=True)).calls
    assert len({c.response_ids for c in calls}) == len(calls) == 3
    assert all(sum(f"answer {i}" in str(a[1]) for a in answers) == 1 for i in range(3))
    assert sorted(as_json(c.raw) for c in calls) == sorted(as_json({"model": "m", **b}) for b in bodies)


async def test_numbers_that_no_column_holds_are_refused(world: World) -> None:
    huge = 10**30
    headers = {"x-api-key": ADMIN}
    for query in (f"page?step={huge}", f"page?cursor={huge}", "page?cursor=²", f"terminal?after={huge}"):
        async with world.http.get(f"{world.url}/api/rollouts/{query}", headers=headers) as answer:
            assert answer.status == 422, query
    assert (await post(world, "/api/rollouts", [{"input": 1, "metadata": {"step": huge}}]))[0] == 422
    claim = await world.claim()
    path = f"/api/rollouts/{claim.rollout.rollout_id}/attempt/0/outcome"
    assert (await post(world, path, {"controller_id": "c1", "outcome": "ok", "exit_code": huge}))[0] == 422
    odd = {"controller_id": "c1", "outcome": "timeout", "reason": "a\0b", "log_tail": "\0"}
    assert (await post(world, path, odd))[0] == 200


# -- forgetting --------------------------------------------------------------------------------------------------------


async def test_deleted_rollouts_leave_no_trace_while_calls_are_in_flight(world: World) -> None:
    for step in range(30):
        claim = await world.claim()
        world.engine.say(Reply(delay=0.02 * (step % 3)))
        asking = asyncio.create_task(world.chat(claim.agent_key, BODY))
        await until(lambda task=asking: world.engine.running or task.done())
        await world.admin.delete(claim.rollout.rollout_id)
        assert (await asking)[0] in (200, 401, 404, 410)
        with pytest.raises(GatewayError) as gone:
            await world.admin.rollout(claim.rollout.rollout_id)
        assert gone.value.status == 404
    assert await rows(world) == dict.fromkeys(TABLES, 0)
    assert len(world.gateway.live) == 0 and world.gateway.pause.inflight == 0


@on_sqlite
async def test_the_space_of_what_was_deleted_is_used_again(world: World) -> None:
    async def cycle(number: int) -> None:
        claim = await world.claim()
        for turn in range(4):
            text = f"{number} {turn} " + "word " * 200
            assert (await world.chat(claim.agent_key, {"messages": [{"role": "user", "content": text}]}))[0] == 200
        await world.admin.outcome(
            claim.rollout.rollout_id, "0", OutcomeReport(controller_id="c1", outcome=Outcome.TIMEOUT)
        )
        await world.admin.trajectory(claim.rollout.rollout_id)
        await world.admin.delete(claim.rollout.rollout_id)

    def pages(db: Any) -> int:
        return db.execute("PRAGMA page_count").fetchone()[0]

    sizes = []
    for number in range(40):
        await cycle(number)
        sizes.append(await world.gateway.store.db.read(pages))
    assert max(sizes[10:]) <= max(sizes[:10]) + 4
    assert await rows(world) == dict.fromkeys(TABLES, 0) and len(world.gateway.live) == 0


async def test_what_ended_long_ago_goes_and_what_nobody_touches_ends(world_maker: MakeWorld) -> None:
    day = 24 * 3600
    async with world_maker(retention_days=2 / day) as world:
        kept = await world.claim(lease=60)
        await world.admin.create_rollouts([RolloutCreate(input=i, rollout_id=f"waiting{i}") for i in range(45)])
        await world.admin.create_rollouts([RolloutCreate(input=1, rollout_id="silent")])
        await world.admin.patch("silent", RolloutPatch(status=StatusPatch(state=RolloutState.RUNNING)))
        ended: dict[str, Any] = {}

        async def all_ended() -> bool:
            for item in (await world.admin.terminal(0, limit=1000)).items:
                ended.setdefault(item.rollout_id, item)
            return len(ended) == 46

        for _ in range(100):
            if await all_ended():
                break
            await asyncio.sleep(0.1)
        assert {i.outcome for i in ended.values()} == {Outcome.CANCELLED} and "silent" in ended
        for _ in range(100):
            if (await rows(world))["rollouts"] == 1:
                break
            await asyncio.sleep(0.1)
        assert await rows(world) | {"keys": 0} == {**dict.fromkeys(TABLES, 0), "rollouts": 1, "attempts": 1}
        assert (await world.chat(kept.agent_key, BODY))[0] == 200  # A lease is kept up by its controller.

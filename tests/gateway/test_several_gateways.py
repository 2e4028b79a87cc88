"""Several gateways on one PostgreSQL store, behind something that gives each request to any of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from leyden.errors import GatewayError
from leyden.schema import ClaimRequest, EngineModel, Outcome, OutcomeReport, PauseRequest, RolloutCreate
from tests.gateway.conftest import ADMIN, MakeWorld, World
from tests.gateway.scripted_engine import Reply
from tests.gateway.test_delivery import lose, until

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


@pytest_asyncio.fixture
async def two(world_maker: MakeWorld) -> AsyncIterator[tuple[World, World]]:
    async with world_maker(replay_grace_seconds=3) as one, world_maker(engine=False, replay_grace_seconds=3) as other:
        yield one, other


async def test_work_is_claimed_once(two: tuple[World, World]) -> None:
    one, other = two
    await one.admin.create_rollouts([RolloutCreate(input=i, rollout_id=f"r{i}") for i in range(30)])

    async def take(world: World, controller: str) -> list[str]:
        out = []
        for _ in range(6):
            claims = await world.admin.claim(ClaimRequest(controller_id=controller, limit=4, lease_seconds=60))
            out += [c.rollout.rollout_id for c in claims]
        return out

    taken = await asyncio.gather(*[take(w, f"c{i}") for i, w in enumerate([one, other, one, other])])
    assert Counter(r for t in taken for r in t) == Counter({f"r{i}": 1 for i in range(30)})


async def test_those_who_wait_at_one_gateway_hear_of_what_happens_at_another(two: tuple[World, World]) -> None:
    one, other = two
    claiming = asyncio.create_task(other.admin.claim(ClaimRequest(controller_id="c", wait_seconds=20)))
    await asyncio.sleep(0.3)
    await one.admin.create_rollouts([RolloutCreate(input=1, rollout_id="r")])
    (claim,) = await asyncio.wait_for(claiming, 5)
    waiting = asyncio.create_task(one.admin.terminal(0, wait_seconds=20))
    await asyncio.sleep(0.3)
    await other.admin.outcome("r", "0", OutcomeReport(controller_id="c", outcome=Outcome.TIMEOUT))
    page = await asyncio.wait_for(waiting, 5)
    assert [i.rollout_id for i in page.items] == [claim.rollout.rollout_id]


async def test_engines_and_pauses_are_known_everywhere(two: tuple[World, World]) -> None:
    one, other = two
    claim = await one.claim()
    assert (await other.chat(claim.agent_key, BODY))[0] == 200
    await other.admin.pause(PauseRequest(owner="t", lease_seconds=60))
    await until(lambda: one.gateway.pause.state().paused, 5)
    held = asyncio.create_task(one.chat(claim.agent_key, BODY))
    await asyncio.sleep(0.3)
    assert not held.done() and len(one.engine.requests) == 1
    with pytest.raises(GatewayError, match="paused by t"):
        await one.admin.pause(PauseRequest(owner="u"))
    await one.admin.resume()
    assert (await asyncio.wait_for(held, 5))[0] == 200
    await one.admin.register_models([EngineModel(model="tiny", endpoint=other.engine.endpoint)])
    await until(lambda: len(other.gateway.engines.all()) == 2, 5)


async def test_a_conversation_is_one_whoever_serves_its_turns(two: tuple[World, World]) -> None:
    one, other = two
    claim = await one.claim()
    messages: list[dict[str, Any]] = []
    for turn in range(6):
        messages.append({"role": "user", "content": f"turn {turn}"})
        one.engine.say(Reply(f"answer {turn}"))
        status, _ = await two[turn % 2].chat(claim.agent_key, {"messages": messages})
        assert status == 200
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    calls = (await other.admin.trajectory(claim.rollout.rollout_id, content=True)).calls
    assert [c.seq for c in calls] == list(range(6)) and all(c.delivered for c in calls)
    assert [c.parent for c in calls] == [None, *(c.call_id for c in calls[:-1])]
    assert all(c.break_reason is None for c in calls)
    assert [c.raw for c in calls] == [{"messages": messages[: 2 * i + 1]} for i in range(6)]


async def test_calls_at_once_on_several_gateways_get_numbers_of_their_own(two: tuple[World, World]) -> None:
    claim = await two[0].claim()
    two[0].engine.default = Reply(delay=0.05)
    bodies = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(24)]
    answers = await asyncio.gather(*[two[i % 2].chat(claim.agent_key, b) for i, b in enumerate(bodies)])
    assert {status for status, _ in answers} == {200}
    calls = (await two[0].admin.trajectory(claim.rollout.rollout_id)).calls
    assert len({c.seq for c in calls}) == 24 and len({c.call_id for c in calls}) == 24


async def test_an_answer_that_one_gateway_recorded_is_served_by_another(two: tuple[World, World]) -> None:
    one, other = two
    claim = await one.claim()
    one.engine.say(Reply("lost", delay=0.4))
    await lose(one, claim.agent_key, BODY, 1)
    await until(lambda: one.engine.running == 0, 5)
    await asyncio.sleep(0.2)
    status, body = await other.chat(claim.agent_key, BODY)
    assert status == 200 and body["choices"][0]["message"]["content"] == "lost"
    calls = (await other.admin.trajectory(claim.rollout.rollout_id)).calls
    assert [(c.call_id, c.delivered) for c in calls] == [(body["id"].removeprefix("chatcmpl-"), True)]
    # Once it has been delivered, an identical request is a new sample, wherever it arrives.
    for world in two:
        assert (await world.chat(claim.agent_key, BODY))[1]["choices"][0]["message"]["content"] == "ok"


async def test_identical_requests_of_connected_clients_are_samples_of_their_own(two: tuple[World, World]) -> None:
    claim = await two[0].claim()
    two[0].engine.say(*[Reply(f"sample {i}", delay=0.02 * i) for i in range(12)])
    answers = await asyncio.gather(*[two[i % 2].chat(claim.agent_key, BODY) for i in range(12)])
    assert {a[1]["choices"][0]["message"]["content"] for a in answers} == {f"sample {i}" for i in range(12)}


async def test_the_end_of_an_attempt_reaches_its_calls_everywhere(two: tuple[World, World]) -> None:
    one, other = two
    for end in ("outcome", "delete"):
        claim = await one.claim(controller="c")
        rollout_id = claim.rollout.rollout_id
        before = one.engine.aborted
        one.engine.say(Reply(delay=30))
        waiting = asyncio.create_task(other.chat(claim.agent_key, BODY))
        await until(lambda: one.engine.running == 1, 5)
        if end == "outcome":
            await one.admin.outcome(rollout_id, "0", OutcomeReport(controller_id="c", outcome=Outcome.TIMEOUT))
        else:
            await one.admin.delete(rollout_id)
        status, _ = await asyncio.wait_for(waiting, 5)
        assert status in (404, 409, 410)
        await until(lambda before=before: one.engine.aborted == before + 1, 5)
        assert (await other.chat(claim.agent_key, BODY))[0] == (409 if end == "outcome" else 401)
        assert len(other.gateway.live) == 0


async def test_what_one_gateway_just_delivered_counts_when_another_ends_the_attempt(two: tuple[World, World]) -> None:
    one, other = two
    for _ in range(10):
        claim = await one.claim(controller="c")
        rollout_id = claim.rollout.rollout_id
        await asyncio.gather(one.chat(claim.agent_key, BODY), one.chat(claim.agent_key, BODY))
        await other.admin.outcome(rollout_id, "0", OutcomeReport(controller_id="c", outcome=Outcome.TIMEOUT))
        calls = (await other.admin.trajectory(rollout_id)).calls
        assert [c.delivered for c in calls] == [True, True]


async def test_leases_expire_once(two: tuple[World, World]) -> None:
    one, other = two
    await one.admin.create_rollouts([RolloutCreate(input=i, rollout_id=f"r{i}") for i in range(10)])
    await other.admin.claim(ClaimRequest(controller_id="c", limit=10, lease_seconds=0.5))
    claims = []
    while len(claims) < 10:
        again = await one.admin.claim(ClaimRequest(controller_id="d", limit=10, lease_seconds=60, wait_seconds=10))
        assert again
        claims += again
    assert {c.attempt_id for c in claims} == {"1"} and len({c.rollout.rollout_id for c in claims}) == 10


async def test_one_idempotency_key_has_one_effect_at_whichever_gateway(two: tuple[World, World]) -> None:
    claim = await two[0].claim()
    rollout_id = claim.rollout.rollout_id
    items = [RolloutCreate(input=i) for i in range(3)]
    made = await asyncio.gather(*[w.admin.create_rollouts(items, idempotency_key="k") for w in two * 3])
    assert len({tuple(r.rollout_id for r in m) for m in made}) == 1
    event = {"event_type": "reward", "data": {"value": 0.5}}
    headers = {"x-api-key": ADMIN, "Idempotency-Key": "e"}

    async def post(world: World) -> Any:
        url = f"{world.url}/api/rollouts/{rollout_id}/attempt/0/events"
        async with world.http.post(url, json=event, headers=headers) as answer:
            return answer.status, await answer.json()

    answers = await asyncio.gather(*[post(w) for w in two * 3])
    assert all(a == answers[0] for a in answers) and answers[0][0] == 200
    assert len(await two[0].admin.events(rollout_id, "reward")) == 1


async def test_the_same_message_may_be_deleted_and_recorded_at_once(two: tuple[World, World]) -> None:
    """Deleting a rollout removes messages that no other uses, while another gateway records a call with them."""
    one, other = two

    async def cycle(world: World, number: int) -> None:
        for _ in range(8):
            claim = await world.claim(controller=f"c{number}")
            assert (await world.chat(claim.agent_key, BODY))[0] == 200
            (call,) = (await world.admin.trajectory(claim.rollout.rollout_id, content=True)).calls
            assert (call.request or {})["messages"] == BODY["messages"] and len(np.frombuffer(call.prompt_ids, "<i4"))
            await world.admin.delete(claim.rollout.rollout_id)

    await asyncio.gather(*[cycle(w, i) for i, w in enumerate([one, other, one, other])])
    left = await one.gateway.store.db.read(lambda db: db.execute("SELECT count(*) FROM messages").fetchone()[0])
    assert left == 0


async def test_a_database_that_drops_its_connections_costs_no_call(two: tuple[World, World]) -> None:
    one, other = two
    claim = await one.claim()
    one.engine.default = Reply(delay=0.2)

    def drop_others(db: Any) -> int:
        found = db.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )
        return found.fetchone()[0]

    for world in (one, other):
        asking = [
            asyncio.create_task(
                w.chat(claim.agent_key, {"messages": [{"role": "user", "content": f"{world.url} {i}"}]})
            )
            for i, w in enumerate(two * 3)
        ]
        await asyncio.sleep(0.1)
        assert await world.gateway.store.db.read(drop_others) > 4
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 6
    assert len((await one.admin.trajectory(claim.rollout.rollout_id)).calls) == 12
    # What happens elsewhere is heard again, too.
    await asyncio.sleep(1.5)
    waiting = asyncio.create_task(one.admin.terminal(0, wait_seconds=20))
    await asyncio.sleep(0.2)
    await other.admin.outcome(claim.rollout.rollout_id, "0", OutcomeReport(controller_id="c1", outcome=Outcome.TIMEOUT))
    assert len((await asyncio.wait_for(waiting, 5)).items) == 1

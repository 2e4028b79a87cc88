"""Rollouts, attempts, leases and rewards: the pure rules, then over HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest

from leyden.errors import GatewayError
from leyden.gateway.errors import Conflict, Invalid
from leyden.gateway.lifecycle import AttemptFacts, backoff, next_state, plan_patch, settle
from leyden.schema import (
    AgentSpec,
    AttemptRef,
    Claim,
    ClaimRequest,
    EventCreate,
    Heartbeat,
    Outcome,
    OutcomeReport,
    RetryPolicy,
    RolloutConfig,
    RolloutCreate,
    RolloutPatch,
    RolloutState,
    StatusPatch,
)
from tests.gateway.conftest import World
from tests.gateway.scripted_engine import Reply

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
Q, R, S, F = RolloutState.QUEUING, RolloutState.RUNNING, RolloutState.SUCCEEDED, RolloutState.FAILED


@pytest.mark.parametrize(
    ("reported", "grader", "reward", "calls", "outcome", "words"),
    [
        (Outcome.OK, False, 1.0, 1, Outcome.OK, None),
        (Outcome.OK, True, 0.0, 1, Outcome.OK, None),
        (Outcome.OK, True, None, 1, Outcome.INFRA, "grader printed no number"),
        (Outcome.OK, False, None, 1, Outcome.AGENT_ERROR, "exited 0 without reporting a reward"),
        (Outcome.OK, False, 1.0, 0, Outcome.AGENT_ERROR, "made no model call"),
        (Outcome.OK, True, None, 0, Outcome.AGENT_ERROR, "made no model call"),
        (Outcome.TIMEOUT, False, None, 0, Outcome.TIMEOUT, "why"),
        (Outcome.INFRA, True, 1.0, 3, Outcome.INFRA, "why"),
    ],
)
def test_settle(
    reported: Outcome, grader: bool, reward: float | None, calls: int, outcome: Outcome, words: str | None
) -> None:
    reason = None if reported is Outcome.OK else "why"
    ending = settle(reported, reason, AttemptFacts(grader, reward, calls))
    assert ending.outcome is outcome
    assert ending.reason is None if words is None else words in (ending.reason or "")


def test_a_grader_that_fails_over_an_agent_without_calls_is_the_agents_fault() -> None:
    ending = settle(Outcome.INFRA, "grader crashed", AttemptFacts(True, None, 0, graded=True))
    assert ending.outcome is Outcome.AGENT_ERROR and "made no model call" in (ending.reason or "")
    ending = settle(Outcome.INFRA, "grader crashed", AttemptFacts(True, None, 1, graded=True))
    assert (ending.outcome, ending.reason) == (Outcome.INFRA, "grader crashed")


def test_an_agent_that_failed_over_a_dead_engine_is_not_at_fault() -> None:
    facts = AttemptFacts(True, None, 1, engine_failure="engine failed: can't reach it")
    ending = settle(Outcome.AGENT_ERROR, "exit code 1", facts)
    assert ending.outcome is Outcome.INFRA and "can't reach it" in (ending.reason or "")
    assert settle(Outcome.TIMEOUT, "slow", facts).outcome is Outcome.TIMEOUT


@pytest.mark.parametrize(
    "rewards,outcome,reason",
    [
        (
            [{"value": 0.0, "source": "infra", "reason": "the database was away"}],
            Outcome.INFRA,
            "the reward was reported as the infrastructure's: the database was away",
        ),
        ([{"value": 0.0, "source": "infra"}, {"value": 0.5, "source": "env"}], Outcome.OK, None),
        (
            [{"value": 0.5}, {"value": 0.0, "source": "infra"}],
            Outcome.INFRA,
            "the reward was reported as the infrastructure's: no reason was given",
        ),
    ],
)
async def test_a_last_reward_of_the_infrastructures_makes_the_attempt_infra(
    world: World, rewards: list[dict[str, Any]], outcome: Outcome, reason: str | None
) -> None:
    claim = await world.claim(config=RolloutConfig(retry=RetryPolicy(infra=1), agent=AgentSpec(command=["true"])))
    world.engine.say("hi")
    await world.chat(claim.agent_key, BODY)
    for data in rewards:
        event = EventCreate(event_type="reward", data=data)
        await world.admin.post_event(claim.rollout.rollout_id, "0", event, key=claim.agent_key)
    report = OutcomeReport(controller_id="c1", outcome=Outcome.OK, exit_code=0)
    status = (await world.admin.outcome(claim.rollout.rollout_id, "0", report)).status
    assert (status.outcome, status.error_message) == (outcome, reason)
    assert status.state is (S if outcome is Outcome.OK else F)


async def test_engine_failures_of_the_last_call_make_the_attempt_infra(world: World) -> None:
    claim = await world.claim(config=RolloutConfig(retry=RetryPolicy(infra=1), agent=AgentSpec(command=["true"])))
    await world.engine.stop()
    status, _ = await world.chat(claim.agent_key, BODY)
    assert status == 502
    report = OutcomeReport(controller_id="c1", outcome=Outcome.AGENT_ERROR, reason="exit code 1")
    ended = await world.admin.outcome(claim.rollout.rollout_id, claim.attempt_id, report)
    assert ended.status.outcome is Outcome.INFRA and "engine failed" in (ended.status.error_message or "")


def test_next_state() -> None:
    usual = RetryPolicy()
    assert [next_state(Outcome.INFRA, n, usual) for n in (1, 2, 3)] == [Q, Q, F]
    assert next_state(Outcome.OK, 1, usual) is S
    assert {next_state(o, 1, usual) for o in (Outcome.AGENT_ERROR, Outcome.TIMEOUT, Outcome.CANCELLED)} == {F}


def test_every_class_of_outcome_has_its_own_number_of_attempts() -> None:
    policy = RetryPolicy(infra=1, agent_error=2, timeout=3)
    assert [next_state(Outcome.INFRA, n, policy) for n in (1, 2)] == [F, F]
    assert [next_state(Outcome.AGENT_ERROR, n, policy) for n in (1, 2)] == [Q, F]
    assert [next_state(Outcome.TIMEOUT, n, policy) for n in (1, 2, 3)] == [Q, Q, F]
    assert next_state(Outcome.CANCELLED, 1, policy) is F


def test_the_wait_before_another_attempt_doubles_up_to_a_limit() -> None:
    policy = RetryPolicy(backoff_seconds=2, backoff_max_seconds=30)
    assert [backoff(n, policy) for n in (1, 2, 3, 4, 5, 5000)] == [2, 4, 8, 16, 30, 30]
    assert backoff(3, RetryPolicy(backoff_seconds=0)) == 0


def test_patch_transitions() -> None:
    legal = {(Q, R), (Q, F), (R, S), (R, F)}
    for current in RolloutState:
        for target in RolloutState:
            if current is target:
                assert plan_patch("r", current, target, None, None) == plan_patch("r", R, None, None, None)
            elif (current, target) in legal:
                plan = plan_patch("r", current, target, None, None)
                assert plan.start == (target is R) and plan.end == (None if target is R else target)
            else:
                with pytest.raises(Conflict):
                    plan_patch("r", current, target, None, None)
    assert plan_patch("r", Q, F, None, None).outcome is Outcome.CANCELLED
    assert plan_patch("r", R, F, None, None).outcome is Outcome.AGENT_ERROR
    for target, outcome in ((S, Outcome.INFRA), (F, Outcome.OK)):
        with pytest.raises(Invalid):
            plan_patch("r", R, target, outcome, None)


async def report(world: World, claim: Claim, outcome: Outcome, **more: Any) -> Any:
    body = OutcomeReport(controller_id="c1", outcome=outcome, **more)
    return await world.admin.outcome(claim.rollout.rollout_id, claim.attempt_id, body)


async def test_a_whole_rollout(world: World) -> None:
    seen = asyncio.create_task(world.admin.terminal(wait_seconds=20, run="r"))
    claim = await world.claim(metadata={"run": "r", "task_id": "t9"})
    assert claim.rollout.status.state is R and claim.grader_key is None
    _, answer = await world.chat(claim.agent_key, BODY)
    ref = (claim.rollout.rollout_id, "0")
    for event in (
        EventCreate(event_type="reward", data={"value": 0.25, "call_id": answer["id"]}),
        EventCreate(event_type="note", data={"x": 1}),
        EventCreate(event_type="reward", data={"value": 1}),
        EventCreate(event_type="reward", data={"value": 0.5, "message": "final"}),
    ):
        await world.admin.post_event(*ref, event, key=claim.agent_key)
    rollout = await report(world, claim, Outcome.OK, exit_code=0, log_tail="bye")
    assert rollout.status.state is S and rollout.status.reward == 0.5 and rollout.status.calls == 1
    assert await report(world, claim, Outcome.OK, exit_code=0) == rollout  # a repeat has no second effect
    page = await seen
    assert [(i.rollout_id, i.reward, i.data_id, i.calls) for i in page.items] == [(ref[0], 0.5, "t9", 1)]
    assert page.total_terminal == 1
    assert (await world.admin.terminal(page.next_after)).items == []
    trajectory = await world.admin.trajectory(ref[0])
    assert trajectory.reward == 0.5 and trajectory.calls[0].reward == 0.25 and trajectory.outcome == "ok"
    kinds = [e.event_type for e in await world.admin.events(ref[0])]
    assert kinds == ["model_request", "reward", "note", "reward", "reward"]
    detail = await world.admin.rollout(ref[0])
    assert detail.attempts == ["0"] and detail.attempt_details[0].log_tail == "bye"
    with pytest.raises(GatewayError) as e:
        await world.admin.post_event(*ref, EventCreate(event_type="reward", data={"value": 9}))
    assert e.value.status == 409
    assert (await world.admin.stats())["late_writes"] == 1


@pytest.mark.parametrize("raw", ["NaN", "Infinity", '"1"', "true", "1e999", "null", "[1]", "{}"])
async def test_rewards_are_finite_numbers(world: World, raw: str) -> None:
    claim = await world.claim()
    url = f"{world.url}/api/rollouts/{claim.rollout.rollout_id}/attempt/0/events"
    headers = {"x-api-key": claim.agent_key, "Content-Type": "application/json"}
    body = f'{{"event_type": "reward", "data": {{"value": {raw}}}}}'
    async with world.http.post(url, data=body, headers=headers) as answer:
        assert answer.status == 422 and isinstance((await answer.json())["detail"], str)
    unknown = {"event_type": "reward", "data": {"value": 1, "call_id": "nope"}}
    async with world.http.post(url, json=unknown, headers=headers) as answer:
        assert answer.status == 422 and "no call nope" in (await answer.json())["detail"]
    assert (await world.admin.rollout(claim.rollout.rollout_id)).rollout.status.reward is None


async def test_infra_is_tried_again_with_new_keys(world: World) -> None:
    claim = await world.claim()
    await world.chat(claim.agent_key, BODY)
    await world.admin.post_event(claim.rollout.rollout_id, "0", EventCreate(event_type="reward", data={"value": 1}))
    for number in ("0", "1", "2"):
        if number != "0":
            (claim,) = await world.admin.claim(ClaimRequest(controller_id="c1", wait_seconds=5))
            assert claim.attempt_id == number and claim.rollout.status.reward is None
            assert (await world.admin.trajectory(claim.rollout.rollout_id)).calls == []
        rollout = await report(world, claim, Outcome.INFRA, reason="pod evicted")
        assert rollout.status.state is (F if number == "2" else Q)
    assert rollout.status.outcome is Outcome.INFRA and rollout.status.error_message == "pod evicted"
    assert (await world.chat(claim.agent_key, BODY))[0] == 409


async def test_another_attempt_waits_its_time_and_others_pass_it(world: World) -> None:
    policy = RetryPolicy(timeout=2, backoff_seconds=0.6)
    claim = await world.claim(config=RolloutConfig(retry=policy, agent=AgentSpec(command=["true"])))
    assert (await report(world, claim, Outcome.TIMEOUT)).status.state is Q
    ended = time.time()
    other = await world.claim()
    assert other.rollout.rollout_id != claim.rollout.rollout_id
    (again,) = await world.admin.claim(ClaimRequest(controller_id="c1", wait_seconds=20))
    assert (again.rollout.rollout_id, again.attempt_id) == (claim.rollout.rollout_id, "1")
    assert again.rollout.status.updated_at - ended > 0.5


async def test_a_waiting_heartbeat_hears_at_once_of_what_was_taken(world: World) -> None:
    claims = [await world.claim(), await world.claim(), await world.claim()]
    refs = [AttemptRef(rollout_id=c.rollout.rollout_id, attempt_id="0") for c in claims]

    async def beat() -> list[AttemptRef]:
        beat = Heartbeat(controller_id="c1", attempts=refs, wait_seconds=30)
        return (await asyncio.wait_for(world.admin.heartbeat(beat), 10)).lost

    waiting = asyncio.create_task(beat())
    await asyncio.sleep(0.2)
    await world.admin.delete(refs[0].rollout_id)
    assert await waiting == refs[:1]
    waiting = asyncio.create_task(beat())
    assert await waiting == refs[:1]  # Taken before: the store says so.
    refs = refs[1:]
    waiting = asyncio.create_task(beat())
    await asyncio.sleep(0.2)
    await report(world, claims[2], Outcome.OK)
    await world.admin.patch(refs[0].rollout_id, RolloutPatch(status=StatusPatch(state=F, outcome=Outcome.CANCELLED)))
    assert await waiting == refs[:1]


async def test_claims_are_first_in_first_out_and_wait(world: World) -> None:
    waiting = asyncio.create_task(world.admin.claim(ClaimRequest(controller_id="c", limit=2, wait_seconds=20)))
    await asyncio.sleep(0.1)
    made = await world.admin.create_rollouts([RolloutCreate(input=i) for i in range(3)])
    claimed = await asyncio.wait_for(waiting, 2)
    claimed += await world.admin.claim(ClaimRequest(controller_id="d", limit=5))
    assert [c.rollout.rollout_id for c in claimed] == [r.rollout_id for r in made]
    begun = time.monotonic()
    assert await world.admin.claim(ClaimRequest(controller_id="c", wait_seconds=0.3)) == []
    assert 0.25 < time.monotonic() - begun < 2


async def test_leases(world: World) -> None:
    kept, lost = await world.claim(lease=0.8), await world.claim(lease=0.8)
    refs = [AttemptRef(rollout_id=c.rollout.rollout_id, attempt_id="0") for c in (kept, lost)]
    world.engine.say(Reply(delay=20))
    running = asyncio.create_task(world.chat(lost.agent_key, BODY))
    for _ in range(5):
        await asyncio.sleep(0.3)
        beat = Heartbeat(controller_id="c1", lease_seconds=0.8, attempts=refs[:1])
        assert (await world.admin.heartbeat(beat)).lost == []
    status, _ = await asyncio.wait_for(running, 1)
    assert status == 409
    detail = await world.admin.rollout(lost.rollout.rollout_id)
    assert detail.rollout.status.state is Q and "heartbeats" in (detail.attempt_details[0].reason or "")
    everything = Heartbeat(controller_id="c1", lease_seconds=30, attempts=refs)
    assert (await world.admin.heartbeat(everything)).lost == refs[1:]
    with pytest.raises(GatewayError) as e:
        await report(world, lost, Outcome.OK)
    assert e.value.status == 409
    assert (await world.admin.rollout(lost.rollout.rollout_id)).attempt_details[0].late_writes == 1
    assert await world.admin.restarted("c1") == 1
    assert (await world.admin.rollout(kept.rollout.rollout_id)).rollout.status.state is Q
    with pytest.raises(GatewayError) as e:
        other = OutcomeReport(controller_id="c2", outcome=Outcome.OK)
        await world.admin.outcome(kept.rollout.rollout_id, "0", other)
    assert e.value.status == 409


async def test_creating_twice_is_creating_once(world: World) -> None:
    item = RolloutCreate(input={"a": 1}, rollout_id="mine")
    first = await world.admin.create_rollouts([item])
    assert await world.admin.create_rollouts([RolloutCreate(input="other", rollout_id="mine")]) == first
    batch = [RolloutCreate(input=1), RolloutCreate(input=2)]
    once = await world.admin.create_rollouts(batch, "k1")
    assert await world.admin.create_rollouts(batch, "k1") == once
    with pytest.raises(GatewayError) as e:
        await world.admin.create_rollouts(batch[:1], "k1")
    assert e.value.status == 409
    claim = next(c for c in await world.admin.claim(ClaimRequest(controller_id="c1", limit=9)))
    event = EventCreate(event_type="note", data={"n": 1})
    for _ in range(2):
        await world.admin.post_event(claim.rollout.rollout_id, "0", event, once="e1")
    assert len(await world.admin.events(claim.rollout.rollout_id)) == 1
    with pytest.raises(GatewayError) as e:
        await world.admin.post_event(claim.rollout.rollout_id, "0", EventCreate(event_type="note"), once="e1")
    assert e.value.status == 409


async def test_pages_and_listings(world: World) -> None:
    items = [RolloutCreate(input=i, is_train=i % 2 == 0, metadata={"run": "r", "step": i // 4}) for i in range(10)]  # type: ignore[arg-type]
    made = [r.rollout_id for r in await world.admin.create_rollouts(items)]
    await world.admin.patch(made[0], RolloutPatch(status=StatusPatch(state=F)))
    seen, cursor = [], None
    while True:
        page = await world.admin.page(run="r", limit=4, cursor=cursor)
        seen += [r.rollout_id for r in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == made[::-1] and page.total == 10
    assert page.by_state == {"queuing": 9, "running": 0, "succeeded": 0, "failed": 1}
    assert (await world.admin.page(run="r", step=1, is_train=True)).total == 2
    assert (await world.admin.page(state_in=["failed"])).total == 1
    headers = {"x-api-key": "admin-key-of-the-tests"}
    async with world.http.get(f"{world.url}/api/rollouts?state_in=failed&state_in=queuing", headers=headers) as answer:
        assert [r["rollout_id"] for r in await answer.json()] == made
    async with world.http.get(f"{world.url}/api/rollouts?state_in=lost", headers=headers) as answer:
        assert answer.status == 422 and "state_in" in (await answer.json())["detail"]
    async with world.http.get(f"{world.url}/openapi.json", headers=headers) as answer:
        assert "/api/claims" in (await answer.json())["paths"]


async def test_clients_that_patch_and_read_events(world: World) -> None:
    """Agent Lightning's way: no claims, the admin key everywhere, token ids from events."""
    await world.admin.create_rollouts([RolloutCreate(input={"q": 1}, rollout_id="al-1")])
    path = "/proxy/rollout/al-1/attempt/0/mode/train/openai/v1/chat/completions"
    assert (await world.chat("admin-key-of-the-tests", BODY, path))[0] == 404
    running = await world.admin.patch("al-1", RolloutPatch(status=StatusPatch(state=R, k8s_job_name="j")))
    assert running.status.last_attempt_id == "0" and running.status.k8s_job_name == "j"
    world.engine.say("one", Reply("two", drop=("token_ids",)))
    assert (await world.chat("admin-key-of-the-tests", BODY, path))[0] == 200
    assert (await world.chat("admin-key-of-the-tests", BODY, path))[0] == 200
    await world.admin.post_event("al-1", "0", EventCreate(event_type="reward", data={"value": 1.0}))
    done = await world.admin.patch("al-1", RolloutPatch(status=StatusPatch(state=S)))
    assert done.status.state is S and done.status.outcome is Outcome.OK and done.status.reward == 1
    with pytest.raises(GatewayError) as e:
        await world.admin.patch("al-1", RolloutPatch(status=StatusPatch(state=F)))
    assert e.value.status == 409
    events = await world.admin.events("al-1", "model_request")
    asked = world.engine.requests[0]["prompt"]
    choice = events[0].data["response"]["choices"][0]
    assert events[0].data["response"]["prompt_token_ids"] == asked and choice["token_ids"][-1] == 2
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert events[0].data["server"] == {"model": "tiny", "version": 7}
    raw = await world.admin._call("GET", "/api/rollouts/al-1/events", query={"format": "triplet"})
    triplet, reward = orjson.loads(raw)
    assert set(triplet["data"]) == {"prompt_token_ids", "response_token_ids", "response_log_probs", "server"}
    assert triplet["data"]["prompt_token_ids"] == asked and reward["event_type"] == "reward"


async def test_a_controller_that_hung_up_gets_no_lease(world: World) -> None:
    poll = asyncio.create_task(world.admin.claim(ClaimRequest(controller_id="gone", wait_seconds=20)))
    await asyncio.sleep(0.2)
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)
    await asyncio.sleep(0.2)
    claim = await world.claim(controller="alive")
    assert claim.attempt_id == "0"

"""Atomic delivery: waiting, losing the client, pausing, and engines that misbehave."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import openai
import orjson
import pytest

from leyden.gateway.attempts import Call as HeldCall
from leyden.gateway.attempts import LiveAttempt
from leyden.gateway.conversation import Forest, Node
from leyden.gateway.memory import Known
from leyden.gateway.service import Gateway
from leyden.schema import (
    Claim,
    EngineModel,
    Outcome,
    OutcomeReport,
    PauseRequest,
    RolloutPatch,
    RolloutState,
    StatusPatch,
)
from tests.gateway.conftest import MakeWorld, World, everything_stored, on_sqlite
from tests.gateway.scripted_engine import Reply

USER: Any = [{"role": "user", "content": "Hello"}]
BODY: dict[str, Any] = {"messages": USER}


async def until(condition: Callable[[], Any], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition didn't come true in time"
        await asyncio.sleep(0.01)


async def lose(world: World, key: str, body: dict[str, Any], arrived: int) -> None:
    """Send a call and close the connection once the engine works on it."""
    async with aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{world.url}/openai/v1/chat/completions"
        asking = asyncio.create_task(session.post(url, json=body, headers=headers))
        await until(lambda: len(world.engine.requests) >= arrived)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


def orphans(gateway: Gateway) -> int:
    return sum(len(waiting) for live in gateway.live.all() for waiting in live.orphans.values())


async def calls_of(world: World, claim: Claim) -> list[Any]:
    return (await world.admin.trajectory(claim.rollout.rollout_id)).calls


@pytest.mark.parametrize("stream", [True, False])
async def test_a_lost_client_gets_the_same_answer_again(world_maker: MakeWorld, stream: bool) -> None:
    async with world_maker(replay_grace_seconds=5) as world:
        claim = await world.claim()
        world.engine.say(Reply("the one", delay=0.4), "another")
        await lose(world, claim.agent_key, {**BODY, "stream": True}, 1)
        await until(lambda: orphans(world.gateway))
        answer = await world.agent(claim.agent_key).chat.completions.create(model="m", messages=USER, stream=False)
        again = await world.chat(claim.agent_key, {"model": "m", **BODY})
        assert answer.choices[0].message.content != "the one"  # `model` is part of what was asked
        assert again[1]["choices"][0]["message"]["content"] == "ok"
        if stream:
            async with world.http.post(
                f"{world.url}/openai/v1/chat/completions",
                json={**BODY, "stream": True},
                headers={"x-api-key": claim.agent_key},
            ) as got:
                assert b"the one" in await got.read()
        else:
            assert (await world.chat(claim.agent_key, BODY))[1]["choices"][0]["message"]["content"] == "the one"
        calls = await calls_of(world, claim)
        assert len(calls) == 3 and all(c.delivered for c in calls)
        assert (await world.admin.stats())["since_start"]["replayed"] == 1


async def test_abandoned_work_is_aborted_after_the_grace_time(world: World) -> None:
    claim = await world.claim()
    world.engine.say(Reply(delay=30))
    await lose(world, claim.agent_key, BODY, 1)
    lost = time.monotonic()
    await until(lambda: world.engine.aborted == 1)
    assert 0.4 < time.monotonic() - lost < 1.5  # 0.5 s of grace
    assert await calls_of(world, claim) == []
    assert world.gateway.pause.inflight == 0


async def test_a_finished_answer_nobody_fetched_stays_undelivered(world: World) -> None:
    claim = await world.claim()
    world.engine.say(Reply("lost", delay=0.1))
    await lose(world, claim.agent_key, BODY, 1)
    await asyncio.sleep(0.8)
    (call,) = await calls_of(world, claim)
    assert not call.delivered and call.untrainable is None
    assert orphans(world.gateway) == 0
    assert (await world.chat(claim.agent_key, BODY))[1]["choices"][0]["message"]["content"] == "ok"
    triplets = await world.admin._call(
        "GET", f"/api/rollouts/{claim.rollout.rollout_id}/events", query={"format": "triplet"}
    )
    assert triplets.count(b"prompt_token_ids") == 1


async def test_the_end_of_an_attempt_aborts_at_once(world_maker: MakeWorld) -> None:
    async with world_maker(replay_grace_seconds=30) as world:
        claim = await world.claim()
        world.engine.say(Reply(delay=30), Reply(delay=30))
        await lose(world, claim.agent_key, BODY, 1)
        waiting = asyncio.create_task(world.chat(claim.agent_key, BODY | {"max_tokens": 5}))
        await until(lambda: len(world.engine.requests) == 2)
        await world.admin.delete(claim.rollout.rollout_id)
        status, body = await waiting
        assert status == 410 and "deleted while this call was running" in body["error"]["message"]
        await until(lambda: world.engine.aborted == 2, 1)
        assert len(world.gateway.live) == 0


async def test_two_connected_identical_requests_are_two_samples(world: World) -> None:
    claim = await world.claim()
    world.engine.say(Reply("a", delay=0.2), Reply("b", delay=0.2))
    answers = await asyncio.gather(*[world.chat(claim.agent_key, BODY) for _ in range(2)])
    assert {a[1]["choices"][0]["message"]["content"] for a in answers} == {"a", "b"}
    assert len(await calls_of(world, claim)) == 2


async def test_waiting_clients_are_kept_alive_and_nothing_means_anything_before_the_answer(
    world_maker: MakeWorld,
) -> None:
    async with world_maker(keepalive_seconds=0.2) as world:
        claim = await world.claim()
        world.engine.say(Reply("late", delay=0.9), Reply("late", delay=0.9))
        agent = world.agent(claim.agent_key, timeout=openai.Timeout(10, read=0.6))
        chunks = [c async for c in await agent.chat.completions.create(model="m", messages=USER, stream=True)]
        noops = [c for c in chunks if c.choices[0].delta.role is None and c.choices[0].delta.content == ""]
        assert len(noops) >= 3 and chunks[: len(noops)] == noops
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "late"
        plain = await agent.chat.completions.create(model="m", messages=USER)
        assert plain.choices[0].message.content == "late"


async def test_late_errors_are_told_inside_the_body(world_maker: MakeWorld) -> None:
    async with world_maker(keepalive_seconds=0.1, request_timeout_seconds=0.5) as world:
        claim = await world.claim()
        world.engine.say(Reply(delay=5), Reply(delay=5))
        status, body = await world.chat(claim.agent_key, BODY)
        assert status == 200 and "no answer within 0.5 s" in body["error"]["message"]
        with pytest.raises(openai.APIError, match="no answer within"):
            stream = await world.agent(claim.agent_key).chat.completions.create(model="m", messages=USER, stream=True)
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [True, False])
async def test_a_silent_engine_is_a_504_and_an_untrainable_call(world_maker: MakeWorld, stream: bool) -> None:
    async with world_maker(request_timeout_seconds=0.4) as world:
        claim = await world.claim()
        world.engine.say(Reply(delay=20))
        status, body = await world.chat(claim.agent_key, {**BODY, "stream": stream})
        assert status == 504 and body["error"]["type"] == "server_error"
        (call,) = await calls_of(world, claim)
        assert call.untrainable.startswith("timeout:") and not call.delivered and call.prompt_ids
        assert world.gateway.pause.inflight == 0 and len(world.engine.requests) == 1
        assert (await world.admin.stats())["uncaptured"] == {"timeout": 1}


async def test_a_dropped_connection_is_tried_again_a_cut_answer_is_not(world: World) -> None:
    claim = await world.claim()
    world.engine.say(Reply(reset=True), "fine", Reply(cut=True))
    assert (await world.chat(claim.agent_key, BODY))[0] == 200
    assert len(world.engine.requests) == 2
    status, body = await world.chat(claim.agent_key, BODY)
    assert status == 502 and "broke off" in body["error"]["message"]
    assert [c.untrainable is None for c in await calls_of(world, claim)] == [True, False]


async def test_a_dead_engine_gives_an_error_after_bounded_tries(world_maker: MakeWorld) -> None:
    async with world_maker(engine=False) as world:
        await world.admin.register_models([EngineModel(model="tiny", endpoint="http://127.0.0.1:9/v1")])
        claim = await world.claim()
        status, body = await world.chat(claim.agent_key, BODY)
        assert (
            status == 502
            and "can't reach the engine" in body["error"]["message"]
            and "4 tries" in body["error"]["message"]
        )


async def test_engine_errors_stay_readable(world: World) -> None:
    claim = await world.claim()
    world.engine.say(Reply(status=400, error={"error": {"message": "no such thing"}}), Reply(status=500, error="boom"))
    status, body = await world.chat(claim.agent_key, BODY)
    assert status == 400 and body["error"]["message"] == "the engine answered 400: no such thing"
    status, body = await world.chat(claim.agent_key, BODY)
    assert status == 502 and "boom" in body["error"]["message"]


async def test_an_engine_abort_is_never_an_answer(world: World) -> None:
    claim = await world.claim()
    world.engine.say(Reply("par", finish_reason="abort", close=False), "whole")
    assert (await world.chat(claim.agent_key, BODY))[1]["choices"][0]["message"]["content"] == "whole"
    (call,) = await calls_of(world, claim)
    assert call.finish_reason == "stop"


async def test_paused_calls_wait_and_never_see_an_error(world: World) -> None:
    claim = await world.claim()
    state = await world.admin.pause(PauseRequest(owner="trainer", lease_seconds=60))
    assert state.paused and state.inflight == 0
    waiting = asyncio.create_task(world.chat(claim.agent_key, BODY))
    await asyncio.sleep(0.3)
    assert not waiting.done() and world.engine.requests == []
    with pytest.raises(Exception, match="paused by trainer"):
        await world.admin.pause(PauseRequest(owner="somebody"))
    assert not (await world.admin.resume()).paused
    assert (await waiting)[0] == 200
    begun = time.monotonic()
    await world.admin.pause(PauseRequest(owner="dead", lease_seconds=0.3))
    assert (await world.chat(claim.agent_key, BODY))[0] == 200
    assert time.monotonic() - begun > 0.2
    assert not (await world.admin.proxy_state()).paused


async def test_calls_wait_for_an_engine_and_stick_to_it(world_maker: MakeWorld) -> None:
    async with world_maker(engine=False) as world:
        claim = await world.claim()
        waiting = asyncio.create_task(world.chat(claim.agent_key, BODY))
        await asyncio.sleep(0.1)
        await world.admin.register_models([EngineModel(model="tiny", endpoint=world.engine.endpoint)])
        assert (await waiting)[0] == 200
        others = [EngineModel(model="tiny", endpoint=f"http://127.0.0.1:9/{i}") for i in range(20)]
        world.gateway.engines.set(others)
        picked = [world.gateway.engines.pick("r1")]
        world.gateway.engines.set(others[::-1])
        picked.append(world.gateway.engines.pick("r1"))
        assert len({p and p.endpoint for p in picked}) == 1
        assert len({(world.gateway.engines.pick(f"r{i}") or others[0]).endpoint for i in range(50)}) > 5


async def test_uncaptured_calls_are_named_at_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    claim = await world.claim(metadata={"run": "r1"})
    world.engine.say(
        Reply("readable", drop=("token_ids",)),
        Reply("x", override={"logprobs": {"token_logprobs": [-0.1]}}),
        Reply("x", top={"usage": {"prompt_tokens": 1, "completion_tokens": 2}}),
        Reply("x", override={"prompt_token_ids": [5]}),
        Reply("xy", override={"logprobs": {"token_logprobs": [-0.1, None, float("nan")]}}),
    )
    for i in range(5):
        status, body = await world.chat(claim.agent_key, {**BODY, "max_tokens": 50 + i})
        assert status == 200
        if i == 0:
            assert body["choices"][0]["message"]["content"] == "readable"
    calls = await calls_of(world, claim)
    assert [(c.untrainable or "").partition(":")[0] for c in calls] == [
        "missing field", "lengths differ", "usage differs", "prompt differs", ""]  # fmt: skip
    assert calls[1].logprobs == b"" and len(calls[1].response_ids) == 8
    assert np.isnan(np.frombuffer(calls[4].logprobs, "<f4")).tolist() == [False, True, True]
    loud = [r for r in caplog.records if r.levelname == "ERROR"]
    assert len(loud) == 1 and "token_ids" in loud[0].getMessage() and "r1" in loud[0].getMessage()
    stats = await world.admin.stats()
    assert stats["uncaptured"]["missing field"] == 1 and stats["since_start"]["nan_logprobs"] == 2


async def test_keys_never_reach_the_engine_and_proxies_are_ignored(
    world_maker: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with world_maker(engine_key="engine-secret") as world:
        claim = await world.claim()
        assert (await world.chat(claim.agent_key, BODY))[0] == 200
        sent = str(world.engine.headers) + str(world.engine.requests)
        assert claim.agent_key not in sent and "Bearer engine-secret" in sent
        stored = await everything_stored(world)
        assert claim.agent_key.encode() not in stored and b"admin-key-of" not in stored


async def test_deleting_a_rollout_during_a_call_leaves_nothing_behind(world: World) -> None:
    for _ in range(20):
        claim = await world.claim()
        world.engine.say(Reply(delay=5))
        waiting = asyncio.create_task(world.chat(claim.agent_key, BODY))
        await until(lambda: world.engine.running)
        await world.admin.delete(claim.rollout.rollout_id)
        assert (await waiting)[0] in (404, 410)
        assert (await world.chat(claim.agent_key, BODY))[0] == 401
    tables = "rollouts attempts keys events calls messages message_uses".split()

    def rows(db: Any) -> list[int]:
        return [db.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in tables]

    assert await world.gateway.store.db.read(rows) == [0] * len(tables)  # type: ignore[attr-defined]
    assert len(world.gateway.live) == 0


LARGE, MANY = 50_000, 200


async def large_engine() -> tuple[asyncio.Server, str]:
    """Answers with the prompt ids that it got, as bytes: next to no work beside the gateway's."""
    choice = b'{"finish_reason": "stop", "token_ids": [5, 2], "logprobs": {"token_logprobs": [-0.5, -0.5]}'
    usage = orjson.dumps({"prompt_tokens": LARGE, "completion_tokens": 2})

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"content-length"))
                asked = await reader.readexactly(length)
                start = asked.index(b'"prompt":') + len(b'"prompt":')
                prompt = asked[start : asked.index(b"]", start) + 1]
                body = b'{"choices": [%b, "prompt_token_ids": %b}], "usage": %b}' % (choice, prompt, usage)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**22)
    return listener, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"


@on_sqlite
async def test_many_large_calls_leave_the_loop_responsive(world_maker: MakeWorld) -> None:
    listener, url = await large_engine()
    async with world_maker(engine=False, request_timeout_seconds=300) as world:
        here = EngineModel(model="tiny", endpoint=url, kind="leyden", max_model_len=10 * LARGE, max_concurrency=MANY)
        await world.admin.register_models([here])
        claims = [await world.claim(controller=f"c{i}", lease=600) for i in range(10)]
        turns = 0
        done = asyncio.Event()
        gauges: dict[str, Any] = {}

        async def probe() -> None:
            nonlocal turns, gauges
            while not done.is_set():
                assert (await world.admin.healthz())["status"] == "ok"
                stats = await world.admin.stats()
                turns += stats["in_flight"] > 0
                if stats["in_flight"] > gauges.get("in_flight", 0):
                    gauges = stats
                await asyncio.sleep(0.02)

        probing = asyncio.create_task(probe())
        prompt = orjson.dumps([7] * (LARGE - 1))

        async def ask(number: int) -> bool:
            headers = {"x-api-key": claims[number % 10].agent_key, "content-type": "application/json"}
            body = b'{"seed": 1, "prompt": [%d, %b}' % (number, prompt.removeprefix(b"["))
            async with world.http.post(f"{world.url}/openai/v1/completions", data=body, headers=headers) as answer:
                return "choices" in await answer.json()

        answers = await asyncio.gather(*[ask(i) for i in range(MANY)])
        done.set()
        await probing
        listener.close()
        assert answers == [True] * MANY
        calls = [c for claim in claims for c in await calls_of(world, claim)]
        assert len(calls) == MANY and all(c.untrainable is None and c.delivered for c in calls)
        assert {len(c.prompt_ids) for c in calls} == {4 * LARGE}
        # Health was answered between the calls, and the gauges tell of them and of how late the loop was.
        assert turns >= 3 and gauges["in_flight"] > 10 and gauges["loop_lag_seconds"] > 0


async def test_more_calls_than_can_be_held_are_turned_away_and_nothing_is_left_of_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.gateway.service.MAX_CALLS", 3)
    monkeypatch.setattr("leyden.gateway.service.COUNT_EVERY", 1)
    claim = await world.claim()
    world.engine.default = Reply("held", delay=0.6)
    held = [asyncio.create_task(world.chat(claim.agent_key, BODY | {"max_tokens": 5 + i})) for i in range(3)]
    await until(lambda: world.engine.running == 3)
    status, body = await world.chat(claim.agent_key, BODY)
    assert status == 503 and "already holds 3 calls" in body["error"]["message"]
    assert [(await h)[0] for h in held] == [200] * 3
    assert (await world.chat(claim.agent_key, BODY))[0] == 200
    assert len(await calls_of(world, claim)) == 4


async def test_nothing_of_finished_rollouts_stays_in_memory(world: World) -> None:
    kinds = (LiveAttempt, Node, Forest, HeldCall, Known)

    def objects() -> dict[str, int]:
        gc.collect()
        counted = Counter(type(o).__name__ for o in gc.get_objects() if type(o) in kinds)
        return {kind.__name__: counted[kind.__name__] for kind in kinds}

    async def cycle(end: str) -> None:
        claim = await world.claim()
        messages: list[Any] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"{turn}"})
            _, body = await world.chat(claim.agent_key, {"messages": messages, "n": 1 + turn % 2})
            messages.append(body["choices"][0]["message"])
        await world.chat(claim.agent_key, {"input": "x"}, "/openai/v1/responses")
        report = OutcomeReport(controller_id="c1", outcome=Outcome.TIMEOUT)
        if end != "delete":
            await world.admin.outcome(claim.rollout.rollout_id, "0", report)
            await calls_of(world, claim)
        if end != "outcome":
            await world.admin.delete(claim.rollout.rollout_id)

    before = objects()
    for end in ("outcome", "delete", "both") * 5:
        await cycle(end)
    assert objects() == before and before["LiveAttempt"] == 0
    assert len(world.gateway.live) == 0 and world.gateway.live._by_key == {} and world.gateway.live._left == {}


async def test_closing_then_late_writes(world: World) -> None:
    claim = await world.claim()
    rollout_id = claim.rollout.rollout_id
    assert (await world.chat(claim.agent_key, BODY))[0] == 200
    before = await calls_of(world, claim)
    await world.admin.patch(rollout_id, RolloutPatch(status=StatusPatch(state=RolloutState.SUCCEEDED)))
    status, body = await world.chat(claim.agent_key, BODY)
    assert status == 409 and "agent phase has ended" in body["error"]["message"]
    with pytest.raises(Exception, match="came too late"):
        report = OutcomeReport(controller_id="c1", outcome=Outcome.OK)
        await world.admin.outcome(rollout_id, "0", report)
    detail = await world.admin.rollout(rollout_id)
    assert detail.attempt_details[0].late_writes == 2
    assert await calls_of(world, claim) == before

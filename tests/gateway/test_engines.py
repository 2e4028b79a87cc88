"""Engines of every kind: what they are asked, how their answers are read, which one is chosen, and whose turn it is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from leyden.gateway.engines.client import ADAPTERS, EngineUnreachable
from leyden.gateway.engines.probe import Probes, processed
from leyden.gateway.engines.protocol import Ask, Chat, Said
from leyden.gateway.engines.queue import FairQueue
from leyden.gateway.engines.registry import EngineRegistry, route
from leyden.gateway.errors import StoreUnavailable
from leyden.schema import CallRecord, CaptureConfig, EngineModel, ModelRoute, PauseRequest, RolloutConfig, Sampling
from leyden.training.rows import build_rows
from tests.gateway.conftest import ADMIN, MakeWorld, World, on_sqlite
from tests.gateway.scripted_engine import Reply
from tests.gateway.test_delivery import until

USER: Any = [{"role": "user", "content": "Hello"}]
PIXEL = "data:image/png;base64,iVBORw0KGgo="
PROMPT = [5, 6, 7]
SPOKEN: Any = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 8}


def ask(**more: Any) -> Ask:
    given: dict[str, Any] = {"stop": [], "stop_token_ids": [2], "request_id": "r", "effective": SPOKEN, **more}
    return Ask(prompt=np.asarray(PROMPT, np.int32), **given)


def engine(kind: Any = "vllm", **more: Any) -> EngineModel:
    return EngineModel(**{"model": "tiny", "endpoint": "http://e/v1", "version": 4, "kind": kind, **more})


def read(kind: str, value: Any) -> Said:
    return ADAPTERS[kind].read(value, ask(), 4)


def answer_of(kind: str, ids: list[int], logprobs: list[Any] | None) -> dict[str, Any]:
    """What an engine of this kind says when it sampled `ids`."""
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(ids)}
    if kind == "sglang":
        pairs = None if logprobs is None else [[x, i, None] for x, i in zip(logprobs, ids, strict=False)]
        info = {**usage, "finish_reason": {"type": "stop", "matched": 2}, "output_token_logprobs": pairs}
        return {"text": "t", "output_ids": ids, "meta_info": info}
    choice = {"text": "t", "finish_reason": "stop", "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
    return {"choices": [choice], "usage": usage}


KINDS = ["leyden", "vllm", "openai", "sglang"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_answer_is_read_whole(kind: str) -> None:
    sample = read(kind, answer_of(kind, [9, 8, 2], [-0.1, -0.2, -0.3])).sample
    assert sample.ids.tolist() == [9, 8, 2] and sample.versions.tolist() == [4, 4, 4]
    np.testing.assert_allclose(sample.logprobs, [-0.1, -0.2, -0.3], rtol=1e-6)
    assert (sample.finish_reason, sample.untrainable) == ("stop", None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_prob_that_is_missing_is_unknown_not_zero(kind: str) -> None:
    sample = read(kind, answer_of(kind, [9, 8, 2], [-0.1, None, math.nan])).sample
    assert sample.untrainable is None and sample.nan_logprobs == 2
    assert np.isnan(sample.logprobs).tolist() == [False, True, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, [], "x", {}, {"choices": []}, {"meta_info": 3}, {"choices": [None]}, [1]])
def test_broken_answers_are_named_and_never_raise(kind: str, value: Any) -> None:
    sample = read(kind, value).sample
    assert sample.finish_reason == "error" and sample.untrainable is not None


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("vllm", {"token_ids": None}, "missing field: choices[0].token_ids"),
        ("vllm", {"token_ids": [9, 8, 2, 1]}, "lengths differ: 3 log-probs for 4 token ids"),
        ("vllm", {"logprobs": {}}, "missing field: choices[0].logprobs.token_logprobs"),
        ("vllm", {"logprobs": {"token_logprobs": [-1.0] * 3, "tokens": ["token_id:1"] * 3}}, "ids differ"),
        ("vllm", {"prompt_token_ids": [1]}, "prompt differs"),
        ("vllm", {"provider_specific_fields": {"token_ids": [9, 8, 2]}, "token_ids": None}, "missing field"),
        ("vllm", {"routed_experts": [["x"]]}, "malformed field: choices[0].routed_experts"),
        ("sglang", {"output_ids": [9, 8, 3]}, "ids differ: output_ids"),
    ],
)
def test_contradictions_make_a_call_untrainable(kind: str, change: dict[str, Any], reason: str) -> None:
    value = answer_of(kind, [9, 8, 2], [-0.1, -0.2, -0.3])
    (value["choices"][0] if kind == "vllm" else value).update(change)
    said = read(kind, value).sample.untrainable
    assert said is not None and said.startswith(reason)


def test_sglang_without_log_probs_has_no_ids_to_trust() -> None:
    assert read("sglang", answer_of("sglang", [9], None)).sample.untrainable == (
        "missing field: meta_info.output_token_logprobs"
    )


def test_experts_are_kept_with_the_call() -> None:
    value = answer_of("vllm", [9, 2], [-0.1, -0.2])
    value["choices"][0]["routed_experts"] = [[[1, 2]], [[3, 4]]]
    sample = read("vllm", value).sample
    assert sample.routed_format == "int32 [2, 1, 2]" and sample.routed_experts is not None
    assert np.frombuffer(sample.routed_experts, "<i4").tolist() == [1, 2, 3, 4]


def test_each_kind_is_asked_in_its_own_words() -> None:
    shape = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    body = ADAPTERS["vllm"].body(engine(), ask(stop=["X"], response_format=shape))
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object"}},
    }
    assert body["stop"] == ["X"] and body["top_k"] == 3 and body["return_token_ids"] is True
    body = ADAPTERS["sglang"].body(engine("sglang"), ask(stop=["X"], response_format=shape))
    assert body["input_ids"].tolist() == PROMPT and body["return_logprob"] is True
    assert body["sampling_params"] == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "max_new_tokens": 8,
        "stop": ["X"],
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "json_schema": '{"type":"object"}',
    }


@pytest.mark.parametrize(
    ("half", "verdict"),
    [
        ({"a": -0.143, "b": -2.143, "c": -4.143}, True),
        ({"a": -0.408, "b": -1.408, "c": -2.408}, False),
        ({"a": -0.408, "b": -1.9, "c": -2.9}, None),
        ({"a": -0.1}, None),
        ({}, None),
    ],
)
def test_two_temperatures_tell_processed_log_probs_from_raw_ones(half: dict[str, float], verdict: bool | None) -> None:
    # Logits 2, 1, 0: raw log-prob of the first -0.408, at temperature 0.5 -0.143.
    assert processed({"a": -0.408, "b": -1.408, "c": -2.408}, half) is verdict


def test_equal_tokens_tell_nothing() -> None:
    assert processed({"a": -1.0, "b": -1.0}, {"a": -1.0, "b": -1.0}) is None


def test_routes_fit_in_order() -> None:
    routes = [ModelRoute(match="claude-haiku-*", model="frozen", trained=False), ModelRoute(match="*", model="tiny")]
    assert route(routes, "tiny", "claude-haiku-4").model == "frozen"
    assert route(routes, "tiny", "claude-opus").model == "tiny"
    assert route([], "tiny", "anything").trained


def test_a_model_is_never_served_by_another_ones_engine() -> None:
    registry = EngineRegistry("tiny")
    registry.set([engine(model="frozen")])
    assert registry.pick("r") is None and registry.pick("r", model="frozen") is not None


@asynccontextmanager
async def serving(
    answer: Callable[[str, dict[str, Any]], Any], tell: Callable[[str], Any] | None = None
) -> AsyncIterator[tuple[str, list[tuple[str, Any]]]]:
    """An HTTP engine of any kind: its base URL, and what it was asked. `tell` answers what is got, not posted."""
    asked: list[tuple[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append((request.path, body))
        return web.json_response(answer(request.path, body))

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    if tell is not None:

        async def show(request: web.Request) -> web.Response:
            return web.json_response(tell(request.path))

        app.router.add_get("/{path:.*}", show)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked
    finally:
        await runner.cleanup()


def sglang_like(_: str, body: dict[str, Any]) -> Any:
    logits = {9: 2.0, 2: 1.0}
    scale = 1 / body["sampling_params"]["temperature"]
    total = math.log(sum(math.exp(x * scale) for x in logits.values()))
    top = [[x * scale - total, i, None] for i, x in logits.items()]
    info = {
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": 2,
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, 9, None], [-0.25, 2, None]],
        "output_top_logprobs": [top, top],
        "weight_version": "11",
    }
    return {"text": "x", "output_ids": [9, 2], "meta_info": info}


async def calls_of(world: World, rollout_id: str) -> list[CallRecord]:
    return (await world.admin.trajectory(rollout_id)).calls


async def test_a_call_through_sglang(world_maker: MakeWorld) -> None:
    async with world_maker(engine=False) as world, serving(sglang_like) as (url, asked):
        await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind="sglang")])
        assert world.gateway.probes.known[url].processed is True
        claim = await world.claim()
        status, _ = await world.chat(claim.agent_key, {"messages": USER})
        (call,) = await calls_of(world, claim.rollout.rollout_id)
        assert status == 200 and call.untrainable is None and call.engine == url
        assert np.frombuffer(call.response_ids, "<i4").tolist() == [9, 2]
        assert np.frombuffer(call.versions, "<i4").tolist() == [11, 11]
        assert asked[-1][0] == "/generate"


def vllm_like(raw: bool) -> Callable[[str, dict[str, Any]], Any]:
    def answer(path: str, body: dict[str, Any]) -> Any:
        scale = 1 if raw else 1 / body["temperature"]
        top = {"a": -0.4 * scale, "b": -1.4 * scale}
        if path.endswith("/chat/completions"):
            message = {"role": "assistant", "content": "seen", "reasoning_content": "hm", "tool_calls": None}
            content = [{"token": "x", "logprob": -0.5}, {"token": "y", "logprob": -0.25}]
            choice: Any = {"message": message, "finish_reason": "stop", "token_ids": [9, 2]}
            usage = {"prompt_tokens": 4, "completion_tokens": 2}
            choice["logprobs"] = {"content": content}
            return {"choices": [choice], "prompt_token_ids": [1, 300, 300, 5], "usage": usage}
        logprobs = {"token_logprobs": [-0.5, -0.25], "top_logprobs": [top, top]}
        choice = {"text": "x", "finish_reason": "stop", "token_ids": [9, 2], "logprobs": logprobs}
        return {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 2}}

    return answer


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_raw_log_probs_are_no_training_data_at_other_temperatures(
    world_maker: MakeWorld, raw: bool, temperature: float
) -> None:
    async with world_maker(engine=False) as world, serving(vllm_like(raw)) as (url, _):
        await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind="vllm")])
        assert world.gateway.probes.known[url].processed is (not raw)
        claim = await world.claim(config=RolloutConfig(sampling=Sampling(temperature=temperature)))
        await world.chat(claim.agent_key, {"messages": USER})
        (call,) = await calls_of(world, claim.rollout.rollout_id)
        bad = raw and temperature != 1
        assert (call.untrainable or "").startswith("raw log-probs") == bad and (call.untrainable is None) != bad


@pytest.mark.parametrize("why", ["mode", "image"])
async def test_the_engine_renders_when_the_run_or_an_image_asks_for_it(world_maker: MakeWorld, why: str) -> None:
    async with world_maker(engine=False) as world, serving(vllm_like(False)) as (url, asked):
        await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind="vllm")])
        capture = CaptureConfig(mode="engine") if why == "mode" else CaptureConfig()
        claim = await world.claim(config=RolloutConfig(capture=capture))
        content: Any = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
        messages = USER if why == "mode" else [{"role": "user", "content": content}]
        status, body = await world.chat(claim.agent_key, {"messages": messages})
        message = body["choices"][0]["message"]
        assert (status, message["content"], message["reasoning_content"]) == (200, "seen", "hm")
        assert asked[-1][0] == "/v1/chat/completions"
        trajectory = await world.admin.trajectory(claim.rollout.rollout_id)
        (call,) = trajectory.calls
        assert np.frombuffer(call.prompt_ids, "<i4").tolist() == [1, 300, 300, 5] and call.untrainable is None
        rows, report = build_rows(trajectory, max_row_tokens=100)
        if why == "mode":
            assert len(rows) == 1 and call.images == []
        else:
            assert asked[-1][1]["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL}}
            assert len(call.images) == 1 and call.images[0].startswith("sha256:")
            assert rows == [] and report.dropped == {"images": 1}


async def test_what_an_engine_cant_do_is_refused_in_one_sentence(world: World) -> None:
    claim = await world.claim()
    content = [{"type": "image_url", "image_url": {"url": PIXEL}}]
    status, body = await world.chat(claim.agent_key, {"messages": [{"role": "user", "content": content}]})
    assert status == 400 and "images" in body["error"]["message"]
    shape = {"type": "json_object"}
    status, body = await world.chat(claim.agent_key, {"messages": USER, "response_format": shape})
    assert status == 400 and body["error"]["param"] == "response_format"
    assert world.engine.requests == []


async def test_constrained_answers_arent_trained(world_maker: MakeWorld) -> None:
    async with world_maker(engine=False) as world, serving(vllm_like(False)) as (url, asked):
        await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind="vllm")])
        claim = await world.claim()
        shape = {"type": "json_object"}
        assert (await world.chat(claim.agent_key, {"messages": USER, "response_format": shape}))[0] == 200
        (call,) = await calls_of(world, claim.rollout.rollout_id)
        assert asked[-1][1]["response_format"] == shape
        assert call.untrainable is not None and call.untrainable.startswith("constrained sampling")


async def test_a_route_leads_to_a_frozen_model_and_is_not_trained(world: World) -> None:
    async with serving(vllm_like(False)) as (url, asked):
        await world.admin.register_models([EngineModel(model="frozen", endpoint=url, kind="vllm")])
        routes = [ModelRoute(match="claude-haiku-*", model="frozen", trained=False)]
        claim = await world.claim(config=RolloutConfig(capture=CaptureConfig(routes=routes)))
        await world.chat(claim.agent_key, {"model": "claude-haiku-4-5", "messages": USER})
        await world.chat(claim.agent_key, {"model": "claude-opus-5", "messages": USER})
        side, main = await calls_of(world, claim.rollout.rollout_id)
        assert side.untrainable == "route: model frozen isn't trained" and side.engine == url
        assert main.untrainable is None and main.engine == world.engine.endpoint
        assert asked[-1][0] == "/v1/chat/completions" and len(world.engine.requests) == 1


async def test_the_model_list_holds_the_names_that_routes_know(world: World) -> None:
    routes = [ModelRoute(match=m, model="tiny") for m in ("gpt-small", "claude-haiku-*", "tiny", "gpt-small", "o?")]
    claim, plain = await world.claim(config=RolloutConfig(capture=CaptureConfig(routes=routes))), await world.claim()
    path = f"/proxy/rollout/{claim.rollout.rollout_id}/attempt/0/mode/train/openai/v1/models"
    for key, where, names in (
        (claim.agent_key, "/openai/v1/models", ["tiny", "gpt-small"]),
        (claim.agent_key, path, ["tiny", "gpt-small"]),
        (ADMIN, path, ["tiny", "gpt-small"]),
        (plain.agent_key, "/openai/v1/models", ["tiny"]),
        (ADMIN, "/openai/v1/models", ["tiny"]),
    ):
        async with world.http.get(world.url + where, headers={"x-api-key": key}) as got:
            assert [m["id"] for m in (await got.json())["data"]] == names
    headers = {"x-api-key": claim.agent_key}
    async with world.http.get(f"{world.url}/anthropic/v1/models", headers=headers) as got:
        assert [m["id"] for m in (await got.json())["data"]] == ["tiny", "gpt-small"]
    assert await calls_of(world, claim.rollout.rollout_id) == []


async def test_a_route_to_nowhere_says_so(world: World) -> None:
    routes = [ModelRoute(match="*", model="nobody")]
    claim = await world.claim(config=RolloutConfig(capture=CaptureConfig(routes=routes)))
    status, body = await world.chat(claim.agent_key, {"messages": USER})
    assert status == 400 and "nobody" in body["error"]["message"] and "tiny" in body["error"]["message"]


async def test_an_engine_that_is_away_registers_all_the_same(world: World) -> None:
    gone = EngineModel(model="other", endpoint="http://127.0.0.1:9/v1", kind="vllm")
    await world.admin.register_models([gone])
    (shown,) = [m for m in await world.admin.models() if m.endpoint == gone.endpoint]
    assert shown.capability is not None and shown.capability.reachable is False


async def test_an_engine_gets_no_more_calls_than_it_takes(world: World) -> None:
    here = world.engine.endpoint
    await world.admin.register_models([EngineModel(model="tiny", endpoint=here, kind="leyden", max_concurrency=2)])
    claim = await world.claim()
    world.engine.default = Reply(delay=0.2)
    asking = [asyncio.create_task(world.chat(claim.agent_key, {"messages": USER, "seed": i})) for i in range(6)]
    seen = 0
    while not all(a.done() for a in asking):
        seen = max(seen, world.engine.running)
        await asyncio.sleep(0.01)
    assert seen == 2 and [(await a)[0] for a in asking] == [200] * 6
    assert (await world.admin.stats())["waiting_for_engines"] == 0


async def test_rollouts_take_turns() -> None:
    queue, order = FairQueue(1), []

    async def work(owner: str) -> None:
        async with queue.slot(owner, 5):
            order.append(owner)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for owner in "aaaabbc":
            group.create_task(work(owner))
    assert order == list("aabcaba") or order == [*list("aabcab"), "a"]
    assert queue.running == 0 and queue.waiting == 0


@pytest.mark.parametrize("when", ["waiting", "given"])
async def test_a_caller_that_leaves_the_queue_takes_nothing_with_it(when: str) -> None:
    queue = FairQueue(1)
    first = queue.slot("a", 5)
    await first.__aenter__()
    second = asyncio.create_task(queue.slot("b", 5).__aenter__())
    await asyncio.sleep(0)
    if when == "given":
        await first.__aexit__(None, None, None)  # The slot is b's, which hasn't run since.
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    if when == "waiting":
        await first.__aexit__(None, None, None)
    assert queue.running == 0 and queue.waiting == 0


async def test_the_wait_for_a_turn_ends() -> None:
    queue = FairQueue(1)
    async with queue.slot("a", 1):
        with pytest.raises(TimeoutError):
            async with queue.slot("b", 0.01):
                pass
    assert queue.running == 0 and queue.waiting == 0


def test_an_engine_is_told_what_its_models_own_settings_would_change() -> None:
    body = ADAPTERS["vllm"].body(engine(), ask(effective={**SPOKEN, "top_k": 0}))
    assert (body["top_k"], body["repetition_penalty"], body["min_p"]) == (-1, 1.0, 0.0)
    assert "top_k" not in ADAPTERS["openai"].body(engine("openai"), ask(effective={**SPOKEN, "top_k": 0}))


def test_a_strict_server_of_a_frozen_model_gets_no_fields_of_ours() -> None:
    chat = Chat(messages=USER, tools=None, tool_choice="auto", tool_name=None, parallel_tool_calls=True)
    used = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    asked = ask(effective=used, chat=chat, trained=False)
    body = ADAPTERS["openai"].body(engine("openai"), asked)
    assert set(body) == {"model", "messages", "temperature", "top_p"}


@pytest.mark.parametrize("kind", ["leyden", "vllm", "openai"])
def test_ids_that_a_proxy_moved_away_are_named(kind: str) -> None:
    value = answer_of(kind, [9, 2], [-0.1, -0.2])
    moved = value["choices"][0].pop("token_ids")
    value["choices"][0]["provider_specific_fields"] = {"token_ids": moved}
    sample = read(kind, value).sample
    assert sample.ids.tolist() == [] and sample.untrainable is not None
    assert "provider_specific_fields" in sample.untrainable


@pytest.mark.parametrize("kind", ["vllm", "openai"])
@pytest.mark.parametrize(
    ("content", "ids", "reason"),
    [
        ([("token_id:40", -0.1), ("token_id:3278", -0.2)], None, None),
        ([("a", -0.1), ("b", -0.2)], None, "missing field: choices[0].token_ids"),
        ([("a", -0.1), ("b", -0.2)], [1, 2, 3, 4, 5], "lengths differ: 2 log-probs for 5 token ids"),
        ([("token_id:1", -0.1)], [2], "ids differ"),
    ],
)
def test_chat_answers_are_checked_like_completions(kind: str, content: Any, ids: Any, reason: str | None) -> None:
    chat = Chat(messages=USER, tools=None, tool_choice="auto", tool_name=None, parallel_tool_calls=True)
    said: Any = {"content": [{"token": t, "logprob": x} for t, x in content]}
    choice = {"message": {"content": "t"}, "finish_reason": "stop", "logprobs": said, "token_ids": ids}
    value = {"choices": [choice], "prompt_token_ids": PROMPT}
    sample = ADAPTERS[kind].read(value, ask(chat=chat), 4).sample
    assert (sample.untrainable or "").startswith(reason or "") and (sample.untrainable is None) == (reason is None)
    if reason is None:
        assert sample.ids.tolist() == [40, 3278]
    value["prompt_token_ids"] = [PROMPT]  # A nested list is nobody's prompt, and no error.
    assert ADAPTERS[kind].read(value, ask(chat=chat), 4).sample.untrainable is not None


def answers(kind: str, changes: list[dict[str, Any]]) -> Callable[[str, dict[str, Any]], Any]:
    """Good answers of a kind of engine to whatever was asked, the first ones changed."""

    def answer(_: str, body: dict[str, Any]) -> Any:
        prompt = body.get("input_ids") or body["prompt"]
        good = answer_of(kind, [9, 2], [-0.5, -0.25])
        (good["meta_info"] if kind == "sglang" else good["usage"])["prompt_tokens"] = len(prompt)
        if "probe" not in body.get("rid", body.get("request_id", "")) and changes:
            (good["meta_info"] if kind == "sglang" else good["choices"][0]).update(changes.pop(0))
        return good

    return answer


@pytest.mark.parametrize("kind", ["vllm", "openai", "sglang"])
async def test_an_aborted_answer_is_asked_for_again(world_maker: MakeWorld, kind: Any) -> None:
    aborted: Any = {"finish_reason": {"type": "abort"} if kind == "sglang" else "abort"}
    async with world_maker(engine=False) as world, serving(answers(kind, [aborted, aborted])) as (url, _):
        await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind=kind)])
        claim = await world.claim()
        status, body = await world.chat(claim.agent_key, {"messages": USER})
        (call,) = await calls_of(world, claim.rollout.rollout_id)
        assert status == 200 and body["choices"][0]["finish_reason"] == "stop"
        assert call.untrainable is None and call.finish_reason == "stop"
        assert (await world.admin.stats())["since_start"]["engine_aborts"] == 2


@pytest.mark.parametrize("kind", ["leyden", "vllm", "openai", "sglang"])
@pytest.mark.parametrize("answer", ["text", "json"])
async def test_what_an_engine_says_against_a_request_reaches_the_client(
    world_maker: MakeWorld, kind: Any, answer: str
) -> None:
    def refuse(_: str, body: dict[str, Any]) -> Any:
        raise web.HTTPBadRequest(
            text="too long for me" if answer == "text" else '{"error": {"message": "too long for me"}}'
        )

    async with world_maker(engine=False) as world, serving(refuse) as (url, _):
        await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind=kind)])
        claim = await world.claim()
        status, body = await world.chat(claim.agent_key, {"messages": USER})
        (call,) = await calls_of(world, claim.rollout.rollout_id)
        assert status == 400 and "too long for me" in body["error"]["message"]
        assert (call.untrainable or "").startswith("engine refused") and call.response_ids == b""


async def test_an_engine_that_comes_up_later_is_asked_before_its_log_probs_are_trusted(
    world_maker: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.gateway.engines.probe.AGAIN_SECONDS", 0)
    async with world_maker(engine=False) as world, serving(vllm_like(False)) as (url, asked):
        here = [EngineModel(model="tiny", endpoint=url, kind="vllm")]
        await world.gateway.store.upsert_models(here)  # As if it had been registered while it was away.
        world.gateway.engines.set(here)
        assert world.gateway.registered()[0].capability is None
        claim = await world.claim(config=RolloutConfig(sampling=Sampling(temperature=0.5)))
        for seed in range(3):
            await world.chat(claim.agent_key, {"messages": USER, "seed": seed})
        assert [c.untrainable for c in await calls_of(world, claim.rollout.rollout_id)] == [None] * 3
        assert len(asked) == 3 + 2  # One probe of two questions.


async def test_log_probs_that_nothing_vouches_for_arent_trained_at_other_temperatures(world_maker: MakeWorld) -> None:
    async with world_maker(engine=False) as world, serving(answers("vllm", [])) as (url, _):
        await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind="vllm")])
        claim = await world.claim(config=RolloutConfig(sampling=Sampling(temperature=0.5)))
        await world.chat(claim.agent_key, {"messages": USER})
        (call,) = await calls_of(world, claim.rollout.rollout_id)
        assert (call.untrainable or "").startswith("unverified log-probs")


async def test_a_new_version_is_no_reason_to_ask_an_engine_again(world_maker: MakeWorld) -> None:
    async with world_maker(engine=False) as world, serving(vllm_like(False)) as (url, asked):
        for version in range(5):
            await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind="vllm", version=version)])
        assert len(asked) == 2


class Clock:
    """Stands in for the time module of the probes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


class Questions:
    """Stands in for the client of engines: counts probes, and answers as it is told."""

    def __init__(self) -> None:
        self.probes = 0
        self.top: Any = None
        self.away = False

    async def post(self, engine: EngineModel, path: str, body: dict[str, Any], seconds: float) -> Any:
        self.probes += body["temperature"] == 1.0
        if self.away:
            raise EngineUnreachable("nobody there")
        answer = answer_of("vllm", [9], [-0.5])
        if self.top is not None:
            answer["choices"][0]["logprobs"]["top_logprobs"] = [self.top(body["temperature"])]
        return answer


async def probes_in(probes: Probes, asked: Questions, clock: Clock, seconds: int) -> int:
    """Probes made while there is a call every second."""
    before, here = asked.probes, engine(max_model_len=100)
    for _ in range(seconds):
        clock.now += 1
        probes.begin(here)
        for _ in range(5):
            await asyncio.sleep(0)
    return asked.probes - before


async def test_engines_that_never_tell_are_asked_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(), Questions()
    monkeypatch.setattr("leyden.gateway.engines.probe.time", clock)
    probes = Probes(asked, lambda: [1, 2], {})  # type: ignore[arg-type]
    assert await probes_in(probes, asked, clock, 60) == 4  # After 0, 5, 10 and 20 seconds more.
    assert await probes_in(probes, asked, clock, 24 * 3600) <= 6 + 24 * 6
    # One that is away may be back, and then its answers count.
    asked.away = True
    await probes_in(probes, asked, clock, 600)
    assert 10 <= await probes_in(probes, asked, clock, 60) <= 12
    asked.away = False
    assert await probes_in(probes, asked, clock, 6) >= 1
    asked.top = lambda t: {"a": -0.4 / t, "b": -1.4 / t}
    assert await probes_in(probes, asked, clock, 600) == 1
    assert probes.known["http://e/v1"].processed is True
    assert await probes_in(probes, asked, clock, 6000) == 0


def listing(*models: Any) -> Callable[[str], Any]:
    return lambda path: {"object": "list", "data": list(models)} if path == "/v1/models" else {}


@pytest.mark.parametrize(
    ("kind", "models", "registered", "length"),
    [
        *((kind, [{"id": "tiny", "max_model_len": 40}], None, 40) for kind in KINDS),
        ("vllm", [{"id": "tiny", "max_model_len": 40}], 60, 60),
        ("vllm", [{"id": "a", "max_model_len": 9}, {"id": "tiny", "max_model_len": 40}], None, 40),
        ("vllm", [{"id": "/models/under-another-name", "max_model_len": 40}], None, 40),
        ("vllm", [{"id": "a", "max_model_len": 9}, {"id": "b", "max_model_len": 8}], None, 2048),
        ("vllm", [{"id": "tiny"}], None, 2048),
        ("vllm", [{"id": "tiny", "max_model_len": "40"}], None, 2048),
        ("vllm", [{"id": "tiny", "max_model_len": True}], None, 2048),
        ("vllm", [5], None, 2048),
    ],
)
@on_sqlite
async def test_the_context_is_the_engines_own_where_nobody_says(
    world_maker: MakeWorld, kind: Any, models: list[Any], registered: int | None, length: int
) -> None:
    async with world_maker(engine=False) as world, serving(answers(kind, []), listing(*models)) as (url, asked):
        here = EngineModel(model="tiny", endpoint=url, kind=kind, max_model_len=registered)
        await world.admin.register_models([here])
        assert world.gateway.max_model_len() == length
        claim = await world.claim()
        assert (await world.chat(claim.agent_key, {"messages": [{"role": "user", "content": ""}]}))[0] == 200
        _, sent = asked[-1]
        prompt = len(sent.get("prompt") or sent["input_ids"])
        limit = sent.get("max_tokens") or sent["sampling_params"]["max_new_tokens"]
        assert prompt + limit == length
        status, body = await world.chat(claim.agent_key, {"messages": [{"role": "user", "content": "x " * length}]})
        assert status == 400 and f"maximum context length is {length} tokens" in body["error"]["message"]


async def test_an_engine_tells_its_context_again_after_a_restart(world_maker: MakeWorld) -> None:
    found = listing({"id": "tiny", "max_model_len": 99})
    async with serving(answers("vllm", []), found) as (url, _):
        async with world_maker(engine=False) as world:
            await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind="vllm")])
            (shown,) = await world.admin.models()
            assert shown.max_model_len is None and shown.capability is not None
            assert shown.capability.max_model_len == 99
        async with world_maker(engine=False) as world:
            await until(lambda: world.gateway.max_model_len() == 99)
            await world.admin.delete_models()
            assert world.gateway.max_model_len() == 2048


async def test_engines_are_forgotten_by_model_by_address_or_all(world: World) -> None:
    here = [("a", "1"), ("a", "2"), ("b", "1"), ("b", "3")]

    async def left() -> list[tuple[str, str]]:
        return sorted((m.model, m.endpoint[-1]) for m in await world.admin.models() if m.model != "tiny")

    at = "http://127.0.0.1:9"
    await world.admin.register_models([EngineModel(model=m, endpoint=f"{at}/{n}", kind="leyden") for m, n in here])
    await world.admin.delete_models(model="never-was")
    assert await left() == here
    await world.admin.delete_models(model="a", endpoint=f"{at}/2")
    assert await left() == [("a", "1"), ("b", "1"), ("b", "3")]
    await world.admin.delete_models(model="b")
    assert await left() == [("a", "1")]
    claim = await world.claim()
    assert (await world.chat(claim.agent_key, {"messages": USER}))[0] == 200
    await world.admin.delete_models(endpoint=f"{at}/1")
    assert [m.model for m in await world.admin.models()] == ["tiny"]
    await world.admin.delete_models()
    assert await world.admin.models() == []


async def test_the_rollouts_of_an_engine_that_dies_move_to_the_others(world: World) -> None:
    dead = EngineModel(model="tiny", endpoint="http://127.0.0.1:9/v1", kind="leyden")
    await world.admin.register_models([dead])
    names = (f"r{i}" for i in range(1000))
    on_it = [n for n in names if world.gateway.engines.pick(n) == dead][:3]
    for name in on_it:
        claim = await world.claim(rollout_id=name)
        assert (await world.chat(claim.agent_key, {"messages": USER}))[0] == 200
        assert (await calls_of(world, name))[0].engine == world.engine.endpoint


async def test_a_pause_that_couldnt_be_stored_holds_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(key: str, value: Any) -> None:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(world.gateway.store, "set_meta", broken)
    with pytest.raises(StoreUnavailable):
        await world.gateway.pause.pause(PauseRequest(owner="trainer", lease_seconds=60))
    assert not world.gateway.pause.active()

"""What engines say wrongly, or leave out, from the call to the training rows and the report."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from leyden.schema import CaptureConfig, EngineModel, RolloutConfig, Sampling, Trajectory
from leyden.training.rows import build_rows, dropped_totals
from tests.gateway.conftest import ADMIN, MakeWorld, World, everything_stored, on_sqlite
from tests.gateway.scripted_engine import Reply
from tests.gateway.test_engines import serving, vllm_like

USER: Any = [{"role": "user", "content": "x"}]


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


async def ask(world: World, key: str, stream: bool = False, **more: Any) -> str:
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{world.url}/openai/v1/chat/completions"
    async with world.http.post(url, json={"messages": USER, "stream": stream, **more}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.text()


async def trajectory(world: World, rollout_id: str) -> Trajectory:
    return await world.admin.trajectory(rollout_id)


async def readable(world: World, rollout_id: str) -> None:
    """Events and triplets are answered whatever was recorded."""
    for query in ({}, {"format": "triplet"}, {"event_type": "model_request"}):
        await world.admin._call("GET", f"/api/rollouts/{rollout_id}/events", query=query)


@on_sqlite
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 3, 4, 6])
async def test_log_probs_of_another_length_are_absent_and_the_ids_stay(world: World, stream: bool, count: int) -> None:
    claim = await world.claim()
    said = {"token_logprobs": [-0.1] * count}
    world.engine.say(Reply("", ids=[5, 6, 7, 8, 9], override={"logprobs": said}))
    await ask(world, claim.agent_key, stream)
    found = await trajectory(world, claim.rollout.rollout_id)
    (call,) = found.calls
    assert ids(call.response_ids) == [5, 6, 7, 8, 9] and call.logprobs == b""
    assert call.untrainable == f"lengths differ: {count} log-probs for 5 token ids"
    assert (await world.admin.stats())["uncaptured"] == {"lengths differ": 1}
    assert build_rows(found, max_row_tokens=1000)[1].dropped == {"lengths differ": 1}
    await readable(world, claim.rollout.rollout_id)


@on_sqlite
@pytest.mark.parametrize("stream", [False, True])
async def test_ids_in_the_texts_of_tokens_are_read(world: World, stream: bool) -> None:
    claim = await world.claim()
    said = {"tokens": ["token_id:40", "token_id:278"], "token_logprobs": [-0.1, -0.2]}
    world.engine.say(Reply("", ids=[0, 0], override={"logprobs": said}, drop=("token_ids",)))
    await ask(world, claim.agent_key, stream)
    (call,) = (await trajectory(world, claim.rollout.rollout_id)).calls
    assert ids(call.response_ids) == [40, 278] and call.untrainable is None
    np.testing.assert_allclose(np.frombuffer(call.logprobs, "<f4"), [-0.1, -0.2], rtol=1e-6)


MALFORMED = [None, "x", [[1]], [True], [1.5], {}, [-1], [2**40], [None], 7]


@on_sqlite
@pytest.mark.parametrize("value", MALFORMED, ids=repr)
@pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids"])
async def test_malformed_ids_are_a_reason_never_an_error_and_swallow_no_other_call(
    world: World, field: str, value: Any
) -> None:
    claim = await world.claim()
    world.engine.say(
        Reply("", ids=[5], drop=("prompt_token_ids",)),
        Reply("", ids=[6], drop=("prompt_token_ids",)),
        Reply("", ids=[7], override={field: value}),
    )
    for _ in range(3):
        await ask(world, claim.agent_key)
    found = await trajectory(world, claim.rollout.rollout_id)
    first, second, third = found.calls
    # An engine needn't repeat the ids that it was sent; two equal prompts are two samples.
    assert [ids(c.response_ids) for c in (first, second)] == [[5], [6]]
    assert first.untrainable is second.untrainable is None and first.prompt_ids == second.prompt_ids
    good = field == "prompt_token_ids" and value is None
    assert (third.untrainable is None) == good
    rows, report = build_rows(found, max_row_tokens=1000)
    assert len(rows) == report.trained_calls == 2 + good
    await readable(world, claim.rollout.rollout_id)


@on_sqlite
@pytest.mark.parametrize("chat", [False, True])
async def test_choices_that_nobody_asked_for_are_no_guess(world_maker: MakeWorld, chat: bool) -> None:
    def several(path: str, body: dict[str, Any]) -> Any:
        value = vllm_like(False)(path, body)
        return {**value, "choices": [*value["choices"], {**value["choices"][0], "index": 1, "token_ids": [8]}]}

    capture = CaptureConfig(mode="engine" if chat else "bridge")
    async with world_maker(engine=False) as world, serving(several) as (url, _):
        await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind="vllm", max_model_len=99)])
        claim = await world.claim(config=RolloutConfig(capture=capture))
        await ask(world, claim.agent_key)
        (call,) = (await trajectory(world, claim.rollout.rollout_id)).calls
        assert call.untrainable == "choices differ: 2 came where one was asked for"


@on_sqlite
async def test_several_samples_are_calls_of_their_own_also_when_one_is_incomplete(world: World) -> None:
    claim = await world.claim()
    world.engine.say(Reply("", ids=[7]), Reply("", ids=[8], drop=("logprobs",)))
    await ask(world, claim.agent_key, n=2)
    found = await trajectory(world, claim.rollout.rollout_id)
    assert sorted(ids(c.response_ids) for c in found.calls) == [[7], [8]]
    assert sorted((c.untrainable or "").partition(":")[0] for c in found.calls) == ["", "missing field"]
    assert build_rows(found, max_row_tokens=1000)[1].dropped == {"missing field": 1}


@on_sqlite
async def test_an_engine_that_renders_has_to_say_what_it_read(
    world_maker: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    def silent(path: str, body: dict[str, Any]) -> Any:
        value = vllm_like(False)(path, body)
        value.pop("prompt_token_ids", None)
        return value

    async with world_maker(engine=False) as world, serving(silent) as (url, _):
        await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind="vllm")])
        config = RolloutConfig(capture=CaptureConfig(mode="engine"))
        claim = await world.claim(config=config, metadata={"run": "r7"})
        caplog.clear()
        for _ in range(2):
            await ask(world, claim.agent_key)
        loud = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
        assert len(loud) == 1 and "prompt_token_ids" in loud[0] and "r7" in loud[0]
        assert (await world.admin.stats())["uncaptured"] == {"missing field": 2}
        await readable(world, claim.rollout.rollout_id)


CUT = [
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
]


@on_sqlite
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("sampling", CUT, ids=str)
async def test_raw_log_probs_are_no_training_data_when_the_distribution_is_cut(
    world_maker: MakeWorld, raw: bool, sampling: dict[str, Any]
) -> None:
    async with world_maker(engine=False) as world, serving(vllm_like(raw)) as (url, _):
        await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind="vllm", max_model_len=99)])
        claim = await world.claim(config=RolloutConfig(sampling=Sampling(**sampling)))
        await ask(world, claim.agent_key)
        (call,) = (await trajectory(world, claim.rollout.rollout_id)).calls
        assert (call.untrainable or "").startswith("raw log-probs") is raw and (call.untrainable is None) is not raw


ASKED: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.2,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 1.5,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.3,
    "logit_bias": {"50": -100},
}


@on_sqlite
@pytest.mark.parametrize("kind", ["leyden", "vllm", "openai", "sglang"])
async def test_no_sampling_of_a_clients_reaches_an_engine(world_maker: MakeWorld, kind: Any) -> None:
    async with world_maker(engine=False) as world, serving(lambda *_: {}) as (url, asked):
        await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind=kind, max_model_len=99)])
        claim = await world.claim()
        await world.chat(claim.agent_key, {"messages": USER, **ASKED})
        sent = asked[-1][1]
        sent = {**sent, **sent.get("sampling_params", {})}
        neutral = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
                   "presence_penalty": 0.0, "frequency_penalty": 0.0}  # fmt: skip
        assert {name: sent[name] for name in neutral if name in sent} == {n: neutral[n] for n in neutral if n in sent}
        assert sent.get("top_k", 0) in (0, -1) and "logit_bias" not in sent
        (call,) = (await trajectory(world, claim.rollout.rollout_id)).calls
        assert call.requested == ASKED
        used = {name: call.effective[name] for name in ("temperature", "top_p", "top_k")}
        assert used == {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


@on_sqlite
@pytest.mark.parametrize("train", [True, False])
async def test_answers_cut_off_are_counted_and_left_out_where_the_run_says_so(world: World, train: bool) -> None:
    capture = CaptureConfig() if train else CaptureConfig(train_truncated=False)
    claim = await world.claim(config=RolloutConfig(capture=capture))
    cut = Reply("", ids=[17], finish_reason="length")
    world.engine.say(cut, cut, cut, Reply("fine"))
    for _ in range(4):
        await ask(world, claim.agent_key)
    found = await trajectory(world, claim.rollout.rollout_id)
    assert [c.finish_reason for c in found.calls] == ["length"] * 3 + ["stop"]
    rows, report = build_rows(found, max_row_tokens=1000)
    if train:
        assert len(rows) == 4 and report.truncated == 3 and report.dropped == {}
    else:
        assert len(rows) == 1 and report.truncated == 0 and report.dropped == {"truncated": 3}
        assert (await world.admin.stats())["uncaptured"] == {"truncated": 3}


@on_sqlite
async def test_a_batch_without_rows_says_why_rollout_by_rollout(world: World) -> None:
    refused = Reply(status=400, error={"error": {"message": "no"}})
    scripts: dict[str, list[Reply]] = {"refused": [refused] * 3, "empty": [Reply(ids=[])], "long": [], "idle": []}
    reports = []
    for name, replies in scripts.items():
        claim = await world.claim(rollout_id=name)
        world.engine.say(*replies)
        for _ in replies:
            await world.chat(claim.agent_key, {"messages": USER})
        if name == "long":
            status, _ = await world.chat(claim.agent_key, {"messages": [{"role": "user", "content": "x " * 3000}]})
            assert status == 400
        rows, report = build_rows(await trajectory(world, name), max_row_tokens=100)
        assert rows == []
        reports.append(report)
    assert [(r.rollout_id, r.calls, r.dropped) for r in reports] == [
        ("refused", 3, {"engine refused": 3}),
        ("empty", 1, {"empty answer": 1}),
        ("long", 1, {"prompt too long": 1}),
        ("idle", 0, {}),
    ]
    assert dropped_totals(reports) == {"engine refused": 3, "empty answer": 1, "prompt too long": 1, "no_calls": 1}
    assert (await world.admin.stats())["uncaptured"] == {"engine refused": 3, "empty answer": 1, "prompt too long": 1}


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "x-goog-api-key"])
async def test_a_key_is_neither_logged_nor_stored_nor_passed_on(
    world_maker: MakeWorld, caplog: pytest.LogCaptureFixture, header: str
) -> None:
    caplog.set_level(logging.DEBUG)
    async with world_maker(engine_key="engine-secret") as world:
        claim = await world.claim(grader=True)
        key = claim.agent_key
        headers = {header: f"Bearer {key}" if header == "Authorization" else key, "Cookie": f"k={key}"}
        world.engine.say("ok", Reply(cut=True), Reply("", drop=("token_ids",)))
        for path, body in (
            ("/openai/v1/chat/completions", {"messages": USER}),
            ("/anthropic/v1/messages", {"messages": USER, "max_tokens": 5}),
            ("/openai/v1/responses", {"input": "x"}),
            ("/openai/v1/nonsense", {}),
            ("/api/rollouts", []),
        ):
            async with world.http.post(world.url + path, json=body, headers=headers) as answer:
                assert key not in await answer.text()
        secrets = [key, claim.grader_key or "", ADMIN, "engine-secret"]
        stored = await everything_stored(world)
        assert len(world.engine.requests) == 3 and str(world.engine.headers).count("Bearer engine-secret") == 3
        for secret in secrets:
            assert secret not in caplog.text and secret.encode() not in stored
            assert secret not in str(world.engine.requests)
        sent = str(world.engine.headers)
        assert not any(secret in sent for secret in secrets[:3])
        shown = str(await world.admin.events(claim.rollout.rollout_id))
        found = str(await world.admin.trajectory(claim.rollout.rollout_id, content=True))
        assert not any(secret in shown + found for secret in secrets)

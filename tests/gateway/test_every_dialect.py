"""What holds in every dialect, streamed or not: ends, errors and engines that misbehave."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from aiohttp import web

from leyden.schema import CallRecord, EngineModel
from leyden.training.rows import build_rows
from tests.gateway.conftest import MakeWorld, World, on_sqlite
from tests.gateway.scripted_engine import END, Reply

USER: Any = [{"role": "user", "content": "What is 1+1?"}]
SCHEMA: Any = {"type": "object", "properties": {}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@dataclass(frozen=True)
class Way:
    """A dialect, and how it says things."""

    path: str
    body: dict[str, Any]
    tools: Any
    stream_path: str
    timeout: str
    """What its errors call a timeout."""
    overflow: str
    cut: str
    """How it says that an answer reached its limit."""

    def long(self) -> dict[str, Any]:
        return orjson.loads(orjson.dumps(self.body).replace(b"What is 1+1?", b"word " * 3000))


CHAT = {"messages": USER}
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
OPENAI = "maximum context length is 2048 tokens"
WAYS = {
    "chat": Way("/openai/v1/chat/completions", CHAT, [FUNCTION], "", "server_error", OPENAI, "length"),
    "completions": Way(
        "/openai/v1/completions", {"prompt": "What is 1+1?"}, None, "", "server_error", OPENAI, "length"
    ),
    "responses": Way(
        "/openai/v1/responses", {"input": "What is 1+1?"}, [{"type": "function", "name": "add", "parameters": SCHEMA}],
        "", "server_error", OPENAI, "max_output_tokens",
    ),
    "anthropic": Way(
        "/anthropic/v1/messages", {**CHAT, "max_tokens": 50}, [{"name": "add", "input_schema": SCHEMA}],
        "", "timeout_error", "prompt is too long: ", "max_tokens",
    ),
    "gemini": Way(
        "/gemini/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "What is 1+1?"}]}]},
        [{"functionDeclarations": [{"name": "add", "parametersJsonSchema": SCHEMA}]}],
        "/gemini/v1beta/models/m:streamGenerateContent?alt=sse", "DEADLINE_EXCEEDED",
        "exceeds the maximum number of tokens allowed (2048)", "MAX_TOKENS",
    ),
}  # fmt: skip
in_every_dialect = pytest.mark.parametrize("name", WAYS)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])


@dataclass
class Got:
    status: int
    headers: Any
    text: str
    stream: bool

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = [line.removeprefix("data: ") for line in self.text.split("\n") if line.startswith("data: ")]
        return [orjson.loads(line) for line in lines if line != "[DONE]"]

    @property
    def error(self) -> dict[str, Any]:
        """The error, in the status's body or as the last event but those that only end the stream."""
        if self.stream and self.status == 200:
            last = [e for e in self.events if e.get("type") != "response.failed"][-1]
            return last["error"]
        return orjson.loads(self.text)["error"]


async def ask(world: World, key: str, name: str, stream: bool, **more: Any) -> Got:
    way = WAYS[name]
    body = {**way.body, **more}
    path = way.path
    if stream and way.stream_path:
        path = way.stream_path
    elif stream:
        body["stream"] = True
    headers = {"Authorization": f"Bearer {key}"}
    async with world.http.post(world.url + path, json=body, headers=headers) as answer:
        return Got(answer.status, answer.headers, (await answer.read()).decode(), stream)


async def recorded(world: World, rollout_id: str) -> list[CallRecord]:
    return (await world.admin.trajectory(rollout_id)).calls


def ended_as_it_should(name: str, got: Got) -> bool:
    """Whether a streamed answer ends with its dialect's terminator."""
    last = got.events[-1]
    if name in ("chat", "completions"):
        return got.text.endswith("data: [DONE]\n\n")
    if name == "gemini":
        return "finishReason" in last.get("candidates", [{}])[0]
    return last["type"] in ("response.completed", "response.incomplete", "message_stop")


@asynccontextmanager
async def silent_engine() -> AsyncIterator[tuple[str, list[int]]]:
    """Accepts connections and never says a word."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1", connections
    finally:
        listener.close()


@on_sqlite
@in_every_dialect
@streamed_or_not
async def test_an_engine_that_stays_silent_is_a_timeout(world_maker: MakeWorld, name: str, stream: bool) -> None:
    async with silent_engine() as (url, connections), world_maker(engine=False, request_timeout_seconds=0.4) as world:
        here = EngineModel(model="tiny", endpoint=url, kind="leyden", max_model_len=2048)
        await world.admin.register_models([here])
        claim = await world.claim()
        got = await ask(world, claim.agent_key, name, stream)
        assert got.status == 504 and "no answer within 0.4 s" in got.error["message"]
        assert WAYS[name].timeout in (got.error.get("type"), got.error.get("status"))
        (call,) = await recorded(world, claim.rollout.rollout_id)
        assert (call.untrainable or "").startswith("timeout: ") and not call.delivered
        assert len(connections) == 1 and world.gateway.pause.inflight == 0


@on_sqlite
@in_every_dialect
@streamed_or_not
@pytest.mark.parametrize("begun", [False, True])
async def test_an_engine_that_breaks_off_is_an_error_never_a_short_answer(
    world_maker: MakeWorld, name: str, stream: bool, begun: bool
) -> None:
    async with world_maker(keepalive_seconds=0.05 if begun else 5) as world:
        claim = await world.claim()
        world.engine.say(Reply("this is cut in the middle", cut=True, delay=0.3 if begun else 0))
        got = await ask(world, claim.agent_key, name, stream)
        assert got.status == (200 if begun else 502)
        assert "broke off" in got.error["message"]
        if begun and stream:
            assert not ended_as_it_should(name, got) and len(got.events) > 1
        elif begun:
            assert got.text.startswith("\n")  # White space, while the client had to wait.
        assert "this is" not in got.text
        trajectory = await world.admin.trajectory(claim.rollout.rollout_id)
        (call,) = trajectory.calls
        assert (call.untrainable or "").startswith("engine failed: ") and not call.delivered
        assert build_rows(trajectory, max_row_tokens=100)[0] == []


@on_sqlite
@in_every_dialect
@streamed_or_not
async def test_how_an_engine_sends_is_not_how_a_client_gets_it(world_maker: MakeWorld, name: str, stream: bool) -> None:
    """An engine behind a proxy that compresses, unasked."""

    async def compressed(request: web.Request) -> web.Response:
        body = await request.json()
        choice = {
            "text": "", "finish_reason": "stop", "token_ids": [*sampled, END],
            "logprobs": {"token_logprobs": [-0.5] * (len(sampled) + 1)},
        }  # fmt: skip
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(sampled) + 1}
        packed = gzip.compress(orjson.dumps({"choices": [choice], "usage": usage}))
        return web.Response(body=packed, headers={"Content-Encoding": "gzip", "X-Engine": "1"})

    app = web.Application()
    app.router.add_post("/v1/completions", compressed)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with world_maker(engine=False) as world:
            sampled = world.engine.tokenizer.encode("你🌍", add_special_tokens=False)
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            await world.admin.register_models([EngineModel(model="tiny", endpoint=url, kind="leyden")])
            claim = await world.claim()
            got = await ask(world, claim.agent_key, name, stream)
            assert got.status == 200 and "你🌍" in got.text
            assert "Content-Encoding" not in got.headers and "X-Engine" not in got.headers
            if stream:
                assert "Content-Length" not in got.headers and ended_as_it_should(name, got)
            else:
                assert int(got.headers["Content-Length"]) == len(got.text.encode())
            (call,) = await recorded(world, claim.rollout.rollout_id)
            assert call.untrainable is None and call.delivered
    finally:
        await runner.cleanup()


def endings(name: str, got: Got) -> list[str]:
    """Every reason for its end that an answer gives."""
    values = got.events if got.stream else [orjson.loads(got.text)]
    if name in ("chat", "completions"):
        return [c["finish_reason"] for v in values for c in v["choices"] if c["finish_reason"] is not None]
    if name == "gemini":
        return [c["finishReason"] for v in values for c in v["candidates"] if "finishReason" in c]
    if name == "anthropic":
        said = [v["delta"] if got.stream else v for v in values if v["type"] in ("message_delta", "message")]
        return [v["stop_reason"] for v in said]
    last = values[-1]["response"] if got.stream else values[-1]
    return [(last["incomplete_details"] or {"reason": last["status"]})["reason"]]


@on_sqlite
@in_every_dialect
@streamed_or_not
async def test_an_answer_ends_once_for_its_own_reason(world: World, name: str, stream: bool) -> None:
    claim = await world.claim()
    tools = WAYS[name].tools
    more = {"tools": tools} if tools else {}
    called = {"chat": "tool_calls", "anthropic": "tool_use", "gemini": "STOP", "responses": "completed"}
    stopped = {**called, "chat": "stop", "completions": "stop", "anthropic": "end_turn"}
    for reply, reason in (
        (Reply("text"), stopped[name]),
        (Reply(f"Let me see.{CALL}"), called.get(name, "stop")),
        (Reply(CALL, finish_reason="tool_calls"), called.get(name, "stop")),
        (Reply("cut", finish_reason="length", close=False), WAYS[name].cut),
        (Reply(CALL, finish_reason="length", close=False), WAYS[name].cut),
        (Reply(f'{CALL}<tool_call>\n{{"name', finish_reason="length", close=False), WAYS[name].cut),
    ):
        world.engine.say(reply)
        got = await ask(world, claim.agent_key, name, stream, **more)
        assert endings(name, got) == [reason], (reply, got.text)
        assert not stream or ended_as_it_should(name, got)


@on_sqlite
@in_every_dialect
@streamed_or_not
async def test_an_answer_without_a_token_is_whole_for_the_client_and_no_training_data(
    world: World, name: str, stream: bool
) -> None:
    claim = await world.claim()
    world.engine.say(Reply(ids=[]))
    got = await ask(world, claim.agent_key, name, stream)
    assert got.status == 200 and len(endings(name, got)) == 1
    trajectory = await world.admin.trajectory(claim.rollout.rollout_id)
    assert (trajectory.calls[0].untrainable or "").startswith("empty answer")
    rows, report = build_rows(trajectory, max_row_tokens=1000)
    assert rows == [] and report.dropped == {"empty answer": 1}


@on_sqlite
@in_every_dialect
@streamed_or_not
async def test_an_overflow_keeps_its_status_and_its_words(world: World, name: str, stream: bool) -> None:
    claim = await world.claim()
    got = await ask(world, claim.agent_key, name, stream, **WAYS[name].long())
    assert got.status == 400 and WAYS[name].overflow in got.error["message"]
    if name in ("chat", "completions", "responses"):
        assert got.error["code"] == "context_length_exceeded"
    assert world.engine.requests == []


@on_sqlite
@pytest.mark.parametrize("name", ["chat", "completions"])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_usage_is_streamed_only_to_those_who_ask_and_always_kept(world: World, name: str, options: Any) -> None:
    claim = await world.claim()
    more = {} if options is None else {"stream_options": options}
    got = await ask(world, claim.agent_key, name, True, **more)
    asked = bool(options and options["include_usage"]) if options else False
    assert sum(not e["choices"] for e in got.events) == (1 if asked else 0)
    assert any("usage" in e for e in got.events) is asked
    (event,) = await world.admin.events(claim.rollout.rollout_id, "model_request")
    (call,) = await recorded(world, claim.rollout.rollout_id)
    kept = {"prompt_tokens": len(call.prompt_ids) // 4, "completion_tokens": len(call.response_ids) // 4}
    assert event.data["response"]["usage"] == {**kept, "total_tokens": sum(kept.values())}
    if asked:
        assert got.events[-1]["usage"] == event.data["response"]["usage"]


@on_sqlite
async def test_each_of_several_streamed_choices_ends_once(world: World) -> None:
    claim = await world.claim()
    world.engine.say(Reply("a"), Reply(CALL), Reply("c", finish_reason="length", close=False))
    got = await ask(world, claim.agent_key, "chat", True, n=3, tools=[FUNCTION])
    ends = {c["index"]: c["finish_reason"] for e in got.events for c in e["choices"] if c["finish_reason"]}
    assert sorted(ends.values()) == ["length", "stop", "tool_calls"] and len(endings("chat", got)) == 3
    calls = await recorded(world, claim.rollout.rollout_id)
    assert len(calls) == 3 and all(c.untrainable is None and c.delivered for c in calls)

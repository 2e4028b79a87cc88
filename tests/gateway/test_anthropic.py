"""Anthropic Messages over HTTP, with the real client: what is answered and what is recorded."""

from __future__ import annotations

from typing import Any

import anthropic
import orjson
import pytest

from leyden.gateway.dialects.anthropic import AnthropicMessages, signature
from leyden.gateway.dialects.base import Context
from leyden.schema import CallRecord, PauseRequest
from tests.gateway.conftest import MakeWorld, World
from tests.gateway.scripted_engine import Reply

USER: Any = [{"role": "user", "content": "What is 1+1?"}]
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
PATH = "/anthropic/v1/messages"


def client(world: World, key: str, **more: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"{world.url}/anthropic", api_key=key, max_retries=0, **more)


async def recorded(world: World, rollout_id: str) -> list[CallRecord]:
    return (await world.admin.trajectory(rollout_id, content=True)).calls


async def events_of(world: World, key: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer, their grammar checked."""
    headers = {"x-api-key": key, "anthropic-version": "2099-01-01", "anthropic-beta": "unheard-of"}
    async with world.http.post(f"{world.url}{PATH}?beta=true", json={**body, "stream": True}, headers=headers) as got:
        assert got.status == 200 and got.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in got.headers
        text = (await got.read()).decode()
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    check_grammar(events)
    return events


def check_grammar(events: list[dict[str, Any]]) -> None:
    """ping* message_start (start delta* stop)* message_delta message_stop, block indices 0, 1, 2, …"""
    rest = [e for e in events if e["type"] != "ping"]
    assert [e["type"] for e in rest[:1] + rest[-2:]] == ["message_start", "message_delta", "message_stop"]
    opened, next_index = None, 0
    fits = {"text": {"text_delta"}, "thinking": {"thinking_delta", "signature_delta"}, "tool_use": {"input_json_delta"}}
    for event in rest[1:-2]:
        if event["type"] == "content_block_start":
            assert opened is None and event["index"] == next_index
            opened, next_index = event["content_block"]["type"], next_index + 1
        elif event["type"] == "content_block_delta":
            assert opened is not None and event["index"] == next_index - 1 and event["delta"]["type"] in fits[opened]
        else:
            assert event["type"] == "content_block_stop" and opened is not None and event["index"] == next_index - 1
            opened = None
    assert opened is None and next_index > 0


@pytest.mark.parametrize(
    ("said", "kinds", "stop"),
    [
        ("two", ["text"], "end_turn"),
        (ONE, ["tool_use"], "tool_use"),
        (f"Let me see. {ONE}\n{ONE}", ["text", "tool_use", "tool_use"], "tool_use"),
        (f"<think>hm 🌍</think>\n{ONE}", ["thinking", "tool_use"], "tool_use"),
        ("<think>only this</think>", ["thinking", "text"], "end_turn"),
        ("", ["text"], "end_turn"),
    ],
)
async def test_json_and_stream_say_the_same(world: World, said: str, kinds: list[str], stop: str) -> None:
    claim = await world.claim()
    world.engine.say(said, said, said)
    agent = client(world, claim.agent_key)
    asked: Any = {"model": "m", "max_tokens": 50, "messages": USER, "tools": [TOOL]}
    plain = await agent.messages.create(**asked)
    async with agent.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert [b.type for b in plain.content] == kinds and plain.stop_reason == streamed.stop_reason == stop
    ids = lambda m: [b.model_dump(exclude={"id", "parsed_output"}) for b in m.content]  # noqa: E731
    assert ids(plain) == ids(streamed)
    calls = await recorded(world, claim.rollout.rollout_id)
    assert len(calls) == 2 and all(c.dialect == "anthropic-messages" and c.delivered for c in calls)
    assert calls[0].response_ids == calls[1].response_ids
    events = await events_of(world, claim.agent_key, asked)
    assert [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"] == kinds
    assert len(await recorded(world, claim.rollout.rollout_id)) == 3  # One for each request.
    usage = (plain.usage.input_tokens, plain.usage.output_tokens)
    assert usage == (len(calls[0].prompt_ids) // 4, len(calls[0].response_ids) // 4)
    assert (streamed.usage.input_tokens, streamed.usage.output_tokens) == usage


async def test_events_follow_the_grammar_also_after_a_long_wait(world_maker: MakeWorld) -> None:
    async with world_maker(keepalive_seconds=0.05) as world:
        claim = await world.claim()
        world.engine.say(Reply(f"<think>a</think>b{ONE}{ONE}", delay=0.3))
        events = await events_of(world, claim.agent_key, {"max_tokens": 9, "messages": USER, "tools": [TOOL]})
        assert [e["type"] for e in events[:2]] == ["ping", "ping"]


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("stream", [False, True])
async def test_system_messages_keep_their_place(world: World, role: str, stream: bool) -> None:
    claim = await world.claim()
    messages = [
        {"role": "user", "content": "hi"},
        {"role": role, "content": [{"type": "text", "text": "note", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "go"},
    ]
    body = {"model": "m", "max_tokens": 16, "system": "S", "messages": messages, "stream": stream}
    headers = {"Authorization": f"Bearer {claim.agent_key}"}
    for _ in range(2):
        async with world.http.post(world.url + PATH, json=body, headers=headers) as got:
            assert got.status == 200
        messages[1]["content"] = "note"
    calls = await recorded(world, claim.rollout.rollout_id)
    for call in calls:
        assert call.request is not None
        said = [(m["role"], m["content"]) for m in call.request["messages"]]
        assert said == [("system", "S"), ("user", "hi"), ("system", "note"), ("user", "go")]
    assert calls[0].prompt_ids == calls[1].prompt_ids


async def test_a_tool_conversation_is_continued_token_for_token(world: World) -> None:
    claim = await world.claim()
    agent = client(world, claim.agent_key)
    world.engine.say(f"<think>a</think>Both. {ONE}\n{ONE}", "done")
    asked: Any = {"model": "m", "max_tokens": 50, "tools": [TOOL]}
    first = await agent.messages.create(messages=USER, **asked)
    uses = [b for b in first.content if b.type == "tool_use"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": uses[1].id, "content": [{"type": "text", "text": "2"}]},
        {"type": "tool_result", "tool_use_id": uses[0].id, "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    history = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    await agent.messages.create(messages=history, **asked)
    one, two = await recorded(world, claim.rollout.rollout_id)
    assert two.parent == one.call_id and two.break_reason is None
    assert two.prompt_ids.startswith(one.prompt_ids + one.response_ids)
    assert two.request is not None
    said = [(m["role"], m["content"]) for m in two.request["messages"][2:]]
    assert said == [("tool", "2"), ("tool", ""), ("user", "Go on.")]


async def test_counting_tokens_is_no_call(world: World) -> None:
    claim = await world.claim()
    agent = client(world, claim.agent_key)
    turns: Any = list(USER)
    for _ in range(2):  # A new conversation, and one that goes on from recorded tokens.
        asked: Any = {"model": "m", "system": "S", "messages": turns, "tools": [TOOL]}
        counted = await agent.beta.messages.count_tokens(**asked)
        answer = await agent.messages.create(max_tokens=5, **asked)
        assert counted.input_tokens == answer.usage.input_tokens
        turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And 2+2?"}]
    calls = await recorded(world, claim.rollout.rollout_id)
    assert len(calls) == len(world.engine.requests) == 2 and calls[1].parent == calls[0].call_id


async def test_an_overflow_is_told_in_the_words_that_make_clients_compact(world: World) -> None:
    claim = await world.claim()
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2048 maximum"):
        await client(world, claim.agent_key).messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "word " * 3000}]
        )


async def test_stop_reasons(world: World) -> None:
    claim = await world.claim()
    agent = client(world, claim.agent_key)
    world.engine.say(Reply("cut", finish_reason="length", close=False), Reply("a END", stop_reason="END", close=False))
    cut = await agent.messages.create(model="m", max_tokens=9, messages=USER)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    ended = await agent.messages.create(model="m", max_tokens=9, messages=USER, stop_sequences=["END"])
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "END")
    assert world.engine.requests[1]["stop"] == ["END"]


async def test_errors_have_the_dialects_shape(world: World) -> None:
    claim = await world.claim()
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        await client(world, "wrong").messages.create(model="m", max_tokens=9, messages=USER)
    assert unknown.value.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "this key isn't known here"},
    }
    async with world.http.get(f"{world.url}/anthropic/v1/nonsense") as got:
        assert got.status == 404 and (await got.json())["error"]["type"] == "not_found_error"
    models = await client(world, claim.agent_key).models.list()
    assert [m.id for m in models.data] == ["tiny"]


async def test_an_engine_that_dies_in_a_begun_stream_is_an_error_event(world_maker: MakeWorld) -> None:
    async with world_maker(keepalive_seconds=0.05) as world:
        claim = await world.claim()
        await world.admin.pause(PauseRequest(owner="t", lease_seconds=0.3))
        world.engine.say(Reply(cut=True))
        with pytest.raises(anthropic.APIStatusError, match="broke off"):
            async with client(world, claim.agent_key).messages.stream(model="m", max_tokens=9, messages=USER) as stream:
                await stream.get_final_message()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"system": [5]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0]"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "'sub'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": "0.7"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": {}}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": "5"}, "top_k"),
        ({"thinking": "adaptive"}, "thinking"),
    ],
)
async def test_what_would_change_the_meaning_is_refused_by_name(
    world: World, change: dict[str, Any], named: str
) -> None:
    claim = await world.claim()
    status, body = await world.chat(claim.agent_key, {"max_tokens": 5, "messages": USER, **change}, PATH)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert named in body["error"]["message"]
    assert world.engine.requests == []


def test_what_harnesses_send_beside_is_read_over() -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": t, **marked} for t in ("x-header: a=1;", "You are an agent.", "Rules.")]
    note = {"role": "system", "content": [{"type": "text", "text": "note", **marked}]}
    thought = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
    use = {"type": "tool_use", "id": "toolux", "name": "add", "input": {"a": 1}, **marked}
    result = {"type": "tool_result", "tool_use_id": "toolux", "content": [{"type": "text", "text": "2"}], **marked}
    body = {
        "model": "m",
        "max_tokens": 128000,
        "stream": True,
        "system": system,
        "messages": [
            *USER,
            note,
            {"role": "assistant", "content": [thought, use]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{**TOOL, "defer_loading": True, "eager_input_streaming": True, **marked}],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": '{"session_id": "s"}'},
        "temperature": 1,
    }
    request = AnthropicMessages().parse(body, Context(headers={"anthropic-beta": "a,b,c"}))
    assert [(m["role"], m["content"]) for m in request.messages] == [
        ("system", "x-header: a=1;\n\nYou are an agent.\n\nRules."),
        ("user", "What is 1+1?"),
        ("system", "note"),
        ("assistant", ""),
        ("tool", "2"),
    ]
    assert request.messages[3]["reasoning_content"] == "hm" and request.response_format is None
    assert request.tools is not None and request.tools[0]["function"]["name"] == "add" and request.max_tokens == 128000


def test_choices_and_images_reach_the_internal_form() -> None:
    parse = AnthropicMessages().parse
    choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    request = parse({"messages": USER, "tools": [TOOL], "tool_choice": choice}, Context())
    assert (request.tool_choice, request.tool_name, request.parallel_tool_calls) == ("required", "add", False)
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "?"}]
    request = parse({"messages": [{"role": "user", "content": content}]}, Context())
    assert request.has_images()
    assert request.messages[0]["content"] == [
        {"type": "image", "url": "data:image/png;base64,AA=="},
        {"type": "text", "text": "?"},
    ]


def test_a_signature_depends_on_the_text_alone() -> None:
    assert signature("a") == signature("a") != signature("b")

"""Chat completions over HTTP, with the real client: what is answered and what is recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

from leyden.gateway.dialects.base import Context
from leyden.gateway.dialects.openai_chat import OpenAIChat
from leyden.schema import CallRecord, RolloutConfig, Sampling
from tests.gateway.conftest import World
from tests.gateway.scripted_engine import Reply

USER: Any = [{"role": "user", "content": "What is 1+1?"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL_TEXT = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


async def recorded(world: World, rollout_id: str, content: bool = False) -> list[CallRecord]:
    return (await world.admin.trajectory(rollout_id, content=content)).calls


async def test_json_and_stream_record_the_same(world: World) -> None:
    claim = await world.claim()
    agent = world.agent(claim.agent_key)
    for text in ("2 你🌍", CALL_TEXT):
        world.engine.say(text, text)
    seen = []
    for tools in (openai.omit, [TOOL]):
        plain = await agent.chat.completions.create(model="any", messages=USER, tools=tools)
        chunks = [
            c async for c in await agent.chat.completions.create(model="any", messages=USER, tools=tools, stream=True)
        ]
        message = plain.choices[0].message
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == (message.content or "")
        assert sum(c.choices[0].finish_reason is not None for c in chunks) == 1
        assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason
        assert all(c.usage is None and c.choices for c in chunks)
        seen.append(message)
    assert seen[0].content == "2 你🌍" and not seen[0].tool_calls
    assert seen[1].content == "Let me see."
    assert seen[1].tool_calls[0].function.name == "add"
    assert seen[1].tool_calls[0].function.arguments == '{"a": 1, "b": "é"}'
    calls = await recorded(world, claim.rollout.rollout_id)
    assert len(calls) == 4
    for a, b in (calls[:2], calls[2:]):
        assert (a.prompt_ids, a.response_ids, a.logprobs, a.versions) == (
            b.prompt_ids,
            b.response_ids,
            b.logprobs,
            b.versions,
        )
        assert a.delivered and b.delivered and a.untrainable is None
    for call, asked in zip(calls, world.engine.requests, strict=True):
        assert ids(call.prompt_ids) == asked["prompt"]
        assert ids(call.response_ids)[-1] == 2
        assert set(ids(call.versions)) == {7}


async def test_streamed_tool_calls_have_indexed_deltas(world: World) -> None:
    claim = await world.claim()
    world.engine.say(CALL_TEXT + "\n<tool_call>\n" + '{"name": "add", "arguments": {}}' + "\n</tool_call>")
    async with world.agent(claim.agent_key).chat.completions.stream(model="m", messages=USER, tools=[TOOL]) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [c.function.arguments for c in calls] == ['{"a": 1, "b": "é"}', "{}"]
    assert final.choices[0].finish_reason == "tool_calls"
    assert all(c.id.isalnum() and len(c.id) <= 40 for c in calls)


async def test_multi_turn_prompts_extend_the_recorded_tokens(world: World) -> None:
    claim = await world.claim()
    # An encoding of the text that the tokenizer itself would not choose: re-encoding would be noticed.
    odd = [ord_id for ch in "two" for ord_id in world.engine.tokenizer.encode(ch, add_special_tokens=False)] + [2]
    world.engine.say(Reply("two", ids=odd), Reply("cut", finish_reason="length", close=False), "last")
    messages = list(USER)
    agent = world.agent(claim.agent_key)
    for follow_up in ("And 2+2?", [{"type": "text", "text": "go on"}], None):
        answer = await agent.chat.completions.create(model="m", messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        if follow_up is not None:
            messages.append({"role": "user", "content": follow_up})
    first, second, third = await recorded(world, claim.rollout.rollout_id)
    assert ids(first.response_ids) == odd
    before = ids(first.prompt_ids) + ids(first.response_ids)
    assert ids(second.prompt_ids)[: len(before)] == before
    assert second.parent == first.call_id and second.break_reason is None
    # An answer that was cut off isn't closed as if it had ended: the prompt is rendered anew.
    assert third.parent is None and third.break_reason == "truncated"
    assert len(ids(first.prompt_ids)) <= (third.break_index or 0) < len(before)
    text = world.engine.tokenizer.decode(ids(third.prompt_ids))
    assert text.endswith(
        "<|im_start|>assistant\ncut<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )
    content = await recorded(world, claim.rollout.rollout_id, content=True)
    assert [m["content"] for m in (content[2].request or {})["messages"]] == [
        "What is 1+1?",
        "two",
        "And 2+2?",
        "cut",
        "go on",
    ]
    assert (content[2].response or {})["content"] == "last"


async def test_rewritten_history_is_a_break_and_a_title_call_is_not(world: World) -> None:
    claim = await world.claim()
    agent = world.agent(claim.agent_key)
    world.engine.say("answer", "title", "third")
    await agent.chat.completions.create(model="m", messages=USER)
    await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Give a title"}])
    changed = [*USER, {"role": "assistant", "content": "something else"}, {"role": "user", "content": "go"}]
    await agent.chat.completions.create(model="m", messages=changed)
    first, title, third = await recorded(world, claim.rollout.rollout_id)
    assert title.parent is None and title.break_reason is None
    assert third.parent is None and third.break_reason == "history_rewritten"
    assert third.break_index is not None and third.break_index >= len(ids(first.prompt_ids))
    assert ids(third.prompt_ids) == world.engine.requests[2]["prompt"]


async def test_tool_results_continue_with_reserialised_arguments(world: World) -> None:
    claim = await world.claim()
    world.engine.say(CALL_TEXT, "3")
    agent = world.agent(claim.agent_key)
    await agent.chat.completions.create(model="m", messages=USER, tools=[TOOL])
    echo = {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"id": "x1", "type": "function", "function": {"name": "add", "arguments": '{"b":"\\u00e9","a":1}'}}
        ],
    }
    history: Any = [*USER, echo, {"role": "tool", "tool_call_id": "x1", "content": [{"type": "text", "text": "3"}]}]
    await agent.chat.completions.create(model="m", messages=history, tools=[TOOL])
    first, second = await recorded(world, claim.rollout.rollout_id)
    assert second.parent == first.call_id
    world.engine.say("again")
    await agent.chat.completions.create(model="m", messages=history)
    third = (await recorded(world, claim.rollout.rollout_id))[2]
    assert third.break_reason == "tools_changed" and third.parent is None


@pytest.mark.parametrize("arguments", ['{"a":3}', "", "{bad"])
async def test_any_argument_text_in_history_is_rendered(world: World, arguments: str) -> None:
    claim = await world.claim()
    function = {"name": "add", "arguments": arguments}
    echo = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    body = {"messages": [*USER, echo, {"role": "tool", "tool_call_id": "1", "content": "3"}], "tools": [TOOL]}
    status, _ = await world.chat(claim.agent_key, body)
    assert status == 200
    call = (await recorded(world, claim.rollout.rollout_id, content=True))[0]
    assert (call.request or {})["messages"][1]["tool_calls"][0]["function"]["arguments"] == arguments


async def test_message_shapes_are_equal(world: World) -> None:
    claim = await world.claim()
    shapes = [
        [{"role": "developer", "content": [{"type": "text", "text": "S"}]}, {"role": "user", "content": "x"},
         {"role": "assistant", "content": None}, {"role": "user", "content": "y"}],
        [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "x"}]},
         {"role": "assistant"}, {"role": "user", "content": "y"}],
        [{"role": "system", "content": "S"}, {"role": "user", "content": "x"},
         {"role": "assistant", "content": ""}, {"role": "user", "content": "y", "cache_control": {"type": "e"}}],
    ]  # fmt: skip
    for messages in shapes:
        assert (await world.chat(claim.agent_key, {"messages": messages}))[0] == 200
    assert len({tuple(r["prompt"]) for r in world.engine.requests}) == 1


def test_what_harnesses_send_is_read_in_every_shape() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    body: dict[str, Any] = {
        "messages": [
            {"role": "developer", "content": parts},
            {"role": "user", "name": "ann", "content": parts},
            {"role": "assistant", "content": parts, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "name": "add", "tool_call_id": "c", "content": parts},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "function_call": None},
            {"role": "user", "content": ""},
        ],
        "tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}],
        "tool_choice": "required",
        "stop": ["Observation:", "</code>"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 65536,
        "reasoning_effort": "high",
        "prompt_cache_key": "k",
        "temperature": 0,
        "store": False,
        "user": "u",
    }
    request = OpenAIChat().parse(body, Context())
    assert [(m["role"], m["content"]) for m in request.messages] == [
        ("system", "ab"), ("user", "ab"), ("assistant", "ab"), ("tool", "ab"), ("assistant", ""), ("user", "")
    ]  # fmt: skip
    assert request.messages[1]["name"] == "ann" and request.messages[3]["name"] == "add"
    assert request.messages[2]["tool_calls"] == [call] and request.messages[4]["reasoning_content"] == "hm"
    assert (request.tool_choice, request.stop, request.max_tokens) == ("required", ["Observation:", "</code>"], 65536)
    assert request.include_usage and request.stream and request.response_format is None
    for shape in ({"max_completion_tokens": 1}, {"max_tokens": None}, {"response_format": {"type": "json_object"}}):
        assert OpenAIChat().parse({"messages": USER, **shape}, Context()).max_tokens == shape.get(
            "max_completion_tokens"
        )


async def test_sampling_is_the_runs_and_both_are_recorded(world: World) -> None:
    config = RolloutConfig(sampling=Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=20))
    claim = await world.claim(config=config)
    body = {"messages": USER, "temperature": 0, "top_p": 0.1, "max_tokens": 32000, "stop": ["END"], "seed": 1}
    assert (await world.chat(claim.agent_key, body))[0] == 200
    asked = world.engine.requests[0]
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["max_tokens"]) == (0.7, 0.9, 5, 20)
    assert asked["stop"] == ["END"] and "seed" not in asked and 2 in asked["stop_token_ids"]
    call = (await recorded(world, claim.rollout.rollout_id))[0]
    assert call.requested == {k: v for k, v in body.items() if k != "messages"}
    assert call.effective == {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 20, "stop": ["END"]}
    default = await world.claim()
    await world.chat(default.agent_key, {"messages": USER, "max_completion_tokens": 9})
    assert (world.engine.requests[1]["temperature"], world.engine.requests[1]["max_tokens"]) == (1.0, 9)


async def test_stop_string_ends_the_text(world: World) -> None:
    claim = await world.claim()
    world.engine.say(Reply("code</code> more", stop_reason="</code>", close=False))
    _, body = await world.chat(claim.agent_key, {"messages": USER, "stop": ["</code>"]})
    assert body["choices"][0]["message"]["content"] == "code"
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_n_gives_sibling_calls(world: World) -> None:
    claim = await world.claim()
    world.engine.say("a", "b", "c")
    answer = await world.agent(claim.agent_key).chat.completions.create(model="m", messages=USER, n=3)
    assert sorted(c.message.content or "" for c in answer.choices) == ["a", "b", "c"]
    calls = await recorded(world, claim.rollout.rollout_id)
    assert len(calls) == 3 and len({c.seq for c in calls}) == 1 and all(c.delivered for c in calls)
    follow = [*USER, {"role": "assistant", "content": "b"}, {"role": "user", "content": "go"}]
    await world.chat(claim.agent_key, {"messages": follow})
    last = (await recorded(world, claim.rollout.rollout_id))[3]
    parent = next(c for c in calls if c.call_id == last.parent)
    assert world.engine.tokenizer.decode(ids(parent.response_ids)) == "b<|im_end|>"


async def test_logprobs_and_usage_only_when_asked(world: World) -> None:
    claim = await world.claim()
    world.engine.say("é")
    plain = await world.agent(claim.agent_key).chat.completions.create(model="m", messages=USER, logprobs=True)
    content = (plain.choices[0].logprobs and plain.choices[0].logprobs.content) or []
    assert [round(t.logprob, 2) for t in content] == [-0.5, -0.51, -0.52]
    assert plain.usage and plain.usage.completion_tokens == 3
    stream = await world.agent(claim.agent_key).chat.completions.create(
        model="m", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [c async for c in stream]
    assert chunks[-1].choices == [] and chunks[-1].usage and chunks[-1].usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [TOOL]}, "tool_choice"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": "three"}, "top_logprobs"),
        ({"temperature": "0"}, "temperature"),
        ({"top_k": 0.5}, "top_k"),
        ({"min_p": []}, "min_p"),
        ({"repetition_penalty": "1"}, "repetition_penalty"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages[0]"),
    ],
)  # fmt: skip
async def test_what_would_change_the_meaning_is_refused_by_name(world: World, extra: Any, named: str) -> None:
    claim = await world.claim()
    status, body = await world.chat(claim.agent_key, {"messages": USER, "unknown_hint": 1, **extra})
    assert status == 400 and body["error"]["param"] == named and body["error"]["type"] == "invalid_request_error"
    assert world.engine.requests == []


async def test_overflow_names_the_limit(world: World) -> None:
    claim = await world.claim()
    with pytest.raises(openai.BadRequestError) as e:
        await world.agent(claim.agent_key).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x " * 3000}]
        )
    assert e.value.code == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in str(e.value)
    (call,) = await recorded(world, claim.rollout.rollout_id)
    assert (
        (call.untrainable or "").startswith("prompt too long: ") and not call.delivered and world.engine.requests == []
    )
    assert len(ids(call.prompt_ids)) > 2048
    # It is no part of any conversation.
    assert (await world.chat(claim.agent_key, {"messages": USER}))[0] == 200
    assert (await recorded(world, claim.rollout.rollout_id))[1].break_reason is None


async def test_models_unknown_paths_and_probes(world: World) -> None:
    claim = await world.claim()
    agent = world.agent(claim.agent_key)
    listed = [m async for m in agent.models.list()]
    assert listed[0].id == "tiny" and listed[0].to_dict()["max_model_len"] == 2048
    assert (await agent.models.retrieve("gpt-5")).id == "gpt-5"
    probes = "api/tags api/v1/models v1/props props version api/show models".split()
    for path in ("/openai/v1/nonsense", *(f"/openai/{p}" for p in probes), "/anthropic/v1/x", "/gemini/v1beta/x"):
        for ask in (world.http.get, world.http.post):
            async with ask(world.url + path) as answer:
                assert answer.status == 404 and "error" in await answer.json(), path
    heads = ("/", "/openai/v1", "/openai/v1/chat/completions", "/anthropic", "/anthropic/api/hello", "/gemini")
    for path in heads:
        async with world.http.head(world.url + path) as answer:
            assert answer.status == 200
    assert await recorded(world, claim.rollout.rollout_id) == []


async def test_older_path_and_both_headers(world: World) -> None:
    claim = await world.claim()
    other = await world.claim(controller="c2")
    path = f"/proxy/rollout/{claim.rollout.rollout_id}/attempt/0/mode/train/openai/v1/chat/completions"
    assert (await world.chat(claim.agent_key, {"messages": USER}, path))[0] == 200
    assert (await world.chat(other.agent_key, {"messages": USER}, path))[0] == 403
    async with world.http.post(
        f"{world.url}/openai/v1/chat/completions", json={"messages": USER}, headers={"x-api-key": claim.agent_key}
    ) as answer:
        assert answer.status == 200
    assert len(await recorded(world, claim.rollout.rollout_id)) == 2

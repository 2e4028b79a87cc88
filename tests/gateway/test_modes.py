"""Capture modes, forced calls and single calls, over HTTP."""

from __future__ import annotations

from typing import Any

import numpy as np

from leyden.schema import AgentSpec, CallRecord, CaptureConfig, RolloutConfig
from tests.gateway.conftest import World, on_sqlite
from tests.gateway.scripted_engine import Reply

USER: Any = [{"role": "user", "content": "What is 1+1?"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


async def recorded(world: World, rollout_id: str) -> list[CallRecord]:
    return (await world.admin.trajectory(rollout_id)).calls


def odd(world: World, text: str) -> list[int]:
    """An encoding that the tokenizer wouldn't choose."""
    return [i for ch in text for i in world.engine.tokenizer.encode(ch, add_special_tokens=False)] + [2]


@on_sqlite
async def test_modes_can_be_compared_on_one_agent(world: World) -> None:
    for mode, joined in (("bridge", True), ("render", False)):
        config = RolloutConfig(agent=AgentSpec(command=["true"]), capture=CaptureConfig(mode=mode))
        claim = await world.claim(config=config)
        world.engine.say(Reply("two", ids=odd(world, "answer")), "end")
        _, first = await world.chat(claim.agent_key, {"messages": USER})
        history = [*USER, first["choices"][0]["message"], {"role": "user", "content": "And 2+2?"}]
        await world.chat(claim.agent_key, {"messages": history})
        one, two = await recorded(world, claim.rollout.rollout_id)
        before = ids(one.prompt_ids) + ids(one.response_ids)
        assert (ids(two.prompt_ids)[: len(before)] == before) is joined
        assert two.parent == (one.call_id if joined else None)
        assert two.break_reason == (None if joined else "retokenised")
        template = world.engine.tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
        assert (ids(two.prompt_ids) == list(template)) is not joined


@on_sqlite
async def test_a_forced_call_is_delivered_whole_recorded_as_sampled_and_continued(world: World) -> None:
    claim = await world.claim()
    rest = ' {"a": 1}}\n</tool_call>'
    world.engine.say(rest, "2")
    named = {"type": "function", "function": {"name": "add"}}
    _, answer = await world.chat(claim.agent_key, {"messages": USER, "tools": [TOOL], "tool_choice": named})
    message = answer["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}
    await world.chat(claim.agent_key, {"messages": [*USER, message, result], "tools": [TOOL]})
    one, two = await recorded(world, claim.rollout.rollout_id)
    assert world.engine.tokenizer.decode(ids(one.prompt_ids)).endswith('<tool_call>\n{"name": "add", "arguments":')
    assert ids(one.response_ids) == [*world.engine.tokenizer.encode(rest, add_special_tokens=False), 2]
    assert two.parent == one.call_id


@on_sqlite
async def test_without_parallel_calls_the_first_is_delivered_and_continued(world: World) -> None:
    claim = await world.claim()
    world.engine.say(f"{CALL}\n{CALL}", "2")
    body = {"messages": USER, "tools": [TOOL], "parallel_tool_calls": False}
    _, answer = await world.chat(claim.agent_key, body)
    message = answer["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}
    await world.chat(claim.agent_key, {**body, "messages": [*USER, message, result]})
    one, two = await recorded(world, claim.rollout.rollout_id)
    assert world.engine.tokenizer.decode(ids(one.response_ids)).count("<tool_call>") == 2
    assert two.parent == one.call_id


@on_sqlite
async def test_requests_that_fail_hold_nothing(world: World) -> None:
    claim = await world.claim()
    world.engine.say("one", Reply(status=400, error={"error": {"message": "no"}}), "three")
    _, first = await world.chat(claim.agent_key, {"messages": USER})
    history = [*USER, first["choices"][0]["message"], {"role": "user", "content": "And 2+2?"}]
    status, _ = await world.chat(claim.agent_key, {"messages": history})
    assert status >= 400
    live = world.gateway.live.all()[0]
    assert [n.continued for n in live.forest.nodes.values()] == [0]
    await world.chat(claim.agent_key, {"messages": history})
    assert [n.continued for n in live.forest.nodes.values()] == [1, 0]

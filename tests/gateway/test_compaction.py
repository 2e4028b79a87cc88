"""Harnesses that sum a conversation up and go on with the summary: the shapes in which they were seen to do so."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.schema import CallKind, CallRecord
from leyden.training.rows import build_rows
from tests.gateway.conftest import MakeWorld, World

TOOLS: Any = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
SYSTEM = {"role": "system", "content": "You are an agent."}
TASK = {"role": "user", "content": "Count the files, then the lines."}
CALL = '<tool_call>\n{"name": "run", "arguments": {"c": 1}}\n</tool_call>'
ASK = {"role": "user", "content": "Write a handoff summary of this conversation for the one who goes on with it."}
FACTS = "1. The task: to count the files of the folder and then their lines.\n   Nothing else was asked for."
NEXT = "2. The state: the files were counted and there are seven; the lines come next."
PLAIN = f"{FACTS}\n{NEXT}"
TAGGED = f"<analysis>\nI go through it step by step, from the start.\n</analysis>\n\n<summary>\n{PLAIN}\n</summary>"


async def say(world: World, key: str, answer: str, messages: list[Any], tools: Any = TOOLS) -> dict[str, Any]:
    world.engine.say(answer)
    status, body = await world.chat(key, {"messages": messages, **({"tools": tools} if tools else {})})
    assert status == 200, body
    return body["choices"][0]["message"]


async def worked(world: World, key: str) -> list[Any]:
    """A conversation of two calls."""
    messages: list[Any] = [SYSTEM, TASK]
    message = await say(world, key, f"I look.{CALL}", messages)
    messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}]
    message = await say(world, key, f"Again.{CALL}", messages)
    return [*messages, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "8"}]


async def recorded(world: World, rollout_id: str) -> list[CallRecord]:
    return (await world.admin.trajectory(rollout_id)).calls


async def test_a_summary_asked_for_without_tools_and_put_behind_the_task(world: World) -> None:
    claim = await world.claim()
    messages = await worked(world, claim.agent_key)
    await say(world, claim.agent_key, PLAIN, [*messages, ASK], tools=None)
    told = {"role": "user", "content": f"Another one began this and wrote:\n{PLAIN}"}
    message = await say(world, claim.agent_key, "Done.", [SYSTEM, TASK, told])
    await say(world, claim.agent_key, "Really.", [SYSTEM, TASK, told, message, {"role": "user", "content": "Sure?"}])
    calls = await recorded(world, claim.rollout.rollout_id)
    assert [(str(c.kind), c.break_reason) for c in calls] == [
        ("main", None), ("main", None), ("summary", "compaction"), ("main", "compaction"), ("main", None)
    ]  # fmt: skip
    assert [c.parent for c in calls] == [None, calls[0].call_id, None, None, calls[3].call_id]
    assert all(c.break_index is not None and c.break_index > 0 for c in calls[2:4])
    rows, report = build_rows(await world.admin.trajectory(claim.rollout.rollout_id), max_row_tokens=10_000)
    assert len(rows) == 3 and report.breaks == {"compaction": 2} and report.dropped == {}


@pytest.mark.parametrize("restart", [False, True])
async def test_a_summary_without_its_thoughts_and_tags_in_a_conversation_that_begins_otherwise(
    world_maker: MakeWorld, restart: bool
) -> None:
    async with world_maker() as world:
        claim = await world.claim(lease=60)
        messages = await worked(world, claim.agent_key)
        await say(world, claim.agent_key, TAGGED, [*messages, ASK])
        if not restart:
            await go_on(world, claim.agent_key, messages)
    if restart:
        async with world_maker() as world:
            await go_on(world, claim.agent_key, messages)
    async with world_maker() as world:
        calls = await recorded(world, claim.rollout.rollout_id)
        assert [str(c.kind) for c in calls] == ["main", "main", "summary", "main"]
        assert calls[2].parent == calls[1].call_id
        assert [c.break_reason for c in calls] == [None, None, None, "compaction"]


async def go_on(world: World, key: str, messages: list[Any]) -> None:
    told = {
        "role": "user",
        "content": f"This goes on from earlier work:\n\nSummary:\n{PLAIN}\n\nThe last turn follows.",
    }
    system = {**SYSTEM, "content": "build 2\n" + SYSTEM["content"]}
    await say(world, key, "Done.", [system, told, *messages[-2:], {"role": "user", "content": "Go on."}])


async def test_a_summary_that_comes_back_as_an_answer(world: World) -> None:
    claim = await world.claim()
    messages = await worked(world, claim.agent_key)
    aide = {"role": "system", "content": "You are a context summarization agent."}
    await say(world, claim.agent_key, PLAIN, [aide, *messages[1:], ASK], tools=None)
    history = [SYSTEM, {"role": "user", "content": "What was done?"}, {"role": "assistant", "content": PLAIN}]
    await say(world, claim.agent_key, "Done.", [*history, {"role": "user", "content": "Go on."}])
    calls = await recorded(world, claim.rollout.rollout_id)
    assert [str(c.kind) for c in calls] == ["main", "main", "summary", "main"]
    assert calls[3].break_reason == "compaction"


@pytest.mark.parametrize(
    "quoted",
    [
        "Check the second finding of a colleague: the lines come next.",
        f"1. {NEXT[3:40]}",
        "Count the files of the folder and then their lines.",
    ],
)
async def test_what_only_sounds_like_the_summary_is_a_conversation_of_its_own(world: World, quoted: str) -> None:
    claim = await world.claim()
    messages = await worked(world, claim.agent_key)
    await say(world, claim.agent_key, PLAIN, [*messages, ASK])
    other = {"role": "system", "content": "You are a helper."}
    await say(world, claim.agent_key, "Done.", [other, {"role": "user", "content": quoted}])
    last = (await recorded(world, claim.rollout.rollout_id))[-1]
    assert last.break_reason is None and last.parent is None and last.kind == CallKind.MAIN

"""Text completions over HTTP, with the real client: what is answered and what is recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leyden.schema import CallRecord
from leyden.training.rows import build_rows
from tests.gateway.conftest import MakeWorld, World
from tests.gateway.scripted_engine import END, Reply

PATH = "/openai/v1/completions"


async def recorded(world: World, rollout_id: str) -> list[CallRecord]:
    return (await world.admin.trajectory(rollout_id)).calls


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


async def test_text_and_ids_are_continued_as_they_are(world: World, tokenizer: Any) -> None:
    claim = await world.claim()
    agent = world.agent(claim.agent_key)
    world.engine.say("two 你🌍", "two 你🌍", "two 你🌍")
    prompt: list[int] = tokenizer.encode("1+1 is", add_special_tokens=False)
    by_text = await agent.completions.create(model="m", prompt="1+1 is", logprobs=1)
    by_ids = await agent.completions.create(model="m", prompt=prompt)
    listed = await agent.completions.create(model="m", prompt=["1+1 is"])
    assert {a.choices[0].text for a in (by_text, by_ids, listed)} == {"two 你🌍"}
    assert [ids(c.prompt_ids) for c in await recorded(world, claim.rollout.rollout_id)] == [prompt] * 3
    said = by_text.choices[0].logprobs
    assert said is not None and said.tokens is not None and said.token_logprobs is not None and said.text_offset
    assert len(said.tokens) == len(said.token_logprobs) == len(said.text_offset)
    assert by_ids.choices[0].logprobs is None and by_text.usage is not None
    assert by_text.usage.prompt_tokens == len(prompt)


async def test_a_stream_says_the_same(world_maker: MakeWorld) -> None:
    async with world_maker(keepalive_seconds=0.05) as world:
        claim = await world.claim()
        world.engine.say(Reply("a b c", delay=0.2))
        options: Any = {"include_usage": True}
        stream = await world.agent(claim.agent_key).completions.create(
            model="m", prompt="x", stream=True, stream_options=options
        )
        chunks = [c async for c in stream]
        assert "".join(c.choices[0].text for c in chunks if c.choices) == "a b c"
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].choices == [] and chunks[-1].usage is not None
        assert len(chunks) > 3


async def test_a_prompt_that_extends_a_call_is_its_child(world: World, tokenizer: Any) -> None:
    claim = await world.claim()
    agent = world.agent(claim.agent_key)
    first: list[int] = tokenizer.encode("once upon", add_special_tokens=False)
    answer: list[int] = [*tokenizer.encode(" a time", add_special_tokens=False), END]
    world.engine.say(Reply(ids=answer), "next", "other")
    await agent.completions.create(model="m", prompt=first)
    await agent.completions.create(model="m", prompt=[*first, *answer, 5])
    await agent.completions.create(model="m", prompt=[*first, answer[0], 5])
    one, two, three = await recorded(world, claim.rollout.rollout_id)
    assert two.parent == one.call_id and three.parent is None
    rows, _ = build_rows(await world.admin.trajectory(claim.rollout.rollout_id), max_row_tokens=1000)
    assert sorted(r.calls for r in rows) == sorted([(one.call_id, two.call_id), (three.call_id,)])


async def test_samples_and_stops(world: World) -> None:
    claim = await world.claim()
    world.engine.say("a", "b", Reply("cut STOP here", stop_reason="STOP", close=False))
    agent = world.agent(claim.agent_key)
    several = await agent.completions.create(model="m", prompt="x", n=2)
    assert sorted(c.text for c in several.choices) == ["a", "b"]
    stopped = await agent.completions.create(model="m", prompt="x", stop="STOP", max_tokens=9)
    assert stopped.choices[0].text == "cut "
    assert world.engine.requests[-1]["stop"] == ["STOP"] and world.engine.requests[-1]["max_tokens"] == 9


@pytest.mark.parametrize("text", ["<think>x</think>y", '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'])
async def test_what_the_model_said_is_text_whatever_it_is(world: World, text: str) -> None:
    claim = await world.claim()
    world.engine.say(text)
    _, body = await world.chat(claim.agent_key, {"prompt": "x"}, PATH)
    assert body["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 5}, "logprobs"),
        ({"n": 0}, "n"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
async def test_what_cant_be_done_is_refused_by_name(world: World, change: dict[str, Any], named: str) -> None:
    claim = await world.claim()
    status, body = await world.chat(claim.agent_key, {"prompt": "x", **change}, PATH)
    assert status == 400 and body["error"]["message"].startswith(named), body
    assert world.engine.requests == []

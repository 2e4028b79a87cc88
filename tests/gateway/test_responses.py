"""OpenAI Responses over HTTP, with the real client: what is answered and what is recorded."""

from __future__ import annotations

from typing import Any

import openai
import orjson
import pytest

from leyden.gateway.dialects.base import Context
from leyden.gateway.dialects.openai_responses import OpenAIResponses
from leyden.gateway.dialects.responses_items import seal, unseal
from leyden.schema import CallRecord, PauseRequest
from tests.gateway.conftest import MakeWorld, World
from tests.gateway.scripted_engine import Reply

PATH = "/openai/v1/responses"
TOOL: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ASK: Any = {"model": "m", "input": "What is 1+1?"}


async def recorded(world: World, rollout_id: str) -> list[CallRecord]:
    return (await world.admin.trajectory(rollout_id, content=True)).calls


def said(call: CallRecord) -> list[tuple[str, Any]]:
    assert call.request is not None
    return [(m["role"], m["content"]) for m in call.request["messages"]]


async def events_of(world: World, key: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer, their grammar checked."""
    headers = {"Authorization": f"Bearer {key}"}
    async with world.http.post(world.url + PATH, json={**body, "stream": True}, headers=headers) as got:
        assert got.status == 200 and "content-length" not in got.headers
        text = (await got.read()).decode()
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(orjson.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    check_grammar(events)
    return events


def check_grammar(events: list[dict[str, Any]]) -> None:
    """created in_progress+ (added (part.added delta* done part.done | delta done) item.done)* end, all numbered."""
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and events[1]["type"] == "response.in_progress"
    last = events[-1]
    assert last["type"] in ("response.completed", "response.incomplete", "response.failed")
    done: list[dict[str, Any]] = []
    current: dict[str, Any] | None = None
    text, part_open = "", False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "in_progress":
            assert current is None and not done
        elif kind == "output_item.added":
            assert current is None and event["output_index"] == len(done)
            current, text = event["item"], ""
        else:
            assert current is not None and event["output_index"] == len(done)
            assert event.get("item_id", current["id"]) == current["id"]
            if kind == "content_part.added":
                assert not part_open and event["part"]["text"] == ""
                part_open = True
            elif kind.endswith(".delta"):
                assert part_open == (current["type"] in ("message", "reasoning"))
                text += event["delta"]
            elif kind == "content_part.done":
                assert part_open and event["part"]["text"] == text
                part_open = False
            elif kind == "output_item.done":
                item = event["item"]
                whole = item["content"][0]["text"] if "content" in item else item.get("arguments", item.get("input"))
                assert not part_open and item["id"] == current["id"] and whole == text
                done.append(item)
                current = None
            else:
                assert kind.endswith(".done") and text in (
                    event.get("text"),
                    event.get("arguments"),
                    event.get("input"),
                )
    assert current is None and last["response"]["output"] == done


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        ("two 你🌍", ["message"]),
        (ONE, ["function_call"]),
        (f"<think>hm</think>Both. {ONE}\n{ONE}", ["reasoning", "message", "function_call", "function_call"]),
        ("<think>only</think>", ["reasoning", "message"]),
        ("", ["message"]),
    ],
)
async def test_json_and_stream_say_the_same(world: World, answer: str, kinds: list[str]) -> None:
    claim = await world.claim()
    world.engine.say(answer, answer, answer)
    agent = world.agent(claim.agent_key)
    plain = await agent.responses.create(**ASK, tools=[TOOL])
    async with agent.responses.stream(**ASK, tools=[TOOL]) as stream:
        streamed = await stream.get_final_response()
    events = await events_of(world, claim.agent_key, {**ASK, "tools": [TOOL]})
    assert plain.status == streamed.status == "completed"
    assert [i.type for i in plain.output] == [i.type for i in streamed.output] == kinds
    assert plain.output_text == streamed.output_text
    assert [i["type"] for i in events[-1]["response"]["output"]] == kinds
    calls = await recorded(world, claim.rollout.rollout_id)
    assert len({c.response_ids for c in calls}) == 1 and len(calls) == 3
    assert all(c.dialect == "openai-responses" and c.delivered and c.untrainable is None for c in calls)
    assert plain.usage is not None and streamed.usage is not None
    assert plain.usage.input_tokens == streamed.usage.input_tokens == len(calls[0].prompt_ids) // 4
    assert plain.usage.output_tokens == len(calls[0].response_ids) // 4


async def test_signs_of_life_are_in_progress_events(world_maker: MakeWorld) -> None:
    async with world_maker(keepalive_seconds=0.05) as world:
        claim = await world.claim()
        world.engine.say(Reply(f"<think>a</think>{ONE}", delay=0.3))
        events = await events_of(world, claim.agent_key, {**ASK, "tools": [TOOL]})
        assert sum(e["type"] == "response.in_progress" for e in events) > 2


async def test_developer_is_system_and_hosted_search_is_dropped(world: World) -> None:
    claim = await world.claim()
    body = {
        "model": "x",
        "stream": True,
        "input": [{"role": "developer", "content": "D"}, {"role": "user", "content": "2+2"}],
        "tools": [{"type": "web_search"}, {"type": "function", "name": "shell", "parameters": {"type": "object"}}],
    }
    await events_of(world, claim.agent_key, body)
    (call,) = await recorded(world, claim.rollout.rollout_id)
    assert said(call) == [("system", "D"), ("user", "2+2")]
    assert call.request is not None and [t["function"]["name"] for t in call.request["tools"]] == ["shell"]
    assert call.prompt_ids and call.response_ids and len(call.logprobs) == len(call.response_ids) and call.delivered


@pytest.mark.parametrize("way", ["items", "sealed", "previous_response_id", "item_reference", "without ids"])
async def test_a_conversation_is_continued_token_for_token(world: World, way: str) -> None:
    claim = await world.claim()
    agent = world.agent(claim.agent_key)
    world.engine.say(f"<think>a</think>Both. {ONE}\n{ONE}", "done")
    question: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add."}]}
    asked: Any = {"model": "m", "tools": [TOOL], "instructions": "Be brief."}
    include: Any = ["reasoning.encrypted_content"]
    first = await agent.responses.create(input=[question], include=include, **asked)
    items: list[Any] = [i.model_dump(exclude_none=True) for i in first.output]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": i["call_id"], "output": out}
        for i, out in zip(items[2:], ["2", [{"type": "input_text", "text": "3"}]], strict=True)
    ]
    if way == "previous_response_id":
        history: list[Any] = results
        asked["previous_response_id"] = first.id
    elif way == "item_reference":
        history = [question, *({"type": "item_reference", "id": i["id"]} for i in items), *results]
    else:
        if way == "sealed":
            del items[0]["content"]
        if way == "without ids":
            items = [{k: v for k, v in i.items() if k != "id"} for i in items]
        history = [question, *items, *results]
    await agent.responses.create(input=history, **asked)
    one, two = await recorded(world, claim.rollout.rollout_id)
    assert said(two)[:2] == [("system", "Be brief."), ("user", "Add.")]
    assert said(two)[2][1] == "Both. " and said(two)[3:] == [("tool", "2"), ("tool", "3")]
    assert two.parent == one.call_id and two.break_reason is None
    assert two.prompt_ids.startswith(one.prompt_ids + one.response_ids)


async def test_instructions_belong_to_their_own_call(world: World) -> None:
    claim = await world.claim()
    agent = world.agent(claim.agent_key)
    first = await agent.responses.create(model="m", input="a", instructions="One.")
    second = await agent.responses.create(model="m", input="b", instructions="Two.", previous_response_id=first.id)
    await agent.responses.create(model="m", input="c", previous_response_id=second.id)
    calls = await recorded(world, claim.rollout.rollout_id)
    turns = [("user", "a"), ("assistant", "ok"), ("user", "b"), ("assistant", "ok"), ("user", "c")]
    assert said(calls[1]) == [("system", "Two."), *turns[:3]]
    assert said(calls[2]) == turns


@pytest.mark.parametrize("instructions", [None, "Be brief.", "Be brief. " * 40])
async def test_a_named_response_costs_no_look_at_the_whole_attempt(
    world_maker: MakeWorld, monkeypatch: pytest.MonkeyPatch, instructions: str | None
) -> None:
    looked: list[str] = []
    more: Any = {"instructions": instructions} if instructions else {}
    async with world_maker() as world:
        claim = await world.claim()
        agent, store = world.agent(claim.agent_key), world.gateway.store
        first = await agent.responses.create(model="m", input="0", **more)
        names = ("attempt_calls", "asked")
        if not store.shared:  # Else each call asks for what other gateways recorded.
            for name in names:
                monkeypatch.setattr(store, name, lambda *_, name=name, **__: looked.append(name))
        last, items = first, []
        for turn in range(1, 6):
            last = await agent.responses.create(model="m", input=str(turn), previous_response_id=last.id, **more)
            items.append({"type": "item_reference", "id": last.output[0].id})
        listed = [{"role": "user", "content": "x"}, *items, {"role": "user", "content": "y"}]
        await agent.responses.create(model="m", input=listed)
        assert looked == []
    async with world_maker() as world:  # What was asked isn't in memory any more.
        agent = world.agent(claim.agent_key)
        await agent.responses.create(model="m", input="6", previous_response_id=last.id)
        await agent.responses.create(model="m", input="branch", previous_response_id=first.id)
        calls = await recorded(world, claim.rollout.rollout_id)
        turns = [(role, text) for i in range(6) for role, text in (("user", str(i)), ("assistant", "ok"))]
        assert said(calls[7]) == [*turns, ("user", "6")]
        assert said(calls[8]) == [*turns[:2], ("user", "branch")]
        assert [c.parent is not None for c in calls[1:6]] == [True] * 5


async def test_a_response_that_failed_cant_be_continued(world_maker: MakeWorld) -> None:
    async with world_maker(keepalive_seconds=0.05) as world:
        claim = await world.claim()
        await world.admin.pause(PauseRequest(owner="t", lease_seconds=0.2))
        world.engine.say(Reply(cut=True))
        failed = (await events_of_failure(world, claim.agent_key))[-1]["response"]["id"]
    for _ in range(2):  # As recorded, and as read back.
        async with world_maker() as world:
            with pytest.raises(openai.BadRequestError, match="not found"):
                await world.agent(claim.agent_key).responses.create(**ASK, previous_response_id=failed)


async def test_references_outlive_a_restart_and_stay_within_their_attempt(world_maker: MakeWorld) -> None:
    async with world_maker() as world:
        claim, other = await world.claim(), await world.claim()
        first = await world.agent(claim.agent_key).responses.create(**ASK)
    async with world_maker() as world:
        again = await world.agent(claim.agent_key).responses.create(**ASK, previous_response_id=first.id)
        assert again.previous_response_id == first.id
        with pytest.raises(openai.BadRequestError) as stranger:
            await world.agent(other.agent_key).responses.create(**ASK, previous_response_id=first.id)
        assert stranger.value.code == "previous_response_not_found"
        with pytest.raises(openai.NotFoundError, match="not found"):
            reference: Any = {"type": "item_reference", "id": first.output[0].id}
            await world.agent(other.agent_key).responses.create(model="m", input=[reference])


async def test_namespaces_and_custom_tools_come_back_under_their_own_names(world: World) -> None:
    claim = await world.claim()
    tools = [
        {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read", "parameters": {}}]},
        {"type": "custom", "name": "patch", "description": "Patches."},
    ]
    calls = [
        '<tool_call>\n{"name": "files__read", "arguments": {"p": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "patch", "arguments": {"input": "*** x"}}\n</tool_call>',
    ]
    world.engine.say("\n".join(calls), "done")
    events = await events_of(world, claim.agent_key, {**ASK, "tools": tools})
    read, patch = events[-1]["response"]["output"]
    assert (read["type"], read["namespace"], read["name"], read["arguments"]) == (
        "function_call", "files", "read", '{"p": 1}',
    )  # fmt: skip
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** x")
    results = [
        {"type": "function_call_output", "call_id": read["call_id"], "output": "r"},
        {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "p"},
    ]
    await events_of(
        world,
        claim.agent_key,
        {"model": "m", "tools": tools, "input": [{"role": "user", "content": ASK["input"]}, read, patch, *results]},
    )
    one, two = await recorded(world, claim.rollout.rollout_id)
    assert two.parent == one.call_id


async def test_an_answer_cut_short_is_incomplete(world: World) -> None:
    claim = await world.claim()
    world.engine.say(Reply("cut", finish_reason="length", close=False))
    events = await events_of(world, claim.agent_key, {**ASK, "max_output_tokens": 2})
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert world.engine.requests[0]["max_tokens"] == 2


async def test_an_engine_that_dies_in_a_begun_stream_fails_the_response(world_maker: MakeWorld) -> None:
    async with world_maker(keepalive_seconds=0.05) as world:
        claim = await world.claim()
        await world.admin.pause(PauseRequest(owner="t", lease_seconds=0.3))
        world.engine.say(Reply(cut=True), Reply(cut=True))
        events = await events_of_failure(world, claim.agent_key)
        assert [e["type"] for e in events[-2:]] == ["error", "response.failed"]
        assert (
            events[-1]["response"]["status"] == "failed" and "broke off" in events[-1]["response"]["error"]["message"]
        )
        with pytest.raises(openai.APIError, match="broke off"):
            await world.admin.pause(PauseRequest(owner="t", lease_seconds=0.3))
            async for _ in await world.agent(claim.agent_key).responses.create(**ASK, stream=True):
                pass


async def events_of_failure(world: World, key: str) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"}
    async with world.http.post(world.url + PATH, json={**ASK, "stream": True}, headers=headers) as got:
        lines = (await got.read()).decode().split("\n")
    return [orjson.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


async def test_an_overflow_has_the_code_that_clients_look_for(world: World) -> None:
    claim = await world.claim()
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as e:
        await world.agent(claim.agent_key).responses.create(model="m", input="word " * 3000)
    assert e.value.code == "context_length_exceeded"


async def test_a_websocket_is_turned_away_with_426(world: World) -> None:
    claim = await world.claim()
    headers = {
        "Authorization": f"Bearer {claim.agent_key}",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    async with world.http.get(world.url + PATH, headers=headers) as got:
        assert got.status == 426 and "WebSocket" in (await got.json())["error"]["message"]


async def test_two_different_prompts_at_once_get_their_own_answers(world: World) -> None:
    import asyncio

    claim = await world.claim()
    agent = world.agent(claim.agent_key)
    world.engine.default = Reply(delay=0.1)
    a, b = await asyncio.gather(
        agent.responses.create(model="m", input="A"), agent.responses.create(model="m", input="B")
    )
    assert a.id != b.id
    calls = await recorded(world, claim.rollout.rollout_id)
    assert sorted(said(c)[-1][1] for c in calls) == ["A", "B"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call"}]}, "input[0]"),
        ({"tools": [{"type": "file_search"}]}, "file_search"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "nope"}}, "nope"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"previous_response_id": "resp_unknown"}, "resp_unknown"),
        ({"previous_response_id": 7}, "'7'"),
        ({"instructions": 7}, "instructions"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": [1]}, "top_p"),
        ({"reasoning": "high"}, "reasoning"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
    ],
)
async def test_what_would_change_the_meaning_is_refused_by_name(
    world: World, change: dict[str, Any], named: str
) -> None:
    claim = await world.claim()
    status, body = await world.chat(claim.agent_key, {**ASK, **change}, PATH)
    assert status == 400 and named in body["error"]["message"]
    assert world.engine.requests == []


def test_what_harnesses_send_beside_is_read_over() -> None:
    files = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [TOOL, files]},
        {"type": "configuration_update", "model": "x"},
        {"type": "message", "role": "user", "content": "q", "internal_chat_message_metadata_passthrough": {}},
    ]
    body = {
        "input": items,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "client_metadata": {"a": 1},
    }
    request = OpenAIResponses().parse(body, Context())
    assert request.messages == [{"role": "user", "content": "q"}]
    assert request.tools is not None
    assert [t["function"]["name"] for t in request.tools] == ["add", "files__read"]


def test_images_reach_the_internal_form() -> None:
    parts = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": "data:image/png;base64,AA=="}]
    items = [
        {"role": "user", "content": parts},
        {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": parts},
    ]
    request = OpenAIResponses().parse({"input": items}, Context())
    assert request.images() == ["data:image/png;base64,AA=="] * 2 and [m["role"] for m in request.messages] == [
        "user", "assistant", "tool"]  # fmt: skip


def test_turns_in_a_row_stay_apart() -> None:
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r1"}]},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r2"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "t2"}]},
        {"role": "assistant", "content": "t3"},
    ]
    messages = OpenAIResponses().parse({"input": items}, Context()).messages
    assert [(m.get("reasoning_content"), m["content"], len(m.get("tool_calls", []))) for m in messages] == [
        ("r1", "", 1),
        ("r2", "t2", 0),
        (None, "t3", 0),
    ]


@pytest.mark.parametrize("text", ["", "hm", "你🌍\ud800"])
def test_sealed_reasoning_opens_to_itself(text: str) -> None:
    assert unseal(seal(text)) == text
    assert unseal("gAAAA") is None and unseal(seal("abc")[:-3] + "!") is None and unseal(None) is None

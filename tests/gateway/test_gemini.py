"""Gemini's generateContent over HTTP: what is answered and what is recorded."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from leyden.gateway.dialects.base import Context
from leyden.gateway.dialects.gemini import Gemini
from leyden.schema import CallRecord
from tests.gateway.conftest import MakeWorld, World, everything_stored
from tests.gateway.scripted_engine import Reply

BASE = "/gemini/v1beta/models/gemini-3-pro"
ASK: Any = {"contents": [{"role": "user", "parts": [{"text": "What is 1+1?"}]}]}
DECLARED: Any = {"name": "add", "description": "Adds.", "parametersJsonSchema": {"type": "object", "properties": {}}}
TOOLS: Any = [{"functionDeclarations": [DECLARED]}]
THREE: Any = [{"functionDeclarations": [{"name": name} for name in ("add", "b", "c")]}]
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'


def called(names: list[str], mode: str = "ANY") -> dict[str, Any]:
    return {"functionCallingConfig": {"mode": mode, "allowedFunctionNames": names}}


async def post(world: World, key: str, method: str, body: Any) -> tuple[int, bytes, str]:
    async with world.http.post(f"{world.url}{BASE}:{method}", json=body, headers={"x-goog-api-key": key}) as got:
        return got.status, await got.read(), got.headers["content-type"]


async def recorded(world: World, rollout_id: str) -> list[CallRecord]:
    return (await world.admin.trajectory(rollout_id, content=True)).calls


def bare(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts without what differs from call to call."""
    parts = answer["candidates"][0]["content"]["parts"]
    calls = [{"functionCall": {**p["functionCall"], "id": None}} for p in parts if "functionCall" in p]
    return [*[p for p in parts if "functionCall" not in p], *calls]


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ("two 你🌍", ["text"]),
        (ONE, ["functionCall"]),
        (f"<think>a</think>b {ONE}{ONE}", ["thought", "text", "functionCall", "functionCall"]),
        ("", ["text"]),
    ],
)
async def test_json_and_both_streams_say_the_same(world: World, said: str, kinds: list[str]) -> None:
    claim = await world.claim()
    world.engine.say(said, said, said)
    body = {**ASK, "tools": TOOLS}
    _, plain, _ = await post(world, claim.agent_key, "generateContent", body)
    _, events, kind = await post(world, claim.agent_key, "streamGenerateContent?alt=sse", body)
    _, array, array_kind = await post(world, claim.agent_key, "streamGenerateContent", body)
    assert kind.startswith("text/event-stream") and array_kind == "application/json"
    answers = [orjson.loads(plain), orjson.loads(events.removeprefix(b"data: ")), *orjson.loads(array)]
    assert len(answers) == 3 and bare(answers[0]) == bare(answers[1]) == bare(answers[2])
    parts = answers[0]["candidates"][0]["content"]["parts"]
    shown = ["functionCall" if "functionCall" in p else "thought" if p.get("thought") else "text" for p in parts]
    assert shown == kinds and answers[0]["candidates"][0]["finishReason"] == "STOP"
    calls = await recorded(world, claim.rollout.rollout_id)
    assert len(calls) == 3 and all(c.dialect == "gemini" and c.delivered for c in calls)
    usage = answers[0]["usageMetadata"]
    assert usage["promptTokenCount"] == len(calls[0].prompt_ids) // 4
    assert usage["candidatesTokenCount"] == len(calls[0].response_ids) // 4


async def test_a_tool_conversation_is_continued_token_for_token(world: World) -> None:
    claim = await world.claim()
    world.engine.say(f"<think>a</think>Both. {ONE}\n{ONE}", "done")
    body = {**ASK, "tools": TOOLS, "systemInstruction": {"parts": [{"text": "S"}]}}
    _, answer, _ = await post(world, claim.agent_key, "generateContent", body)
    content = orjson.loads(answer)["candidates"][0]["content"]
    kept = [p for p in content["parts"] if not p.get("thought")]
    results = [
        {"functionResponse": {"name": "add", "id": p["functionCall"]["id"], "response": {"output": 2}}}
        for p in kept
        if "functionCall" in p
    ]
    history = [*ASK["contents"], {**content, "parts": kept}, {"role": "user", "parts": results}]
    status, _, _ = await post(world, claim.agent_key, "generateContent", {**body, "contents": history})
    one, two = await recorded(world, claim.rollout.rollout_id)
    assert status == 200 and two.parent == one.call_id and two.request is not None
    assert [m["role"] for m in two.request["messages"]] == ["system", "user", "assistant", "tool", "tool"]


async def test_a_turn_that_comes_back_as_one_content_an_event_is_continued(world_maker: MakeWorld) -> None:
    async with world_maker(keepalive_seconds=0.05) as world:
        claim = await world.claim()
        world.engine.say(Reply(f"<think>a</think>Both. {ONE}", delay=0.2), "done")
        body = {**ASK, "tools": TOOLS}
        _, events, _ = await post(world, claim.agent_key, "streamGenerateContent?alt=sse", body)
        told = [orjson.loads(e.removeprefix("data: ")) for e in events.decode().strip().split("\n\n")]
        said = [e["candidates"][0]["content"] for e in told]
        call = said[-1]["parts"][-1]["functionCall"]
        result = {"functionResponse": {"name": "add", "id": f"add__{call['id']}", "response": {"output": 2}}}
        history = [*ASK["contents"], *said, {"role": "user", "parts": [result]}]
        status, _, _ = await post(world, claim.agent_key, "generateContent", {**body, "contents": history})
        one, two = await recorded(world, claim.rollout.rollout_id)
        assert len(said) > 2 and status == 200 and two.request is not None
        assert [m["role"] for m in two.request["messages"]] == ["user", "assistant", "tool"]
        assert two.parent == one.call_id and two.prompt_ids.startswith(one.prompt_ids + one.response_ids)


@pytest.mark.parametrize("version", ["v1", "v1alpha", "v1beta"])
async def test_all_versions_that_clients_ask_for_are_served(world: World, version: str) -> None:
    claim = await world.claim()
    path = f"/gemini/{version}/models/m:generateContent"
    own = f"/proxy/rollout/{claim.rollout.rollout_id}/attempt/{claim.attempt_id}/mode/train{path}"
    assert [(await world.chat(claim.agent_key, ASK, p))[0] for p in (path, own)] == [200, 200]


async def test_a_key_may_come_in_the_address_and_goes_no_further(
    world_maker: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_maker() as world:
        claim = await world.claim()
        key = claim.agent_key

        async def status(path: str, method: str = "POST", **headers: str) -> int:
            body = ASK if method == "POST" else None
            async with world.http.request(method, world.url + path, json=body, headers=headers) as got:
                assert key not in await got.text()
                return got.status

        assert await status(f"{BASE}:generateContent?key={key}") == 200
        assert await status(f"{BASE}:streamGenerateContent?alt=sse&key={key}") == 200
        assert await status(f"/gemini/v1beta/models?key={key}", "GET") == 200
        assert await status(f"/gemini/v1beta/nothing?key={key}") == 404
        assert await status(f"{BASE}:generateContent?key=wrong") == 401
        assert await status(f"{BASE}:generateContent?key=") == 401
        # A key in a header is the one that counts, and other dialects know no other place.
        assert await status(f"{BASE}:generateContent?key={key}", **{"x-goog-api-key": "wrong"}) == 401
        assert await status(f"/openai/v1/models?key={key}", "GET") == 401
        assert await status(f"/anthropic/v1/models?key={key}", "GET") == 401
        assert len(await recorded(world, claim.rollout.rollout_id)) == 2
        assert key not in caplog.text and key.encode() not in await everything_stored(world)
        assert key not in str(world.engine.headers) + str(world.engine.requests)


async def test_counting_tokens_is_no_call(world: World) -> None:
    claim = await world.claim()
    _, counted, _ = await post(world, claim.agent_key, "countTokens", {"generateContentRequest": ASK})
    _, direct, _ = await post(world, claim.agent_key, "countTokens", ASK)
    await post(world, claim.agent_key, "generateContent", ASK)
    (call,) = await recorded(world, claim.rollout.rollout_id)
    assert orjson.loads(counted) == orjson.loads(direct) == {"totalTokens": len(call.prompt_ids) // 4}


async def test_models_and_errors_have_the_dialects_shape(world: World) -> None:
    claim = await world.claim()
    headers = {"x-goog-api-key": claim.agent_key}
    async with world.http.get(f"{world.url}/gemini/v1beta/models", headers=headers) as got:
        assert (await got.json())["models"][0]["name"] == "models/tiny"
    async with world.http.get(f"{world.url}/gemini/v1beta/models/any", headers=headers) as got:
        assert (await got.json())["name"] == "models/any"
    status, body, _ = await post(world, "wrong", "generateContent", ASK)
    assert status == 401 and orjson.loads(body)["error"]["status"] == "UNAUTHENTICATED"
    status, body, _ = await post(world, claim.agent_key, "embedContent", ASK)
    assert status == 405 or status == 404
    long = {"contents": [{"parts": [{"text": "word " * 3000}]}]}
    status, body, _ = await post(world, claim.agent_key, "generateContent", long)
    assert (
        status == 400
        and "exceeds the maximum number of tokens allowed (2048)" in orjson.loads(body)["error"]["message"]
    )


async def test_signs_of_life_come_before_the_answer(world_maker: MakeWorld) -> None:
    async with world_maker(keepalive_seconds=0.05) as world:
        claim = await world.claim()
        world.engine.say(Reply("cut", delay=0.3, finish_reason="length", close=False), Reply("x", delay=0.3))
        _, events, _ = await post(world, claim.agent_key, "streamGenerateContent?alt=sse", ASK)
        told = [orjson.loads(e.removeprefix("data: ")) for e in events.decode().strip().split("\n\n")]
        assert len(told) > 2 and all("finishReason" not in e["candidates"][0] for e in told[:-1])
        assert told[-1]["candidates"][0]["finishReason"] == "MAX_TOKENS"
        _, array, _ = await post(world, claim.agent_key, "streamGenerateContent", ASK)
        assert array.startswith(b"\n") and len(orjson.loads(array)) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"contents": []}, "contents"),
        ({"contents": [5]}, "contents[0]"),
        ({"contents": [{"role": "robot", "parts": []}]}, "contents[0]"),
        ({"contents": [{"parts": [{"videoMetadata": {}}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [3]}]}, "contents[0].parts[0]"),
        ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "systemInstruction"),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0]"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "toolConfig"),
        ({"tools": [{"functionDeclarations": 5}]}, "tools[0].functionDeclarations"),
        ({"tools": TOOLS, "toolConfig": called(["nope"])}, "allowedFunctionNames names nope"),
        ({"tools": THREE, "toolConfig": called(["add", "b"])}, "allowedFunctionNames"),
        ({"tools": THREE, "toolConfig": called(["add"], "AUTO")}, "allowedFunctionNames"),
        ({"cachedContent": "c"}, "cachedContent"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "maxOutputTokens"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "responseMimeType"),
        ({"generationConfig": {"temperature": "1"}}, "temperature"),
        ({"generationConfig": {"topP": True}}, "topP"),
        ({"generation_config": {"top_k": "64"}}, "topK"),
        ({"generationConfig": {"seed": 1.5}}, "seed"),
        ({"generationConfig": {"thinkingConfig": 1}}, "thinkingConfig"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "responseModalities"),
        ({"generationConfig": {"responseLogprobs": True}}, "responseLogprobs"),
    ],
)
async def test_what_would_change_the_meaning_is_refused_by_name(
    world: World, change: dict[str, Any], named: str
) -> None:
    claim = await world.claim()
    status, body, _ = await post(world, claim.agent_key, "generateContent", {**ASK, **change})
    assert status == 400 and named in orjson.loads(body)["error"]["message"]
    assert world.engine.requests == []


def test_both_spellings_and_capital_types_are_read() -> None:
    function = {
        "name": "f",
        "parameters": {"type": "OBJECT", "properties": {"a": {"type": "ARRAY", "items": {"type": "STRING"}}}},
    }
    body = {
        **ASK,
        "system_instruction": {"parts": {"text": "S"}},
        "tools": [{"function_declarations": [function]}],
        "tool_config": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generation_config": {"max_output_tokens": 7, "stopSequences": ["X"], "response_schema": {"type": "OBJECT"}},
    }
    request = Gemini().parse(body, Context(path="models/a/b:generateContent"))
    assert (request.model, request.messages[0]) == ("a/b", {"role": "system", "content": "S"})
    assert request.tools is not None and request.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "string"}}},
    }
    assert (request.tool_choice, request.tool_name, request.max_tokens, request.stop) == ("required", "f", 7, ["X"])
    assert request.response_format == {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("mode", "names", "choice"),
    [
        ("ANY", [], ("required", None)),
        ("ANY", ["c", "b", "add"], ("required", None)),
        ("ANY", ["b"], ("required", "b")),
        ("NONE", [], ("none", None)),
        ("VALIDATED", [], ("auto", None)),
    ],
)
def test_modes_of_calling_functions(mode: str, names: list[str], choice: tuple[str, str | None]) -> None:
    body = {**ASK, "tools": THREE, "toolConfig": called(names, mode)}
    request = Gemini().parse(body, Context(path="models/m:generateContent"))
    assert (request.tool_choice, request.tool_name) == choice


def test_what_harnesses_send_beside_is_read_over() -> None:
    call = {"functionCall": {"name": "add", "args": {"a": 1}}, "thoughtSignature": "c2ln"}
    answer = {"role": "model", "parts": [{"text": "hm", "thought": True}, call]}
    result = {"functionResponse": {"name": "add", "response": {"output": "2"}}}
    config = {"temperature": 1, "topP": 0.95, "topK": 64, "thinkingConfig": {"includeThoughts": True}}
    body = {"contents": [*ASK["contents"], answer, {"role": "user", "parts": [result]}], "tools": TOOLS}
    more = {"generationConfig": config, "safetySettings": [], "labels": {}}
    request = Gemini().parse({**body, **more}, Context(path="models/m:streamGenerateContent", query={"alt": "sse"}))
    assert [m["role"] for m in request.messages] == ["user", "assistant", "tool"] and request.stream
    assert request.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}
    assert request.requested == config


def test_schemas_are_read_as_json_schema() -> None:
    own = {
        "type": "OBJECT",
        "properties": {
            "any_of": {"any_of": [{"type": "STRING"}, {"type": "INTEGER"}], "description": "A"},
            "type": {"type": "ARRAY", "items": {"type": "NUMBER", "nullable": True}, "min_items": "1", "maxItems": 3},
        },
        "property_ordering": ["type", "any_of"],
        "required": ["type"],
    }
    config = {"responseMimeType": "application/json", "responseSchema": own}
    request = Gemini().parse({**ASK, "generationConfig": config}, Context(path="models/m:generateContent"))
    assert request.response_format is not None and request.response_format["schema"] == {
        "type": "object",
        "properties": {
            "any_of": {"anyOf": [{"type": "string"}, {"type": "integer"}], "description": "A"},
            "type": {
                "type": "array",
                "items": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "minItems": 1,
                "maxItems": 3,
            },
        },
        "required": ["type"],
    }


def test_images_reach_the_internal_form() -> None:
    parts = [{"inlineData": {"mimeType": "image/png", "data": "AA=="}}, {"text": "?"}]
    request = Gemini().parse({"contents": [{"parts": parts}]}, Context(path="models/m:generateContent"))
    assert request.images() == ["data:image/png;base64,AA=="]

"""OpenAI Responses, JSON and server-sent events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from leyden.gateway.dialects import fields
from leyden.gateway.dialects.base import EVENTS, Answer, Context, Message, ModelRequest, Refers, Stream, ToolChoice
from leyden.gateway.dialects.openai_chat import OpenAIChat, error_body
from leyden.gateway.dialects.responses_items import RESPONSE, Conversation, Tools, history, output_items, referred
from leyden.gateway.errors import Refused

_SAMPLING = ("temperature", "top_p", "max_output_tokens", "top_logprobs", "reasoning")
_ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "reasoning", "temperature")
_ECHOED += ("text", "tool_choice", "tools", "top_p", "user", "prompt_cache_key", "service_tier", "safety_identifier")
_REFUSED = {
    "background": "answers are given on the connection that asked",
    "conversation": "send the items, or previous_response_id",
    "prompt": "send the prompt's text as instructions",
}


class OpenAIResponses(OpenAIChat):
    """Implements leyden.gateway.dialects.base.Dialect; errors and model lists are those of chat completions."""

    name = "openai-responses"

    def refers_to(self, body: dict[str, Any]) -> Refers:
        return referred(body)

    def parse(self, body: dict[str, Any], context: Context) -> ModelRequest:
        for name, detail in _REFUSED.items():
            if body.get(name):
                raise fields.unsupported(name, detail)
        tools = Tools()
        for i, value in enumerate(fields.listing(body, "tools")):
            tools.add(value, f"tools[{i}]")
        conversation = Conversation(context.answers, tools)
        instructions = fields.text(body, "instructions", "")
        if instructions:
            conversation.messages.append({"role": "system", "content": instructions})
        if body.get("previous_response_id") is not None:
            conversation.messages += history(body["previous_response_id"], context)
        given = body.get("input")
        if isinstance(given, str):
            conversation.messages.append({"role": "user", "content": given})
        elif given is not None or not conversation.messages:
            for i, item in enumerate(fields.listing(body, "input")):
                conversation.add(item, f"input[{i}]")
        if not conversation.messages:
            raise Refused("input must be text or a non-empty list of items", param="input")
        choice, only = _tool_choice(body.get("tool_choice"), tools)
        include = fields.listing(body, "include")
        fields.numbers(body, ("temperature", "top_p"))
        fields.mapping(body, "reasoning")
        if fields.count(body, "top_logprobs", 0):
            raise fields.unsupported("top_logprobs", "only log-probabilities of the sampled tokens are recorded")
        if "message.output_text.logprobs" in include:
            raise fields.unsupported("include", "log-probabilities are given by Chat Completions (logprobs)")
        parallel = body.get("parallel_tool_calls")
        return ModelRequest(
            model=fields.text(body, "model", "default"),
            messages=conversation.messages,
            tools=tools.listed or None,
            tool_choice=choice,
            tool_name=only,
            parallel_tool_calls=parallel is None or fields.flag(body, "parallel_tool_calls"),
            response_format=_format(fields.mapping(fields.mapping(body, "text"), "format")),
            stream=fields.flag(body, "stream"),
            max_tokens=fields.count(body, "max_output_tokens", 1),
            requested=fields.asked(body, _SAMPLING),
            may_be_continued=body.get("store") is not False,
            instructed=bool(instructions),
            echo={
                "response": fields.asked(body, _ECHOED),
                "tools": tools,
                "sealed": "reasoning.encrypted_content" in include,
            },
        )

    def fingerprint_parts(self, body: dict[str, Any], context: Context) -> dict[str, Any]:
        return {k: v for k, v in body.items() if k not in ("stream", "stream_options")}

    def json_answer(self, answer: Answer, request: ModelRequest) -> bytes:
        return orjson.dumps(_response(answer, request))

    def stream(self, call_id: str, created: int, request: ModelRequest) -> Stream:
        return ResponseStream(call_id, created, request)


class ResponseStream:
    """Implements leyden.gateway.dialects.base.Stream."""

    content_type = EVENTS

    def __init__(self, call_id: str, created: int, request: ModelRequest) -> None:
        self._pending = _head(call_id, created, request) | {"status": "in_progress", "output": []}
        self._request = request
        self._sequence = 0

    def _event(self, kind: str, **more: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **more}
        self._sequence += 1
        return fields.event(body, kind)

    def _opening(self) -> bytes:
        return b"" if self._sequence else self._event("response.created", response=self._pending)

    def keepalive(self) -> bytes:
        return self._opening() + self._event("response.in_progress", response=self._pending)

    def answer(self, answer: Answer) -> Iterator[bytes]:
        if not self._sequence:
            yield self.keepalive()
        response = _response(answer, self._request)
        for index, item in enumerate(response["output"]):
            yield from self._item(index, item)
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, error: Refused) -> bytes:
        said = error_body(error)
        code = said["code"] or said["type"]
        failed = {**self._pending, "status": "failed", "error": {"code": code, "message": error.message}}
        opening = self._opening()
        # Some clients read the fields of the event, others those of an error object inside it.
        told = self._event("error", code=code, message=error.message, param=error.param, error=said)
        return opening + told + self._event("response.failed", response=failed)

    def _item(self, index: int, item: dict[str, Any]) -> Iterator[bytes]:
        """The events that build one item, the last with the whole of it."""
        at = {"item_id": item["id"], "output_index": index}
        kind = item["type"]
        text_name = {"function_call": "arguments", "custom_tool_call": "input"}.get(kind, "content")
        empty = {**item, text_name: [] if text_name == "content" else "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=empty)
        if text_name != "content":
            family = (
                "response.function_call_arguments" if kind == "function_call" else "response.custom_tool_call_input"
            )
            yield self._event(f"{family}.delta", **at, delta=item[text_name])
            yield self._event(f"{family}.done", **at, **{text_name: item[text_name]}, name=item["name"])
        else:
            part = item["content"][0]
            family = "response.reasoning_text" if kind == "reasoning" else "response.output_text"
            more = {} if kind == "reasoning" else {"logprobs": []}
            at["content_index"] = 0
            yield self._event("response.content_part.added", **at, part={**part, "text": ""})
            if part["text"]:
                yield self._event(f"{family}.delta", **at, delta=part["text"], **more)
            yield self._event(f"{family}.done", **at, text=part["text"], **more)
            yield self._event("response.content_part.done", **at, part=part)
        yield self._event("response.output_item.done", output_index=index, item=item)


def _head(call_id: str, created: int, request: ModelRequest) -> dict[str, Any]:
    """A response object without what isn't known before its answer."""
    defaults: dict[str, Any] = {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
    }
    return {
        "id": RESPONSE + call_id,
        "object": "response",
        "created_at": created,
        "model": request.model,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": request.parallel_tool_calls,
        "store": True,
        "truncation": "disabled",
        "usage": None,
        **defaults,
        **request.echo["response"],
    }


def _response(answer: Answer, request: ModelRequest) -> dict[str, Any]:
    choice = answer.choices[0]
    cut = choice.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    message: Message = {
        "role": "assistant",
        "content": choice.text,
        "reasoning_content": choice.reasoning,
        "tool_calls": choice.tool_calls,
    }
    return _head(answer.call_id, answer.created, request) | {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output_items(answer.call_id, message, request.echo["tools"], request.echo["sealed"], status),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": choice.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + choice.completion_tokens,
        },
    }


def _format(shape: dict[str, Any]) -> dict[str, Any] | None:
    kind = shape.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema" and isinstance(shape.get("schema"), dict):
        return {"type": "json_schema", "name": str(shape.get("name") or "answer"), "schema": shape["schema"]}
    raise Refused("text.format must be of type text, json_object, or json_schema with a schema", param="text.format")


def _tool_choice(value: Any, tools: Tools) -> tuple[ToolChoice, str | None]:
    if value is None or value == "auto":
        return "auto", None
    if value == "none":
        return "none", None
    if value == "required":
        return "required", None
    kind = value.get("type") if isinstance(value, dict) else value
    if kind in ("function", "custom") and isinstance(value.get("name"), str):
        known = {tools.namespaces.get(t["function"]["name"], (None, t["function"]["name"]))[1]: t for t in tools.listed}
        found = known.get(value["name"])
        if found is None:
            raise Refused(f"tool_choice names {value['name']!r}, which isn't among the tools", param="tool_choice")
        return "required", found["function"]["name"]
    raise fields.unsupported("tool_choice", f"{kind!r}; there are auto, none, required and a function by name")

"""OpenAI Chat Completions, JSON and server-sent events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from leyden.gateway.dialects import fields
from leyden.gateway.dialects.base import (
    EVENTS,
    NOTHING,
    Answer,
    Choice,
    Context,
    Message,
    ModelRequest,
    Refers,
    Stream,
    ToolChoice,
)
from leyden.gateway.errors import Refused

MAX_CHOICES = 128
_SAMPLING = (
    "temperature top_p top_k min_p max_tokens max_completion_tokens n seed stop presence_penalty frequency_penalty"
    " repetition_penalty logit_bias logprobs top_logprobs"
).split()
_NUMBERS = "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty".split()
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


class OpenAIChat:
    """Implements leyden.gateway.dialects.base.Dialect."""

    name = "openai-chat"

    def refers_to(self, body: dict[str, Any]) -> Refers:
        return NOTHING

    def parse(self, body: dict[str, Any], context: Context) -> ModelRequest:
        _refuse_unsupported(body)
        messages = fields.listing(body, "messages")
        if not messages:
            raise Refused("messages must be a non-empty list", param="messages")
        tools = _tools(fields.listing(body, "tools"))
        choice, only = _tool_choice(body.get("tool_choice"), tools)
        options = fields.mapping(body, "stream_options")
        parallel = body.get("parallel_tool_calls")
        return ModelRequest(
            model=fields.text(body, "model", "default"),
            messages=[_message(m, f"messages[{i}]") for i, m in enumerate(messages)],
            tools=tools or None,
            tool_choice=choice,
            tool_name=only,
            parallel_tool_calls=parallel is None or fields.flag(body, "parallel_tool_calls"),
            response_format=_format(fields.mapping(body, "response_format")),
            logprobs=fields.flag(body, "logprobs"),
            **common(body, options),
        )

    def fingerprint_parts(self, body: dict[str, Any], context: Context) -> dict[str, Any]:
        return {k: v for k, v in body.items() if k not in ("stream", "stream_options")}

    def json_answer(self, answer: Answer, request: ModelRequest) -> bytes:
        choices = []
        for index, choice in enumerate(answer.choices):
            message: dict[str, Any] = {"role": "assistant", "content": choice.text or None}
            if not choice.text and not choice.tool_calls:
                message["content"] = ""
            if choice.reasoning:
                message["reasoning_content"] = choice.reasoning
            if choice.tool_calls:
                message["tool_calls"] = choice.tool_calls
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": _logprobs(choice),
                    "finish_reason": _finish(choice),
                }
            )
        return orjson.dumps({**_head(answer, "chat.completion"), "choices": choices, "usage": usage(answer)})

    def stream(self, call_id: str, created: int, request: ModelRequest) -> Stream:
        return ChatStream(call_id, created, request)

    def error(self, error: Refused) -> bytes:
        return orjson.dumps({"error": error_body(error)})

    def models(self, names: Sequence[str], created: int, max_model_len: int | None) -> bytes:
        return orjson.dumps({"object": "list", "data": [_model(name, created, max_model_len) for name in names]})

    def model(self, name: str, created: int, max_model_len: int | None) -> bytes:
        return orjson.dumps(_model(name, created, max_model_len))


class ChatStream:
    """Implements leyden.gateway.dialects.base.Stream."""

    content_type = EVENTS

    def __init__(self, call_id: str, created: int, request: ModelRequest) -> None:
        self._call_id, self._created, self._request = call_id, created, request

    def keepalive(self) -> bytes:
        # An empty delta of a choice: clients that would trip over `choices: []` or drop comments take it as progress.
        choice = {"index": 0, "delta": {"content": ""}, "finish_reason": None}
        head = {"id": f"chatcmpl-{self._call_id}", "object": "chat.completion.chunk", "created": self._created}
        return fields.event({**head, "model": self._request.model, "choices": [choice]})

    def answer(self, answer: Answer) -> Iterator[bytes]:
        head = _head(answer, "chat.completion.chunk")
        # With include_usage every chunk but the last carries a null usage; without it no chunk mentions usage.
        tail: dict[str, Any] = {"usage": None} if self._request.include_usage else {}

        def chunk(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return fields.event({**head, "choices": [choice], **tail})

        for index, choice in enumerate(answer.choices):
            yield chunk(index, {"role": "assistant", "content": ""})
            if choice.reasoning:
                yield chunk(index, {"reasoning_content": choice.reasoning})
            logprobs = _logprobs(choice)
            if choice.text or logprobs:
                yield chunk(index, {"content": choice.text}, logprobs=logprobs)
            for position, call in enumerate(choice.tool_calls):
                opening = {**call, "index": position, "function": {**call["function"], "arguments": ""}}
                yield chunk(index, {"tool_calls": [opening]})
                rest = {"index": position, "function": {"arguments": call["function"]["arguments"]}}
                yield chunk(index, {"tool_calls": [rest]})
            yield chunk(index, {}, _finish(choice))
        if self._request.include_usage:
            yield fields.event({**head, "choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"

    def error(self, error: Refused) -> bytes:
        return fields.event({"error": error_body(error)})


def _model(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "leyden", "max_model_len": max_model_len}


def error_body(error: Refused) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.call_id}", "object": kind, "created": answer.created, "model": answer.model}


def usage(answer: Answer) -> dict[str, int]:
    completion = sum(c.completion_tokens for c in answer.choices)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": answer.prompt_tokens + completion,
    }


def _finish(choice: Choice) -> str:
    return "tool_calls" if choice.tool_calls and choice.finish_reason == "stop" else choice.finish_reason


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    content = [
        {"token": t.token.decode("utf-8", "replace"), "bytes": list(t.token), "logprob": t.logprob, "top_logprobs": []}
        for t in choice.logprobs
    ]
    return {"content": content, "refusal": None}


def common(body: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What chat and text completions have in common, as fields of a ModelRequest."""
    fields.numbers(body, _NUMBERS)
    fields.count(body, "seed", -(2**63))
    fields.count(body, "top_k", -1)
    fields.mapping(body, "logit_bias")
    return {
        "stream": fields.flag(body, "stream"),
        "include_usage": fields.flag(options, "include_usage"),
        "n": fields.count(body, "n", 1, MAX_CHOICES) or 1,
        "stop": fields.strings(body, "stop"),
        "max_tokens": fields.count(body, "max_completion_tokens", 1) or fields.count(body, "max_tokens", 1),
        "requested": fields.asked(body, _SAMPLING),
    }


def _refuse_unsupported(body: dict[str, Any]) -> None:
    """Refuse what would change the meaning of the answer. Fields that are only hints are ignored."""
    if body.get("functions") or body.get("function_call"):
        raise fields.unsupported("functions", "use tools")
    if fields.count(body, "top_logprobs", 0):
        raise fields.unsupported("top_logprobs", "only log-probabilities of the sampled tokens are recorded")
    modalities = fields.listing(body, "modalities")
    if body.get("audio") or any(m != "text" for m in modalities):
        raise fields.unsupported("modalities", "this model writes text only")
    if body.get("web_search_options") is not None:
        raise fields.unsupported("web_search_options", "this model has no web search")


def _format(shape: dict[str, Any]) -> dict[str, Any] | None:
    kind = shape.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    given = shape.get("json_schema")
    if kind == "json_schema" and isinstance(given, dict) and isinstance(given.get("schema"), dict):
        return {"type": "json_schema", "name": str(given.get("name") or "answer"), "schema": given["schema"]}
    raise Refused(
        "response_format must be of type text, json_object, or json_schema with json_schema.schema",
        param="response_format",
    )


def _tool_choice(value: Any, tools: list[dict[str, Any]]) -> tuple[ToolChoice, str | None]:
    if value is None or value == "auto":
        return "auto", None
    if value == "none":
        return "none", None
    if value == "required" and tools:
        return "required", None
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is not None and any(t["function"]["name"] == name for t in tools):
        return "required", name
    raise Refused("tool_choice must be auto, none, required, or a function of tools by name", param="tool_choice")


def _tools(values: list[Any]) -> list[dict[str, Any]]:
    for i, tool in enumerate(values):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise Refused(f"{where}: only tools of type function are supported, not {kind!r}", param=where)
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise Refused(f"{where}.function needs a name", param=where)
        if not isinstance(function.get("parameters", {}), dict | None):
            raise Refused(f"{where}.function.parameters must be an object", param=where)
    return values


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise Refused(f"{where} must be an object", param=where)
    said = value.get("role")
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise Refused(f"{where}: role {said!r} isn't one of {', '.join(_ROLES)}", param=where)
    out: Message = {"role": role, "content": _content(value.get("content"), where, images=role in ("user", "tool"))}
    for name in ("name", "tool_call_id"):
        if isinstance(value.get(name), str):
            out[name] = value[name]
    if role == "assistant":
        reasoning = value.get("reasoning_content") or value.get("reasoning")
        if isinstance(reasoning, str):
            out["reasoning_content"] = reasoning
        calls = fields.listing(value, "tool_calls")
        if calls:
            out["tool_calls"] = [_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return out


def _tool_call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"{where}: only calls of functions with a name are supported", param=where)
    arguments = fields.arguments_text(function.get("arguments"))
    return {
        "id": fields.word(value.get("id")) or None,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _content(content: Any, where: str, *, images: bool) -> str | list[dict[str, Any]]:
    """A message's content: a string, a list of parts, or nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(f"{where}.content must be text or a list of parts", param=where)
    return fields.as_content([_part(p, f"{where}.content[{i}]", images) for i, p in enumerate(content)])


def _part(part: Any, where: str, images: bool) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict):
        for name in ("text", "refusal"):
            if isinstance(part.get(name), str):
                return {"type": "text", "text": part[name]}
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if images and part.get("type") == "image_url" and isinstance(url, str):
            return {"type": "image", "url": url}
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise Refused(f"{where}: {kind!r} isn't supported here", param=where, code="unsupported_content")

"""OpenAI Chat Completions, JSON and server-sent events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from leyden.gateway.dialects.base import Answer, Choice, Context, Message, ModelRequest, Stream
from leyden.gateway.errors import Refused

MAX_CHOICES = 128
_SAMPLING = (
    "temperature top_p top_k min_p max_tokens max_completion_tokens n seed stop presence_penalty frequency_penalty"
    " repetition_penalty logit_bias logprobs top_logprobs"
).split()
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

    def refers_to(self, body: dict[str, Any]) -> Sequence[str]:
        return ()

    def parse(self, body: dict[str, Any], context: Context) -> ModelRequest:
        _refuse_unsupported(body)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused("messages must be a non-empty list", param="messages")
        options = body.get("stream_options")
        return ModelRequest(
            model=body["model"] if isinstance(body.get("model"), str) else "default",
            messages=[_message(m, f"messages[{i}]") for i, m in enumerate(messages)],
            tools=_tools(body.get("tools")),
            tool_choice="none" if body.get("tool_choice") == "none" else "auto",
            stream=_flag(body, "stream"),
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            n=_count(body, "n", 1, MAX_CHOICES) or 1,
            stop=_stop(body.get("stop")),
            max_tokens=_count(body, "max_completion_tokens", 1) or _count(body, "max_tokens", 1),
            logprobs=_flag(body, "logprobs"),
            requested={name: body[name] for name in _SAMPLING if body.get(name) is not None},
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
        return orjson.dumps({**_head(answer, "chat.completion"), "choices": choices, "usage": _usage(answer)})

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

    def __init__(self, call_id: str, created: int, request: ModelRequest) -> None:
        self._call_id, self._created, self._request = call_id, created, request

    def keepalive(self) -> bytes:
        # An empty delta of a choice: clients that would trip over `choices: []` or drop comments take it as progress.
        choice = {"index": 0, "delta": {"content": ""}, "finish_reason": None}
        head = {"id": f"chatcmpl-{self._call_id}", "object": "chat.completion.chunk", "created": self._created}
        return _event({**head, "model": self._request.model, "choices": [choice]})

    def answer(self, answer: Answer) -> Iterator[bytes]:
        head = _head(answer, "chat.completion.chunk")
        # With include_usage every chunk but the last carries a null usage; without it no chunk mentions usage.
        tail: dict[str, Any] = {"usage": None} if self._request.include_usage else {}

        def chunk(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return _event({**head, "choices": [choice], **tail})

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
            yield _event({**head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def error(self, error: Refused) -> bytes:
        return _event({"error": error_body(error)})


def _model(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "leyden", "max_model_len": max_model_len}


def error_body(error: Refused) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.call_id}", "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: Answer) -> dict[str, int]:
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


def _unsupported(field: str, detail: str) -> Refused:
    return Refused(f"{field} isn't supported here: {detail}", param=field, code="unsupported_parameter")


def _refuse_unsupported(body: dict[str, Any]) -> None:
    """Refuse what would change the meaning of the answer. Fields that are only hints are ignored."""
    shape = body.get("response_format")
    if shape is not None and (not isinstance(shape, dict) or shape.get("type") != "text"):
        kind = shape.get("type") if isinstance(shape, dict) else shape
        raise _unsupported("response_format", f"type {kind!r} would need constrained sampling; ask for it in words")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _unsupported("tool_choice", "only auto and none are; a forced call would need constrained sampling")
    if body.get("functions") or body.get("function_call"):
        raise _unsupported("functions", "use tools")
    if body.get("top_logprobs"):
        raise _unsupported("top_logprobs", "only log-probabilities of the sampled tokens are recorded")
    if body.get("audio") or any(m != "text" for m in body.get("modalities") or []):
        raise _unsupported("modalities", "this model writes text only")
    if body.get("web_search_options") is not None:
        raise _unsupported("web_search_options", "this model has no web search")


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"{name} must be true or false", param=name)
    return bool(value)


def _count(body: dict[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise Refused(f"{name} must be a whole number {limit}, not {value!r}", param=name)
    return value


def _stop(value: Any) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise Refused("stop must be a string or a list of strings", param="stop")
    return [s for s in stops if s]


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise Refused("tools must be a list", param="tools")
    for i, tool in enumerate(value):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise Refused(f"{where}: only tools of type function are supported, not {kind!r}", param=where)
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise Refused(f"{where}.function needs a name", param=where)
    return value or None


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise Refused(f"{where} must be an object", param=where)
    role = _ROLES.get(value.get("role", ""))
    if role is None:
        raise Refused(f"{where}: role {value.get('role')!r} isn't one of {', '.join(_ROLES)}", param=where)
    out: Message = {"role": role, "content": _text(value.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if isinstance(value.get(name), str):
            out[name] = value[name]
    if role == "assistant":
        reasoning = value.get("reasoning_content") or value.get("reasoning")
        if isinstance(reasoning, str):
            out["reasoning_content"] = reasoning
        calls = value.get("tool_calls")
        if calls:
            if not isinstance(calls, list):
                raise Refused(f"{where}.tool_calls must be a list", param=where)
            out["tool_calls"] = [_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return out


def _tool_call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"{where}: only calls of functions with a name are supported", param=where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else orjson.dumps(arguments).decode()
    name = function["name"]
    return {"id": value.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(content: Any, where: str) -> str:
    """The text of a message's content: a string, a list of text parts, or nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(f"{where}.content must be text or a list of text parts", param=where)
    parts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif isinstance(part, dict) and isinstance(part.get("refusal"), str):
            parts.append(part["refusal"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Refused(
                f"{where}.content[{i}]: {kind!r} isn't supported, this model reads text only",
                param=f"{where}.content[{i}]",
                code="unsupported_content",
            )
    return "".join(parts)

"""Gemini generateContent: JSON, server-sent events, and streams without `alt=sse` as a JSON array."""

from __future__ import annotations

import base64
import hashlib
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

_SAMPLING = ("temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "candidateCount", "seed")
_SAMPLING += ("presencePenalty", "frequencyPenalty", "thinkingConfig")
_MODES: dict[str, ToolChoice] = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto"}
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
GENERATE, STREAM, COUNT = "generateContent", "streamGenerateContent", "countTokens"
MAX_CANDIDATES = 128


class Gemini:
    """Implements leyden.gateway.dialects.base.Dialect. The model and what is asked of it are in the path."""

    name = "gemini"

    def refers_to(self, body: dict[str, Any]) -> Refers:
        return NOTHING

    def parse(self, body: dict[str, Any], context: Context) -> ModelRequest:
        model, _, method = context.path.removeprefix("models/").rpartition(":")
        if isinstance(body.get("generateContentRequest"), dict):
            body = body["generateContentRequest"]  # One of the two forms in which tokens are counted.
        if _either(body, "cachedContent"):
            raise fields.unsupported("cachedContent", "send the contents")
        given = fields.mapping(body, _name(body, "generationConfig"))
        config = {_camel(name): value for name, value in given.items()}
        fields.numbers(config, ("temperature", "topP", "topK", "presencePenalty", "frequencyPenalty"))
        fields.count(config, "seed", -(2**63))
        fields.mapping(config, "thinkingConfig")
        if any(kind != "TEXT" for kind in fields.listing(config, "responseModalities")):
            raise fields.unsupported("generationConfig.responseModalities", "this model writes text only")
        if fields.flag(config, "responseLogprobs"):
            raise fields.unsupported("generationConfig.responseLogprobs", "Chat Completions gives them (logprobs)")
        messages = _system(_either(body, "systemInstruction"))
        contents = fields.listing(body, "contents")
        if not contents:
            raise Refused("contents must be a non-empty list", param="contents")
        for i, content in enumerate(contents):
            said = _content(content, f"contents[{i}]")
            if i and said[0]["role"] == messages[-1]["role"] == "assistant":
                # Clients that streamed a turn send back a content for each of its events.
                said = [_joined(messages.pop(), said[0])]
            messages += said
        tools = _tools(fields.listing(body, "tools"))
        choice, only = _tool_choice(
            fields.mapping(body, _name(body, "toolConfig")), [t["function"]["name"] for t in tools]
        )
        return ModelRequest(
            model=model or "default",
            messages=messages,
            tools=tools or None,
            tool_choice=choice,
            tool_name=only,
            response_format=_format(config),
            stream=method == STREAM,
            n=fields.count(config, "candidateCount", 1, MAX_CANDIDATES) or 1,
            stop=fields.strings(config, "stopSequences"),
            max_tokens=fields.count(config, "maxOutputTokens", 1),
            requested=fields.asked(config, _SAMPLING),
            echo={"sse": context.query.get("alt") == "sse"},
        )

    def fingerprint_parts(self, body: dict[str, Any], context: Context) -> dict[str, Any]:
        return {"path": context.path.replace(STREAM, GENERATE), "body": body}

    def json_answer(self, answer: Answer, request: ModelRequest) -> bytes:
        return orjson.dumps(_response(answer))

    def stream(self, call_id: str, created: int, request: ModelRequest) -> Stream:
        return EventStream(request.model) if request.echo["sse"] else ArrayStream()

    def error(self, error: Refused) -> bytes:
        return orjson.dumps({"error": _error(error)})

    def models(self, names: Sequence[str], created: int, max_model_len: int | None) -> bytes:
        return orjson.dumps({"models": [_model(name, max_model_len) for name in names]})

    def model(self, name: str, created: int, max_model_len: int | None) -> bytes:
        return orjson.dumps(_model(name, max_model_len))

    def token_count(self, tokens: int) -> bytes:
        """The answer of the token-counting route."""
        return orjson.dumps({"totalTokens": tokens})


class EventStream:
    """Implements leyden.gateway.dialects.base.Stream, as server-sent events."""

    content_type = EVENTS

    def __init__(self, model: str) -> None:
        self._model = model

    def keepalive(self) -> bytes:
        nothing = {"index": 0, "content": {"role": "model", "parts": [{"text": ""}]}}
        return fields.event({"candidates": [nothing], "modelVersion": self._model})

    def answer(self, answer: Answer) -> Iterator[bytes]:
        yield fields.event(_response(answer))

    def error(self, error: Refused) -> bytes:
        return fields.event({"error": _error(error)})


class ArrayStream:
    """Implements leyden.gateway.dialects.base.Stream, as one JSON array."""

    content_type = b"application/json"

    def keepalive(self) -> bytes:
        return b"\n"

    def answer(self, answer: Answer) -> Iterator[bytes]:
        yield orjson.dumps([_response(answer)])

    def error(self, error: Refused) -> bytes:
        return orjson.dumps([{"error": _error(error)}])


def _response(answer: Answer) -> dict[str, Any]:
    completion = sum(c.completion_tokens for c in answer.choices)
    usage = {
        "promptTokenCount": answer.prompt_tokens,
        "candidatesTokenCount": completion,
        "totalTokenCount": answer.prompt_tokens + completion,
    }
    candidates = [
        {
            "index": i,
            "content": {"role": "model", "parts": _parts(choice)},
            "finishReason": "MAX_TOKENS" if choice.finish_reason == "length" else "STOP",
        }
        for i, choice in enumerate(answer.choices)
    ]
    return {
        "candidates": candidates,
        "usageMetadata": usage,
        "modelVersion": answer.model,
        "responseId": answer.call_id,
    }


def _parts(choice: Choice) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if choice.reasoning:
        parts.append({"text": choice.reasoning, "thought": True})
    if choice.text or not choice.tool_calls:
        parts.append({"text": choice.text})
    for call in choice.tool_calls:
        arguments = fields.parsed(call["function"]["arguments"])
        given = arguments if isinstance(arguments, dict) else {"arguments": call["function"]["arguments"]}
        said = {"id": call["id"], "name": call["function"]["name"], "args": given}
        parts.append({"functionCall": said, "thoughtSignature": _signature(choice.call_id)})
    return parts


def _signature(call_id: str) -> str:
    """What clients want back with a call; it means nothing to the gateway."""
    return base64.b64encode(hashlib.sha256(call_id.encode()).digest()).decode()


def _model(name: str, max_model_len: int | None) -> dict[str, Any]:
    limits = {"inputTokenLimit": max_model_len, "outputTokenLimit": max_model_len} if max_model_len else {}
    methods = [GENERATE, COUNT, STREAM]
    return {"name": f"models/{name}", "displayName": name, **limits, "supportedGenerationMethods": methods}


def _error(error: Refused) -> dict[str, Any]:
    message = error.message
    if error.overflow is not None:
        tokens, limit = error.overflow
        message = f"The input token count ({tokens}) exceeds the maximum number of tokens allowed ({limit})."
    status = _STATUS.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    return {"code": error.status, "message": message, "status": status}


def _name(body: dict[str, Any], name: str) -> str:
    """The name under which a field is given: clients write them in camel case or with underscores."""
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    return snake if snake in body and name not in body else name


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _either(body: dict[str, Any], name: str) -> Any:
    return body.get(_name(body, name))


def _system(value: Any) -> list[Message]:
    if value is None:
        return []
    parts = value.get("parts") if isinstance(value, dict) else [{"text": value}] if isinstance(value, str) else None
    if isinstance(parts, dict):
        parts = [parts]
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise Refused("systemInstruction must hold text parts", param="systemInstruction")
    text = "".join(p["text"] for p in parts)
    return [{"role": "system", "content": text}] if text else []


def _tools(values: list[Any]) -> list[dict[str, Any]]:
    out = []
    for i, value in enumerate(values):
        where = f"tools[{i}]"
        if not isinstance(value, dict):
            raise Refused(f"{where} must be an object", param=where)
        declared = _either(value, "functionDeclarations")
        hosted = [k for k, v in value.items() if v is not None and k != _name(value, "functionDeclarations")]
        if hosted:
            raise fields.unsupported(f"{where}.{hosted[0]}", "tools that run on the vendor's side aren't here")
        if not isinstance(declared, list | None):
            raise Refused(f"{where}.functionDeclarations must be a list", param=where)
        for j, function in enumerate(declared or ()):
            at = f"{where}.functionDeclarations[{j}]"
            if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
                raise Refused(f"{at} needs a name", param=at)
            schema = _either(function, "parametersJsonSchema")
            schema = schema if schema is not None else _schema(function.get("parameters"))
            out.append(fields.tool(function["name"], function.get("description"), schema))
    return out


def _tool_choice(config: dict[str, Any], names: list[str]) -> tuple[ToolChoice, str | None]:
    where = "toolConfig.functionCallingConfig"
    calling = fields.mapping(config, _name(config, "functionCallingConfig"))
    mode = fields.word(calling.get("mode") or "AUTO")
    if mode not in _MODES:
        raise Refused(f"{where}.mode must be one of {', '.join(_MODES)}", param="toolConfig")
    allowed = set(fields.strings(calling, _name(calling, "allowedFunctionNames")))
    if not allowed <= set(names):
        named = ", ".join(sorted(allowed - set(names)))
        raise Refused(f"{where}.allowedFunctionNames names {named}, which isn't among the tools", param="toolConfig")
    if not names:
        return "auto", None
    if mode == "ANY" and len(allowed) == 1:
        return "required", allowed.pop()
    if mode != "NONE" and allowed not in (set(), set(names)):
        raise fields.unsupported(f"{where}.allowedFunctionNames", "name one function with mode ANY, or send only those")
    return _MODES[mode], None


def _schema(value: Any) -> Any:
    """A schema of this dialect as JSON Schema: other spellings, types in capitals, numbers as text, `nullable`."""
    if isinstance(value, list):
        return [_schema(v) for v in value]
    if not isinstance(value, dict):
        return value
    out: dict[str, Any] = {}
    for key, given in value.items():
        word = _camel(key)
        if word in ("properties", "$defs") and isinstance(given, dict):
            out[word] = {name: _schema(v) for name, v in given.items()}
        elif word in ("items", "prefixItems", "anyOf", "additionalProperties"):
            out[word] = _schema(given)
        elif word == "type" and isinstance(given, str):
            out[word] = given.lower()
        elif word.startswith(("min", "max")) and isinstance(given, str) and given.isdecimal():
            out[word] = int(given)
        elif word not in ("nullable", "propertyOrdering"):
            out[word] = given
    if value.get("nullable") is True:
        return {"anyOf": [out, {"type": "null"}]}
    return out


def _format(config: dict[str, Any]) -> dict[str, Any] | None:
    schema = config.get("responseJsonSchema")
    schema = schema if schema is not None else _schema(config.get("responseSchema"))
    if isinstance(schema, dict):
        return {"type": "json_schema", "name": "answer", "schema": schema}
    kind = config.get("responseMimeType")
    if kind in (None, "text/plain"):
        return None
    if kind == "application/json":
        return {"type": "json_object"}
    raise fields.unsupported(
        "generationConfig.responseMimeType", f"{kind!r}; there are text/plain and application/json"
    )


def _content(value: Any, where: str) -> list[Message]:
    """One content: results of functions become messages of their own, in order."""
    if not isinstance(value, dict):
        raise Refused(f"{where} must be an object", param=where)
    role = value.get("role") or "user"
    if role not in ("user", "model", "function"):
        raise Refused(f"{where}: role {role!r} isn't one of user, model, function", param=where)
    given = fields.listing(value, "parts")
    for i, part in enumerate(given):
        if not isinstance(part, dict):
            raise Refused(f"{where}.parts[{i}] must be an object", param=where)
    if role == "model":
        return [_assistant(given, where)]
    out: list[Message] = []
    parts: list[dict[str, Any]] = []

    def close() -> None:
        if parts:
            out.append({"role": "user", "content": fields.as_content(list(parts))})
            parts.clear()

    for i, part in enumerate(given):
        result = _either(part, "functionResponse")
        if isinstance(result, dict):
            close()
            said = result.get("response")
            out.append(
                {
                    "role": "tool",
                    "content": said if isinstance(said, str) else orjson.dumps(said).decode(),
                    "name": str(result.get("name") or ""),
                    "tool_call_id": str(result.get("id") or ""),
                }
            )
        else:
            parts.append(_part(part, f"{where}.parts[{i}]"))
    close()
    return out or [{"role": "user", "content": ""}]


def _assistant(parts: list[dict[str, Any]], where: str) -> Message:
    text, reasoning, calls = [], [], []
    for i, part in enumerate(parts):
        call = _either(part, "functionCall")
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            function = {"name": call["name"], "arguments": fields.arguments_text(call.get("args") or {})}
            calls.append({"id": fields.word(call.get("id")) or None, "type": "function", "function": function})
        elif isinstance(part.get("text"), str):
            (reasoning if part.get("thought") else text).append(part["text"])
        elif set(part) - {"thoughtSignature", "thought_signature", "thought"}:
            raise _unreadable(part, f"{where}.parts[{i}]")
    message: Message = {"role": "assistant", "content": "".join(text)}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _joined(first: Message, second: Message) -> Message:
    message: Message = {"role": "assistant", "content": first["content"] + second["content"]}
    for name in ("reasoning_content", "tool_calls"):
        if name in first or name in second:
            empty: Any = [] if name == "tool_calls" else ""
            message[name] = first.get(name, empty) + second.get(name, empty)
    return message


def _part(part: dict[str, Any], where: str) -> dict[str, Any]:
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    inline, file = _either(part, "inlineData"), _either(part, "fileData")
    if isinstance(inline, dict) and isinstance(inline.get("data"), str):
        kind = str(_either(inline, "mimeType") or "image/png")
        if kind.startswith("image/"):
            return {"type": "image", "url": f"data:{kind};base64,{inline['data']}"}
    if isinstance(file, dict) and str(_either(file, "fileUri") or "").startswith(("http://", "https://")):
        return {"type": "image", "url": _either(file, "fileUri")}
    raise _unreadable(part, where)


def _unreadable(part: dict[str, Any], where: str) -> Refused:
    kinds = ", ".join(sorted(part)) or "nothing"
    return Refused(f"{where}: a part with {kinds} isn't supported here", param=where, code="unsupported_content")

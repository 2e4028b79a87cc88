"""Anthropic Messages, JSON and server-sent events."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
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
    ToolChoice,
)
from leyden.gateway.errors import Refused

_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stop_sequences", "thinking")
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none", "tool": "required"}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Harnesses put notes to the model between the turns; those keep their place."""
_PING = fields.event({"type": "ping"}, "ping")


class AnthropicMessages:
    """Implements leyden.gateway.dialects.base.Dialect."""

    name = "anthropic-messages"

    def refers_to(self, body: dict[str, Any]) -> Refers:
        return NOTHING

    def parse(self, body: dict[str, Any], context: Context) -> ModelRequest:
        if body.get("mcp_servers"):
            raise fields.unsupported("mcp_servers", "connect the servers to the agent instead")
        given = fields.listing(body, "messages")
        if not given:
            raise Refused("messages must be a non-empty list", param="messages")
        messages: list[Message] = []
        system = _system(body.get("system"))
        if system:
            messages.append({"role": "system", "content": system})
        for i, value in enumerate(given):
            messages += _message(value, f"messages[{i}]")
        tools = _tools(fields.listing(body, "tools"))
        choice = fields.mapping(body, "tool_choice")
        fields.numbers(body, ("temperature", "top_p"))
        fields.count(body, "top_k", -1)
        fields.mapping(body, "thinking")
        called, only = _tool_choice(choice, [t["function"]["name"] for t in tools or ()])
        return ModelRequest(
            model=fields.text(body, "model", "default"),
            messages=messages,
            tools=tools,
            tool_choice=called,
            tool_name=only,
            parallel_tool_calls=not fields.flag(choice, "disable_parallel_tool_use"),
            response_format=_format(body),
            stream=fields.flag(body, "stream"),
            stop=fields.strings(body, "stop_sequences"),
            max_tokens=fields.count(body, "max_tokens", 1),
            requested=fields.asked(body, _SAMPLING),
        )

    def fingerprint_parts(self, body: dict[str, Any], context: Context) -> dict[str, Any]:
        return {k: v for k, v in body.items() if k != "stream"}

    def json_answer(self, answer: Answer, request: ModelRequest) -> bytes:
        choice = answer.choices[0]
        message = _head(answer) | {
            "content": _blocks(choice),
            "stop_reason": _stop_reason(choice),
            "stop_sequence": choice.stop_sequence,
            "usage": _usage(answer.prompt_tokens, choice.completion_tokens),
        }
        return orjson.dumps(message)

    def stream(self, call_id: str, created: int, request: ModelRequest) -> MessageStream:
        return MessageStream()

    def error(self, error: Refused) -> bytes:
        return orjson.dumps(_error(error))

    def models(self, names: Sequence[str], created: int, max_model_len: int | None) -> bytes:
        data = [_model(name, created, max_model_len) for name in names]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return orjson.dumps({"data": data, "has_more": False, **ends})

    def model(self, name: str, created: int, max_model_len: int | None) -> bytes:
        return orjson.dumps(_model(name, created, max_model_len))

    def token_count(self, tokens: int) -> bytes:
        """The answer of the token-counting route."""
        return orjson.dumps({"input_tokens": tokens})


class MessageStream:
    """Implements leyden.gateway.dialects.base.Stream."""

    content_type = EVENTS

    def keepalive(self) -> bytes:
        # Pings may come before message_start, which has to wait: its usage isn't known yet.
        return _PING

    def answer(self, answer: Answer) -> Iterator[bytes]:
        choice = answer.choices[0]
        start = _head(answer) | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(answer.prompt_tokens, 0),
        }
        yield fields.event({"type": "message_start", "message": start}, "message_start")
        for index, block in enumerate(_blocks(choice)):
            opened, deltas = _pieces(block)
            yield _indexed("content_block_start", index, content_block=opened)
            for delta in deltas:
                yield _indexed("content_block_delta", index, delta=delta)
            yield _indexed("content_block_stop", index)
        end = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stop_sequence}
        usage = _usage(answer.prompt_tokens, choice.completion_tokens)
        yield fields.event({"type": "message_delta", "delta": end, "usage": usage}, "message_delta")
        yield fields.event({"type": "message_stop"}, "message_stop")

    def error(self, error: Refused) -> bytes:
        return fields.event(_error(error), "error")


def signature(thinking: str) -> str:
    """What stands in for the vendor's signature: the same for the same text, and of no meaning to the gateway."""
    return b64encode(hashlib.sha256(b"leyden thinking\n" + thinking.encode("utf-8", "replace")).digest()).decode()


def _indexed(kind: str, index: int, **more: Any) -> bytes:
    return fields.event({"type": kind, "index": index, **more}, kind)


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A whole block as the one that opens it and the deltas that fill it."""
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        opened = {"type": "thinking", "thinking": "", "signature": ""}
        return opened, [{"type": "thinking_delta", "thinking": block["thinking"]}, signed]
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    given = {"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}
    return {**block, "input": {}}, [given]


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        signed = signature(choice.reasoning)
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": signed})
    if choice.text or not choice.tool_calls:
        # Clients take an answer without any block for a broken one.
        blocks.append({"type": "text", "text": choice.text})
    for call in choice.tool_calls:
        name, given = call["function"]["name"], _input(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    value = fields.parsed(arguments)
    # The dialect has objects only; what isn't one stays readable under a name of its own.
    return value if isinstance(value, dict) else {"arguments": arguments if value is None else value}


def _stop_reason(choice: Choice) -> str:
    if choice.finish_reason == "length":
        return "max_tokens"
    if choice.tool_calls:
        return "tool_use"
    return "stop_sequence" if choice.stop_sequence is not None else "end_turn"


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.call_id}", "type": "message", "role": "assistant", "model": answer.model}


def _usage(prompt: int, completion: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, **cached, "output_tokens": completion}


def _model(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    when = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    entry = {"type": "model", "id": name, "display_name": name, "created_at": when}
    return {**entry, "max_input_tokens": max_model_len, "max_model_len": max_model_len}


def _error(error: Refused) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.overflow is not None:
        message = f"prompt is too long: {error.overflow[0]} tokens > {error.overflow[1]} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _tool_choice(choice: dict[str, Any], names: list[str]) -> tuple[ToolChoice, str | None]:
    kind = fields.word(choice.get("type") or "auto")
    if kind not in _CHOICES:
        raise Refused(f"tool_choice.type must be one of {', '.join(_CHOICES)}", param="tool_choice")
    if _CHOICES[kind] == "required" and not names:
        raise Refused(f"tool_choice {kind!r} needs tools", param="tool_choice")
    only = choice.get("name") if kind == "tool" else None
    if kind == "tool" and only not in names:
        raise Refused(f"tool_choice names {only!r}, which isn't among the tools", param="tool_choice")
    return _CHOICES[kind], only


def _format(body: dict[str, Any]) -> dict[str, Any] | None:
    shape = fields.mapping(fields.mapping(body, "output_config"), "format") or fields.mapping(body, "output_format")
    if not shape:
        return None
    if shape.get("type") != "json_schema" or not isinstance(shape.get("schema"), dict):
        raise Refused("output_format must be of type json_schema with a schema", param="output_format")
    return {"type": "json_schema", "name": "answer", "schema": shape["schema"]}


def _system(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise Refused("system must be text or a list of text blocks", param="system")
    # Blocks are paragraphs of one prompt.
    return "\n\n".join(_block_text(b, f"system[{i}]") for i, b in enumerate(value))


def _block_text(block: Any, where: str) -> str:
    if isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return block["text"]
    raise Refused(f"{where} must be a text block", param=where)


def _tools(values: list[Any]) -> list[dict[str, Any]] | None:
    out = []
    for i, value in enumerate(values):
        where = f"tools[{i}]"
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
            raise Refused(f"{where} needs a name", param=where)
        if value.get("type") not in (None, "custom") and "input_schema" not in value:
            raise fields.unsupported(where, f"the vendor's own tool {value['type']!r} isn't known to this model")
        out.append(fields.tool(value["name"], value.get("description"), value.get("input_schema")))
    return out or None


def _message(value: Any, where: str) -> list[Message]:
    """One message of the dialect: results of tools become messages of their own, in order."""
    if not isinstance(value, dict):
        raise Refused(f"{where} must be an object", param=where)
    role, content = value.get("role"), value.get("content")
    role = _ROLES.get(fields.word(role))
    if role is None:
        raise Refused(f"{where}: role {value.get('role')!r} isn't one of {', '.join(_ROLES)}", param=where)
    if content is None or isinstance(content, str):
        return [{"role": role, "content": content or ""}]
    if not isinstance(content, list):
        raise Refused(f"{where}.content must be text or a list of blocks", param=where)
    blocks = [_checked(block, f"{where}.content[{i}]") for i, block in enumerate(content)]
    if role == "assistant":
        return [_assistant(blocks, where)]
    out: list[Message] = []
    parts: list[dict[str, Any]] = []

    def close() -> None:
        if parts:
            out.append({"role": role, "content": fields.as_content(list(parts))})
            parts.clear()

    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            close()
            result = _result(block.get("content"), f"{where}.content[{i}]")
            out.append({"role": "tool", "content": result, "tool_call_id": str(block.get("tool_use_id") or "")})
        else:
            parts.append(_part(block, f"{where}.content[{i}]"))
    close()
    return out or [{"role": role, "content": ""}]


def _checked(block: Any, where: str) -> dict[str, Any]:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise Refused(f"{where} must be a block with a type", param=where)
    return block


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    text, reasoning, calls = [], [], []
    for i, block in enumerate(blocks):
        kind = block["type"]
        if kind == "text" and isinstance(block.get("text"), str):
            text.append(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            reasoning.append(block["thinking"])
        elif kind == "tool_use" and isinstance(block.get("name"), str):
            function = {"name": block["name"], "arguments": fields.arguments_text(block.get("input"))}
            calls.append({"id": fields.word(block.get("id")) or None, "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise _unreadable(kind, f"{where}.content[{i}]")
    message: Message = {"role": "assistant", "content": "".join(text)}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _result(content: Any, where: str) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(f"{where}.content must be text or a list of blocks", param=where)
    return fields.as_content([_part(_checked(b, f"{where}.content[{i}]"), where) for i, b in enumerate(content)])


def _part(block: dict[str, Any], where: str) -> dict[str, Any]:
    kind = block["type"]
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    if kind == "image":
        return {"type": "image", "url": _image(block.get("source"), where)}
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return {"type": "text", "text": str(source.get("data") or "")}
    if kind == "tool_reference":
        return {"type": "text", "text": str(block.get("tool_name") or "")}
    raise _unreadable(kind, where)


def _image(source: Any, where: str) -> str:
    if isinstance(source, dict):
        if source.get("type") == "url" and isinstance(source.get("url"), str):
            return source["url"]
        if source.get("type") == "base64" and isinstance(source.get("data"), str):
            return f"data:{source.get('media_type') or 'image/png'};base64,{source['data']}"
    raise Refused(f"{where}: an image needs a source of type base64 or url", param=where)


def _unreadable(kind: str, where: str) -> Refused:
    return Refused(f"{where}: blocks of type {kind!r} aren't supported here", param=where, code="unsupported_content")

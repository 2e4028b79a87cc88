"""Items of the Responses API to messages and tools. Pure.

What one answer said comes back as several items (reasoning, message, function calls); together they are one assistant
message again. Item ids name the call that they came from, so `item_reference` and `previous_response_id` are answered
from the attempt's recorded calls.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden.gateway.dialects import fields
from leyden.gateway.dialects.base import Context, Message, Refers
from leyden.gateway.errors import Refused

RESPONSE, MESSAGE, REASONING, FUNCTION = "resp_", "msg_", "rs_", "fc_"
_SEALED = "leyden.1."
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_DROPPED = ("web_search", "web_search_preview", "web_search_2025_08_26")
"""Hosted tools that coding harnesses list in every request, whether or not the model has them."""
_IGNORED_ITEMS = frozenset({"configuration_update", "compaction_trigger"})
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


@dataclass(slots=True)
class Tools:
    """The tools of a request in the internal form, and by which names the client knows them."""

    listed: list[dict[str, Any]] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Internal name to (namespace, name in it)."""
    custom: set[str] = field(default_factory=set)
    """Tools that take one text instead of JSON."""

    def add(self, value: Any, where: str, namespace: str | None = None) -> None:
        kind = fields.word(value.get("type")) if isinstance(value, dict) else ""
        if kind == "namespace" and namespace is None:
            own = _name(value, where)
            for i, inner in enumerate(fields.listing(value, "tools")):
                self.add(inner, f"{where}.tools[{i}]", own)
        elif kind == "function":
            name = self._named(_name(value, where), namespace)
            self.listed.append(fields.tool(name, value.get("description"), value.get("parameters")))
        elif kind == "custom":
            name = self._named(_name(value, where), namespace)
            self.custom.add(name)
            schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            self.listed.append(fields.tool(name, value.get("description"), schema))
        elif kind not in _DROPPED:
            raise fields.unsupported(where, f"tools of type {kind!r} run on the vendor's side; give it as a function")

    def _named(self, name: str, namespace: str | None) -> str:
        if namespace is None:
            return name
        internal = inner_name(namespace, name)
        self.namespaces[internal] = (namespace, name)
        return internal


def inner_name(namespace: str, name: str) -> str:
    """The name under which the model knows a tool of a namespace."""
    return f"{namespace}__{name}"


def _name(value: dict[str, Any], where: str) -> str:
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Refused(f"{where} needs a name", param=where)
    return name


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`: a client that keeps only this loses nothing."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unseal(value: Any) -> str | None:
    """What `seal` sealed; None for anything else."""
    if not isinstance(value, str) or not value.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(value.removeprefix(_SEALED), validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, UnicodeDecodeError):
        return None


def call_of(item_id: Any) -> str | None:
    """The call that an item or response id names; None for ids that aren't ours."""
    if not isinstance(item_id, str):
        return None
    for prefix in (RESPONSE, MESSAGE, REASONING, FUNCTION):
        if item_id.startswith(prefix):
            rest = item_id.removeprefix(prefix)
            return rest.rpartition("_")[0] if prefix == FUNCTION else rest
    return None


def referred(body: dict[str, Any]) -> Refers:
    """The calls whose record is needed to read `body`."""
    given, answers = body.get("input"), []
    if isinstance(given, list):
        named = [i.get("id") for i in given if isinstance(i, dict) and i.get("type") == "item_reference"]
        answers = [call for item_id in named if (call := call_of(item_id)) is not None]
    return Refers(call_of(body.get("previous_response_id")), answers)


def history(previous: Any, context: Context) -> list[Message]:
    """The conversation up to and with the response `previous`, without the instructions that were only that call's.

    Raises:
        Refused: 400, code previous_response_not_found.
    """
    before, said = context.continued, context.answers.get(call_of(previous) or "")
    if before is None or said is None:
        raise Refused(
            f"Previous response with id '{previous}' not found: it isn't one of this attempt's",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return [*before.messages[1 if before.instructed else 0 :], said]


class Conversation:
    """Collects input items into messages."""

    def __init__(self, answers: Mapping[str, Message], tools: Tools) -> None:
        self.messages: list[Message] = []
        self._answers = answers
        self._tools = tools
        self._turn: Message | None = None
        """The assistant message that following items may still belong to."""

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise Refused(f"{where} must be an object", param=where)
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reason(_reasoning(item))
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, kind == "custom_tool_call", where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _content(item.get("output"), f"{where}.output")
            self._plain({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id") or "")})
        elif kind == "item_reference":
            self._refer(item.get("id"), where)
        elif kind == "additional_tools":
            for i, value in enumerate(fields.listing(item, "tools")):
                self._tools.add(value, f"{where}.tools[{i}]")
        elif fields.word(kind) not in _IGNORED_ITEMS:
            raise Refused(
                f"{where}: items of type {kind!r} aren't supported here", param=where, code="unsupported_item"
            )

    def _plain(self, message: Message) -> None:
        self._turn = None
        self.messages.append(message)

    def _assistant(self) -> Message:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = _ROLES.get(fields.word(item.get("role")))
        if role is None:
            raise Refused(f"{where}: role {item.get('role')!r} isn't one of {', '.join(_ROLES)}", param=where)
        content = _content(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._plain({"role": role, "content": content})
            return
        if not isinstance(content, str):
            raise Refused(f"{where}.content: an assistant's message holds text only", param=where)
        if self._turn is not None and (self._turn["content"] or self._turn.get("tool_calls")):
            self._turn = None
        self._assistant()["content"] = content

    def _reason(self, text: str) -> None:
        turn = self._turn
        if turn is not None and (turn["content"] or turn.get("tool_calls")):
            self._turn = None  # An answer begins with its reasoning: this one is the next.
        if text:
            turn = self._assistant()
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def _call(self, item: dict[str, Any], custom: bool, where: str) -> None:
        name = _name(item, where)
        if isinstance(item.get("namespace"), str) and item["namespace"]:
            name = inner_name(item["namespace"], name)
        given = {"input": str(item.get("input") or "")} if custom else item.get("arguments")
        function = {"name": name, "arguments": fields.arguments_text(given)}
        call = {"id": fields.word(item.get("call_id")) or None, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _refer(self, item_id: Any, where: str) -> None:
        said = self._answers.get(call_of(item_id) or "")
        if said is None:
            raise Refused(
                f"{where}: item '{item_id}' not found: it isn't one of this attempt's",
                status=404,
                param=where,
                code="item_not_found",
            )
        if item_id.startswith(REASONING):
            self._reason(said.get("reasoning_content") or "")
        elif item_id.startswith(MESSAGE):
            self._message({"role": "assistant", "content": said.get("content") or ""}, where)
        else:
            calls, index = said.get("tool_calls") or [], item_id.rpartition("_")[2]
            if not index.isdecimal() or int(index) >= len(calls):
                raise Refused(f"{where}: item '{item_id}' not found", status=404, param=where, code="item_not_found")
            self._assistant().setdefault("tool_calls", []).append(calls[int(index)])


def _reasoning(item: dict[str, Any]) -> str:
    for name in ("content", "summary"):
        parts = item.get(name)
        texts = [p["text"] for p in parts if _is_text(p)] if isinstance(parts, list) else []
        if any(texts):
            return "".join(texts)
        if name == "content" and (sealed := unseal(item.get("encrypted_content"))) is not None:
            return sealed
    return ""


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and fields.word(part.get("type")) in _TEXT_PARTS and isinstance(part.get("text"), str)


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(f"{where} must be text or a list of parts", param=where)
    return fields.as_content([_part(p, f"{where}[{i}]") for i, p in enumerate(content)])


def _part(part: Any, where: str) -> dict[str, Any]:
    if _is_text(part):
        return {"type": "text", "text": part["text"]}
    if isinstance(part, dict):
        if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
            return {"type": "text", "text": part["refusal"]}
        if part.get("type") == "input_image" and isinstance(part.get("image_url"), str):
            return {"type": "image", "url": part["image_url"]}
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise Refused(f"{where}: {kind!r} isn't supported here", param=where, code="unsupported_content")


def output_items(call_id: str, message: Message, tools: Tools, sealed: bool, status: str) -> Sequence[dict[str, Any]]:
    """What an assistant message is as items, in order. There is always one."""
    items: list[dict[str, Any]] = []
    reasoning, text, calls = message.get("reasoning_content"), message["content"], message.get("tool_calls") or []
    if reasoning:
        items.append(
            {
                "id": REASONING + call_id,
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": reasoning}],
                "encrypted_content": seal(reasoning) if sealed else None,
                "status": "completed",
            }
        )
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        own = {"id": MESSAGE + call_id, "type": "message", "role": "assistant", "status": status}
        items.append({**own, "content": [part]})
    for i, call in enumerate(calls):
        items.append(_call_item(f"{FUNCTION}{call_id}_{i}", call, tools))
    return items


def _call_item(item_id: str, call: dict[str, Any], tools: Tools) -> dict[str, Any]:
    internal, given = call["function"]["name"], call["function"]["arguments"]
    namespace, name = tools.namespaces.get(internal, (None, internal))
    own = {"id": item_id, "call_id": call["id"], "name": name, "status": "completed"}
    if namespace is not None:
        own["namespace"] = namespace
    if internal in tools.custom:
        return {**own, "type": "custom_tool_call", "input": _custom_input(given)}
    return {**own, "type": "function_call", "arguments": given}


def _custom_input(arguments: str) -> str:
    value = fields.parsed(arguments)
    found = value.get("input") if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments

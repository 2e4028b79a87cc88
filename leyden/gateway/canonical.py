"""When are two messages the same? Harnesses re-serialise what they send back; this is what counts.

- text: a string, a list of text parts and nothing at all are their text; an assistant's is stripped. Images count.
- tool calls: (name, parsed arguments), in order. Ids don't count, nor how the arguments were written.
- reasoning doesn't count: harnesses drop it, cut it or send it back.
- tool results between two answers are a set: harnesses send them in the order in which they finished. A result is
  its text and which call of the answer before it belongs to.
- tool schemas count, since templates print them, but not marks for caches that providers want in them.

Everything else, such as cache marks and unknown fields, doesn't count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

Message = dict[str, Any]
_VOLATILE = frozenset({"cache_control", "defer_loading"})


@dataclass(frozen=True, slots=True)
class Keys:
    """The identity of a request: of its tool schemas, and of every prefix of its messages (`chain[i]`: the first i)."""

    tools: bytes
    chain: list[bytes]


def parse_arguments(text: Any) -> Any:
    """Tool arguments as a value: parsed JSON, {} for nothing, the text itself when it isn't JSON."""
    if not isinstance(text, str):
        return {} if text is None else text
    if not text.strip():
        return {}
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def plain_text(content: Any) -> str | None:
    """The text of a message's content; None when it holds more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    if all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        return "".join(p["text"] for p in content)
    return None


def canonical(message: Message, position: int | None = None) -> bytes:
    """The identity of a message, as bytes. `position` is that of the call that a tool result answers."""
    role = message["role"]
    content = message.get("content")
    text: Any = plain_text(content)
    if text is None and content is not None:
        text = [[p.get("type"), p.get("text") or p.get("url")] for p in content]
    if role == "assistant":
        calls = [_canonical_call(c["function"]) for c in message.get("tool_calls") or ()]
        value: list[Any] = [role, text.strip() if isinstance(text, str) else text, calls]
    elif role == "tool":
        value = [role, text, position]
    else:
        value = [role, text, message.get("name")]
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _canonical_call(function: Mapping[str, Any]) -> list[Any]:
    arguments = function.get("arguments")
    value = parse_arguments(arguments)
    try:
        return [function.get("name"), orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()]
    except TypeError:  # Nested deeper than can be written again: it counts as it was sent.
        return [function.get("name"), str(arguments)]


def clean_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Tool schemas without the marks that don't count."""
    out = []
    for tool in tools or ():
        kept = {k: v for k, v in tool.items() if k not in _VOLATILE} if _VOLATILE & tool.keys() else tool
        function = kept.get("function")
        if isinstance(function, dict) and _VOLATILE & function.keys():
            kept = {**kept, "function": {k: v for k, v in function.items() if k not in _VOLATILE}}
        out.append(kept)
    return out


def tools_key(tools: Sequence[dict[str, Any]] | None) -> bytes:
    """The identity of tool schemas."""
    return _digest(orjson.dumps(clean_tools(tools), option=orjson.OPT_SORT_KEYS))


def request_keys(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, known: Keys | None = None, same: int = 0
) -> Keys:
    """The keys of a request. `known` are those of one with these tools and these first `same` messages."""
    # A set of tool results is made anew as a whole, together with the answer that says which calls they belong to.
    while same and messages[same - 1]["role"] in ("tool", "assistant"):
        same -= 1
    chain = known.chain[: same + 1] if known and same else [_digest(b"conversation")]
    positions: dict[Any, int] = {}
    before_results, results = chain[-1], []
    for message in messages[len(chain) - 1 :]:
        if message["role"] == "tool":
            if not results:
                before_results = chain[-1]
            # A result that belongs to no known call belongs to its place.
            part = canonical(message, positions.get(message.get("tool_call_id"), -1 - len(results)))
            results.append(_digest(part))
            chain.append(_digest(before_results + b"".join(sorted(results))))
            continue
        results = []
        positions = {c.get("id"): i for i, c in enumerate(message.get("tool_calls") or ()) if c.get("id")}
        chain.append(_digest(chain[-1] + canonical(message)))
    return Keys(known.tools if known else tools_key(tools), chain)


def extended(key: bytes, answer: Message) -> bytes:
    """The key of a conversation with one more message, not a tool result."""
    return _digest(key + canonical(answer))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()

"""Reading fields of request bodies: typed, and refused by name when they don't fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import orjson

from leyden.gateway.errors import Refused


def unsupported(field: str, detail: str) -> Refused:
    """The refusal of a field that would change the meaning of the answer."""
    return Refused(f"{field} isn't supported here: {detail}", param=field, code="unsupported_parameter")


def text(body: dict[str, Any], name: str, default: str) -> str:
    """A string field; `default` when absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise Refused(f"{name} must be a string, not {_shown(value)}", param=name)
    return value


def word(value: Any) -> str:
    """A value that is looked up among known words: itself when it is a string, else "", which is none of them."""
    return value if isinstance(value, str) else ""


def flag(body: dict[str, Any], name: str) -> bool:
    """A boolean field; absent and null are False."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"{name} must be true or false, not {_shown(value)}", param=name)
    return bool(value)


def count(body: dict[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    """A whole number between `least` and `most`; None when absent or null."""
    value = body.get(name)
    if value is None:
        return None
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise Refused(f"{name} must be a whole number {limit}, not {_shown(value)}", param=name)
    return int(value)


def number(body: dict[str, Any], name: str) -> float | None:
    """A finite number; None when absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(f"{name} must be a number, not {_shown(value)}", param=name)
    return float(value)


def numbers(body: dict[str, Any], names: Sequence[str]) -> None:
    """Refuse those of the named fields that are given and aren't finite numbers."""
    for name in names:
        number(body, name)


def mapping(body: dict[str, Any], name: str) -> dict[str, Any]:
    """An object field; empty when absent or null."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Refused(f"{name} must be an object, not {_shown(value)}", param=name)
    return value


def listing(body: dict[str, Any], name: str) -> list[Any]:
    """A list field; empty when absent or null."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise Refused(f"{name} must be a list, not {_shown(value)}", param=name)
    return value


def strings(body: dict[str, Any], name: str) -> list[str]:
    """A string or a list of strings, without empty ones; empty when absent or null."""
    value = body.get(name)
    items = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(s, str) for s in items):
        raise Refused(f"{name} must be a string or a list of strings", param=name)
    return [s for s in items if s]


def asked(body: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of the named fields that are given."""
    return {name: body[name] for name in names if body.get(name) is not None}


def tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool in the internal form."""
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str) and description:
        function["description"] = description
    function["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def arguments_text(value: Any) -> str:
    """Tool arguments as the string that the internal form keeps."""
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value).decode()


def parsed(arguments: str) -> Any:
    """Tool arguments as a value; None when they aren't JSON."""
    try:
        return orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return None


def as_content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content of internal parts: text alone as a string, a list only when there are images."""
    if any(p["type"] == "image" for p in parts):
        return parts
    return "".join(p["text"] for p in parts)


def event(value: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


def _shown(value: Any) -> str:
    """A value as a message can show it: short, and on one line."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."

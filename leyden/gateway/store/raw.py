"""What a client sent, stored so that a conversation of k turns costs the bytes of its new messages. Pure.

A request body is taken apart into values that are stored by hash: each element of a list of objects (messages, tools),
each other object or long string, and one `head` of what is left. Prompts that are one long text or list of token ids
are cut into pieces. What grows with the conversation comes last, so that a later request of the same conversation
shares a prefix of hashes with an earlier one, and only the rest is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from leyden.gateway.store.records import HASH_BYTES, MessageRef

_GROWING = ("messages", "input", "contents", "prompt")
_PIECE = 2048
"""Elements, or characters, of a piece."""
Field = tuple[str, int | None] | tuple[str, int, bool]
"""A field and how many values it has, None for a value that isn't taken apart; True: they are pieces of one."""
_SHORT = 100
"""Strings up to this length stay in the head; a hash and a row of their own would cost as much."""


def message_ref(value: Any) -> MessageRef:
    """A JSON value with the hash that it is stored under."""
    body = orjson.dumps(value)
    return MessageRef(hashlib.blake2b(body, digest_size=HASH_BYTES).digest(), body)


@dataclass(slots=True)
class RawRequest:
    """A request body taken apart. The first `base_len` of `refs` are those of the call `base`."""

    head: MessageRef
    fields: str
    """JSON list of `Field` in the order of `refs`."""
    refs: Sequence[MessageRef]
    base: str | None = None
    base_len: int = 0

    def hashes(self) -> bytes:
        return b"".join(r.hash for r in self.refs)


def refs(values: Sequence[Any], hashes: Sequence[bytes] = (), stored: bytes = b"") -> list[MessageRef]:
    """The values as they are stored. `hashes` are those of the first ones, where they are known already.

    A value whose hash is known and at its place in `stored`, the hashes of a call that shares its values, gets no body:
    it won't be written.
    """
    same = 0
    for known in hashes:
        if stored[same * HASH_BYTES : (same + 1) * HASH_BYTES] != known:
            break
        same += 1
    return [*(MessageRef(h, b"") for h in hashes[:same]), *map(message_ref, values[same:])]


def values_of(body: dict[str, Any]) -> tuple[dict[str, Any], list[Field], list[Any]]:
    """A body taken apart: its head, which field has how many values, and the values."""
    head: dict[str, Any] = {}
    fields: list[Field] = []
    values: list[Any] = []
    for name in sorted(body, key=lambda n: n in _GROWING):
        value = body[name]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            fields.append((name, len(value)))
            values.extend(value)
        elif isinstance(value, str | list) and len(value) > _PIECE:
            pieces = [value[i : i + _PIECE] for i in range(0, len(value), _PIECE)]
            fields.append((name, len(pieces), True))
            values.extend(pieces)
        elif isinstance(value, dict) or (isinstance(value, str) and len(value) > _SHORT):
            fields.append((name, None))
            values.append(value)
        else:
            head[name] = value
    return head, fields, values


def raw_request(head: dict[str, Any], fields: list[Field], values: Sequence[MessageRef]) -> RawRequest:
    return RawRequest(message_ref(head), orjson.dumps(fields).decode(), values)


def take_apart(body: dict[str, Any]) -> RawRequest:
    head, fields, values = values_of(body)
    return raw_request(head, fields, refs(values))


def share(raw: RawRequest, base: str, base_hashes: bytes) -> RawRequest:
    """The same with what the call `base`, whose hashes are given, has in common with it."""
    same = 0
    for ref in raw.refs:
        if base_hashes[same * HASH_BYTES : (same + 1) * HASH_BYTES] != ref.hash:
            break
        same += 1
    return RawRequest(raw.head, raw.fields, raw.refs, base if same else None, same)


def put_together(head: dict[str, Any], fields: str, hashes: bytes, body_of: Callable[[bytes], Any]) -> dict[str, Any]:
    """The body again, equal as JSON to what was taken apart."""
    out = dict(head)
    values = iter([body_of(hashes[i : i + HASH_BYTES]) for i in range(0, len(hashes), HASH_BYTES)])
    for name, count, *in_pieces in orjson.loads(fields):
        if count is None:
            out[name] = next(values)
            continue
        own = [next(values) for _ in range(count)]
        if in_pieces:
            out[name] = "".join(own) if isinstance(own[0], str) else [x for piece in own for x in piece]
        else:
            out[name] = own
    return out

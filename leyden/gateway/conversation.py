"""The calls of one attempt as a forest of conversations. Pure: plain values in, decisions out.

A harness sends the whole conversation with every call. `Forest.plan` finds the recorded call that a request continues,
by comparing canonical messages, so the next prompt can be the recorded tokens plus the encoding of the new messages.
`link` then compares tokens: a call gets a parent only if its prompt extends the parent's prompt and response exactly;
any other relation to an earlier call is a break, with a reason and the first token that differs.

Two messages are the same when role and text are, for assistant turns stripped text and (name, parsed arguments) of the
tool calls in order. Harnesses re-serialise arguments, rename call ids, drop empty content and reasoning: none of these
count. Tool schemas are part of a conversation's identity, because templates print them into the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

Ids = npt.NDArray[np.int32]
Message = dict[str, Any]

BREAK_TOOLS = "tools_changed"
BREAK_HISTORY = "history_rewritten"
BREAK_NO_NEW = "no_new_message"
BREAK_REASONING = "template_dropped_reasoning"
BREAK_FAMILY = "unknown_family"
BREAK_TRUNCATED = "truncated"
BREAK_TOKENS = "tokens_differ"


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


def canonical(message: Message) -> bytes:
    """The identity of a message, as bytes."""
    role = message["role"]
    text = message.get("content") or ""
    if role == "assistant":
        calls = [
            [call["function"].get("name"), parse_arguments(call["function"].get("arguments"))]
            for call in message.get("tool_calls") or []
        ]
        value: list[Any] = [role, text.strip(), calls]
    else:
        value = [role, text, message.get("name")]
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _reasoning(message: Message) -> str:
    return (message.get("reasoning_content") or "").strip()


def _chain(start: bytes, parts: Sequence[bytes]) -> list[bytes]:
    """Keys of every prefix of `parts`: the first is of none of them, the last of all."""
    keys = [hashlib.blake2b(start, digest_size=16).digest()]
    for part in parts:
        keys.append(hashlib.blake2b(keys[-1] + part, digest_size=16).digest())
    return keys


@dataclass(slots=True, eq=False)
class Node:
    """A recorded call: what it read, what it sampled, and the keys under which it is found."""

    call_id: str
    seq: int
    base: Node | None
    base_len: int
    suffix: Ids
    response: Ids
    parent: Node | None
    answer: Message
    request_hashes: list[bytes]
    """Hashes of the request's messages as stored."""
    finish_reason: str
    delivered: bool = False

    def full(self) -> Ids:
        """Prompt and response."""
        pieces: list[Ids] = []
        node: Node | None = self
        keep: int | None = None
        while node is not None:
            own = np.concatenate([node.suffix, node.response])
            pieces.append(own if keep is None else own[: max(0, keep - node.base_len)])
            keep = node.base_len if keep is None else min(keep, node.base_len)
            node = node.base
        return np.concatenate(pieces[::-1])

    def prompt(self) -> Ids:
        return self.full()[: self.base_len + len(self.suffix)]


@dataclass(frozen=True, slots=True)
class Keys:
    """Prefix keys of a request's messages, with and without its tools."""

    strict: list[bytes]
    loose: list[bytes]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to make a request's prompt.

    `extend`: the recorded tokens of `node`, then `messages[start:]`. `full`: render everything; when `node` is given,
    the request continues that call but not token for token, and `reason` says why. `root`: a new conversation.
    """

    kind: Literal["extend", "full", "root"]
    keys: Keys
    node: Node | None = None
    start: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """How a prompt relates to what was recorded: shared tokens with `base`, and a parent or a break."""

    base: Node | None = None
    base_len: int = 0
    parent: Node | None = None
    break_reason: str | None = None
    break_index: int | None = None


def request_keys(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> Keys:
    parts = [canonical(m) for m in messages]
    identity = orjson.dumps(list(tools or []), option=orjson.OPT_SORT_KEYS)
    return Keys(_chain(b"tools" + identity, parts), _chain(b"any tools", parts))


@dataclass(slots=True)
class Forest:
    """All recorded calls of a running attempt."""

    nodes: dict[str, Node] = field(default_factory=dict)
    _answered: dict[bytes, list[Node]] = field(default_factory=dict)
    """By key of the request's messages and the answer."""
    _answered_loose: dict[bytes, list[Node]] = field(default_factory=dict)
    _asked: dict[bytes, Node] = field(default_factory=dict)
    """By key of the request's messages alone."""

    def plan(self, messages: Sequence[Message], keys: Keys) -> Plan:
        """Find the longest recorded conversation that `messages` continues; `keys` are theirs (`request_keys`)."""
        count = len(messages)
        for end in range(count, 0, -1):
            node = _best(self._answered.get(keys.strict[end], ()), messages[end - 1])
            if node is None:
                continue
            if end == count:
                return Plan("full", keys, node, reason=BREAK_NO_NEW)
            if any(m["role"] == "assistant" for m in messages[end:]):
                return Plan("full", keys, node, reason=BREAK_HISTORY)
            return Plan("extend", keys, node, start=end)
        for end in range(count, 0, -1):
            node = _best(self._answered_loose.get(keys.loose[end], ()), messages[end - 1])
            if node is not None:
                return Plan("full", keys, node, reason=BREAK_TOOLS)
        for end in range(count - 1, 0, -1):
            node = self._asked.get(keys.strict[end])
            if node is not None and messages[end]["role"] == "assistant":
                return Plan("full", keys, node, reason=BREAK_HISTORY)
        return Plan("root", keys)

    def add(
        self,
        call_id: str,
        seq: int,
        keys: Keys,
        link_: Link,
        prompt: Ids,
        response: Ids,
        answer: Message | None,
        finish_reason: str,
        request_hashes: list[bytes],
        *,
        delivered: bool = False,
    ) -> Node:
        """Record a call. One without an answer (a failed one) is kept but never continued."""
        node = Node(
            call_id=call_id,
            seq=seq,
            base=link_.base,
            base_len=link_.base_len,
            suffix=prompt[link_.base_len :].copy(),
            response=response,
            parent=link_.parent,
            answer=answer or {"role": "assistant", "content": ""},
            request_hashes=request_hashes,
            finish_reason=finish_reason,
            delivered=delivered,
        )
        self.nodes[call_id] = node
        if answer is not None:
            part = [canonical(answer)]
            self._answered.setdefault(_extend(keys.strict[-1], part), []).append(node)
            self._answered_loose.setdefault(_extend(keys.loose[-1], part), []).append(node)
            self._asked.setdefault(keys.strict[-1], node)
        return node


def _extend(key: bytes, parts: Sequence[bytes]) -> bytes:
    for part in parts:
        key = hashlib.blake2b(key + part, digest_size=16).digest()
    return key


def _best(nodes: Sequence[Node], echoed: Message) -> Node | None:
    """The call whose answer `echoed` is. Reasoning is optional in an echo, but must be the call's own when given.

    Siblings may have answered with the same text: the tool call ids of the echo tell them apart, else the one that was
    delivered, and last, counts.
    """
    reasoning = _reasoning(echoed)
    ids = [c.get("id") for c in echoed.get("tool_calls") or []]

    def rank(node: Node) -> tuple[bool, bool, int]:
        own = [c.get("id") for c in node.answer.get("tool_calls") or []]
        return (bool(ids) and own == ids, node.delivered, node.seq)

    fitting = [n for n in nodes if not reasoning or _reasoning(n.answer) == reasoning]
    return max(fitting, key=rank, default=None)


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading ids agree."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def link(plan: Plan, prompt: Ids, reason: str | None) -> Link:
    """Relate a finished prompt to the call that it continues, by token identity.

    `reason` says why the prompt was rendered in full, when it was; a full rendering that extends the recorded tokens
    all the same isn't a break.
    """
    if plan.node is None:
        return Link()
    before = plan.node.full()
    same = common_prefix(prompt, before)
    base = plan.node if same else None
    if same == len(before) and len(prompt) > same:
        return Link(base, same, parent=plan.node)
    return Link(base, same, break_reason=reason or BREAK_TOKENS, break_index=same)

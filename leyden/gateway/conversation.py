"""The calls of one attempt as a forest of conversations. Pure: plain values in, decisions out.

A harness sends the whole conversation with every call. `Forest.plan` finds the recorded call that a request continues,
by comparing canonical messages (leyden.gateway.canonical), so the next prompt can be the recorded tokens plus the
encoding of the new messages. `link` then compares tokens: a call gets a parent only if its prompt extends the parent's
prompt and response exactly; any other relation to an earlier call is a break, with a reason and the first token that
differs. Recorded ids are never changed.

Calls overlap: sub-agents share a key, clients repeat requests. Two calls that continue the same one are two branches
of it. Of several answers with the same text, an echo continues one that nobody continues yet: a call that is being
made holds the one that it continues (`Forest.reserve`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from leyden.gateway.canonical import Keys, Message, extended, plain_text, request_keys
from leyden.gateway.memory import Memory
from leyden.gateway.tokens import Ids

__all__ = ["Forest", "Ids", "Keys", "Link", "Message", "Node", "Plan", "common_prefix", "link", "request_keys"]

BREAK_TOOLS = "tools_changed"
BREAK_HISTORY = "history_rewritten"
BREAK_NO_NEW = "no_new_message"
BREAK_COMPACTION = "compaction"
BREAK_REASONING = "template_dropped_reasoning"
BREAK_TEMPLATE = "template_rewrote_history"
BREAK_OPEN_REASONING = "reasoning_unclosed"
BREAK_FAMILY = "unknown_family"
BREAK_TRUNCATED = "truncated"
BREAK_RETOKENISED = "retokenised"
BREAK_TOKENS = "tokens_differ"

CACHED_LEAVES = 8
"""Conversations of an attempt whose tokens are kept in one piece; others are put together when they go on."""
SUMMARY_CHARS = 80
"""An answer of at least this length that comes back inside a new conversation's messages was its summary."""
RAW_ANSWER: Message = {"role": "assistant", "content": ""}
"""Stands for every answer to a prompt without messages: such calls are recognised by their tokens alone."""
SUMMARY_LINE = 40
"""Characters from which a line of a summary is told from what anybody might write."""
SUMMARY_CALLS = 16
"""Calls among which a summary is looked for, newest first."""


@dataclass(slots=True, eq=False)
class Node:
    """A recorded call: what it read, what it sampled, and how it is recognised."""

    call_id: str
    seq: int
    base: Node | None
    base_len: int
    suffix: Ids
    response: Ids
    parent: Node | None
    answer: Message
    request_hashes: list[bytes]
    """Hashes of the request's messages as stored, and (`raw_hashes`) of its body, of which the next call of the
    conversation stores only what is new. Gone when it has: else a conversation's turns would add up squared."""
    finish_reason: str
    summary: bool = False
    """Whether it was asked for a summary of its conversation."""
    tools: bytes = b""
    raw_hashes: bytes = b""
    delivered: bool = False
    continued: int = 0
    """Calls that continue this one, recorded or under way."""
    thought: bool | None = None
    """Whether prompt and response hold sampled reasoning; filled in by the renderer."""
    _full: Ids | None = None

    def shed(self) -> None:
        """Let go of what only a conversation's last calls keep."""
        self._full, self.request_hashes, self.raw_hashes = None, [], b""

    def full(self) -> Ids:
        """Prompt and response."""
        if self._full is not None:
            return self._full
        pieces: list[Ids] = []
        node: Node | None = self
        keep: int | None = None
        while node is not None:
            if node._full is not None:
                pieces.append(node._full[:keep])
                break
            own = np.concatenate([node.suffix, node.response])
            pieces.append(own if keep is None else own[: max(0, keep - node.base_len)])
            keep = node.base_len if keep is None else min(keep, node.base_len)
            node = node.base
        return np.concatenate(pieces[::-1])

    @property
    def prompt_len(self) -> int:
        return self.base_len + len(self.suffix)

    def prompt(self) -> Ids:
        return self.full()[: self.prompt_len]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to make a request's prompt.

    `extend`: the recorded tokens of `node`, then `messages[start:]`. `full`: render everything; when `node` is given,
    the request continues that call but not token for token, and `reason` says why. `root`: a new conversation; `near`
    is an earlier call whose prompt begins alike, if there is one.
    """

    kind: Literal["extend", "full", "root"]
    keys: Keys
    node: Node | None = None
    start: int = 0
    reason: str | None = None
    near: Node | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """How a prompt relates to what was recorded: shared tokens with `base`, and a parent or a break."""

    base: Node | None = None
    base_len: int = 0
    parent: Node | None = None
    break_reason: str | None = None
    break_index: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it was recognised: its keys, and the hashes of its messages as stored, once they are made."""

    keys: Keys
    hashes: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Forest:
    """All recorded calls of a running attempt."""

    nodes: dict[str, Node] = field(default_factory=dict)
    _answered: dict[bytes, list[Node]] = field(default_factory=dict)
    """By key of the request's messages and the answer."""
    _asked: dict[bytes, Node] = field(default_factory=dict)
    """The first call, by tools and key of the request's messages."""
    _heads: set[bytes] = field(default_factory=set)
    """Tools and first message of every conversation."""
    _last: Node | None = None
    _leaves: deque[Node] = field(default_factory=deque)
    """Nodes that keep their tokens in one piece."""
    requests: Memory[Request] = field(default_factory=Memory)
    """By messages, tagged with their tools."""

    def plan(self, messages: Sequence[Message], keys: Keys) -> Plan:
        """Find the longest recorded conversation that `messages` continues; `keys` are theirs (`request_keys`)."""
        count = len(messages)
        other_tools: Node | None = None
        for end in range(count, 0, -1):
            found = self._answered.get(keys.chain[end])
            if found is None:
                continue
            node = _best([n for n in found if n.tools == keys.tools], messages[end - 1])
            if node is None:
                other_tools = other_tools or _best(found, messages[end - 1])
                continue
            if end == count:
                return Plan("full", keys, node, reason=BREAK_NO_NEW)
            if any(m["role"] == "assistant" for m in messages[end:]):
                return Plan("full", keys, node, reason=BREAK_HISTORY)
            return Plan("extend", keys, node, start=end)
        if other_tools is not None:
            return Plan("full", keys, other_tools, reason=BREAK_TOOLS)
        for end in range(count, 0, -1):
            node = self._asked.get(keys.tools + keys.chain[end])
            if node is not None and end == count:
                return Plan("root", keys, near=node)  # The same question again is a new sample.
            if node is not None:
                # The same and something else means that the answer was replaced or left out.
                summed_up = self._summary_in(messages[end:], alike=True) is not None
                return Plan("full", keys, node, reason=BREAK_COMPACTION if summed_up else BREAK_HISTORY)
        summary = self._summary_in(messages, alike=_head(keys) in self._heads)
        if summary is not None:
            return Plan("full", keys, summary, reason=BREAK_COMPACTION)
        return Plan("root", keys, near=self._last)

    def plan_tokens(self, prompt: Ids, keys: Keys) -> Plan:
        """A plan for a prompt that the client gave as text or tokens: it continues the longest call that it extends."""
        best: Node | None = None
        for node in self._answered.get(extended(keys.chain[-1], RAW_ANSWER), ()):
            whole = node.full()
            longer = best is None or len(whole) > best.prompt_len + len(best.response)
            if longer and len(whole) < len(prompt) and np.array_equal(prompt[: len(whole)], whole):
                best = node
        if best is not None:
            return Plan("extend", keys, best)
        return Plan("root", keys, near=self._last)

    def reserve(self, plan: Plan) -> None:
        """Hold the call that a plan continues, until `release`. Calls that continue it are counted by `add`."""
        if plan.node is not None:
            plan.node.continued += 1

    def release(self, plan: Plan) -> None:
        """Let go of what `reserve` held: the call was added, or failed."""
        if plan.node is not None:
            plan.node.continued -= 1

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
        raw_hashes: bytes = b"",
        *,
        delivered: bool = False,
        summary: bool = False,
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
            raw_hashes=raw_hashes,
            finish_reason=finish_reason,
            summary=summary,
            tools=keys.tools,
            delivered=delivered,
        )
        self.nodes[call_id] = node
        self._last = node
        if answer is None:
            return node
        if link_.base is not None and (link_.parent is not None or link_.break_reason is not None):
            link_.base.continued += 1
        said = answer if len(keys.chain) > 1 else RAW_ANSWER
        self._answered.setdefault(extended(keys.chain[-1], said), []).append(node)
        self._heads.add(_head(keys))
        asked = keys.tools + keys.chain[-1]
        first = self._asked.setdefault(asked, node)
        if (seq, call_id) < (first.seq, first.call_id):
            self._asked[asked] = node
        self._cache(node, prompt)
        return node

    def _cache(self, node: Node, prompt: Ids) -> None:
        node._full = np.concatenate([prompt, node.response])
        if node.parent is not None and node.parent._full is not None:
            node.parent.shed()
            self._leaves.remove(node.parent)
        self._leaves.append(node)
        if len(self._leaves) > CACHED_LEAVES:
            self._leaves.popleft().shed()

    def _summary_in(self, messages: Sequence[Message], *, alike: bool) -> Node | None:
        """The call whose answer is part of one of `messages`: what was said before has been summed up.

        `alike`: they begin like an earlier conversation. Others are asked only about calls that were made for a
        summary: agents quote answers to their sub-agents, too.
        """
        texts = [(m["role"], plain_text(m.get("content")) or "") for m in messages if m["role"] != "tool"]
        told = [text for role, text in texts if role != "assistant"]
        for node in list(self.nodes.values())[: -SUMMARY_CALLS - 1 : -1]:
            said = (plain_text(node.answer.get("content")) or "").strip()
            if node.summary and any(_sums_up(said, text) for _, text in texts):
                return node
            if alike and len(said) >= SUMMARY_CHARS and any(said in text for text in told):
                return node
        return None


def _sums_up(summary: str, text: str) -> bool:
    """Whether `text` holds a summary, or what a harness left of it: some cut out thoughts and tags."""
    if summary and summary in text:
        return True
    lines = {line.strip() for line in summary.splitlines()}
    return sum(len(line) for line in lines if len(line) >= SUMMARY_LINE and line in text) >= SUMMARY_CHARS


def _head(keys: Keys) -> bytes:
    """How a conversation begins: tools and first message."""
    return keys.tools + keys.chain[min(1, len(keys.chain) - 1)]


def _reasoning(message: Message) -> str:
    return (message.get("reasoning_content") or "").strip()


def _best(nodes: Sequence[Node], echoed: Message) -> Node | None:
    """The call whose answer `echoed` is. Reasoning is optional in an echo, but must be the call's own when given.

    Siblings may have answered with the same text. The tool call ids of the echo tell them apart; else one that was
    delivered counts before one that wasn't, one that nobody continues before others, and the last.
    """
    reasoning = _reasoning(echoed)
    ids = [c.get("id") for c in echoed.get("tool_calls") or []]

    def rank(node: Node) -> tuple[bool, bool, bool, int, str]:
        own = [c.get("id") for c in node.answer.get("tool_calls") or []]
        return (bool(ids) and own == ids, node.delivered, not node.continued, node.seq, node.call_id)

    fitting = [n for n in nodes if not reasoning or _reasoning(n.answer) == reasoning]
    return max(fitting, key=rank, default=None)


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading ids agree."""
    size, start, step = min(len(a), len(b)), 0, 64
    while start < size:
        end = min(size, start + step)
        different = a[start:end] != b[start:end]
        first = int(different.argmax())
        if different[first]:
            return start + first
        start, step = end, step * 16  # Prompts that differ at all mostly differ early.
    return size


def link(plan: Plan, prompt: Ids, reason: str | None) -> Link:
    """Relate a finished prompt to the call that it continues, by token identity.

    `reason` says why the prompt was rendered in full, when it was; a full rendering that extends the recorded tokens
    all the same isn't a break.
    """
    earlier = plan.node or plan.near
    if earlier is None:
        return Link()
    before = earlier.full()
    same = common_prefix(prompt, before)
    base = earlier if same else None
    if plan.node is None:
        return Link(base, same)
    if same == len(before) and len(prompt) > same:
        return Link(base, same, parent=plan.node)
    return Link(base, same, break_reason=reason or BREAK_TOKENS, break_index=same)

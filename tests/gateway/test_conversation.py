"""The forest: which call a request continues, whatever the order in which conversations interleave."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.gateway.canonical import Message, canonical, request_keys
from leyden.gateway.conversation import Forest, Node, common_prefix, link

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]


def encode(messages: list[Message]) -> list[int]:
    """A template that only ever appends: one token per character, 1 and 2 around every turn."""
    out: list[int] = []
    for m in messages:
        out += [1, len(m["role"]) + 3, *(100 + ord(c) for c in m.get("content") or ""), 2]
    return out


def ask(forest: Forest, messages: list[Message], answer: Message, call_id: str, seq: int, tools: Any = None) -> Node:
    """One call: plan, make the prompt, sample ids that no encoding would give, record."""
    keys = request_keys(messages, tools)
    plan = forest.plan(messages, keys)
    opening = [1, 12]
    if plan.kind == "extend" and plan.node is not None:
        prompt = [*plan.node.full().tolist(), *encode(messages[plan.start :]), *opening]
    else:
        prompt = ([9] if tools else []) + encode(messages) + opening
    ids = np.asarray(prompt, np.int32)
    response = np.asarray([1000 + seq, *(2000 + ord(c) for c in answer["content"]), 2], np.int32)
    node = forest.add(call_id, seq, keys, link(plan, ids, plan.reason), ids, response, answer, "stop", [])
    node.delivered = True
    return node


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


@dataclass
class Talk:
    """A conversation that goes on turn by turn, from its own first message or from a turn of another."""

    name: str
    turns: int
    branch: tuple[int, int] | None
    history: list[Message] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


@st.composite
def talks(draw: st.DrawFn) -> list[tuple[int, tuple[int, int] | None]]:
    out: list[tuple[int, tuple[int, int] | None]] = []
    for index in range(draw(st.integers(1, 4))):
        branch = None
        if index and draw(st.booleans()):
            other = draw(st.integers(0, index - 1))
            branch = (other, draw(st.integers(1, out[other][0])))
        out.append((draw(st.integers(1, 4)), branch))
    return out


def play(shape: list[tuple[int, tuple[int, int] | None]], order: random.Random) -> tuple[dict[str, str | None], Forest]:
    forest, seq = Forest(), 0
    all_talks = [Talk(f"t{i}", turns, branch) for i, (turns, branch) in enumerate(shape)]
    snapshots: dict[tuple[int, int], list[Message]] = {}
    frozen: dict[str, tuple[bytes, bytes]] = {}
    parents: dict[str, str | None] = {}
    while True:
        ready = [
            (i, t)
            for i, t in enumerate(all_talks)
            if len(t.done) < t.turns and (t.done or t.branch is None or t.branch in snapshots)
        ]
        if not ready:
            break
        index, talk = order.choice(ready)
        if not talk.done:
            talk.history = list(snapshots[talk.branch]) if talk.branch else [{"role": "system", "content": "S"}]
        turn = len(talk.done)
        talk.history.append(user(f"{talk.name} asks {turn}"))
        answer = said(f"{talk.name} hears {turn}", reasoning_content="r")
        call_id = f"{talk.name}.{turn}"
        node = ask(forest, talk.history, answer, call_id, seq)
        seq += 1
        parents[call_id] = node.parent.call_id if node.parent else None
        frozen[call_id] = (node.prompt().tobytes(), node.response.tobytes())
        echo = said(f" {answer['content']}\n") if order.random() < 0.5 else dict(answer)
        talk.history.append(echo)
        talk.done.append(call_id)
        snapshots[index, turn + 1] = list(talk.history)
        for known, (prompt, response) in frozen.items():
            kept = forest.nodes[known]
            assert (kept.prompt().tobytes(), kept.response.tobytes()) == (prompt, response)
    return parents, forest


@settings(max_examples=60, deadline=None)
@given(talks(), st.integers(0, 2**32), st.integers(0, 2**32))
def test_any_interleaving_gives_the_same_parents(
    shape: list[tuple[int, tuple[int, int] | None]], one: int, other: int
) -> None:
    parents, forest = play(shape, random.Random(one))
    again, _ = play(shape, random.Random(other))
    assert parents == again
    for index, (turns, branch) in enumerate(shape):
        before = f"t{branch[0]}.{branch[1] - 1}" if branch else None
        for turn in range(turns):
            assert parents[f"t{index}.{turn}"] == before
            before = f"t{index}.{turn}"
    for node in forest.nodes.values():
        if node.parent is not None:
            assert common_prefix(node.prompt(), node.parent.full()) == len(node.parent.full())


def test_canonical_messages() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": '{"x": 1, "y": "é"}'}}
    again = {"id": "b", "function": {"name": "f", "arguments": '{"y":"\\u00e9","x":1}'}}
    assert canonical(said("t ", tool_calls=[call])) == canonical(said("t", tool_calls=[again], reasoning_content="z"))
    assert canonical({"role": "assistant", "content": None}) == canonical({"role": "assistant"})
    empty = {"id": "a", "function": {"name": "f", "arguments": ""}}
    none = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    assert canonical(said("", tool_calls=[empty])) == canonical(said("", tool_calls=[none]))
    assert canonical(user("t ")) != canonical(user("t"))
    assert canonical(said("t", tool_calls=[call])) != canonical(said("t"))


def test_kinds_of_breaks() -> None:
    forest = Forest()
    first = [user("a")]
    ask(forest, first, said("A", reasoning_content="why"), "c0", 0, TOOLS)
    history = [*first, said("A"), user("b")]

    def plan(messages: list[Message], tools: Any = TOOLS) -> tuple[str, str | None]:
        found = forest.plan(messages, request_keys(messages, tools))
        return found.kind, found.reason

    assert plan(history) == ("extend", None)
    assert plan([*first, said("A", reasoning_content=" why "), user("b")]) == ("extend", None)
    assert plan([*first, said("A", reasoning_content="other"), user("b")]) == ("full", "history_rewritten")
    assert plan(history, None) == ("full", "tools_changed")
    assert plan([*first, said("B"), user("b")]) == ("full", "history_rewritten")
    assert plan([*history, said("never sampled"), user("c")]) == ("full", "history_rewritten")
    assert plan([*first, said("A")]) == ("full", "no_new_message")
    assert plan([user("title?")]) == ("root", None)
    assert plan([user("few"), said("shot"), user("b")]) == ("root", None)
    assert plan(first) == ("root", None)


def test_a_full_rendering_that_extends_is_no_break() -> None:
    forest = Forest()
    node = ask(forest, [user("a")], said("A"), "c0", 0)
    messages = [user("a"), said("A"), user("b")]
    plan = forest.plan(messages, request_keys(messages, None))
    longer = np.concatenate([node.full(), np.asarray([5, 6], np.int32)])
    joined = link(plan, longer, "unknown_family")
    assert joined.parent is node and joined.break_reason is None
    changed = longer.copy()
    changed[3] = 7
    broken = link(plan, changed, "unknown_family")
    assert (broken.parent, broken.break_reason, broken.break_index, broken.base_len) == (None, "unknown_family", 3, 3)
    assert link(plan, changed, None).break_reason == "tokens_differ"


def test_echoed_call_ids_tell_siblings_apart() -> None:
    forest = Forest()
    for seq, name in enumerate(("x", "y")):
        call = {"id": name, "function": {"name": "f", "arguments": "{}"}}
        ask(forest, [user("a")], said("", tool_calls=[call]), name, seq)
    for name, expected in (("x", "x"), ("y", "y"), ("z", "y")):
        echo = said("", tool_calls=[{"id": name, "function": {"name": "f", "arguments": "{}"}}])
        messages = [user("a"), echo, {"role": "tool", "content": "1"}]
        found = forest.plan(messages, request_keys(messages, None)).node
        assert found is not None and found.call_id == expected


@pytest.mark.parametrize(("a", "b", "n"), [([], [], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1), ([4], [5], 0)])
def test_common_prefix(a: list[int], b: list[int], n: int) -> None:
    assert common_prefix(np.asarray(a, np.int32), np.asarray(b, np.int32)) == n

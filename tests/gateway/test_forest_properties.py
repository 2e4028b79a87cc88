"""Whatever order the calls of several conversations come in, with branches, retries, sub-agents and calls that overlap:
the same trees, every sampled token trained once, and nothing recorded ever changes.

The tokenizer, template, renderer and rows are the real ones; only what the model samples is made up.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leyden.gateway.attempts import grow
from leyden.gateway.canonical import Message, request_keys
from leyden.gateway.conversation import Forest, Link, Node, Request
from leyden.gateway.renderer import ModelRenderer, Prompt
from leyden.gateway.store.records import StoredCall
from leyden.schema import CallRecord, Trajectory
from leyden.training.rows import build_rows

END = 2
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
]


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ModelRenderer:
    return ModelRenderer(model_folder)


@dataclass(frozen=True)
class Turn:
    """One call of an agent: what it says, how many tools it calls, how often it is sampled before the agent goes on."""

    calls: int
    samples: int
    reasons: bool
    cut: bool


@dataclass(frozen=True)
class Script:
    """An agent's calls, from its own first message or from a turn of an earlier agent, and how it sends turns back."""

    turns: tuple[Turn, ...]
    branch: tuple[int, int] | None
    seed: int


@dataclass
class Agent:
    index: int
    script: Script
    history: list[Message] = field(default_factory=list)
    turn: int = 0
    sample: int = 0
    waiting: tuple[str, Prompt, list[Message]] | None = None

    @property
    def done(self) -> bool:
        return self.turn >= len(self.script.turns)


@st.composite
def scripts(draw: st.DrawFn) -> list[Script]:
    out: list[Script] = []
    for index in range(draw(st.integers(1, 4))):
        turns = draw(
            st.lists(
                st.builds(
                    Turn,
                    calls=st.integers(0, 3),
                    samples=st.sampled_from([1, 1, 1, 2]),
                    reasons=st.booleans(),
                    cut=st.sampled_from([False, False, False, True]),
                ),
                min_size=1,
                max_size=4,
            )
        )
        branch = None
        if index and draw(st.booleans()):
            other = draw(st.integers(0, index - 1))
            branch = (other, draw(st.integers(1, len(out[other].turns))))
        out.append(Script(tuple(turns), branch, draw(st.integers(0, 2**16))))
    return out


class Play:
    """Runs scripts in a given order. Calls overlap: each is begun and finished in two steps of their own."""

    def __init__(self, model: ModelRenderer, shapes: list[Script], order: int) -> None:
        self.model = model
        self.forest = Forest()
        self.order = random.Random(order)
        self.agents = [Agent(i, s) for i, s in enumerate(shapes)]
        self.reached: dict[tuple[int, int], list[Message]] = {}
        self.frozen: dict[str, tuple[bytes, bytes]] = {}
        self.stored: list[StoredCall] = []
        self.run()

    def run(self) -> None:
        while True:
            ready = [a for a in self.agents if a.waiting or (not a.done and self.may_begin(a))]
            if not ready:
                return
            agent = self.order.choice(ready)
            if agent.waiting:
                self.finish(agent)
                self.check_frozen()
            else:
                self.begin(agent)

    def may_begin(self, agent: Agent) -> bool:
        return bool(agent.history) or agent.script.branch is None or agent.script.branch in self.reached

    def begin(self, agent: Agent) -> None:
        if not agent.history:
            start = self.reached[agent.script.branch] if agent.script.branch else [{"role": "system", "content": "S"}]
            agent.history = [*start, {"role": "user", "content": f"agent {agent.index} asks"}]
        elif agent.sample == 0 and agent.history[-1]["role"] == "assistant":
            agent.history.append({"role": "user", "content": f"agent {agent.index} goes on with {agent.turn}"})
        messages = [dict(m) for m in agent.history]
        known, same = self.forest.requests.match(messages, TOOLS)
        keys = request_keys(messages, TOOLS, known.made.keys if known else None, same)
        assert keys == request_keys(messages, TOOLS)
        plan = self.forest.plan(messages, keys)
        self.forest.reserve(plan)
        prompt = self.model.render(plan, messages, TOOLS)
        self.forest.requests.keep(messages, Request(keys), TOOLS)
        agent.waiting = (f"{agent.index}.{agent.turn}.{agent.sample}", prompt, messages)

    def finish(self, agent: Agent) -> None:
        assert agent.waiting is not None
        call_id, prompt, messages = agent.waiting
        agent.waiting = None
        turn = agent.script.turns[agent.turn]
        response, finish = self.say(call_id, turn, agent.script.seed)
        said = self.model.parse(prompt.ids, response, TOOLS, None).message()
        relation = self.model.relate(prompt.plan, prompt.ids, prompt.reason)
        seq = len(self.stored)
        node = self.forest.add(
            call_id, seq, prompt.plan.keys, relation, prompt.ids, response, said, finish, [], delivered=True
        )
        self.forest.release(prompt.plan)
        self.frozen[call_id] = (prompt.ids.tobytes(), response.tobytes())
        self.stored.append(_stored(node, messages, prompt.ids, relation))
        if agent.sample + 1 < turn.samples:
            agent.sample += 1
            return
        agent.sample = 0
        agent.turn += 1
        agent.history += self.echo(said, agent)
        self.reached[agent.index, agent.turn] = list(agent.history)

    def say(self, call_id: str, turn: Turn, seed: int) -> tuple[np.ndarray[Any, Any], str]:
        """Made-up ids: the text in single characters, which no encoder would choose, so re-encoding is noticed."""
        rng = random.Random(f"{call_id}/{seed}")
        text = f"<think>\nwhy {call_id}\n</think>\n\n" if turn.reasons else ""
        text += f"says {call_id} {rng.choice(['', ' ', 'é你'])}"
        for i in range(turn.calls):
            text += f'\n<tool_call>\n{{"name": "look", "arguments": {{"b": {i}, "a": "{call_id} é"}}}}\n</tool_call>'
        ids = [i for ch in text for i in self.model.codec.encode(ch)]
        return np.asarray(ids if turn.cut else [*ids, END], np.int32), "length" if turn.cut else "stop"

    def echo(self, said: Message, agent: Agent) -> list[Message]:
        """The answer as some harness would send it back, and its tool results."""
        rng = random.Random(f"{agent.index}/{agent.turn}/{agent.script.seed}")
        out: Message = {"role": "assistant", "content": rng.choice([said["content"], said["content"].strip()])}
        if "reasoning_content" in said and rng.random() < 0.5:
            out["reasoning_content"] = said["reasoning_content"] + "\n"
        results: list[Message] = []
        for call in said.get("tool_calls", []):
            call_id = call["id"] if rng.random() < 0.5 else f"renamed{len(results)}"
            arguments = call["function"]["arguments"]
            if rng.random() < 0.5:
                arguments = arguments.replace("é", "\\u00e9").replace(": ", ":")
            function = {"name": call["function"]["name"], "arguments": arguments}
            out.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": call_id, "content": f"result {len(results)}"})
        rng.shuffle(results)
        return [out, *results]

    def check_frozen(self) -> None:
        for call_id, (prompt, response) in self.frozen.items():
            node = self.forest.nodes[call_id]
            assert node.prompt().tobytes() == prompt
            assert node.response.tobytes() == response
            assert node.full().tobytes() == prompt + response

    def trees(self) -> dict[str, tuple[str | None, str | None, int | None]]:
        return {c.call_id: (c.parent, c.break_reason, c.break_index) for c in self.stored}


def _stored(node: Node, messages: list[Message], prompt: Any, relation: Link) -> StoredCall:
    size = len(node.response)
    return StoredCall(
        call_id=node.call_id,
        rollout_id="r",
        attempt_id="1",
        seq=node.seq,
        dialect="d",
        base=node.base.call_id if node.base else None,
        base_len=node.base_len,
        prompt_ids=prompt.astype("<i4").tobytes(),
        response_ids=node.response.astype("<i4").tobytes(),
        logprobs=np.full(size, -0.5, "<f4").tobytes(),
        versions=np.zeros(size, "<i4").tobytes(),
        finish_reason=node.finish_reason,
        parent=node.parent.call_id if node.parent else None,
        break_reason=relation.break_reason,
        break_index=relation.break_index,
        delivered=True,
        untrainable=None,
        reward=None,
        requested={},
        effective={},
        started_at=0.0,
        ended_at=0.0,
        engine=None,
        model="m",
        fingerprint=b"",
        response=node.answer,
        messages=messages,
        tools=TOOLS,
    )


def trajectory(play: Play) -> Trajectory:
    names = [n for n in CallRecord.__struct_fields__ if n not in ("request", "raw")]
    calls = [CallRecord(**{n: getattr(c, n) for n in names}) for c in play.stored]
    return Trajectory(rollout_id="r", attempt_id="1", outcome="ok", reward=1.0, calls=calls)


ANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANY
@given(shapes=scripts(), one=st.integers(0, 2**32), other=st.integers(0, 2**32))
def test_any_interleaving_gives_the_same_trees(
    model: ModelRenderer, shapes: list[Script], one: int, other: int
) -> None:
    first, second = Play(model, shapes, one), Play(model, shapes, other)
    assert first.trees() == second.trees()
    assert first.frozen == second.frozen


@ANY
@given(shapes=scripts(), order=st.integers(0, 2**32))
def test_a_conversation_is_one_chain_unless_an_answer_was_cut_off(
    model: ModelRenderer, shapes: list[Script], order: int
) -> None:
    play = Play(model, shapes, order)
    reasons = {c.call_id: c.break_reason for c in play.stored}
    for agent in play.agents:
        for turn in range(1, len(agent.script.turns)):
            before = agent.script.turns[turn - 1]
            last = f"{agent.index}.{turn - 1}.{before.samples - 1}"
            for sample in range(agent.script.turns[turn].samples):
                node = play.forest.nodes[f"{agent.index}.{turn}.{sample}"]
                parent = node.parent.call_id if node.parent else None
                # The full rendering of what was cut off may happen to be the very tokens that were sampled.
                assert parent == last or (parent is None and before.cut)
                assert reasons[node.call_id] == (None if parent else "truncated")


@ANY
@given(shapes=scripts(), order=st.integers(0, 2**32))
def test_every_sampled_token_is_trained_exactly_once(model: ModelRenderer, shapes: list[Script], order: int) -> None:
    play = Play(model, shapes, order)
    rows, report = build_rows(trajectory(play), max_row_tokens=10**6)
    assert report.broken_links == 0 and not report.dropped
    assert report.trained_tokens == sum(len(n.response) for n in play.forest.nodes.values())
    owners = Counter(call for row in rows for call in row.calls)
    assert owners == Counter(play.forest.nodes.keys())
    for row in rows:
        trained = row.ids[row.mask].tolist()
        spans = [play.forest.nodes[c].response.tolist() for c in row.calls]
        assert trained == [i for span in spans for i in span]


@ANY
@given(shapes=scripts(), order=st.integers(0, 2**32))
def test_a_forest_read_back_from_the_store_is_the_same(model: ModelRenderer, shapes: list[Script], order: int) -> None:
    play = Play(model, shapes, order)
    again = Forest()
    half = len(play.stored) // 2
    grow(again, play.stored[:half])
    grow(again, play.stored[half:])
    assert again.nodes.keys() == play.forest.nodes.keys()
    for call_id, node in play.forest.nodes.items():
        other = again.nodes[call_id]
        assert other.full().tobytes() == node.full().tobytes() and other.prompt_len == node.prompt_len
        assert (other.parent and other.parent.call_id) == (node.parent and node.parent.call_id)
        assert other.answer == node.answer and other.tools == node.tools
    for agent in play.agents:
        messages = [*agent.history, {"role": "user", "content": "and then?"}]
        keys = request_keys(messages, TOOLS)
        here, there = play.forest.plan(messages, keys), again.plan(messages, keys)
        assert (here.kind, here.start, here.reason) == (there.kind, there.start, there.reason)
        assert (here.node and here.node.call_id) == (there.node and there.node.call_id)

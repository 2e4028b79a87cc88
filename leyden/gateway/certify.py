"""Proof, on random conversations, that a model's renderer does what the gateway relies on. Pure but for the tokenizer.

Three properties: recorded tokens continued by new messages equal the full rendering wherever the template only
appends (`bridge`); what was rendered is parsed into the same message again (`parse`); rendered tokens are those of the
model's own chat template (`template`). A conversation that breaks one is made as small as it can be.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from leyden.gateway.canonical import canonical, request_keys
from leyden.gateway.conversation import Forest, Link, Plan
from leyden.gateway.errors import Invalid
from leyden.gateway.families import Turn, turns
from leyden.gateway.renderer import ModelRenderer, prepare

Messages = list[dict[str, Any]]
SHRINK_TRIES = 300
"""Smaller conversations tried at most for one failure."""
AROUND = 12
"""Tokens shown on both sides of a difference."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: Messages
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two renderings of the same thing part, and the text there."""

    what: str
    index: int
    expected: str
    got: str


@dataclass(slots=True)
class Tally:
    """How one property fared. `refused`: what the template doesn't render, or where nothing had to hold."""

    checked: int = 0
    failed: int = 0
    refused: int = 0
    smallest: Conversation | None = None
    difference: Difference | None = None


@dataclass(slots=True)
class Report:
    family: str
    conversations: int
    tallies: dict[str, Tally] = field(default_factory=dict)

    def failed(self) -> int:
        return sum(t.failed for t in self.tallies.values())


Outcomes = Iterator[Difference | bool]
"""For every single check: a difference, True when it held, False when nothing had to hold."""


def certify(model: ModelRenderer, count: int, seed: int) -> Report:
    """Check `count` conversations."""
    report = Report(model.family, count, {name: Tally() for name in PROPERTIES})
    rng = random.Random(seed)
    for _ in range(count):
        conversation = random_conversation(rng)
        for name, tally in report.tallies.items():
            _count(model, PROPERTIES[name], conversation, tally)
    return report


def _count(model: ModelRenderer, check: Property, conversation: Conversation, tally: Tally) -> None:
    for outcome in check(model, conversation):
        if outcome is False:
            tally.refused += 1
            continue
        tally.checked += 1
        if isinstance(outcome, Difference):
            tally.failed += 1
            if tally.smallest is None:
                tally.smallest, tally.difference = _smallest(model, check, conversation, outcome)


# -- properties --------------------------------------------------------------------------------------------------------


def check_bridge(model: ModelRenderer, conversation: Conversation) -> Outcomes:
    """Recorded tokens continued by new messages, as the gateway does it, against the full rendering."""
    messages, tools = conversation.messages, conversation.tools
    try:
        found = list(turns(_Full(model), conversation.messages, conversation.tools))
    except Invalid:
        yield False
        return
    for turn in found:
        end = turn.at + 1 + len(turn.new)
        prompt = model.render(_plan(conversation, turn, "stop"), messages[:end], tools)
        if prompt.reason is not None:
            yield False
        elif prompt.ids.tolist() != turn.full:
            yield _difference(model, "continued", turn.full, prompt.ids.tolist())
        else:
            yield True
        yield _check_truncated(model, conversation, turn, end)


def _check_truncated(model: ModelRenderer, conversation: Conversation, turn: Turn, end: int) -> Difference | bool:
    """An answer that was cut off is never continued as if it had ended."""
    if len(turn.answer) < 3:
        return False
    cut = replace(turn, answer=turn.answer[: len(turn.answer) // 2])
    said = model.parse(_ids(cut.prompt), _ids(cut.answer), conversation.tools, None).message()
    messages = [*conversation.messages[: turn.at], said, *conversation.messages[turn.at + 1 : end]]
    plan = _plan(Conversation(messages, conversation.tools), cut, "length")
    try:
        want = model.full(messages, conversation.tools).tolist()
    except Invalid:
        return False
    got = model.render(plan, messages, conversation.tools)
    if plan.kind == "extend" and got.reason is None:
        return Difference("a truncated answer was continued", len(cut.prompt) + len(cut.answer), "", "")
    return True if got.ids.tolist() == want else _difference(model, "truncated", want, got.ids.tolist())


def _plan(conversation: Conversation, turn: Turn, finish: str) -> Plan:
    """A plan for what follows an answer that was recorded with the tokens of `turn`."""
    forest = Forest()
    messages, tools = conversation.messages, conversation.tools
    keys = request_keys(messages[: turn.at], tools)
    answer = messages[turn.at]
    forest.add("0", 0, keys, Link(), _ids(turn.prompt), _ids(turn.answer), answer, finish, [], delivered=True)
    asked = messages[: turn.at + 1 + len(turn.new)]
    return forest.plan(asked, request_keys(asked, tools))


def check_parse(model: ModelRenderer, conversation: Conversation) -> Outcomes:
    """Answers in the template's own tokens, parsed, against the message that they show."""
    try:
        found = list(turns(_Full(model), conversation.messages, conversation.tools))
    except Invalid:
        yield False
        return
    for turn in found:
        said = _as_encoded(model, conversation.messages[turn.at])
        if said.get("tool_calls") and not conversation.tools:
            yield False
            continue
        parsed = model.parse(_ids(turn.prompt), _ids(turn.answer), conversation.tools, None).message()
        shown = model.codec.decode(turn.answer)
        reasoning = (said.get("reasoning_content") or "").strip()
        expected = reasoning if reasoning and reasoning in shown else ""
        got = (parsed.get("reasoning_content") or "").strip()
        if canonical(parsed) != canonical(said):
            yield Difference("message", len(turn.prompt), canonical(said).decode(), canonical(parsed).decode())
        elif got != expected:
            yield Difference("reasoning", len(turn.prompt), expected, got)
        else:
            yield True


def _as_encoded(model: ModelRenderer, message: dict[str, Any]) -> dict[str, Any]:
    """A message as its tokens spell it: some tokenizers put text into a normal form."""

    def spelled(value: Any) -> Any:
        if isinstance(value, str):
            return model.codec.decode(model.codec.encode(value))
        if isinstance(value, list):
            return [spelled(v) for v in value]
        if isinstance(value, dict):
            return {k: spelled(v) for k, v in value.items()}
        return value

    return spelled(message)


def check_template(model: ModelRenderer, conversation: Conversation) -> Outcomes:
    """Our tokens against the template's, for the prompt of every call of the conversation."""
    messages, tools = conversation.messages, conversation.tools
    ours = not model.known.prints_tools and (tools or any(m.get("tool_calls") or m["role"] == "tool" for m in messages))
    if ours or not model.tokenizer.chat_template:
        yield False
        return
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i]
    for end in [*answers, *([len(messages)] if messages[-1]["role"] != "assistant" else [])]:
        try:
            want = model.tokenizer.apply_chat_template(
                [prepare(m) for m in messages[:end]],
                tools=tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except Exception:  # What the template refuses is no prompt.
            yield False
            continue
        try:
            got = model.full(messages[:end], tools).tolist()
        except Invalid as e:
            yield Difference(f"refused: {e.message}", 0, "", "")
            continue
        yield True if got == list(want) else _difference(model, "prompt", list(want), got)


Property = Callable[[ModelRenderer, Conversation], Outcomes]
PROPERTIES: dict[str, Property] = {"bridge": check_bridge, "parse": check_parse, "template": check_template}


class _Full:
    """The model's full rendering as a renderer."""

    def __init__(self, model: ModelRenderer) -> None:
        self._model = model

    def render_ids(self, messages: Messages, *, tools: Any = None, add_generation_prompt: bool = True) -> list[int]:
        assert add_generation_prompt
        return self._model.full(messages, tools).tolist()

    def get_stop_token_ids(self) -> list[int]:
        return self._model.known.renderer.get_stop_token_ids()


def _ids(ids: list[int]) -> Any:
    return np.asarray(ids, np.int32)


def _difference(model: ModelRenderer, what: str, want: list[int], got: list[int]) -> Difference:
    pairs = enumerate(zip(want, got, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(len(want), len(got)))
    around = slice(max(0, index - AROUND), index + AROUND)
    return Difference(what, index, model.codec.decode(want[around]), model.codec.decode(got[around]))


# -- shrinking ---------------------------------------------------------------------------------------------------------


def _smallest(
    model: ModelRenderer, check: Property, conversation: Conversation, difference: Difference
) -> tuple[Conversation, Difference]:
    """A conversation from which nothing can be taken without the property holding again."""
    tries = 0
    again = True
    while again:
        again = False
        for smaller in _smaller(conversation):
            tries += 1
            if tries > SHRINK_TRIES:
                return conversation, difference
            found = _first_failure(model, check, smaller)
            if found is not None:
                conversation, difference, again = smaller, found, True
                break
    return conversation, difference


def _first_failure(model: ModelRenderer, check: Property, conversation: Conversation) -> Difference | None:
    try:
        return next((o for o in check(model, conversation) if isinstance(o, Difference)), None)
    except Exception:  # A conversation that makes no sense says nothing.
        return None


def _smaller(conversation: Conversation) -> Iterator[Conversation]:
    """Conversations with a little less in them, the most less first."""
    messages, tools = conversation.messages, conversation.tools
    for size in (len(messages) // 2, 1):
        for at in range(0, len(messages), max(1, size)):
            rest = messages[:at] + messages[at + size :]
            if size and rest:
                yield Conversation(rest, tools)
    for i in range(len(tools or [])):
        yield Conversation(messages, [t for j, t in enumerate(tools or []) if j != i] or None)
    for i, message in enumerate(messages):
        for changed in _smaller_messages(message):
            yield Conversation([*messages[:i], changed, *messages[i + 1 :]], tools)


def _smaller_messages(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in ("reasoning_content", "name"):
        if name in message:
            yield {k: v for k, v in message.items() if k != name}
    calls = message.get("tool_calls") or []
    for i in range(len(calls)):
        yield {**message, "tool_calls": calls[:i] + calls[i + 1 :]}
        if calls[i]["function"]["arguments"]:
            bare = copy.deepcopy(calls)
            bare[i]["function"]["arguments"] = {}
            yield {**message, "tool_calls": bare}
    for name in ("content", "reasoning_content"):
        text = message.get(name) or ""
        if len(text) > 1:
            half = len(text) // 2
            for shorter in (text[:half], text[half:], text[:-1], text[1:]):
                yield {**message, name: shorter}


# -- random conversations ----------------------------------------------------------------------------------------------

_TEXTS = [
    "Hello",
    "The answer is 42.",
    "What's the weather in Zürich — today?",
    "naïve café, e\u0301 and é",
    "你好,世界。これはテストです。",
    "مرحبا بالعالم",
    "👩‍👩‍👧‍👦 🌍🏳️‍🌈",
    "line one\nline two\n\n\nline five",
    "    indented\n\ttabbed  twice",
    " leading and trailing ",
    "\n",
    "def f(x: int) -> str:\n    return f'{x:>10}'\n",
    '{"json": [1, 2.5e-3, null, true], "quote": "\\"\\u00e9\\""}',
    "<b>markup</b> & &amp; <unknown tag>",
    "1234567890 3.14159 -7 1e9",
    "a\u200bb\u00a0c\ufeffd",
    "C:\\path\\n and `code` and $x^2$",
    "don't can't I'm 'quoted'",
]
_NAMES = ["add", "get_weather", "search-docs", "x"]


def random_conversation(rng: random.Random) -> Conversation:
    """System or none, one to three rounds, with or without tools, in the shapes that harnesses send."""
    tools = [_tool(rng, name) for name in rng.sample(_NAMES, rng.randint(1, 3))] if rng.random() < 0.6 else None
    messages: Messages = []
    if rng.random() < 0.6:
        messages.append({"role": "system", "content": _text(rng)})
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": _text(rng)})
        while tools and rng.random() < 0.55:
            messages += _tool_round(rng, tools)
        messages.append(_answer(rng))
        if rng.random() < 0.1:
            messages.append({"role": "system", "content": _text(rng)})
    if rng.random() < 0.7:
        messages.append({"role": "user", "content": _text(rng)})
    return Conversation(messages, tools)


def _text(rng: random.Random) -> str:
    if rng.random() < 0.08:
        return ""
    parts = [rng.choice(_TEXTS) for _ in range(rng.randint(1, 3))]
    return rng.choice([" ", "\n", "", "\n\n"]).join(parts)


def _answer(rng: random.Random, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": "" if calls and rng.random() < 0.5 else _text(rng)}
    if rng.random() < 0.3:
        out["reasoning_content"] = f"I think: {rng.choice(_TEXTS).strip()}"
    if calls:
        out["tool_calls"] = calls
    return out


def _tool_round(rng: random.Random, tools: list[dict[str, Any]]) -> Messages:
    """An answer with one to three calls, and their results in any order."""
    calls = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        function = {"name": rng.choice(tools)["function"]["name"], "arguments": _arguments(rng)}
        calls.append({"id": f"{rng.randrange(10**9):09d}", "type": "function", "function": function})
    results = [
        {"role": "tool", "content": _text(rng), "tool_call_id": c["id"], "name": c["function"]["name"]} for c in calls
    ]
    rng.shuffle(results)
    return [_answer(rng, calls), *results]


def _arguments(rng: random.Random) -> dict[str, Any]:
    values = [1, -2.5, True, None, [1, "é"], {"deep": {"x": []}}, "", *_TEXTS]
    return {name: rng.choice(values) for name in rng.sample(["a", "b", "query"], rng.randint(0, 3))}


def _tool(rng: random.Random, name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"query": {"type": "string", "description": rng.choice(_TEXTS)}}}
    return {
        "type": "function",
        "function": {"name": name, "description": rng.choice(_TEXTS), "parameters": parameters},
    }

"""Which renderer fits a model: found by comparing tokens with the model's own chat template, never by name alone.

Users' fine-tuned folders have any name, and templates of one name differ between versions. So every typed renderer
of the renderers library whose special tokens the tokenizer has is compared with the template on a fixed set of
conversations (`PROBES`), and the first that agrees on all of them is the family. The name only says which to try
first. When none agrees the template itself renders (leyden.gateway.template), and continues recorded tokens after
messages of those roles for which that was shown to equal the full rendering. When there is no such role, or the
template ends answers in no way we know, conversations aren't continued at all (family `default`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from renderers import configs, create_renderer
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import BaseRendererConfig, DefaultRendererConfig

from leyden.errors import PreflightError
from leyden.gateway.suiting import Manners, learn
from leyden.gateway.template import TemplateRenderer
from leyden.gateway.tokens import Codec

log = logging.getLogger("leyden.gateway")

_CONFIGS: dict[str, type[BaseRendererConfig]] = {
    kind.model_fields["name"].default: kind
    for kind in vars(configs).values()
    if isinstance(kind, type) and issubclass(kind, BaseRendererConfig) and "name" in kind.model_fields
}
ROLES = ("user", "tool", "system")
Messages = list[dict[str, Any]]


@dataclass(slots=True)
class Family:
    """The renderer of a model.

    Attributes:
        name: of the typed renderer, or `template` or `default`.
        renderer: parses and continues.
        full: renders whole conversations: the template where there is one.
        keeping: continues as if reasoning were never dropped; for conversations that hold none. None when `renderer`
            already does.
        roles: roles of new messages after which recorded tokens are continued.
        prints_tools: the template itself prints tool schemas; otherwise they are printed in the Hermes form.
        reasons: the template knows of reasoning.
        forgets: roles of messages after which the template drops the reasoning of earlier answers.
        hermes: calls are JSON in <tool_call> tags.
        manners: which conversations the template takes; others are changed until it does.
    """

    name: str
    renderer: Any
    full: Any
    keeping: Any = None
    roles: frozenset[str] = frozenset(ROLES)
    prints_tools: bool = True
    reasons: bool = False
    forgets: frozenset[str] = frozenset()
    hermes: bool = False
    manners: Manners = field(default_factory=Manners)


def _call(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": 'Add "two" numbers: é <b>.',
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "array", "items": {"type": "string"}}},
                "required": ["a"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]
_LONG = " ".join(f"Rule {i}: count {i * i} things." for i in range(80))


@dataclass(frozen=True, slots=True)
class Probe:
    """A conversation to compare on."""

    messages: Any
    tools: Any = None


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(text: str, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def _result(text: str, call_id: str, name: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": name}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


_ADD = _call("add", {"a": 1, "b": ["x", "é"]}, "call00001")
_NOW = _call("now", {}, "call00002")
PROBES: list[Probe] = [
    Probe([_user("Hello")]),
    Probe([_system("Be brief."), _user("Hello")]),
    Probe([_user(" spaces  and\n\nlines \n"), _said("naïve 你好 🌍 é e\u0301"), _user("{'json': [1, 2.5]}\t\\n")]),
    Probe([_system("S"), _user("a"), _said(""), _user("b"), _said("<b>c</b>"), _user("d")]),
    Probe([_system(_LONG), _user("a"), _said("A"), _user("b")]),
    Probe([_system("S"), _user("a"), _said("A"), _system("late note"), _user("b"), _said("B"), _system("later")]),
    Probe([_user("a")], _TOOLS),
    Probe([_system("S"), _user("a"), _said("A"), _user("b")], _TOOLS),
    Probe([_user("a"), _said("", _ADD), _result("4\n2", "call00001", "add")], _TOOLS),
    Probe(
        [
            _system("S"),
            _user("a"),
            _said("Let me see.", _ADD),
            _result('{"ok": true}', "call00001", "add"),
            _said("", _NOW),
            _result("", "call00002", "now"),
            _said("done"),
            _user("thanks"),
        ],
        _TOOLS,
    ),
    Probe(
        [
            _user("a"),
            _said("", _ADD, _NOW),
            _result("noon", "call00002", "now"),
            _result("42", "call00001", "add"),
            _said("both"),
            _user("b"),
        ],
        _TOOLS,
    ),
    Probe(
        [
            _user("a"),
            _said("", _ADD, reasoning_content="I must add."),
            _result("42", "call00001", "add"),
            _said("It is 42.", reasoning_content="Now I know."),
            _user("b"),
        ],
        _TOOLS,
    ),
    Probe([_user("a"), _said("A", reasoning_content="why"), _user("b")]),
]


def choose(codec: Codec, folder: Path, name: str | None) -> Family:
    """The family of a tokenizer and its template. `name` is what the model calls itself, if anything.

    Raises:
        PreflightError: the model has no chat template and no known name.
    """
    family = _chosen(codec, folder, name)
    if codec.chat_template:
        family.manners = learn(
            lambda messages: codec.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        )
    return family


def _chosen(codec: Codec, folder: Path, name: str | None) -> Family:
    known = MODEL_RENDERER_MAP.get(name or "")
    if not codec.chat_template:
        if known is None:
            raise PreflightError(f"the model in {folder} has no chat template; use an instruction-tuned model")
        codec.tokenizer.name_or_path = name
        try:
            typed = create_renderer(codec, cast(Any, _CONFIGS[known]()))
        except Exception as e:  # Each has its own way to say what it lacks.
            raise PreflightError(f"the model in {folder} needs the renderer {known}, which says: {e}") from e
        return _family(known, typed, None)
    try:
        template = TemplateRenderer(codec)
    except ValueError as e:
        log.warning("conversations of the model in %s can't be continued token for token: %s", folder, e)
        fallback = create_renderer(codec, DefaultRendererConfig(reasoning_parser="think"))
        return Family("default", fallback, fallback, roles=frozenset())
    template.piecewise = _splits(template)
    if template.habits.tools:
        for kind in dict.fromkeys([known, *_kinds()] if known else _kinds()):
            for typed in _typed(codec, kind):
                if agrees(typed, template):
                    return _family(kind, typed, template)
    if template.habits.tool_role and not template.habits.tools and not continues(template, "tool"):
        template.use(tool_role=False)
    roles = frozenset(role for role in ROLES if continues(template, role))
    habits = template.habits
    return Family(
        "template" if roles else "default",
        template,
        template,
        roles=roles,
        prints_tools=habits.tools,
        reasons=habits.reasons,
        forgets=habits.forgets,
        hermes=habits.hermes_opener,
    )


def _splits(template: TemplateRenderer) -> bool:
    """Whether encoding turn by turn gives the same tokens as encoding whole conversations."""
    for probe in PROBES:
        try:
            text = template.ask(*template.spell_out(probe.messages, probe.tools), True)
        except Exception:  # What a template refuses says nothing.
            continue
        if template.codec.encode_parts(text, template.boundary) != template.codec.encode(text):
            return False
    return True


def _kinds() -> list[str]:
    """Names of the library's typed renderers."""
    return [name for name in dict.fromkeys(MODEL_RENDERER_MAP.values())]


def _typed(codec: Codec, kind: str) -> Iterator[Any]:
    """A typed renderer in the variants that its config knows; none when the tokenizer lacks its special tokens."""
    config = _CONFIGS[kind]
    variants: list[dict[str, Any]] = [{}]
    if "enable_thinking" in config.model_fields:
        default = config.model_fields["enable_thinking"].default
        variants += [{"enable_thinking": value} for value in (False, True) if value is not default]
    for variant in variants:
        try:
            yield create_renderer(codec, cast(Any, config.model_validate(variant)))
        except Exception:  # Each has its own way to say that it isn't for this tokenizer.
            return


def _family(kind: str, typed: Any, template: TemplateRenderer | None) -> Family:
    keeping = None
    if getattr(typed, "effective_thinking_retention", "all") != "all":
        settings = typed.config.model_dump(exclude_none=True) | {"thinking_retention": "all"}
        try:
            keeping = create_renderer(typed._tokenizer, type(typed.config).model_validate(settings))
        except Exception:  # Some configs hold retention settings of their own that contradict this one.
            keeping = None
    if template is None:
        return Family(kind, typed, typed, keeping)
    habits = template.habits
    roles = frozenset(role for role in ROLES if continues(keeping or typed, role))
    return Family(kind, typed, template, keeping, roles, True, habits.reasons, habits.forgets, habits.hermes_opener)


def agrees(renderer: Any, template: TemplateRenderer) -> bool:
    """Whether a renderer gives the template's own tokens on every probe that the template can render."""
    for probe in PROBES:
        for generate in (True, False):
            if probe.messages[-1]["role"] == "assistant" and generate:
                continue
            try:
                want = template.render_ids(probe.messages, tools=probe.tools, add_generation_prompt=generate)
            except Exception:  # What a template refuses says nothing about a renderer.
                continue
            try:
                got = renderer.render_ids(probe.messages, tools=probe.tools, add_generation_prompt=generate)
            except Exception:
                return False
            if list(got) != want:
                return False
    return True


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer inside a conversation, and what came after it, as tokens.

    `full` is the whole rendering up to the next answer; `prompt` and `answer`, message `at`, are its beginning, and
    `new` are the messages that the rest of it shows.
    """

    at: int
    prompt: list[int]
    answer: list[int]
    new: Messages
    full: list[int]


def turns(renderer: Any, messages: Messages, tools: list[dict[str, Any]] | None) -> Iterator[Turn]:
    """Every answer after which the rendering of `messages` only appends. Raises what rendering raises."""
    stops = set(renderer.get_stop_token_ids())
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for at, until in zip(answers, [*answers[1:], len(messages)], strict=True):
        new = messages[at + 1 : until]
        if not new or at == 0:
            continue
        prompt = list(renderer.render_ids(messages[:at], tools=tools, add_generation_prompt=True))
        full = list(renderer.render_ids(messages[:until], tools=tools, add_generation_prompt=True))
        if full[: len(prompt)] != prompt:
            continue
        end = next((i for i in range(len(prompt), len(full)) if full[i] in stops), None)
        if end is not None:
            yield Turn(at, prompt, full[len(prompt) : end + 1], new, full)


def continues(renderer: Any, role: str) -> bool:
    """Whether recorded tokens and new messages, one of them of `role`, equal the full rendering on all probes."""
    compared = 0
    for probe in PROBES:
        try:
            found = list(turns(renderer, probe.messages, probe.tools))
        except Exception:  # What a template refuses says nothing.
            continue
        for turn in found:
            if all(m["role"] != role for m in turn.new):
                continue
            bridged = renderer.bridge_to_next_turn(turn.prompt, turn.answer, turn.new, tools=probe.tools)
            if bridged is None or list(bridged.token_ids) != turn.full:
                return False
            compared += 1
    return compared > 0

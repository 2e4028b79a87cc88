"""Conversations that a model's template refuses: rendered all the same, with nothing left out and in its place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from leyden.gateway.renderer import ModelRenderer
from leyden.gateway.suiting import Manners, learn, suited
from tests.gateway.conftest import World, make_world
from tests.tiny import CHAT_TEMPLATE, make_tiny_model

ONLY_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)
BY_TURNS = (
    "{% for m in messages %}{% if loop.index0 > 0 and m.role == 'user' and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% endfor %}"
)
DROPS_LATE = "{% set messages = messages[:1] + (messages[1:] | rejectattr('role', 'equalto', 'system') | list) %}"
GOES_THROUGH = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ '<<' ~ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ '[' ~ k ~ '=' ~ v ~ ']' }}"
    "{% endfor %}{{ '>>' }}{% endfor %}{% endfor %}"
)
TEMPLATES = {"first": ONLY_FIRST, "first, by turns": ONLY_FIRST + BY_TURNS, "none, by turns": NO_SYSTEM + BY_TURNS,
             "none": NO_SYSTEM, "drops": DROPS_LATE}  # fmt: skip


def made(folder: Path, before: str) -> Path:
    made = make_tiny_model(folder)
    (made / "chat_template.jinja").write_text(before + CHAT_TEMPLATE)
    return made


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def text(model: ModelRenderer, messages: Sequence[Any]) -> str:
    return model.codec.decode(model.full(messages, None).tolist())


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_message_is_shown_in_its_place_whatever_the_template_refuses(tmp_path: Path, name: str) -> None:
    model = ModelRenderer(made(tmp_path, TEMPLATES[name]))
    for count in range(1, 6):
        for roles in itertools.product(("system", "user", "assistant"), repeat=count):
            if roles[0] == "assistant" or "user" not in roles:
                continue
            shown = text(model, [said(role, f"w{i}w") for i, role in enumerate(roles)])
            places = [shown.find(f"w{i}w") for i in range(count)]
            assert -1 not in places and places == sorted(places), (roles, shown)


def test_what_a_template_takes_it_is_given_as_it_is(model_folder: Path, tmp_path: Path) -> None:
    plain = ModelRenderer(model_folder)
    assert plain.known.manners.all
    first = ModelRenderer(made(tmp_path, ONLY_FIRST))
    assert first.known.manners == Manners(several_system=False, late_system=False)
    usual = [said("system", "S"), said("user", "a"), said("assistant", "b"), said("user", "c"), said("user", "d")]
    assert text(first, usual) == text(plain, usual)
    late = [said("system", "S"), said("system", "T"), said("user", "a"), said("system", "note"), said("user", "b")]
    spelt = [said("system", "S\n\nT"), said("user", "a"), said("user", "<system>\nnote\n</system>"), said("user", "b")]
    assert text(first, late) == text(plain, spelt)


def test_manners_are_learned_from_refusals_and_from_silence() -> None:
    def drops_system(messages: Sequence[Any]) -> str:
        return "".join(m["content"] for m in messages if m["role"] != "system")

    def refuses(messages: Sequence[Any]) -> str:
        raise ValueError("no")

    assert learn(drops_system) == Manners(system=False, several_system=False, late_system=False)
    assert learn(refuses) == Manners()
    messages = [said("system", "S"), said("user", "a")]
    assert suited(messages, learn(drops_system)) == [said("user", "<system>\nS\n</system>"), said("user", "a")]


@pytest.mark.parametrize("arguments", ['{"a":3}', "", "{bad", "[1]", "7"])
def test_templates_that_go_through_arguments_get_a_mapping(tmp_path: Path, arguments: str) -> None:
    model = ModelRenderer(made(tmp_path, GOES_THROUGH))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [said("user", "x"), {"role": "assistant", "content": "", "tool_calls": [call]}, said("tool", "3")]
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    shown = model.codec.decode(model.full(messages, tools).tolist())
    wanted = {'{"a":3}': "[a=3]", "": "", "{bad": "[arguments={bad]", "[1]": "[arguments=[1]]", "7": "[arguments=7]"}
    assert model.known.prints_tools and f"<<f{wanted[arguments]}>>" in shown, shown
    assert call["function"]["arguments"] == arguments


@pytest.mark.parametrize("name", TEMPLATES)
async def test_an_agent_whose_notes_a_template_refuses_goes_on_token_for_token(
    tmp_path: Path, tokenizer: Any, name: str
) -> None:
    folder = made(tmp_path / "model", TEMPLATES[name])
    async with make_world(tmp_path / "store.db", folder, tokenizer) as world:
        claim = await world.claim()
        world.engine.say("one", "two")
        messages = [said("user", "hi"), said("system", "note"), said("user", "go")]
        body: dict[str, Any] = {"model": "m", "max_tokens": 16, "system": "S", "messages": messages}
        await answered(world, claim.agent_key, body)
        messages += [said("assistant", "one"), said("system", "later"), said("user", "more")]
        await answered(world, claim.agent_key, body)
        first, second = (await world.admin.trajectory(claim.rollout.rollout_id)).calls
        assert second.parent == first.call_id and second.break_reason is None
        shown = world.engine.tokenizer.decode(world.engine.requests[-1]["prompt"])
        assert [w for w in ("S", "note", "go", "one", "later", "more") if w not in shown] == []


async def answered(world: World, key: str, body: dict[str, Any]) -> None:
    status, said = await world.chat(key, body, "/anthropic/v1/messages")
    assert status == 200, said

"""Rendering, parsing and bridging with the tiny model, and what is refused as ChatML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyden.errors import PreflightError
from leyden.gateway.canonical import request_keys
from leyden.gateway.conversation import Forest
from leyden.gateway.renderer import ModelRenderer
from tests.tiny import DEFAULT_SYSTEM, make_tiny_model

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ModelRenderer:
    return ModelRenderer(model_folder)


def parse(model: ModelRenderer, text: str, tools: Any = TOOLS, stop: str | None = None) -> Any:
    ids = np.asarray([*model.tokenizer.encode(text, add_special_tokens=False), 2], np.int32)
    return model.parse(np.asarray([1], np.int32), ids, tools, stop)


def test_a_plain_template_is_continued_after_every_role(model: ModelRenderer) -> None:
    assert model.family == "template" and model.stop_token_ids == [2] and model.max_model_len == 2048
    assert model.known.roles == {"user", "tool", "system"} and not model.known.prints_tools
    assert model.known.renderer.habits.default_system == DEFAULT_SYSTEM
    messages: Any = [{"role": "user", "content": "héllo 你🌍"}]
    want = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert model.full(messages, None).tolist() == list(want)


def changed(tmp_path: Path, old: str, new: str) -> ModelRenderer:
    folder = make_tiny_model(tmp_path)
    template = folder / "chat_template.jinja"
    assert old in template.read_text()
    template.write_text(template.read_text().replace(old, new))
    return ModelRenderer(folder)


def test_templates_that_only_append_are_continued_whatever_they_look_like(tmp_path: Path) -> None:
    for i, (old, new) in enumerate(
        [
            ("message['content']", "message['content'] | trim"),
            ("'<|im_end|>' + '\n'", "'<|im_end|>'"),
            ("<|im_start|>", "[[turn]] "),
        ]
    ):
        model = changed(tmp_path / str(i), old, new)
        assert (model.family, model.known.roles) == ("template", {"user", "tool", "system"})


def test_templates_that_change_what_was_said_are_not_continued(tmp_path: Path) -> None:
    counted = changed(
        tmp_path / "a", "{% for message in messages %}", "{{ messages | length }}{% for message in messages %}"
    )
    assert counted.family == "default" and not counted.known.roles
    no_end = changed(tmp_path / "b", "<|im_end|>", "")
    assert no_end.family == "default"


def test_an_unknown_template_breaks_with_its_reason(tmp_path: Path) -> None:
    model, forest = changed(tmp_path / "m", "<|im_end|>", "<|end|>"), Forest()
    first: Any = [{"role": "user", "content": "a"}]
    keys = request_keys(first, None)
    prompt = model.render(forest.plan(first, keys), first, None)
    odd = np.asarray([*[model.tokenizer.convert_tokens_to_ids(c) for c in "answer"], 2], np.int32)
    answer = model.parse(prompt.ids, odd, None, None).message()
    assert answer["content"] == "answer"
    forest.add("c", 0, keys, model.relate(prompt.plan, prompt.ids, prompt.reason), prompt.ids, odd, answer, "stop", [])
    second = [*first, answer, {"role": "user", "content": "b"}]
    again = model.render(forest.plan(second, request_keys(second, None)), second, None)
    relation = model.relate(again.plan, again.ids, again.reason)
    assert relation.break_reason == "unknown_family" and relation.parent is None
    assert relation.break_index is not None and len(prompt.ids) <= relation.break_index < len(prompt.ids) + len(odd)


def test_tool_calls_are_parsed_and_broken_ones_stay_text(model: ModelRenderer) -> None:
    good = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "x"]}}\n</tool_call>'
    parsed = parse(model, f"hm {good}")
    assert parsed.text == "hm " and json.loads(parsed.tool_calls[0]["function"]["arguments"]) == {"a": [1, "x"]}
    for broken in ("<tool_call>\n{bad}\n</tool_call>", '<tool_call>\n{"name": "a', "<tool_call>\n[1]\n</tool_call>"):
        parsed = parse(model, f"hm {good}{broken}")
        assert len(parsed.tool_calls) == 1 and parsed.text == f"hm {broken}"
    assert parse(model, good, tools=None).text == good


def test_reasoning_and_stop_strings(model: ModelRenderer) -> None:
    parsed = parse(model, "<think>\nwhy\n</think>\n\nso")
    assert (parsed.reasoning, parsed.text) == ("why", "so")
    assert parsed.message() == {"role": "assistant", "content": "so", "reasoning_content": "why"}
    assert parse(model, "a STOP b", stop="STOP").text == "a "
    assert parse(model, "<think>never closed").text == ""


def test_tools_are_printed_into_the_system_message(model: ModelRenderer) -> None:
    messages: Any = [{"role": "user", "content": "a"}]
    text = model.tokenizer.decode(model.full(messages, TOOLS))
    assert text.startswith(f"<|im_start|>system\n{DEFAULT_SYSTEM}\n\n# Tools") and '"name": "add"' in text


def test_folders_without_a_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="holds no tokenizer"):
        ModelRenderer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PreflightError, match="can't load the tokenizer"):
        ModelRenderer(tmp_path)

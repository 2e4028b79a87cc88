"""`leyden renderer check`: real families pass it, and it finds what is wrong with one that is broken on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leyden.cli import app
from leyden.gateway.certify import certify
from leyden.gateway.renderer import ModelRenderer
from tests.real_tokenizers import tokenizer_folder


@pytest.fixture
def model(model_folder: Path) -> ModelRenderer:
    return ModelRenderer(model_folder)


EXPECTED = {
    "qwen3": ("qwen3", {"user", "tool", "system"}, {"user"}, True),
    "llama3_1": ("template", {"user", "tool", "system"}, set(), False),
    # Its template moves late system messages to the front.
    "deepseek_v3": ("template", {"user", "tool"}, set(), False),
}


@pytest.mark.parametrize("family", EXPECTED)
def test_real_families_are_recognised_by_what_is_in_the_folder_and_certified(family: str) -> None:
    model = ModelRenderer(tokenizer_folder(family))
    known = model.known
    assert (known.name, known.roles, known.forgets, known.prints_tools) == EXPECTED[family]
    report = certify(model, 40, seed=1)
    for name, tally in report.tallies.items():
        assert tally.checked > 20, name
        assert tally.failed == 0, (name, tally.smallest, tally.difference)


def test_a_changed_template_is_not_taken_for_the_family_that_it_came_from(tmp_path: Path) -> None:
    """Tools, calls and reasoning are then the changed template's own, and are continued and parsed all the same."""
    for path in tokenizer_folder("qwen3").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "# Tools" in config["chat_template"]
    config["chat_template"] = config["chat_template"].replace("# Tools", "# Functions")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    model = ModelRenderer(tmp_path)
    known = model.known
    assert (known.name, known.roles, known.forgets) == ("template", {"user", "tool", "system"}, {"user"})
    assert known.prints_tools and known.reasons and known.hermes
    report = certify(model, 40, seed=2)
    assert [t.failed for t in report.tallies.values()] == [0, 0, 0]
    assert all(t.checked > 20 for t in report.tallies.values())


def test_a_lost_newline_between_turns_is_found_and_shrunk(model: ModelRenderer) -> None:
    renderer = model.known.renderer
    continuation = renderer._continuation
    renderer._continuation = lambda new: (continuation(new) or "").removeprefix("\n")
    tally = certify(model, 20, seed=0).tallies["bridge"]
    assert tally.failed and tally.smallest is not None and tally.difference is not None
    roles = [m["role"] for m in tally.smallest.messages]
    assert len(roles) <= 4 and "assistant" in roles[1:-1]
    assert sum(len(m["content"]) for m in tally.smallest.messages) <= 4
    assert "<|im_end|>\n<|im_start|>" in tally.difference.expected
    assert "<|im_end|><|im_start|>" in tally.difference.got


def test_a_lost_call_is_found(model: ModelRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.gateway.template.split_calls", lambda text: (text, []))
    report = certify(model, 20, seed=0)
    assert report.tallies["parse"].failed and not report.tallies["bridge"].failed
    smallest = report.tallies["parse"].smallest
    assert smallest is not None and smallest.tools
    assert sum(len(m.get("tool_calls") or []) for m in smallest.messages) == 1


def test_other_tokens_than_the_templates_are_found(model: ModelRenderer) -> None:
    original = model.known.full.render_ids

    def changed(messages: Any, **how: Any) -> list[int]:
        return original([{**m, "content": m["content"].strip()} for m in messages], **how)

    model.known.full.render_ids = changed
    tally = certify(model, 20, seed=0).tallies["template"]
    assert tally.failed and tally.smallest is not None and len(tally.smallest.messages) == 1


def test_a_truncated_answer_that_is_continued_is_found(model: ModelRenderer) -> None:
    model._why_not = lambda node, new: None  # type: ignore[method-assign]
    assert certify(model, 10, seed=0).tallies["bridge"].failed


def test_the_command_prints_its_figures_and_fails_on_failure(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = CliRunner().invoke(app, ["renderer", "check", str(model_folder), "--conversations", "10"])
    assert good.exit_code == 0
    assert good.output.splitlines()[-1] == (
        f"renderer check: model={model_folder} family=template conversations=10"
        " bridge_failed=0 parse_failed=0 template_failed=0"
    )
    monkeypatch.setattr("leyden.gateway.template.split_calls", lambda text: (text, []))
    bad = CliRunner().invoke(app, ["renderer", "check", str(model_folder), "--conversations", "10"])
    assert bad.exit_code == 1 and "the smallest conversation that shows it" in bad.output

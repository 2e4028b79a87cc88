"""Whatever a model samples is parsed: nothing raises, what comes out can be sent, and no text is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leyden.gateway.canonical import canonical
from leyden.gateway.renderer import ModelRenderer
from leyden.gateway.tokens import Codec
from tests.real_tokenizers import FAMILIES, tokenizer_folder

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", '{"name": "look", "arguments": ', '{"a": 1}', "}", "{",
    '"\\ud800"', "NaN", "[" * 600, "é你🌍", "text ", "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", '{"name": "", "arguments": {}}', "null",
]  # fmt: skip


@pytest.fixture(scope="module", params=["tiny", *FAMILIES])
def model(request: pytest.FixtureRequest, model_folder: Path) -> ModelRenderer:
    return ModelRenderer(model_folder if request.param == "tiny" else tokenizer_folder(request.param))


def check(model: ModelRenderer, ids: list[int], prompt: list[int], forced: int = 0) -> None:
    for tools in (TOOLS, None):
        said = model.parse(np.asarray(prompt, np.int32), np.asarray(ids, np.int32), tools, None, forced)
        message = said.message()
        assert orjson.loads(orjson.dumps(message)) == message
        canonical(message)
        for call in said.tool_calls:
            assert tools and call["function"]["name"]


RUNS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@RUNS
@given(data=st.data())
def test_random_tokens_are_parsed(model: ModelRenderer, data: st.DataObject) -> None:
    size = len(model.tokenizer)
    token = st.one_of(
        st.integers(0, size - 1), st.sampled_from([i for i in model.tokenizer.all_special_ids if i < size])
    )
    ids = data.draw(st.lists(token, max_size=30))
    prompt = data.draw(st.lists(token, min_size=1, max_size=10))
    check(model, ids, prompt, data.draw(st.integers(0, len(prompt))))


@RUNS
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_half_finished_calls_and_tags_are_parsed(model: ModelRenderer, pieces: list[str]) -> None:
    check(model, model.codec.encode("".join(pieces)), model.codec.encode("<think>\n")[:1])


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\n{bad}\n</tool_call>",
        '<tool_call>\n{"name": "look", "arguments": {"a": 1}',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 3}\n</tool_call>',
        "<tool_call></tool_call>",
    ],
)
def test_calls_that_cannot_be_read_stay_text_beside_good_ones(model: ModelRenderer, broken: str) -> None:
    good = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    ids = model.codec.encode(f"before {good}\n{broken}")
    said = model.parse(np.asarray([1], np.int32), np.asarray(ids, np.int32), TOOLS, None)
    assert [c["function"]["arguments"] for c in said.tool_calls] == ['{"a": 1}']
    assert said.text.startswith("before") and broken in said.text


def test_text_around_calls_is_kept(model: ModelRenderer) -> None:
    good = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    ids = model.codec.encode(f"before\n{good}\n{good}\nafter")
    said = model.parse(np.asarray([1], np.int32), np.asarray(ids, np.int32), TOOLS, None)
    assert len(said.tool_calls) == 2 and said.text.split() == ["before", "after"]


def test_numbers_and_text_that_json_cannot_carry_are_left_as_text(model: ModelRenderer) -> None:
    for arguments in ('{"a": NaN}', '{"a": -Infinity}'):
        call = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
        ids = model.codec.encode(call)
        said = model.parse(np.asarray([1], np.int32), np.asarray(ids, np.int32), TOOLS, None)
        assert not said.tool_calls and arguments in said.text


def test_the_codec_agrees_with_the_tokenizer(model: ModelRenderer) -> None:
    assert isinstance(model.codec, Codec)
    for text in ("", "a", "long " * 500, "".join(PIECES)):
        ids = model.tokenizer.encode(text, add_special_tokens=False)
        assert model.codec.encode(text) == ids == model.codec.encode(text)
        assert model.codec.decode(ids) == model.tokenizer.decode(ids, skip_special_tokens=False)

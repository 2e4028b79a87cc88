"""What an engine may say about an answer, and what is made of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.gateway.engines.integrity import read_sample

PROMPT = np.asarray([1, 2], np.int32)
GOOD: dict[str, Any] = {
    "token_ids": [5, 6, 2],
    "logprobs": {"token_logprobs": [-0.1, -0.2, 0.0]},
    "token_versions": [3, 3, 4],
    "finish_reason": "stop",
    "prompt_token_ids": [1, 2],
}
USAGE = {"prompt_tokens": 2, "completion_tokens": 3}


def test_a_good_answer() -> None:
    sample = read_sample(GOOD, USAGE, PROMPT, 9)
    assert sample.untrainable is None and sample.ids.tolist() == [5, 6, 2] and sample.versions.tolist() == [3, 3, 4]
    assert read_sample({**GOOD, "token_versions": None}, None, PROMPT, 9).versions.tolist() == [9, 9, 9]


@pytest.mark.parametrize(
    ("change", "usage", "reason"),
    [
        ({"token_ids": None}, USAGE, "missing field: choices[0].token_ids"),
        ({"logprobs": None}, USAGE, "missing field: choices[0].logprobs.token_logprobs"),
        ({"logprobs": {"token_logprobs": [-0.1]}}, USAGE, "lengths differ: 1 log-probs for 3 token ids"),
        ({"token_versions": [1]}, USAGE, "lengths differ: 1 versions for 3 token ids"),
        ({"prompt_token_ids": [1, 3]}, USAGE, "prompt differs"),
        ({"prompt_token_ids": [[1]]}, USAGE, "prompt differs"),
        ({}, {"prompt_tokens": 2, "completion_tokens": 4}, "usage differs: completion_tokens is 4 for 3 ids"),
        ({"logprobs": {"token_logprobs": [0.5, 0, 0]}}, USAGE, "malformed field: a log-prob above 0"),
        ({"token_ids": [], "logprobs": {"token_logprobs": []}, "token_versions": []}, None, "empty answer"),
    ],
)
def test_disagreement_is_a_reason(change: dict[str, Any], usage: Any, reason: str) -> None:
    sample = read_sample({**GOOD, **change}, usage, PROMPT, 0)
    assert sample.untrainable is not None and sample.untrainable.startswith(reason)
    assert len(sample.logprobs) in (0, len(sample.ids))


def test_missing_logprobs_of_single_tokens_stay_missing() -> None:
    sample = read_sample({**GOOD, "logprobs": {"token_logprobs": [-0.1, None, float("-inf")]}}, USAGE, PROMPT, 0)
    assert sample.untrainable is None and sample.nan_logprobs == 2
    assert np.isnan(sample.logprobs).tolist() == [False, True, True]


def test_ids_in_token_texts() -> None:
    logprobs = {"tokens": ["token_id:40", "token_id:3278"], "token_logprobs": [-0.1, -0.2]}
    sample = read_sample({"logprobs": logprobs, "finish_reason": "stop"}, None, PROMPT, 0)
    assert sample.ids.tolist() == [40, 3278] and sample.untrainable is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(GOOD, json_values)) | json_values, json_values)
def test_nothing_raises_and_trainable_means_consistent(choice: Any, usage: Any) -> None:
    sample = read_sample(choice, usage, PROMPT, 0)
    if sample.untrainable is None:
        assert len(sample.ids) == len(sample.logprobs) == len(sample.versions) > 0

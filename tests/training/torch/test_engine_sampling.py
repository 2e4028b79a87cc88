"""Sampling maths against plain references."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from leyden.training.torch.requests import Params, first_stop, stopped_by, visible_text  # noqa: E402
from leyden.training.torch.sampling import chosen_logprobs, draw, restrict, sample  # noqa: E402


def reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities by the definition, in plain Python."""
    scaled = [x / temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = order[: top_k or None]
    peak = max(scaled)
    weight = {i: math.exp(scaled[i] - peak) for i in kept}
    total = sum(weight.values())
    nucleus, mass = [], 0.0
    for i in kept:
        if nucleus and top_p < 1 and mass >= top_p - 1e-9:
            break
        nucleus.append(i)
        mass += weight[i] / total
    total = sum(weight[i] for i in nucleus)
    return [weight[i] / total if i in nucleus else 0.0 for i in range(len(scaled))]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=600),
    st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    st.integers(0, 12),
    st.sampled_from([0.11, 0.503, 0.907, 1.0]),
    st.floats(0, 1, exclude_max=True),
)
def test_logprob_is_of_the_distribution_sampled_from(
    logits: list[float], temperature: float, top_k: int, top_p: float, uniform: float
) -> None:
    tokens, logprobs = sample(torch.tensor([logits]), [temperature], [top_k], [top_p], [uniform])
    expected = reference(logits, temperature, top_k, top_p)
    if expected[tokens[0]] == 0:  # a probability within rounding of the top-p boundary may fall on either side
        kept = restrict(torch.tensor([logits]) / temperature, torch.tensor([top_k]), torch.tensor([top_p]))
        assert torch.isfinite(kept[0, tokens[0]])
        return
    assert logprobs[0] == pytest.approx(math.log(expected[tokens[0]]), abs=2e-3 if top_p < 1 else 1e-5)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (7, 1.0), (0, 0.62), (9, 0.73)])
def test_draws_follow_the_distribution(top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(300, generator=generator) * 2
    n = 4096
    # Evenly spread uniforms make the inverse transform's counts exact to one draw per token.
    uniforms = [(i + 0.5) / n for i in range(n)]
    tokens, _ = sample(logits.expand(n, -1).clone(), [1.0] * n, [top_k] * n, [top_p] * n, uniforms)
    counts = torch.bincount(torch.tensor(tokens), minlength=300).double() / n
    expected = torch.tensor(reference(logits.tolist(), 1.0, top_k, top_p), dtype=torch.float64)
    assert (counts - expected).abs().max() <= 2 / n


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((3, 700), -torch.inf)
    logits[:, 299] = 1.0
    logits[:, 300] = 2.0
    tokens, logprobs = draw(logits, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert set(tokens.tolist()) <= {299, 300} and torch.isfinite(logprobs).all()


def test_greedy_has_the_plain_softmax_logprob_whatever_its_batch_mates_ask() -> None:
    logits = torch.randn(2, 50)
    expected = logits[0].log_softmax(0)
    tokens, logprobs = sample(logits.clone(), [0.0, 0.5], [3, 2], [0.2, 0.5], [0.9, 0.1])
    assert tokens[0] == int(expected.argmax()) and logprobs[0] == pytest.approx(float(expected.max()), abs=1e-5)


def test_non_finite_logits_show() -> None:
    for bad in (math.nan, math.inf):
        logits = torch.zeros(1, 10)
        logits[0, 4] = bad
        assert not math.isfinite(sample(logits.clone(), [1.0], [0], [1.0], [0.5])[1][0])
        assert not math.isfinite(sample(logits.clone(), [0.0], [0], [1.0], [0.5])[1][0])


def test_chosen_logprobs() -> None:
    logits = torch.randn(4, 30)
    tokens = torch.tensor([0, 29, 3, 3])
    assert torch.allclose(chosen_logprobs(logits, tokens), logits.log_softmax(1)[range(4), tokens], atol=1e-6)


def test_stops() -> None:
    params = Params(10, stop_token_ids=frozenset({5}), stop=("END",))
    words = {1: "xE", 2: "ND!", 5: ""}

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids)

    assert stopped_by([1], params, decode) is None
    assert stopped_by([1, 2], params, decode) == "END"
    assert stopped_by([1, 5], params, decode) == 5
    assert first_stop("a b c", ["c", "b"]) == "b"
    assert visible_text("say END!", "END") == "say " and visible_text("all", 5) == "all"

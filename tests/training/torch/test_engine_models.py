"""The engine's answers against transformers' own forward, for every family that it knows and one that it doesn't."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from leyden.errors import PreflightError  # noqa: E402
from leyden.training.torch.decoder import FastRunner  # noqa: E402
from leyden.training.torch.decoder_weights import WeightsError, from_folder  # noqa: E402
from leyden.training.torch.engine import Engine, EngineDead, NotFinite, QueueFull  # noqa: E402
from leyden.training.torch.generic import GenericRunner  # noqa: E402
from leyden.training.torch.kv import BLOCK  # noqa: E402
from leyden.training.torch.loading import LoadedModel, load_model, plan_sizes  # noqa: E402
from leyden.training.torch.requests import Answer, Params  # noqa: E402

VOCAB = 300
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biased": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 8}),
    "mistral-windowed": (transformers.MistralConfig, {"sliding_window": 32, "head_dim": 8}),
    "gpt2": (transformers.GPT2Config, {}),
}
FAST = {"llama", "llama-biased", "qwen2", "qwen3", "mistral"}


def save_model(folder: Path, family: str, seed: int = 0) -> Path:
    """A random model of a family, saved with every bias and gain away from its neutral value."""
    make, extra = FAMILIES[family]
    torch.manual_seed(seed)
    if family == "gpt2":
        shape: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
        config = make(**shape, initializer_range=0.3, eos_token_id=2)
    else:
        config = make(**SHAPE, **extra)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


class Rig:
    """An engine over a saved model, and the model's own answers."""

    def __init__(self, folder: Path, kv_tokens: int = 2048, max_batch: int = 8, **options: Any) -> None:
        self.folder = folder
        self.model: LoadedModel = load_model(
            folder, device=torch.device("cpu"), max_batch=max_batch, max_model_len=None, kv_cache_tokens=kv_tokens
        )
        self.engine = Engine(self.model.runner, n_blocks=kv_tokens // BLOCK, max_batch=max_batch, **options)
        self.engine.start()

    def ask(self, prompt: list[int], n: int = 1, **params: Any) -> list[Future[Answer]]:
        return self.engine.submit(prompt, Params(**{"max_tokens": 12, **params}), n)[1]

    def logprobs(self, ids: list[int], temperature: float = 1.0, folder: Path | None = None) -> list[float]:
        """Log-probability of each token but the first, by transformers' full forward."""
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder or self.folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            rows = (reference(torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)
        return rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def rig(llama: Path) -> Iterator[Rig]:
    made = Rig(llama)
    yield made
    made.engine.stop()


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    rig = Rig(save_model(tmp_path, family))
    assert isinstance(rig.model.runner, FastRunner if family in FAST else GenericRunner)
    try:
        prompts = [prompt_of(i, length) for i, length in enumerate((1, 16, 33, 60))]
        futures = [rig.ask(p, temperature=0.8, seed=i, prompt_logprobs=i % 2 == 1)[0] for i, p in enumerate(prompts)]
        for prompt, future in zip(prompts, futures, strict=True):
            answer = future.result(60)
            ids = prompt + answer.token_ids
            assert answer.logprobs == pytest.approx(rig.logprobs(ids, 0.8)[len(prompt) - 1 :], abs=1e-4)
            if answer.prompt_logprobs is not None:
                assert answer.prompt_logprobs == pytest.approx(rig.logprobs(prompt), abs=1e-4)
    finally:
        rig.engine.stop()


def test_tokens_dont_depend_on_batch_mates(rig: Rig) -> None:
    asks = [
        {"prompt": prompt_of(i % 5, 10 + 7 * (i % 5)), "temperature": [0.0, 1.0, 0.7][i % 3], "seed": i, "top_p": 0.9}
        for i in range(16)
    ]
    alone = [rig.ask(**ask)[0].result(60).token_ids for ask in asks]  # type: ignore[arg-type]
    together = [rig.ask(**ask)[0] for ask in asks]  # type: ignore[arg-type]
    assert [future.result(60).token_ids for future in together] == alone


def test_group_and_next_turn_reuse_their_prefix(rig: Rig) -> None:
    prompt = prompt_of(1, 50)
    group = [future.result(60) for future in rig.ask(prompt, n=8, seed=4)]
    assert sorted(answer.cached_tokens for answer in group) == [0] + [49] * 7
    assert len({tuple(answer.token_ids) for answer in group}) > 1
    turn = prompt + group[0].token_ids + [9, 10]
    after = rig.ask(turn, temperature=0.0)[0].result(60)
    assert after.cached_tokens == 50 + 11
    assert after.logprobs == pytest.approx(rig.logprobs(turn + after.token_ids)[len(turn) - 1 :], abs=1e-4)


def test_answers_survive_preemption(llama: Path) -> None:
    small, large = Rig(llama, kv_tokens=96), Rig(llama, kv_tokens=2048)
    try:
        asks = [(prompt_of(i, 17), {"max_tokens": 40, "seed": i}) for i in range(4)]
        wanted = [large.ask(prompt, **rest)[0].result(60).token_ids for prompt, rest in asks]
        futures = [small.ask(prompt, **rest)[0] for prompt, rest in asks]
        assert [future.result(60).token_ids for future in futures] == wanted
        assert small.engine.stats()["preemptions"] > 0
    finally:
        small.engine.stop()
        large.engine.stop()


def test_stop_tokens_and_lengths(rig: Rig) -> None:
    prompt = prompt_of(2, 8)
    free = rig.ask(prompt, temperature=0.0)[0].result(60)
    assert (free.finish_reason, len(free.token_ids)) == ("length", 12)
    third = free.token_ids[2]
    end = rig.ask(prompt, temperature=0.0, stop_token_ids=frozenset({third}))[0].result(60)
    assert (end.finish_reason, end.stop_reason) == ("stop", third)
    assert end.token_ids == free.token_ids[: free.token_ids.index(third) + 1]
    scored = rig.ask(prompt, max_tokens=0, prompt_logprobs=True)[0].result(60)
    assert scored.token_ids == [] and len(scored.prompt_logprobs or []) == 7


def test_new_weights_in_flight(rig: Rig, tmp_path: Path) -> None:
    other = save_model(tmp_path, "llama", seed=5)
    prompt = prompt_of(3, 40)
    running = rig.ask(prompt, max_tokens=400, seed=1)[0]
    while rig.engine.generated_tokens < 20:
        assert not running.done()
    rig.engine.load_weights(from_folder(other), 7)
    answer = running.result(60)
    assert set(answer.versions) == {0, 7} and answer.versions == sorted(answer.versions)
    fresh = rig.ask(prompt, temperature=0.0, prompt_logprobs=True)[0].result(60)
    assert fresh.versions == [7] * 12
    assert fresh.prompt_logprobs == pytest.approx(rig.logprobs(prompt, folder=other), abs=1e-4)
    again = rig.ask(prompt + answer.token_ids)[0].result(60)
    # What the earlier, mixed sequence left must not serve anybody.
    ids = prompt + answer.token_ids + again.token_ids
    assert again.logprobs == pytest.approx(rig.logprobs(ids, folder=other)[-len(again.token_ids) :], abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bad_weights_are_refused_by_name_and_change_nothing(family: str, tmp_path: Path) -> None:
    rig = Rig(save_model(tmp_path / "good", family))
    good = load_file(tmp_path / "good" / "model.safetensors")
    name = sorted(n for n in good if "mlp" in n and n.endswith("weight"))[0]
    faults = {
        "missing": {k: v for k, v in good.items() if k != name},
        "shape": {**good, name: good[name][:-1].contiguous()},
        "finite": {**good, name: good[name].index_fill(0, torch.tensor([0]), torch.nan)},
    }
    prompt = prompt_of(4, 20)
    try:
        before = rig.ask(prompt, temperature=0.0)[0].result(60)
        for word, tensors in faults.items():
            folder = tmp_path / word
            folder.mkdir()
            save_file(tensors, folder / "model.safetensors")
            with pytest.raises(WeightsError, match=f"{name}.*{word}"):
                rig.engine.load_weights(from_folder(folder), 1)
        with pytest.raises(WeightsError, match="no file"):
            rig.engine.load_weights(from_folder(tmp_path), 1)
        after = rig.ask(prompt, temperature=0.0)[0].result(60)
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5) and after.versions == before.versions
        zeros = {k: torch.zeros_like(v) for k, v in good.items()}
        (tmp_path / "zeros").mkdir()
        save_file(zeros, tmp_path / "zeros" / "model.safetensors")
        rig.engine.load_weights(from_folder(tmp_path / "zeros"), 1)
        flat = rig.ask(prompt)[0].result(60)
        assert flat.logprobs == pytest.approx([-5.70378] * 12, abs=1e-4) and flat.versions == [1] * 12
    finally:
        rig.engine.stop()


def test_abort_returns_what_was_sampled(rig: Rig) -> None:
    ticket, (future,) = rig.engine.submit(prompt_of(5, 10), Params(max_tokens=450))
    while rig.engine.generated_tokens < 3:
        assert not future.done()
    rig.engine.abort(ticket)
    answer = future.result(10)
    assert answer.finish_reason == "abort" and 3 <= len(answer.token_ids) < 450
    assert rig.engine.stats()["running"] == 0


def test_a_failing_model_tells_everybody(llama: Path) -> None:
    told: list[str] = []
    rig = Rig(llama, on_death=told.append)
    futures = rig.ask(prompt_of(6, 10), n=3, max_tokens=400)

    def fail(plan: object) -> None:
        raise MemoryError("no more memory")

    rig.model.runner.forward = fail  # type: ignore[method-assign,assignment]
    for future in futures:
        with pytest.raises(EngineDead, match="MemoryError: no more memory"):
            future.result(10)
    with pytest.raises(EngineDead):
        rig.ask([5])
    assert len(told) == 1


def test_a_full_queue_refuses(llama: Path) -> None:
    rig = Rig(llama, max_batch=2, max_waiting=3)
    with pytest.raises(QueueFull):
        rig.ask([5], n=6)
    assert [future.result(60).finish_reason for future in rig.ask([5], n=5)] == ["length"] * 5
    rig.engine.stop()


def test_infinite_logits_fail_their_request_only(rig: Rig) -> None:
    logits = rig.model.runner.logits
    rig.model.runner.logits = lambda features: logits(features).fill_(torch.nan)  # type: ignore[method-assign]
    with pytest.raises(NotFinite):
        rig.ask([5])[0].result(10)
    rig.model.runner.logits = logits  # type: ignore[method-assign]
    assert rig.ask([5])[0].result(10).finish_reason == "length"


def test_sizes() -> None:
    gib = 1 << 30
    asked: dict[str, Any] = {"model_positions": 4096, "weight_bytes": gib, "kv_token_bytes": 1 << 16, "max_batch": 64}
    free = plan_sizes(**asked, free_bytes=8 * gib, max_model_len=None, kv_cache_tokens=None)
    assert free.kv_bytes == 2 * gib and free.max_model_len == 4096
    small = plan_sizes(**asked, free_bytes=80 * gib, max_model_len=256, kv_cache_tokens=None)
    assert small.kv_tokens == 64 * 256
    tight = plan_sizes(**asked, free_bytes=8 * gib, max_model_len=None, kv_cache_tokens=100)
    assert tight.max_model_len == tight.kv_tokens == 112
    with pytest.raises(PreflightError, match=r"needs .* GiB .* lower kv_cache_tokens"):
        plan_sizes(**asked, free_bytes=2 * gib, max_model_len=None, kv_cache_tokens=None)
    with pytest.raises(PreflightError, match="4096 positions"):
        plan_sizes(**asked, free_bytes=8 * gib, max_model_len=5000, kv_cache_tokens=None)

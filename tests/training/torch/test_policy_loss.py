"""The loss and its gradient on a small transformer: the same whatever the layout, order, split or fragmentation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from leyden.config import LoraConfig, TrainingConfig
from leyden.errors import RunError
from leyden.training import packing
from leyden.training.losses import token_weights
from leyden.training.packing import Item, padded_batches, tree_batches
from leyden.training.rows import Row
from leyden.training.torch import chunks
from leyden.training.torch.policy import Policy, whole_row

VOCABULARY = 48


def tiny(dtype: torch.dtype, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).to(dtype)


def policy(dtype: torch.dtype = torch.float64, *, tied: bool = True, **settings: object) -> Policy:
    packed = settings.pop("packed", None)
    onednn = settings.pop("onednn", False)
    config = TrainingConfig(threads=1, learning_rate=1e-3, **settings)  # pyright: ignore[reportArgumentType]
    return Policy(tiny(dtype, tied), config, Path("tiny"), packing=packed, onednn=onednn)  # pyright: ignore[reportArgumentType]


def row(rollout: str, ids: list[int], trained: list[int], old: float = -3.0) -> Row:
    mask = np.zeros(len(ids), dtype=bool)
    mask[trained] = True
    logprobs = np.where(mask, old - np.arange(len(ids)) % 3 / 4, np.nan).astype(np.float32)
    return Row(rollout, np.array(ids, np.int32), mask, logprobs, np.zeros(len(ids), np.int32), 1, ())


def weighted(rows: list[Row], advantages: dict[str, float], how: str = "rollout_mean") -> list[Item]:
    weights = token_weights(rows, advantages, how)  # pyright: ignore[reportArgumentType]
    return [Item(r, advantages[r.rollout_id], weights[r.rollout_id]) for r in rows if r.rollout_id in weights]


def gradient(p: Policy, batches: list) -> tuple[float, torch.Tensor]:
    p.optimizer.zero_grad(set_to_none=True)
    loss, _ = p.accumulate(batches)
    return loss, torch.cat([g.grad.flatten() for g in p.parameters if g.grad is not None]).clone()


def direct(p: Policy, items: list[Item]) -> tuple[float, torch.Tensor]:
    """The textbook loss, row by row through the model's own forward and full log-softmax."""
    p.optimizer.zero_grad(set_to_none=True)
    p.hf.config._attn_implementation = "sdpa"
    total = torch.zeros((), dtype=p.dtype)
    for i in items:
        ids = torch.tensor(i.row.ids, dtype=torch.long)
        logp = p.hf(input_ids=ids[None]).logits[0].log_softmax(-1)
        for t in np.flatnonzero(i.row.mask):
            new = logp[t - 1, ids[t]]
            old = float(i.row.logprobs[t])
            ratio = torch.exp(new - (new.detach() if math.isnan(old) else old))
            low, high = 1 - p.config.loss.clip_low, 1 + p.config.loss.clip_high
            total = total - i.weight * torch.min(ratio * i.advantage, ratio.clamp(low, high) * i.advantage)
    total.backward()
    return float(total.detach()), torch.cat([g.grad.flatten() for g in p.parameters if g.grad is not None]).clone()


def batch_of_rows(seed: int) -> tuple[list[Row], dict[str, float]]:
    rng = np.random.default_rng(seed)
    rows, advantages = [], {}
    for group in range(3):
        prompt = [1, 2, *rng.integers(0, VOCABULARY, 6).tolist()]
        for sample in range(3):
            name = f"{group}.{sample}"
            advantages[name] = float(rng.normal())
            ids = prompt + rng.integers(0, VOCABULARY, int(rng.integers(2, 9))).tolist()
            rows.append(row(name, ids, list(range(len(prompt), len(ids)))))
            if sample == 1:
                rows.append(row(name, [*ids, 5, 6, 7], [len(ids) + 2]))
    return rows, advantages


@pytest.mark.parametrize("how", ["rollout_mean", "token_mean"])
@pytest.mark.parametrize("tied", [True, False])
def test_layouts_and_splits_give_the_textbook_loss_and_gradient(how: str, tied: bool, monkeypatch) -> None:
    monkeypatch.setattr(chunks, "LOGIT_ROWS", 7)
    monkeypatch.setattr(packing, "BLOCK_TOKENS", 9)
    p = policy(tied=tied)
    items = weighted(*batch_of_rows(0), how)
    loss, grad = direct(p, items)
    for batches in (
        padded_batches(items, 10_000),
        padded_batches(items, 20),
        padded_batches(items[::-1], 40),
        tree_batches(items, 10_000),
        tree_batches(items, 20),
        [*tree_batches(items[::2], 30), *padded_batches(items[1::2], 30)],
    ):
        other, g = gradient(p, batches)
        assert other == pytest.approx(loss, abs=1e-6)
        torch.testing.assert_close(g, grad, atol=1e-6, rtol=0)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_fragmentation_changes_nothing(seed: int, pieces: int) -> None:
    """One rollout's sampled spans in one row, or cut into several rows with the rest as context."""
    p = policy()
    rows, advantages = batch_of_rows(seed)
    loss, grad = gradient(p, tree_batches(weighted(rows, advantages), 64))
    cut = []
    for r in rows:
        owners = np.arange(len(r)) % pieces
        for k in range(pieces):
            mask = r.mask & (owners == k)
            if mask.any():
                end = int(np.flatnonzero(mask)[-1]) + 1
                cut.append(
                    Row(r.rollout_id, r.ids[:end], mask[:end], r.logprobs[:end], r.versions[:end], r.prompt_len, ())
                )
    order = np.random.default_rng(seed).permutation(len(cut))
    other, g = gradient(p, tree_batches(weighted([cut[i] for i in order], advantages), 48))
    assert other == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(g, grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("onednn", [False, True])
def test_fp32_packed_equals_padded(onednn: bool) -> None:
    if onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    p = policy(torch.float32, onednn=onednn)
    assert p.onednn is onednn and p.packing
    items = weighted(*batch_of_rows(3))
    reference, grad = gradient(policy(torch.float32), padded_batches(items, 50))
    loss, packed = gradient(p, tree_batches(items, 10_000))
    assert loss == pytest.approx(reference, abs=1e-4)
    torch.testing.assert_close(packed, grad, atol=1e-4, rtol=0)


def test_zero_advantage_rollouts_count_in_the_denominator_but_cost_nothing() -> None:
    """Their gradient is zero; leaving them out must not raise the weight of the others."""
    rows, advantages = batch_of_rows(1)
    advantages["0.0"] = advantages["1.1"] = 0.0
    items = weighted(rows, advantages)
    trained = {i.row.rollout_id: sum(r.trained for r in rows if r.rollout_id == i.row.rollout_id) for i in items}
    assert {round(1 / (i.weight * trained[i.row.rollout_id])) for i in items} == {9}
    p = policy()
    ids = [3, 9, 27, 5]
    logits = p.hf(input_ids=torch.tensor([ids])).logits[0]
    p.temperature = 0.5
    wanted = (logits / 0.5).log_softmax(-1)[torch.arange(3), torch.tensor(ids[1:])]
    np.testing.assert_allclose(p.score_ids(ids), wanted.detach().numpy(), atol=1e-10)


def test_window_attention_turns_packing_off() -> None:
    p = policy()
    assert p.packing
    p.hf.config.sliding_window = 4
    assert not p._packing_agrees()


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8)])
@pytest.mark.parametrize("tied", [True, False])
def test_saved_folders_load_as_models_and_resume_bit_for_bit(lora, tied: bool, tmp_path: Path) -> None:
    first = policy(torch.float32, tied=tied, lora=lora)
    items = weighted(*batch_of_rows(5))
    first.update(items)
    first.save(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert ("lm_head.weight" in names) is not tied and not [n for n in names if "lora" in n or "base_layer" in n]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = [4, 8, 15, 16, 23, 42]
    logp = exported(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    np.testing.assert_allclose(
        logp[torch.arange(5), torch.tensor(ids[1:])].detach().numpy(), first.score_ids(ids), atol=1e-5
    )
    second = policy(torch.float32, tied=tied, lora=lora)
    assert not np.allclose(second.score_ids(ids), first.score_ids(ids), atol=1e-5)
    second.restore(tmp_path)
    assert second.score_ids(ids) == first.score_ids(ids)
    assert second.update(items).losses == first.update(items).losses
    assert second.score_ids(ids) == first.score_ids(ids)


@pytest.mark.parametrize("begun", [True, False])
def test_a_resumed_run_keeps_the_library_it_began_with(begun: bool, tmp_path: Path) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    first = policy(torch.float32, onednn=begun)
    items = weighted(*batch_of_rows(5))
    first.update(items)
    first.save(tmp_path)
    second = policy(torch.float32, onednn=not begun)
    second.restore(tmp_path)
    assert second.onednn is begun
    assert second.update(items).losses == first.update(items).losses
    assert second.score_ids([1, 2, 3]) == first.score_ids([1, 2, 3])


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    policy(torch.float32, tied=False).save(tmp_path)
    with pytest.raises(RunError, match="can't be taken up"):
        policy(torch.float32, tied=True).restore(tmp_path)


def test_lora_trains_adapters_only() -> None:
    p = policy(torch.float32, lora=LoraConfig(rank=2, alpha=4))
    base = {n: v.clone() for n, v in p.model.state_dict().items() if "lora_" not in n}
    p.update(weighted(*batch_of_rows(6)))
    assert all(torch.equal(v, base[n]) for n, v in p.model.state_dict().items() if n in base)
    assert any(float(v.abs().sum()) > 0 for n, v in p.model.state_dict().items() if "lora_B" in n)


def test_whole_rows_score_every_token_but_the_first() -> None:
    assert whole_row([1, 2, 3]).trained == 2

"""Micro-batches: budgets, prefix trees and attention blocks as plain data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.training import packing
from leyden.training.packing import Item, TreeBatch, padded_batches, trainable, tree_batches
from leyden.training.rows import Row


def item(ids: list[int], trained: list[int], advantage: float = 1.0, weight: float = 1.0) -> Item:
    mask = np.zeros(len(ids), dtype=bool)
    mask[trained] = True
    logprobs = np.where(mask, -np.arange(len(ids)) / 10, np.nan).astype(np.float32)
    row = Row("r", np.array(ids, np.int32), mask, logprobs, np.zeros(len(ids), np.int32), 1, ())
    return Item(row, advantage, weight)


items_strategy = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=14).map(lambda ids: item(ids, list(range(1, len(ids), 2)))),
    min_size=1,
    max_size=10,
)


def ancestors(batch: TreeBatch, token: int) -> list[int]:
    """Tokens that the attention blocks let `token` see."""
    block = next(b for b in batch.blocks if b.start <= token < b.stop)
    seen = [t for a in block.ancestors for t in range(batch.blocks[a].start, batch.blocks[a].stop)]
    own = batch.mask(block)[token - block.start]
    return seen + [block.start + int(j) for j in np.flatnonzero(own)]


@settings(max_examples=200, deadline=None)
@given(items_strategy, st.sampled_from([1, 4, 384]), st.sampled_from([8, 10_000]))
def test_each_token_sees_exactly_its_own_prefix(items: list[Item], block_tokens: int, budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK_TOKENS", block_tokens)
        batches = tree_batches(items, budget)
    prefixes = set()
    for batch in batches:
        assert [b.start for b in batch.blocks] == [0, *[b.stop for b in batch.blocks]][:-1]
        assert batch.blocks[-1].stop == batch.tokens
        for token in range(batch.tokens):
            seen = ancestors(batch, token)
            assert batch.positions[seen].tolist() == list(range(len(seen))) and seen[-1] == token
            prefixes.add(tuple(batch.ids[seen].tolist()))
        if len(items) > 1 and len(batches) > 1:
            assert batch.tokens <= max(budget, max(len(i.row) for i in items))
    expected = {tuple(i.row.ids[:n].tolist()) for i in items for n in range(1, len(i.row) + 1)}
    assert prefixes == expected
    if budget == 10_000:
        assert sum(b.tokens for b in batches) == len(expected)


@settings(max_examples=100, deadline=None)
@given(items_strategy, st.sampled_from([8, 40, 10_000]))
def test_both_layouts_hold_every_target_once_with_its_own_context(items: list[Item], budget: int) -> None:
    def key(context: list[int], target: int, old: float) -> tuple[object, ...]:
        return (tuple(context), target, round(old, 4))

    wanted = sorted(
        key(i.row.ids[:t].tolist(), int(i.row.ids[t]), float(i.row.logprobs[t]))
        for i in items
        for t in np.flatnonzero(i.row.mask)
    )
    tree, padded = [], []
    for batch in tree_batches(items, budget):
        for h, target, old in zip(batch.targets.hidden, batch.targets.ids, batch.targets.old, strict=True):
            tree.append(key(batch.ids[ancestors(batch, int(h))].tolist(), int(target), float(old)))
    for batch in padded_batches(items, budget):
        width = batch.ids.shape[1]
        assert batch.tokens <= max(budget, width)
        for h, target, old in zip(batch.targets.hidden, batch.targets.ids, batch.targets.old, strict=True):
            row, at = divmod(int(h), width)
            assert at < batch.lengths[row]
            padded.append(key(batch.ids[row, : at + 1].tolist(), int(target), float(old)))
    assert sorted(tree) == sorted(padded) == wanted


def test_a_group_pays_for_its_prompt_once() -> None:
    prompt = list(range(100))
    items = [item([*prompt, 200 + i, 1, 2], [100, 101, 102]) for i in range(8)]
    (batch,) = tree_batches(items, 10_000)
    assert batch.tokens == 100 + 8 * 3
    assert sum(b.tokens for b in padded_batches(items, 10_000)) == 8 * 103


def test_rows_without_a_gradient_are_left_out() -> None:
    kept = item([1, 2], [1], advantage=-0.5)
    assert trainable([item([1, 2], [1], advantage=0.0), kept, item([1, 2], [])]) == [kept]
    assert tree_batches([], 10) == [] and padded_batches([], 10) == []

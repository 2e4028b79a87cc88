"""Micro-batches of a step's rows under a token budget. Pure: numpy only.

Two layouts of the same rows:

- padded: rows sorted by length, padded at the end; the reference.
- trees: rows share long prefixes (a group's prompt, earlier turns, branches). Sorted lexicographically, each row
  adds only the tokens after its longest common prefix with the row before it; that is the depth-first walk of the rows'
  prefix trie, so each unique token is computed once. Token j is visible to token i exactly when it is an ancestor in
  the
  trie: j <= i < end[j] in depth-first order. A token's position is its depth.

Attention over a tree is cut into blocks so that its cost follows the paths and not the square of the batch: a block is
a run of whole small subtrees (attending to its ancestors and, by mask, within itself) or a single run of tokens that
branches later. What a block attends to are itself and earlier blocks that lie on its path from the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leyden.training.rows import Row

BLOCK_TOKENS = 384
"""Subtrees up to this size share one attention call. Larger wastes masked products, smaller costs more calls per
layer."""


@dataclass(frozen=True)
class Item:
    """A row with what the loss needs: its rollout's advantage and the weight of each of its trained tokens."""

    row: Row
    advantage: float
    weight: float


@dataclass(frozen=True)
class Targets:
    """Trained tokens of a micro-batch, flat, sorted by `hidden`.

    `hidden` int64 [n]: flat index of the position whose output predicts the token; `ids` int64 [n]; `old` float32 [n]
    (NaN unknown); `advantages`, `weights` float64 [n].
    """

    hidden: NDArray[np.int64]
    ids: NDArray[np.int64]
    old: NDArray[np.float32]
    advantages: NDArray[np.float64]
    weights: NDArray[np.float64]


@dataclass(frozen=True)
class PaddedBatch:
    """`ids` int64 [b, L], `lengths` int64 [b]; `hidden` of the targets indexes the flattened [b * L]."""

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    targets: Targets

    @property
    def tokens(self) -> int:
        return self.ids.size


@dataclass(frozen=True)
class Block:
    """Tokens [start, stop) of a tree batch, attending to the blocks `ancestors` (all of each) and, by `end`, to
    themselves."""

    start: int
    stop: int
    ancestors: tuple[int, ...]


@dataclass(frozen=True)
class TreeBatch:
    """Unique tokens in depth-first order: `ids`, `positions` (depth), `end` (subtree end) int64 [n], and attention
    blocks."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    end: NDArray[np.int64]
    blocks: tuple[Block, ...]
    targets: Targets

    @property
    def tokens(self) -> int:
        return self.ids.size

    def mask(self, block: Block) -> NDArray[np.bool_]:
        """bool [q, q] of a block: True where the key token (column) is the query token (row) or its ancestor."""
        i = np.arange(block.start, block.stop)
        return (i[None, :] <= i[:, None]) & (i[:, None] < self.end[i][None, :])


def trainable(items: Sequence[Item]) -> list[Item]:
    """Items with a gradient: zero advantages give none, and the step's denominators have counted them already."""
    return [i for i in items if i.advantage != 0.0 and i.row.trained]


def padded_batches(items: Sequence[Item], budget: int) -> list[PaddedBatch]:
    """Rows sorted by length, in batches of at most `budget` padded tokens (a longer row is a batch of its own)."""
    batches: list[PaddedBatch] = []
    chosen: list[Item] = []
    for item in sorted(items, key=lambda i: (len(i.row), i.row.ids.tobytes())):
        if chosen and len(item.row) * (len(chosen) + 1) > budget:
            batches.append(_pad(chosen))
            chosen = []
        chosen.append(item)
    if chosen:
        batches.append(_pad(chosen))
    return batches


def tree_batches(items: Sequence[Item], budget: int) -> list[TreeBatch]:
    """Prefix trees of at most `budget` unique tokens each (a longer row is a batch of its own)."""
    batches: list[TreeBatch] = []
    chosen: list[Item] = []
    tokens = 0
    # Big-endian bytes of non-negative ids sort as the id sequences do.
    for item in sorted(items, key=lambda i: i.row.ids.astype(">i4").tobytes()):
        fresh = len(item.row) - (common_prefix(chosen[-1].row.ids, item.row.ids) if chosen else 0)
        if chosen and tokens + fresh > budget:
            batches.append(_tree(chosen))
            chosen, tokens, fresh = [], 0, len(item.row)
        chosen.append(item)
        tokens += fresh
    if chosen:
        batches.append(_tree(chosen))
    return batches


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _targets(items: Sequence[Item], places: Sequence[NDArray[np.int64]]) -> Targets:
    """`places[k][j]` is the flat position of token j of row k."""
    hidden, ids, old, advantages, weights = [], [], [], [], []
    for item, place in zip(items, places, strict=True):
        at = np.flatnonzero(item.row.mask)
        hidden.append(place[at - 1])
        ids.append(item.row.ids[at])
        old.append(item.row.logprobs[at])
        advantages.append(np.full(len(at), item.advantage))
        weights.append(np.full(len(at), item.weight))
    flat = np.concatenate(hidden).astype(np.int64)
    order = np.argsort(flat, kind="stable")
    return Targets(
        flat[order],
        np.concatenate(ids).astype(np.int64)[order],
        np.concatenate(old).astype(np.float32)[order],
        np.concatenate(advantages)[order],
        np.concatenate(weights)[order],
    )


def _pad(items: Sequence[Item]) -> PaddedBatch:
    width = max(len(i.row) for i in items)
    ids = np.zeros((len(items), width), dtype=np.int64)
    for k, item in enumerate(items):
        ids[k, : len(item.row)] = item.row.ids
    places = [np.arange(len(i.row), dtype=np.int64) + k * width for k, i in enumerate(items)]
    return PaddedBatch(ids, np.array([len(i.row) for i in items], dtype=np.int64), _targets(items, places))


def _tree(items: Sequence[Item]) -> TreeBatch:
    """The trie of lexicographically sorted rows, in depth-first order."""
    total = sum(len(i.row) for i in items)
    ids, positions, end = (np.zeros(total, dtype=np.int64) for _ in range(3))
    places: list[NDArray[np.int64]] = []
    path = np.zeros(0, dtype=np.int64)
    previous = np.zeros(0, dtype=np.int32)
    n = 0
    for item in items:
        row = item.row.ids
        shared = common_prefix(previous, row)
        end[path[shared:]] = n
        fresh = np.arange(n, n + len(row) - shared, dtype=np.int64)
        ids[fresh] = row[shared:]
        positions[fresh] = np.arange(shared, len(row))
        path = np.concatenate([path[:shared], fresh])
        places.append(path)
        previous = row
        n += len(fresh)
    end[path] = n
    ids, positions, end = ids[:n], positions[:n], end[:n]
    return TreeBatch(ids, positions, end, _blocks(positions, end), _targets(items, places))


def _blocks(positions: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[Block, ...]:
    total = len(end)
    # A run goes on while the next token is the only child: one deeper, and ending where its parent ends.
    breaks = np.flatnonzero((positions[1:] != positions[:-1] + 1) | (end[1:] != end[:-1])) + 1
    blocks: list[Block] = []
    above: list[tuple[int, int]] = []  # (block, end of what lies under it), from the root down
    at = 0
    while at < total:
        while above and at >= above[-1][1]:
            above.pop()
        limit = above[-1][1] if above else total
        ancestors = tuple(b for b, _ in above)
        stop = int(end[at])
        if stop - at <= BLOCK_TOKENS:
            while stop < limit and end[stop] - at <= BLOCK_TOKENS:
                stop = int(end[stop])
        else:
            later = int(np.searchsorted(breaks, at, side="right"))
            run = int(breaks[later]) if later < len(breaks) else total
            if run < stop:
                above.append((len(blocks), stop))
            stop = run
        blocks.append(Block(at, stop, ancestors))
        at = stop
    return tuple(blocks)

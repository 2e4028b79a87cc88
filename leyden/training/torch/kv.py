"""Paged KV bookkeeping: a pool of reference-counted blocks and a tree of token prefixes over them. Pure data, no torch.

A block holds the keys and values of `BLOCK` consecutive tokens. Sequences own references to blocks; the prefix tree
owns one reference to each block that it indexes. What only the tree still references can be reclaimed, least recently
used first. Invariants:

- A block is written only by the sequence that allocated it; everybody else reads. A prefix that ends inside a block is
  reused by copying that block.
- A sequence whose blocks are in the tree references every block on its path (`PrefixTree.extend` makes it adopt the
  tree's own block when two sequences computed the same tokens), so an unreferenced node never has a referenced child
  and every block that only the tree references can be reclaimed leaf by leaf.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

BLOCK = 16
"""Tokens in a block: small enough that copying one is cheap, large enough that gathers move long rows."""


def blocks_for(tokens: int) -> int:
    """Blocks that `tokens` tokens need."""
    return -(-tokens // BLOCK)


class BlockPool:
    """`n_blocks` reference-counted blocks, named 0 … n_blocks-1. Low numbers are handed out first."""

    def __init__(self, n_blocks: int) -> None:
        if n_blocks < 1:
            raise ValueError("a block pool needs at least one block")
        self.n_blocks = n_blocks
        self.refs = [0] * n_blocks
        self.in_tree = [False] * n_blocks
        self.reclaimable = 0
        """Blocks that only the prefix tree references."""
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that can be had without taking any from a sequence."""
        return len(self._free) + self.reclaimable

    def take(self) -> int | None:
        """A free block with one reference, or None when none is free."""
        if not self._free:
            return None
        block = self._free.pop()
        self.refs[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Add a reference to a block in use."""
        if self.refs[block] < 1:
            raise ValueError(f"block {block} is free and can't be shared")
        if self.refs[block] == 1 and self.in_tree[block]:
            self.reclaimable -= 1
        self.refs[block] += 1

    def drop(self, block: int) -> None:
        """Give a reference back; the last one frees the block."""
        if self.refs[block] < 1:
            raise ValueError(f"block {block} is free already")
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._free.append(block)
        elif self.refs[block] == 1 and self.in_tree[block]:
            self.reclaimable += 1

    def mark(self, block: int) -> None:
        """Add the tree's reference to a block that a sequence holds."""
        self.hold(block)
        self.in_tree[block] = True

    def unmark(self, block: int) -> None:
        """Give the tree's reference back."""
        if self.refs[block] == 1:
            self.reclaimable -= 1
        self.in_tree[block] = False
        self.drop(block)


@dataclass(eq=False)
class Node:
    """Tokens of one block under the tokens of its parents. Leaves may hold fewer than `BLOCK` tokens."""

    tokens: tuple[int, ...]
    block: int
    parent: Node | None
    used: int = 0
    full: dict[tuple[int, ...], Node] = field(default_factory=dict)
    by_first: dict[int, list[Node]] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """The longest known prefix of a prompt: whole blocks, then `partial_tokens` tokens of `partial_block`."""

    node: Node
    blocks: list[int]
    partial_block: int | None
    partial_tokens: int

    @property
    def length(self) -> int:
        return len(self.blocks) * BLOCK + self.partial_tokens


class PrefixTree:
    """Which token prefixes have their keys and values in the pool. `epoch` counts clears: a new one for new weights."""

    def __init__(self, pool: BlockPool, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.epoch = 0
        self.nodes = 0
        self._clock = 0
        self.root = Node((), -1, None)

    def match(self, tokens: SequenceOf[int], limit: int) -> Match:
        """The longest prefix of `tokens[:limit]` in the tree. Takes no references."""
        node, blocks, at = self.root, [], 0
        self._clock += 1
        if not self.enabled:
            return Match(node, blocks, None, 0)
        while at + BLOCK <= limit:
            child = node.full.get(tuple(tokens[at : at + BLOCK]))
            if child is None:
                break
            child.used = self._clock
            blocks.append(child.block)
            node, at = child, at + BLOCK
        best, best_length = None, 0
        if at < limit:
            rest = tuple(tokens[at : min(limit, at + BLOCK)])
            for child in node.by_first.get(rest[0], ()):
                length = common_prefix(child.tokens, rest)
                if length > best_length:
                    best, best_length = child, length
        if best is not None:
            best.used = self._clock
        return Match(node, blocks, best.block if best else None, best_length)

    def extend(self, node: Node, tokens: tuple[int, ...], block: int) -> Node:
        """Index a block of `BLOCK` tokens under `node`; return its node, whose `block` the caller must use from now on.

        The caller holds a reference to `block`. When the tree already has these tokens, the caller's reference moves to
        the tree's block and its own is given back.
        """
        self._clock += 1
        self._forget_partial(node, tokens[0], block)
        child = node.full.get(tokens)
        if child is None:
            self.pool.mark(block)
            child = Node(tokens, block, node)
            node.full[tokens] = child
            node.by_first.setdefault(tokens[0], []).append(child)
            self.nodes += 1
        elif child.block != block:
            self.pool.hold(child.block)
            self.pool.drop(block)
        child.used = self._clock
        return child

    def extend_partial(self, node: Node, tokens: tuple[int, ...], block: int) -> None:
        """Index the first `len(tokens)` < `BLOCK` tokens of a block that its owner may go on writing behind them."""
        if not tokens:
            return
        self._clock += 1
        self._forget_partial(node, tokens[0], block)
        siblings = node.by_first.get(tokens[0], ())
        if any(sibling.tokens[: len(tokens)] == tokens for sibling in siblings):
            return
        self.pool.mark(block)
        node.by_first.setdefault(tokens[0], []).append(Node(tokens, block, node, self._clock))
        self.nodes += 1

    def reclaim(self, wanted: int) -> int:
        """Free up to `wanted` blocks that only the tree references, least recently used first; return how many."""
        heap = [(leaf.used, id(leaf), leaf) for leaf in self._leaves() if self.pool.refs[leaf.block] == 1]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < wanted:
            leaf = heapq.heappop(heap)[2]
            parent = leaf.parent
            self._remove(leaf)
            freed += 1
            if parent is not None and parent is not self.root and not parent.by_first:
                if self.pool.refs[parent.block] == 1:
                    heapq.heappush(heap, (parent.used, id(parent), parent))
        return freed

    def clear(self) -> None:
        """Forget everything; blocks that sequences hold stay theirs."""
        stack = [child for children in self.root.by_first.values() for child in children]
        while stack:
            node = stack.pop()
            stack.extend(child for children in node.by_first.values() for child in children)
            self.pool.unmark(node.block)
        self.root = Node((), -1, None)
        self.nodes = 0
        self.epoch += 1

    def _leaves(self) -> list[Node]:
        leaves, stack = [], [self.root]
        while stack:
            node = stack.pop()
            if node.by_first:
                stack.extend(child for children in node.by_first.values() for child in children)
            elif node is not self.root:
                leaves.append(node)
        return leaves

    def _forget_partial(self, node: Node, first: int, block: int) -> None:
        """Drop the leaf that indexed the beginning of `block`, which is about to be indexed further."""
        if not self.pool.in_tree[block]:
            return
        for child in node.by_first.get(first, ()):
            if child.block == block and len(child.tokens) < BLOCK:
                self._remove(child)
                return

    def _remove(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            return
        siblings = parent.by_first[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.by_first[node.tokens[0]]
        if parent.full.get(node.tokens) is node:
            del parent.full[node.tokens]
        self.pool.unmark(node.block)
        self.nodes -= 1


def common_prefix(a: SequenceOf[int], b: SequenceOf[int]) -> int:
    """How many first items `a` and `b` have in common."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    # Halving over slices compares long lists at C speed.
    low, high = 0, shorter
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low

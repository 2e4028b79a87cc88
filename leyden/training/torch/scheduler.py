"""What the engine runs next: continuous batching as a state machine over plain data. No torch, no clocks, no threads.

Each step takes one pending token of every decoding sequence and up to `prefill_tokens` prompt tokens of those that are
still reading their prompt; sequences join and leave between steps. Waiting requests are admitted in order of arrival. A
request whose prompt shares more with a prompt being read right now than with the prefix tree waits for that prompt's
next step, so that prompts which arrive together are read once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from leyden.training.torch.kv import BLOCK, BlockPool, Node, PrefixTree, blocks_for, common_prefix

SHARE_FLOOR = 4
"""Fewer common tokens than this aren't worth waiting a step for."""


@dataclass(eq=False)
class Sequence:
    """A prompt and what was sampled after it. `tokens[:computed]` have their keys and values in `blocks`."""

    key: int
    tokens: list[int]
    reuse: bool = True
    """False reads the whole prompt through the model, whatever is cached."""
    prompt_length: int = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    cached: int | None = None
    """Prompt tokens that the first admission found in the tree."""
    node: Node | None = None
    indexed: int = 0
    epoch: int = -1
    """The tree's epoch when the keys and values were first computed; in another epoch they aren't shared."""

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


@dataclass(frozen=True)
class Chunk:
    """Run `sequence.tokens[start : start + count]`. `samples`: the last of them is followed by a new token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass
class Plan:
    """One step. `copies` are (from, to) blocks to copy before anything runs."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Waiting and running sequences over one block pool."""

    def __init__(self, pool: BlockPool, tree: PrefixTree, max_batch: int, prefill_tokens: int = 512) -> None:
        self.pool = pool
        self.tree = tree
        self.max_batch = max_batch
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.released: list[int] = []
        """Keys of sequences that gave their blocks back since the list was last emptied."""

    @property
    def token_capacity(self) -> int:
        """The longest sequence that can ever run."""
        return self.pool.n_blocks * BLOCK

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others.

        Raises:
            ValueError: when it could never fit.
        """
        if len(sequence.tokens) > self.token_capacity:
            raise ValueError(f"{len(sequence.tokens)} tokens can't fit into a KV cache of {self.token_capacity} tokens")
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """The next step; no chunks when there is nothing to do."""
        plan = Plan()
        budget = self.prefill_tokens
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            count = sequence.pending
            if count > 1:
                count = min(count, budget)
            if count == 0 or not self._grow(sequence, sequence.computed + count):
                continue
            if sequence.pending > 1:
                budget -= count
            plan.chunks.append(_chunk(sequence, count))
        self._admit(plan, budget)
        return plan

    def commit(self, chunk: Chunk) -> None:
        """The chunk has run: its tokens' keys and values exist, and may be shared."""
        sequence = chunk.sequence
        sequence.computed = chunk.start + chunk.count
        self._index(sequence)
        if chunk.samples and chunk.count > 1:
            self._index_tail(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, in whatever state; what it computed stays cached."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._index_tail(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def new_weights(self) -> list[Sequence]:
        """Drop every cached prefix. Sequences that have sampled go on over their own keys and values; those still
        reading their prompt start again, in their old order, and are returned."""
        self.tree.clear()
        restarted = [s for s in self.running if len(s.tokens) == s.prompt_length]
        for sequence in reversed(restarted):
            self._requeue(sequence)
            sequence.cached = None
        return restarted

    def _admit(self, plan: Plan, budget: int) -> None:
        reading = [s for s in self.running if s.pending > 1 and s.epoch == self.tree.epoch]
        deferred: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_batch and budget > 0:
            sequence = self.waiting.popleft()
            limit = len(sequence.tokens) - 1 if sequence.reuse else 0
            match = self.tree.match(sequence.tokens, limit)
            if any(self._soon(sequence, other, limit) >= match.length + SHARE_FLOOR for other in reading):
                deferred.append(sequence)
                continue
            for block in match.blocks:
                self.pool.hold(block)
            reserve = len(self.running)
            if (
                blocks_for(len(sequence.tokens) + 1) - len(match.blocks) > self.pool.available - reserve
                and self.running
            ):
                for block in match.blocks:
                    self.pool.drop(block)
                self.waiting.appendleft(sequence)
                break
            sequence.blocks = list(match.blocks)
            sequence.node, sequence.indexed = match.node, len(match.blocks)
            sequence.epoch = self.tree.epoch
            sequence.computed = len(match.blocks) * BLOCK
            self.running.append(sequence)
            if match.partial_block is not None:
                self._copy_partial(plan, sequence, match.partial_block, match.partial_tokens)
            if sequence.cached is None:
                sequence.cached = min(sequence.computed, sequence.prompt_length)
            count = sequence.pending if sequence.pending == 1 else min(sequence.pending, budget)
            if not self._grow(sequence, sequence.computed + count):
                break
            if sequence.pending > 1:
                budget -= count
                reading.append(sequence)
            plan.chunks.append(_chunk(sequence, count))
        self.waiting.extendleft(reversed(deferred))

    def _soon(self, sequence: Sequence, other: Sequence, limit: int) -> int:
        """How much of `sequence` the tree will know once `other` has read its prompt."""
        return min(limit, common_prefix(sequence.tokens, other.tokens)) if sequence.reuse and self.tree.enabled else 0

    def _copy_partial(self, plan: Plan, sequence: Sequence, source: int, tokens: int) -> None:
        self.pool.hold(source)
        block = self._take()
        self.pool.drop(source)
        if block is not None:
            plan.copies.append((source, block))
            sequence.blocks.append(block)
            sequence.computed += tokens

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give `sequence` blocks for `tokens` tokens, from the newest others if it must be. False: it had to yield."""
        while len(sequence.blocks) < blocks_for(tokens):
            block = self._take()
            if block is not None:
                sequence.blocks.append(block)
                continue
            newest = self.running[-1]
            self._requeue(newest)
            self.preemptions += 1
            if newest is sequence:
                return False
        return True

    def _take(self) -> int | None:
        block = self.pool.take()
        if block is None and self.pool.reclaimable:
            # A sixty-fourth of the pool at a time: walking the tree for each block would cost more than the step.
            self.tree.reclaim(max(1, self.pool.n_blocks // 64))
            block = self.pool.take()
        return block

    def _index(self, sequence: Sequence) -> None:
        if not self._shareable(sequence):
            return
        while (sequence.indexed + 1) * BLOCK <= sequence.computed:
            at = sequence.indexed
            assert sequence.node is not None
            tokens = tuple(sequence.tokens[at * BLOCK : (at + 1) * BLOCK])
            sequence.node = self.tree.extend(sequence.node, tokens, sequence.blocks[at])
            sequence.blocks[at] = sequence.node.block
            sequence.indexed += 1

    def _index_tail(self, sequence: Sequence) -> None:
        start = sequence.indexed * BLOCK
        if self._shareable(sequence) and start < sequence.computed:
            assert sequence.node is not None
            tokens = tuple(sequence.tokens[start : sequence.computed])
            self.tree.extend_partial(sequence.node, tokens, sequence.blocks[sequence.indexed])

    def _shareable(self, sequence: Sequence) -> bool:
        return self.tree.enabled and sequence.epoch == self.tree.epoch

    def _requeue(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        for block in reversed(sequence.blocks):
            self.pool.drop(block)
        sequence.blocks = []
        sequence.computed = sequence.indexed = 0
        sequence.node = None
        self.released.append(sequence.key)


def _chunk(sequence: Sequence, count: int) -> Chunk:
    return Chunk(sequence, sequence.computed, count, sequence.computed + count == len(sequence.tokens))

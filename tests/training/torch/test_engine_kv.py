"""The block pool, the prefix tree and the scheduler as pure data."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.training.torch.kv import BLOCK, BlockPool, PrefixTree, blocks_for, common_prefix
from leyden.training.torch.scheduler import Scheduler, Sequence


def make(n_blocks: int = 64, max_batch: int = 8, prefill: int = 64) -> Scheduler:
    pool = BlockPool(n_blocks)
    return Scheduler(pool, PrefixTree(pool), max_batch, prefill)


class Written:
    """What the blocks would hold: (token, its whole prefix) per slot, so that wrong sharing shows."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, scheduler: Scheduler) -> list[Sequence]:
        """Carry one plan out; return the sequences due a token."""
        plan = scheduler.plan()
        copied = [
            ((target, i), self.slots[(source, i)])
            for source, target in plan.copies
            for i in range(BLOCK)
            if (source, i) in self.slots
        ]
        self.slots.update(copied)
        for chunk in plan.chunks:
            tokens = chunk.sequence.tokens
            for at in range(chunk.start, chunk.start + chunk.count):
                self.slots[(chunk.sequence.blocks[at // BLOCK], at % BLOCK)] = tuple(tokens[: at + 1])
        for chunk in plan.chunks:
            scheduler.commit(chunk)
            self.check(chunk.sequence)
        return [chunk.sequence for chunk in plan.chunks if chunk.samples]

    def check(self, sequence: Sequence) -> None:
        for at in range(sequence.computed):
            held = self.slots[(sequence.blocks[at // BLOCK], at % BLOCK)]
            assert held == tuple(sequence.tokens[: at + 1])


def finish_all(scheduler: Scheduler) -> None:
    for sequence in [*scheduler.running, *scheduler.waiting]:
        scheduler.finish(sequence)


def assert_nothing_leaks(scheduler: Scheduler) -> None:
    """With no sequence left, the tree alone holds blocks, and clearing it frees all."""
    pool = scheduler.pool
    assert pool.reclaimable == pool.n_blocks - pool.free == scheduler.tree.nodes
    assert sum(pool.refs) == scheduler.tree.nodes
    scheduler.tree.clear()
    assert pool.free == pool.n_blocks and pool.reclaimable == 0 and not any(pool.refs) and not any(pool.in_tree)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(6, 40), st.integers(1, 6))
def test_any_schedule_reads_right_prefixes_and_leaks_nothing(seed: int, n_blocks: int, max_batch: int) -> None:
    rng = random.Random(seed)
    scheduler, written = make(n_blocks, max_batch, prefill=24), Written()
    stems = [[rng.randrange(3) for _ in range(40)] for _ in range(2)]
    history: list[list[int]] = []
    longest = scheduler.token_capacity
    for key in range(30):
        for _ in range(rng.randrange(3)):
            base = rng.choice(stems + history[-4:])
            prompt = base[: rng.randint(1, len(base))] + [rng.randrange(3) for _ in range(rng.randrange(20))]
            scheduler.add(Sequence(key, prompt[: longest - 1], reuse=rng.random() < 0.9))
        for _ in range(rng.randrange(6)):
            for sequence in written.run(scheduler):
                sequence.tokens.append(rng.randrange(3))
                if len(sequence.tokens) >= longest or rng.random() < 0.1:
                    history.append(list(sequence.tokens))
                    scheduler.finish(sequence)
        if rng.random() < 0.1:
            scheduler.new_weights()
        if scheduler.running and rng.random() < 0.2:
            scheduler.finish(rng.choice(scheduler.running))
    for _ in range(2000):
        if not scheduler.running and not scheduler.waiting:
            break
        for sequence in written.run(scheduler):
            scheduler.finish(sequence)
    assert not scheduler.running and not scheduler.waiting
    assert_nothing_leaks(scheduler)


def test_identical_prompts_that_arrive_together_are_read_once() -> None:
    scheduler, written = make(prefill=512), Written()
    prompt = list(range(100, 153))
    for key in range(8):
        scheduler.add(Sequence(key, list(prompt)))
    first = written.run(scheduler)
    assert len(first) == 1
    plan_two = written.run(scheduler)
    assert len(plan_two) == 7
    assert [s.cached for s in plan_two] == [len(prompt) - 1] * 7
    finish_all(scheduler)
    assert_nothing_leaks(scheduler)


def test_next_turn_reuses_prompt_and_sampled_tokens() -> None:
    scheduler, written = make(), Written()
    turn = Sequence(0, list(range(40)))
    scheduler.add(turn)
    for token in range(900, 910):
        assert written.run(scheduler) == [turn]
        turn.tokens.append(token)
    scheduler.finish(turn)
    following = Sequence(1, [*turn.tokens, 7, 8, 9])
    scheduler.add(following)
    written.run(scheduler)
    # All but the last sampled token, whose keys and values were never computed.
    assert following.cached == 49


def test_new_weights_forget_prefixes_and_keep_sampling_sequences_going() -> None:
    scheduler, written = make(), Written()
    old, reading = Sequence(0, list(range(20))), Sequence(1, list(range(200, 330)))
    scheduler.add(old)
    written.run(scheduler)
    old.tokens.append(1)
    scheduler.add(reading)
    written.run(scheduler)
    old.tokens.append(2)
    computed = old.computed
    assert scheduler.new_weights() == [reading]
    assert old.computed == computed and reading.computed == 0
    scheduler.finish(old)
    again = Sequence(2, list(range(20)))
    scheduler.add(again)
    for _ in range(5):
        written.run(scheduler)
    assert again.cached == 0
    finish_all(scheduler)
    assert_nothing_leaks(scheduler)


def test_newest_gives_way_when_the_cache_is_full_and_comes_back() -> None:
    scheduler, written = make(n_blocks=5, max_batch=4), Written()
    a, b = Sequence(0, [1] * 17), Sequence(1, [2] * 17)
    scheduler.add(a)
    scheduler.add(b)
    done: list[Sequence] = []
    for _ in range(200):
        for sequence in written.run(scheduler):
            sequence.tokens.append(3)
            if len(sequence.tokens) == 40:
                scheduler.finish(sequence)
                done.append(sequence)
    assert done == [a, b] and scheduler.preemptions > 0
    assert_nothing_leaks(scheduler)


def test_first_come_first_served() -> None:
    scheduler, written = make(max_batch=2), Written()
    for key in range(6):
        scheduler.add(Sequence(key, [key] * 5))
    order = []
    for _ in range(10):
        for sequence in written.run(scheduler):
            order.append(sequence.key)
            scheduler.finish(sequence)
    assert order == sorted(order) == list(range(6))


def test_least_recently_used_prefix_goes_first() -> None:
    scheduler, written = make(n_blocks=6, max_batch=1), Written()
    for key, token in enumerate((1, 2, 1, 3)):
        scheduler.add(Sequence(key, [token] * 33))
        for sequence in written.run(scheduler):
            scheduler.finish(sequence)
    tree = scheduler.tree
    assert tree.match([1] * 33, 33).length >= 32
    assert tree.match([2] * 33, 33).length < 33


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])


def test_blocks_for() -> None:
    assert [blocks_for(n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]

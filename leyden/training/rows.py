"""From recorded calls to training rows.

A call's prompt either extends, token for token, the prompt + response of an earlier call (its parent) or starts anew,
so the calls of an attempt form a forest. A row is a path of that forest from a root to a leaf: the leaf's prompt +
response, in which the responses of the path's calls are the sampled spans. Calls on several paths (branches,
sub-agents that share a prefix) are trained in one row only and are context in the others, so every sampled token is
trained exactly once whatever the shape of the forest.

Parent links are checked, never trusted: when the tokens don't agree the call starts a row of its own and the broken
link is counted. Pure: numpy only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from leyden.schema import CallRecord, Trajectory


@dataclass(frozen=True)
class Row:
    """One sequence to train on; all arrays have its length T.

    Attributes:
        ids: int32 token ids, prompt first.
        mask: bool, True at tokens trained in this row (never at index 0).
        logprobs: float32 log-probabilities that the sampling engine gave for trained tokens; NaN where it gave none
            (the loss then takes an importance ratio of exactly 1) and at untrained tokens.
        versions: int32 policy version of each trained token, -1 elsewhere.
        prompt_len: tokens before the first sampled span of the path.
        calls: ids of the calls trained in this row.
    """

    rollout_id: str
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    prompt_len: int
    calls: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained(self) -> int:
        """Trained tokens in this row."""
        return int(self.mask.sum())

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        return self.ids[: self.prompt_len]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        return self.ids[self.prompt_len :]

    @property
    def unknown(self) -> NDArray[np.bool_]:
        """bool [T]: trained tokens without a recorded log-probability."""
        return self.mask & np.isnan(self.logprobs)


@dataclass
class RowReport:
    """What became of one rollout's calls. `dropped` counts calls by the reason for which they aren't trained."""

    rollout_id: str
    calls: int = 0
    trained_calls: int = 0
    rows: int = 0
    trained_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)
    """Calls that continue a conversation but not token for token, by reason."""
    truncated: int = 0
    """Trained calls whose answer was cut off by its limit."""
    over_long_rows: int = 0
    broken_links: int = 0
    unknown_logprobs: int = 0
    digest: str = ""
    """Of the rows (`digest`); what `leyden rows rebuild` must find again."""


@dataclass
class _Node:
    call: CallRecord
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    reason: str | None
    parent: _Node | None = None

    @property
    def end(self) -> int:
        return len(self.prompt) + len(self.response)


def build_rows(trajectory: Trajectory, *, max_row_tokens: int) -> tuple[list[Row], RowReport]:
    """Rows of one attempt, and what was left out.

    Untrainable and undelivered calls are never trained, but stay as context of later calls that extend them. Calls
    whose prompt holds images aren't either: rows are token ids. Rows
    longer than `max_row_tokens` are dropped; a call of such a row is still trained when a shorter row contains it.
    """
    breaks = Counter(c.break_reason for c in trajectory.calls if c.break_reason is not None)
    report = RowReport(trajectory.rollout_id, calls=len(trajectory.calls), breaks=dict(breaks))
    nodes = _forest(trajectory, report)
    leaves = _trainable_leaves(nodes)
    owned: set[int] = set()
    rows: list[Row] = []
    for leaf in leaves:
        if leaf.end > max_row_tokens:
            report.over_long_rows += 1
            continue
        rows.append(_row(trajectory.rollout_id, leaf, owned))
    dropped: Counter[str] = Counter()
    for node in nodes:
        if node.reason is not None:
            dropped[node.reason] += 1
        elif id(node) not in owned:
            dropped["over_length"] += 1
    report.dropped = dict(dropped)
    report.rows = len(rows)
    report.digest = digest(rows)
    report.trained_calls = len(owned)
    report.truncated = sum(n.call.finish_reason == "length" for n in nodes if id(n) in owned)
    report.trained_tokens = sum(r.trained for r in rows)
    report.unknown_logprobs = sum(int(r.unknown.sum()) for r in rows)
    return rows, report


def digest(rows: Sequence[Row]) -> str:
    """A name for exactly these rows: equal only when every id, mask, log-probability, version and call is."""
    hashed = hashlib.sha256()
    for row in rows:
        hashed.update(f"{row.rollout_id} {len(row)} {row.prompt_len} {' '.join(row.calls)}\n".encode())
        for array in (row.ids, row.mask, row.logprobs, row.versions):
            hashed.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return hashed.hexdigest()[:32]


def total_digest(digests: Mapping[str, str]) -> str:
    """The same for many rollouts, by id, in whatever order they come."""
    lines = "".join(f"{rollout} {digests[rollout]}\n" for rollout in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()[:32]


def dropped_totals(reports: list[RowReport]) -> dict[str, int]:
    """Calls not trained, by reason, over a batch; rollouts that made no call count under `no_calls`."""
    total: Counter[str] = Counter()
    for r in reports:
        total.update(r.dropped)
        if r.calls == 0:
            total["no_calls"] += 1
    return dict(total)


def _forest(trajectory: Trajectory, report: RowReport) -> list[_Node]:
    """Calls in order of arrival, linked to parents whose tokens they really extend."""
    nodes: list[_Node] = []
    by_id: dict[str, _Node] = {}
    for call in sorted(trajectory.calls, key=lambda c: c.seq):
        node = _node(call, trajectory.attempt_id)
        if call.parent is not None:
            parent = by_id.get(call.parent)
            if parent is not None and _extends(node.prompt, parent):
                node.parent = parent
            else:
                report.broken_links += 1
        nodes.append(node)
        by_id.setdefault(call.call_id, node)
    return nodes


def _node(call: CallRecord, attempt_id: str) -> _Node:
    prompt = np.frombuffer(call.prompt_ids, dtype="<i4").astype(np.int32)
    response = np.frombuffer(call.response_ids, dtype="<i4").astype(np.int32)
    reason: str | None = None
    if call.attempt_id != attempt_id:
        reason = "other_attempt"
    elif call.untrainable is not None:
        # Reasons may carry detail after a colon; counting needs the class alone.
        reason = call.untrainable.split(":", 1)[0].strip()[:80] or "untrainable"
    elif not call.delivered:
        reason = "undelivered"
    elif len(response) == 0:
        reason = "empty_ids"
    elif len(prompt) == 0:
        reason = "empty_prompt"
    elif call.images:
        # The placeholder ids alone would be another prompt than the one that the policy saw.
        reason = "images"
    elif len(call.logprobs) != 4 * len(response) or len(call.versions) != 4 * len(response):
        reason = "length_mismatch"
    return _Node(call, prompt, response, reason)


def _extends(prompt: NDArray[np.int32], parent: _Node) -> bool:
    cut = len(parent.prompt)
    return (
        len(prompt) >= parent.end
        and np.array_equal(prompt[:cut], parent.prompt)
        and np.array_equal(prompt[cut : parent.end], parent.response)
    )


def _trainable_leaves(nodes: list[_Node]) -> list[_Node]:
    """Trainable calls that no trainable call extends: the ends of rows."""
    extended: set[int] = set()
    for node in nodes:
        if node.reason is None:
            above = node.parent
            while above is not None and id(above) not in extended:
                extended.add(id(above))
                above = above.parent
    return [n for n in nodes if n.reason is None and id(n) not in extended]


def _row(rollout_id: str, leaf: _Node, owned: set[int]) -> Row:
    ids = np.concatenate([leaf.prompt, leaf.response])
    mask = np.zeros(len(ids), dtype=bool)
    logprobs = np.full(len(ids), np.nan, dtype=np.float32)
    versions = np.full(len(ids), -1, dtype=np.int32)
    calls: list[str] = []
    prompt_len = len(leaf.prompt)
    node: _Node | None = leaf
    while node is not None:
        span = slice(len(node.prompt), node.end)
        if len(node.response):
            prompt_len = span.start
        if node.reason is None and id(node) not in owned:
            owned.add(id(node))
            mask[span] = True
            given = np.frombuffer(node.call.logprobs, dtype="<f4")
            logprobs[span] = np.where(np.isfinite(given), given, np.nan)
            versions[span] = np.frombuffer(node.call.versions, dtype="<i4")
            calls.append(node.call.call_id)
        node = node.parent
    return Row(rollout_id, ids, mask, logprobs, versions, prompt_len, tuple(reversed(calls)))

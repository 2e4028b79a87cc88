"""The faithfulness audit: recompute recorded log-probs with the weights that sampled them.

A call's recorded ids and log-probs must be what the model of its policy version gives for them. Weights are at hand
for the base model (version 0) and for the checkpoints that were kept; calls of other versions aren't sampled.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from leyden.client import Reader
from leyden.config import load_run
from leyden.errors import RunError
from leyden.models import resolve_model
from leyden.schema import CallRecord
from leyden.training.checkpoint import checkpoints
from leyden.training.rows import Row
from leyden.training.torch.policy import Policy

ROLLOUTS_LISTED = 20_000
"""Newest rollouts among which calls are sampled."""


@dataclass
class AuditReport:
    """|difference| between recorded and recomputed log-probs (natural), over `tokens` tokens of `calls` calls."""

    calls: int = 0
    tokens: int = 0
    max_difference: float = 0.0
    mean_difference: float = 0.0
    worst_call: str | None = None
    worst_rollout: str | None = None
    calls_by_version: dict[int, int] = field(default_factory=dict)


async def audit_calls(client: Reader, run: str, run_dir: Path, n: int, seed: int = 0) -> AuditReport:
    """Audit up to `n` random training calls of a run.

    Raises:
        RunError: no recorded call's weights are at hand.
    """
    folders = {0: resolve_model(load_run(run_dir / "run.yaml").model)}
    folders |= {c.state.version: c.folder for c in checkpoints(run_dir) if c.state.version > 0}
    chosen = await _choose(client, run, n, set(folders), random.Random(seed))
    if not chosen:
        raise RunError(f"run {run!r} has no recorded training call of a version whose weights are kept ({run_dir})")
    config = load_run(run_dir / "run.yaml").training.model_copy(update={"lora": None})
    report = AuditReport()
    total = 0.0
    for version, folder in sorted(folders.items()):
        calls = [(r, c) for r, c in chosen if _version(c) == version]
        if not calls:
            continue
        policy = await asyncio.to_thread(Policy.load, folder, config)
        report.calls_by_version[version] = len(calls)
        for rollout_id, call in calls:
            differences = np.abs(await asyncio.to_thread(_differences, policy, call))
            report.calls += 1
            report.tokens += len(differences)
            total += float(differences.sum())
            if report.worst_call is None or float(differences.max()) > report.max_difference:
                report.max_difference = float(differences.max())
                report.worst_call, report.worst_rollout = call.call_id, rollout_id
    report.mean_difference = total / report.tokens
    return report


async def _choose(
    client: Reader, run: str, n: int, versions: set[int], rng: random.Random
) -> list[tuple[str, CallRecord]]:
    ids: list[str] = []
    cursor: str | None = None
    while len(ids) < ROLLOUTS_LISTED:
        page = await client.page(run=run, is_train=True, limit=500, cursor=cursor)
        ids += [r.rollout_id for r in page.items if r.status.calls]
        cursor = page.next_cursor
        if cursor is None:
            break
    rng.shuffle(ids)
    chosen: list[tuple[str, CallRecord]] = []
    for rollout_id in ids:
        if len(chosen) >= n:
            break
        calls = [c for c in (await client.trajectory(rollout_id)).calls if _version(c) in versions]
        # At most two of one rollout, so that a long one doesn't stand for the whole run.
        chosen += [(rollout_id, c) for c in rng.sample(calls, min(2, len(calls), n - len(chosen)))]
    return chosen


def _version(call: CallRecord) -> int | None:
    """The one version that sampled the whole answer; None when there are several or it isn't trained anyway."""
    versions = set(np.frombuffer(call.versions, "<i4").tolist())
    recorded = np.frombuffer(call.logprobs, "<f4")
    usable = call.untrainable is None and call.delivered and len(call.logprobs) == len(call.response_ids) > 0
    usable = usable and bool(np.isfinite(recorded).any())
    return versions.pop() if usable and len(versions) == 1 else None


def _differences(policy: Policy, call: CallRecord) -> np.ndarray:
    prompt = np.frombuffer(call.prompt_ids, "<i4")
    response = np.frombuffer(call.response_ids, "<i4")
    recorded = np.frombuffer(call.logprobs, "<f4").astype(np.float64)
    ids = np.concatenate([prompt, response]).astype(np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    empty = np.full(len(ids), np.nan, dtype=np.float32)
    row = Row("audit", ids, mask, empty, np.zeros(len(ids), dtype=np.int32), len(prompt), (call.call_id,))
    policy.temperature = float(call.effective.get("temperature") or 1.0)
    known = np.isfinite(recorded)
    return policy.score([row])[0][known] - recorded[known]

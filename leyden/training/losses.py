"""The clipped policy-gradient loss over trained tokens, and its diagnostics.

Everything works on the flat list of trained tokens (masks select, they never multiply: an overflow at a masked token
can't turn into inf * 0). Denominators are fixed for the whole step before it is split: each token carries its weight, a
loss is a plain sum, and any order or split into rows and micro-batches accumulates to the same loss and gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leyden.training.rows import Row

LOG_RATIO_LIMIT = 20.0
"""|log ratio| is clamped here before exp, with gradient 0 beyond: e^20 is far outside any clip range, e^89 overflows
fp32."""


def token_weights(
    rows: Sequence[Row], advantages: Mapping[str, float], normalisation: Literal["rollout_mean", "token_mean"]
) -> dict[str, float]:
    """Weight of one trained token, by rollout, for a whole step. Rollouts without an advantage are left out.

    `rollout_mean`: 1 / (R * T_r) with R the rollouts of the step that enter the loss (zero advantages included) and T_r
    the rollout's trained tokens over all its rows: the sequence mean of GRPO (arXiv 2402.03300, eq. 3) with the rollout
    as the sequence. `token_mean`: 1 / sum of T_r, as in DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 8).
    """
    tokens: dict[str, int] = {}
    for row in rows:
        if row.rollout_id in advantages and row.trained:
            tokens[row.rollout_id] = tokens.get(row.rollout_id, 0) + row.trained
    if normalisation == "token_mean":
        total = sum(tokens.values())
        return {r: 1.0 / total for r in tokens}
    return {r: 1.0 / (len(tokens) * n) for r, n in tokens.items()}


@dataclass
class LossStats:
    """Sums over trained tokens, to be added up over micro-batches. Log-probs are natural.

    `ratio` statistics, clipping and KL count tokens with a recorded log-probability only.
    """

    tokens: int = 0
    known: int = 0
    ratio_sum: float = 0.0
    ratio_max: float = 0.0
    clipped: int = 0
    kl_sum: float = 0.0
    entropy_sum: float = 0.0

    def add(self, other: LossStats) -> None:
        self.tokens += other.tokens
        self.known += other.known
        self.ratio_sum += other.ratio_sum
        self.ratio_max = max(self.ratio_max, other.ratio_max)
        self.clipped += other.clipped
        self.kl_sum += other.kl_sum
        self.entropy_sum += other.entropy_sum

    def metrics(self) -> dict[str, float]:
        """Means over tokens: importance ratio, share clipped, approximate KL (k3), entropy estimate (-log p of
        samples).

        k3 = (ratio - 1) - log ratio: Schulman 2020, "Approximating KL Divergence", for KL(sampling || current).
        """
        known, tokens = max(self.known, 1), max(self.tokens, 1)
        return {
            "ratio_mean": self.ratio_sum / known if self.known else math.nan,
            "ratio_max": self.ratio_max if self.known else math.nan,
            "clip_fraction": self.clipped / known,
            "approx_kl": self.kl_sum / known,
            "entropy": self.entropy_sum / tokens,
        }


def ppo_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, LossStats]:
    """Weighted sum over trained tokens of -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    Schulman et al. 2017, "Proximal Policy Optimization" (arXiv 1707.06347), eq. 7; separate bounds: DAPO
    (arXiv 2503.14476), section 3.1. With ratio = exp(new - old).

    Args:
        logprobs: [n] log-probabilities under the model in training; the gradient flows through these.
        old: [n] recorded log-probabilities; NaN means unknown and gives a ratio of exactly 1.
        advantages: [n]; weights: [n], from `token_weights`.

    Returns:
        The scalar loss of these tokens and their statistics.
    """
    known = ~torch.isnan(old)
    base = torch.where(known, old.to(logprobs.dtype), logprobs.detach())
    log_ratio = (logprobs - base).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    loss = -(surrogate * weights).sum()
    with torch.no_grad():
        r, lr = ratio[known], log_ratio[known]
        positive = advantages[known] > 0
        clipped = torch.where(positive, r > 1.0 + clip_high, r < 1.0 - clip_low)
        stats = LossStats(
            tokens=logprobs.numel(),
            known=r.numel(),
            ratio_sum=float(r.sum()),
            ratio_max=float(r.max()) if r.numel() else 0.0,
            clipped=int(clipped.sum()),
            kl_sum=float((r - 1.0 - lr).sum()),
            entropy_sum=float(-logprobs.sum()),
        )
    return loss, stats

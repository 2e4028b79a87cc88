"""Tree attention for Hugging Face models, and log-probabilities that never hold rows x vocabulary.

Registered with transformers' attention interface as "leyden_tree", so it works for every model whose attention goes
through that interface. `Policy` checks it against the model's own attention on real weights before relying on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from leyden.training.packing import TreeBatch

NAME = "leyden_tree"


@dataclass(frozen=True)
class TreeLayout:
    """A tree batch's attention on a device: per block its length, the blocks it attends to, and an additive mask [q,
    k]."""

    sizes: list[int]
    ancestors: list[tuple[int, ...]]
    masks: list[Tensor]

    @classmethod
    def of(cls, batch: TreeBatch, dtype: torch.dtype, device: torch.device) -> TreeLayout:
        sizes = [b.stop - b.start for b in batch.blocks]
        masks = []
        for block in batch.blocks:
            own = batch.mask(block)
            above = np.ones((len(own), sum(sizes[a] for a in block.ancestors)), dtype=bool)
            seen = torch.from_numpy(np.concatenate([above, own], axis=1)).to(device)
            masks.append(torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf")))
        return cls(sizes, [b.ancestors for b in batch.blocks], masks)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: TreeLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one concatenated tree batch; query [1, heads, n, d], key and value [1, kv_heads, n, d].

    Returns [1, n, heads, d], as transformers expects.
    """
    if tree is None:
        raise RuntimeError("leyden_tree attention was called without its layout")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    # split, not slices: its backward is one concatenation instead of a zero tensor per slice.
    queries, keys, values = (t.split(tree.sizes, dim=2) for t in (query, key, value))
    out = []
    for i, mask in enumerate(tree.masks):
        k = torch.cat([*(keys[a] for a in tree.ancestors[i]), keys[i]], dim=2)
        v = torch.cat([*(values[a] for a in tree.ancestors[i]), values[i]], dim=2)
        out.append(scaled_dot_product_attention(queries[i], k, v, attn_mask=mask[None, None], scale=scaling))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        lse = torch.logsumexp(logits, dim=-1)
        ctx.save_for_backward(logits, lse, rows, ids)
        return logits[rows, ids] - lse[rows]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, lse, rows, ids = ctx.saved_tensors
        per_row = torch.zeros_like(lse).index_add_(0, rows, grads[0])
        # The logits aren't needed any more: their memory becomes the gradient's.
        out = logits.sub_(lse[:, None]).exp_().mul_(-per_row[:, None])
        out.index_put_((rows, ids), grads[0], accumulate=True)
        return out, None, None


def token_logprobs(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """log softmax(logits[rows])[ids] for logits [m, vocabulary], rows and ids int64 [n]. The backward consumes
    `logits`."""
    result: Tensor = _TokenLogprobs.apply(logits, rows, ids)  # pyright: ignore[reportAssignmentType]
    return result

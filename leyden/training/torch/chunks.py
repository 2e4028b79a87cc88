"""Targets of a micro-batch in chunks, so that logits exist for a bounded number of positions at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyden.training.packing import Targets
from leyden.training.rows import Row

LOGIT_ROWS = 1024
"""Positions whose logits exist at once: 1,024 x 49k fp32 is 200 MB, and larger chunks were not faster."""


@dataclass(frozen=True)
class ChunkRows:
    """Targets' places in a chunk of hidden states: `index` int64 [n] into its `size` rows."""

    index: Tensor
    size: int


@dataclass(frozen=True)
class TargetTensors:
    """A chunk of targets on a device; numbers in fp32, or fp64 for an fp64 model. All [n]."""

    ids: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor

    @classmethod
    def of(cls, t: Targets, at: slice, like: Tensor) -> TargetTensors:
        def move(a: NDArray[Any]) -> Tensor:
            return torch.from_numpy(a[at]).to(
                like.device, torch.float64 if like.dtype == torch.float64 else torch.float32
            )

        return cls(torch.from_numpy(t.ids[at]).to(like.device), move(t.old), move(t.advantages), move(t.weights))


def chunks(targets: Targets) -> list[tuple[int, ChunkRows, slice]]:
    """Chunks of at most LOGIT_ROWS distinct positions: (first position, targets' rows in the chunk, targets)."""
    _, rows = np.unique(targets.hidden, return_inverse=True)
    out = []
    count = int(rows[-1]) + 1 if len(rows) else 0
    for start in range(0, count, LOGIT_ROWS):
        stop = min(start + LOGIT_ROWS, count)
        at = slice(int(np.searchsorted(rows, start)), int(np.searchsorted(rows, stop)))
        out.append((start, ChunkRows(torch.from_numpy(rows[at] - start), stop - start), at))
    return out


def whole_row(ids: Any) -> Row:
    """A row in which every token but the first is a target: for scoring."""
    array = np.asarray(ids, dtype=np.int32)
    mask = np.ones(len(array), dtype=bool)
    mask[0] = False
    nan = np.full(len(array), np.nan, dtype=np.float32)
    return Row("score", array, mask, nan, np.full(len(array), -1, dtype=np.int32), 1, ())

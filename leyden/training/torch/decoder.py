"""Forward passes of a step: the fast decoder for llama-like models, and the runner interface that the engine drives.

A step is a flat run of tokens from many sequences: all decoding sequences' single tokens, then chunks of prompts.
Matrix products run once over all of them; attention runs per group of decoding sequences of like length, and per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.training.torch.decoder_weights import DecoderSpec, DecoderWeights, TensorSource, build
from leyden.training.torch.kv import BLOCK, blocks_for
from leyden.training.torch.scheduler import Chunk, Plan

_GROUP_WASTE = 32
"""Padded blocks that cost about as much as attention over one more group (measured on a 135M model, fp32)."""


class Runner(Protocol):
    """Runs steps of one model. Only the engine's thread calls it, except `prepare`."""

    shares_prefixes: bool
    """Whether keys and values live in the scheduler's blocks, so that prefixes can be shared."""

    def forward(self, plan: Plan) -> tuple[list[Chunk], Tensor]:
        """Run a plan. Returns its chunks in the order of their rows, and features [tokens, …] for `logits`."""
        ...

    def logits(self, features: Tensor) -> Tensor:
        """Logits [rows, vocab] float32, owned by the caller, of some rows of the features."""
        ...

    def prepare(self, source: TensorSource) -> object:
        """Check new weights and make them ready to swap in; runs beside steps.

        Raises:
            WeightsError: naming the tensor; nothing has changed.
        """
        ...

    def swap(self, prepared: object) -> None:
        """Use prepared weights from the next step on."""
        ...

    def release(self, key: int) -> None:
        """A sequence gave its blocks back."""
        ...


@dataclass(frozen=True)
class Group:
    """Decoding rows `first : first + rows`. `table` [rows × blocks] int64 block numbers; `mask` [rows, 1, 1, tokens]
    float is -inf behind each row's own tokens."""

    first: int
    rows: int
    table: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Span:
    """Prompt rows `first : first + count` at positions `start …`. `table` [blocks]; `mask` [count, start + count]
    float, or None when the chunk starts its sequence."""

    first: int
    count: int
    start: int
    table: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Batch:
    """A plan as tensors: `tokens`, `positions`, `slots` [rows] int64 (slot: block × BLOCK + offset)."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    groups: list[Group]
    spans: list[Span]


def arrange(plan: Plan) -> tuple[list[Chunk], list[list[Chunk]], list[Chunk]]:
    """The plan's chunks in row order, decoding groups of like length, and prompt chunks."""
    singles = sorted((c for c in plan.chunks if c.count == 1), key=lambda c: -c.start)
    spans = [c for c in plan.chunks if c.count > 1]
    groups: list[list[Chunk]] = []
    waste = 0
    for chunk in singles:
        behind = blocks_for(groups[-1][0].start + 1) - blocks_for(chunk.start + 1) if groups else 0
        if not groups or waste + behind > _GROUP_WASTE:
            groups.append([])
            waste = behind = 0
        groups[-1].append(chunk)
        waste += behind
    return singles + spans, groups, spans


def make_batch(
    order: list[Chunk], groups: list[list[Chunk]], spans: list[Chunk], device: torch.device, dtype: torch.dtype
) -> Batch:
    """Tensors of an arranged plan, on `device`; masks of `dtype`."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for chunk in order:
        blocks = chunk.sequence.blocks
        end = chunk.start + chunk.count
        tokens.extend(chunk.sequence.tokens[chunk.start : end])
        positions.extend(range(chunk.start, end))
        slots.extend(blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(chunk.start, end))
    row = 0
    made_groups = []
    for chunks in groups:
        width = blocks_for(chunks[0].start + 1)
        table = np.empty((len(chunks), width), dtype=np.int64)
        for i, chunk in enumerate(chunks):
            used = blocks_for(chunk.start + 1)
            table[i, :used] = chunk.sequence.blocks[:used]
            # Padding repeats an own block: always readable, masked below.
            table[i, used:] = chunk.sequence.blocks[0]
        ends = torch.tensor([c.start for c in chunks], device=device).unsqueeze(1)
        hidden = torch.arange(width * BLOCK, device=device).unsqueeze(0) > ends
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        flat = torch.from_numpy(table.reshape(-1)).to(device)
        made_groups.append(Group(row, len(chunks), flat, mask[:, None, None, :]))
        row += len(chunks)
    made_spans = []
    for chunk in spans:
        end = chunk.start + chunk.count
        mask = None
        if chunk.start:
            seen = torch.arange(chunk.start, end, device=device).unsqueeze(1)
            hidden = torch.arange(end, device=device).unsqueeze(0) > seen
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        blocks = torch.tensor(chunk.sequence.blocks[: blocks_for(end)], device=device)
        made_spans.append(Span(row, chunk.count, chunk.start, blocks, mask))
        row += chunk.count
    flat = [torch.tensor(values, dtype=torch.int64, device=device) for values in (tokens, positions, slots)]
    return Batch(flat[0], flat[1], flat[2], made_groups, made_spans)


class FastRunner:
    """Own forward of a llama-like decoder over a paged KV pool.

    `kv` is [layers, blocks, BLOCK, 2 (k, v), kv_heads, head_size]. Keys are stored after rotation. Rotary frequencies
    come in as `inv_freq` [head_size / 2] float32 and a scale, as transformers computes them.
    """

    shares_prefixes = True

    def __init__(
        self,
        spec: DecoderSpec,
        source: TensorSource,
        inv_freq: Tensor,
        rope_scale: float,
        max_positions: int,
        n_blocks: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.weights = build(source, spec, device, dtype)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq.float().cpu())
        self._rope = torch.polar(torch.full_like(angles, rope_scale), angles).to(device).unsqueeze(1)
        shape = (spec.layers, n_blocks, BLOCK, 2, spec.kv_heads, spec.head_size)
        if device.type == "cpu" and dtype == torch.float32:
            # numpy's zeros are untouched pages: memory is taken as blocks are first written, in ascending order.
            self.kv = torch.from_numpy(np.zeros(shape, dtype=np.float32))
        else:
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self._kv_layers = list(self.kv.unbind(0))
        self._slot_layers = [layer.view(n_blocks * BLOCK, 2 * spec.kv_width) for layer in self._kv_layers]

    def prepare(self, source: TensorSource) -> DecoderWeights:
        return build(source, self.spec, self.device, self.dtype)

    def swap(self, prepared: object) -> None:
        assert isinstance(prepared, DecoderWeights)
        self.weights = prepared

    def release(self, key: int) -> None:
        """Blocks are the scheduler's; there is nothing else to give back."""

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        features = F.rms_norm(features, (self.spec.hidden,), None, self.spec.eps)
        return self.weights.head(features).float()

    @torch.inference_mode()
    def forward(self, plan: Plan) -> tuple[list[Chunk], Tensor]:
        if plan.copies:
            sources, targets = (torch.tensor(side, device=self.device) for side in zip(*plan.copies, strict=True))
            self.kv[:, targets] = self.kv[:, sources]
        order, groups, spans = arrange(plan)
        return order, self._run(make_batch(order, groups, spans, self.device, self.dtype))

    def _run(self, batch: Batch) -> Tensor:
        spec = self.spec
        rows, hidden, q_width = batch.tokens.shape[0], (spec.hidden,), spec.q_width
        qk_width = q_width + spec.kv_width
        rope = self._rope.index_select(0, batch.positions)
        x = F.embedding(batch.tokens, self.weights.embedding)
        for i, layer in enumerate(self.weights.layers):
            qkv = layer.qkv(F.rms_norm(x, hidden, None, spec.eps))
            qk = qkv[:, :qk_width].view(rows, -1, spec.head_size)
            if layer.qk_gain is not None:
                qk.copy_(F.rms_norm(qk, (spec.head_size,), None, spec.eps).mul_(layer.qk_gain))
            self._rotate(qk, rope)
            self._slot_layers[i].index_copy_(0, batch.slots, qkv[:, q_width:])
            x = layer.out.plus(self._attend(qkv[:, :q_width], self._kv_layers[i], batch), x)
            gate_up = layer.gate_up(F.rms_norm(x, hidden, None, spec.eps))
            gated = F.silu(gate_up[:, : spec.inner]).mul_(gate_up[:, spec.inner :])
            x = layer.down.plus(gated, x)
        return x

    def _rotate(self, qk: Tensor, rope: Tensor) -> None:
        """Turn q and k heads [rows, heads, head_size] in place by their positions' angles."""
        if qk.dtype == torch.float32:
            torch.view_as_complex(qk.unflatten(2, (-1, 2))).mul_(rope)
        else:
            turned = torch.view_as_complex(qk.float().unflatten(2, (-1, 2))).mul_(rope)
            qk.copy_(torch.view_as_real(turned).flatten(2))

    def _attend(self, q: Tensor, kv: Tensor, batch: Batch) -> Tensor:
        """Attention output [rows, heads × head_size] of q [rows, heads × head_size]."""
        spec = self.spec
        heads, kv_heads, size = spec.heads, spec.kv_heads, spec.head_size
        fold = heads // kv_heads
        outputs = []
        for g in batch.groups:
            k, v = kv.index_select(0, g.table).view(g.rows, -1, 2, kv_heads, size).permute(2, 0, 3, 1, 4).unbind(0)
            # The query heads that share a key head act as that many query positions: keys are read once.
            own = q[g.first : g.first + g.rows].view(g.rows, kv_heads, fold, size)
            mask = g.mask.expand(g.rows, 1, fold, -1)
            out = F.scaled_dot_product_attention(own, k, v, attn_mask=mask)
            outputs.append(out.reshape(g.rows, heads * size))
        for s in batch.spans:
            end = s.start + s.count
            paged = kv.index_select(0, s.table).view(1, -1, 2, kv_heads, size)[:, :end]
            k, v = paged.permute(2, 0, 3, 1, 4).unbind(0)
            own = q[s.first : s.first + s.count].view(1, s.count, heads, size).transpose(1, 2)
            out = F.scaled_dot_product_attention(
                own, k, v, attn_mask=s.mask, is_causal=s.mask is None, enable_gqa=fold > 1
            )
            outputs.append(out.transpose(1, 2).reshape(s.count, heads * size))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

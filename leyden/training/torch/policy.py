"""The policy in training: a Hugging Face causal language model with AdamW, on one device.

Full fine-tuning or LoRA (Hu et al. 2021, arXiv 2106.09685, through peft). Weights and optimizer are fp32 on a CPU and
the model's own dtype is kept on CUDA. Gradients of a step accumulate over micro-batches; an update whose loss or
gradient isn't finite is refused and changes nothing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from leyden.config import TrainingConfig
from leyden.errors import PreflightError, RunError
from leyden.preflight import CHECKPOINT_MARGIN
from leyden.training.losses import LossStats, ppo_loss
from leyden.training.packing import (
    Item,
    PaddedBatch,
    TreeBatch,
    padded_batches,
    trainable,
    tree_batches,
)
from leyden.training.rows import Row
from leyden.training.torch.attention import NAME as TREE_ATTENTION
from leyden.training.torch.attention import TreeLayout, token_logprobs
from leyden.training.torch.chunks import TargetTensors, chunks, whole_row
from leyden.training.torch.linear import onednn_serves, replace_linears
from leyden.training.torch.memory import keep_freed_memory
from leyden.training.torch.pretrained import load_model, with_lora

SELF_CHECK = 1e-3
"""Largest |log-prob difference| between tree packing and the model's own attention for packing to be used (fp32)."""

COPIED = ("tokenizer", "special_tokens", "chat_template", "vocab", "merges", "generation_config", "added_tokens")
"""File name prefixes copied beside exported weights, so that the folder loads as a whole model."""


@dataclass
class UpdateReport:
    """One step's update. `refused` says why nothing more was applied; `optimizer_steps` counts those that were.

    `losses` and `grad_norms` have one entry per epoch; `tokens` are computed positions per epoch, `padded_tokens` what
    padding every row to the longest of its micro-batch would have computed; `stats` are those of the last epoch.
    """

    rows: int = 0
    skipped_rows: int = 0
    tokens: int = 0
    row_tokens: int = 0
    micro_batches: int = 0
    optimizer_steps: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0
    seconds: float = 0.0
    refused: str | None = None
    stats: LossStats = field(default_factory=LossStats)


class Policy:
    """A model, its optimizer and what an update needs. Not thread-safe; updates run in one thread at a time."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        source: Path,
        *,
        temperature: float = 1.0,
        packing: bool | None = None,
        onednn: bool | None = None,
    ) -> None:
        """Take a loaded model. `packing` and `onednn`: None decides by a check on this machine."""
        self.config = config
        self.source = source
        self.temperature = temperature
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self._set_threads()
        self.tied = bool(getattr(model.config, "tie_word_embeddings", False))
        self.hf: Any = model
        self.model: Any = with_lora(model, config) if config.lora else model
        self.model.eval()
        if config.lora and config.lora.dropout:
            for name, module in self.model.named_modules():
                if "lora_dropout" in name:
                    module.train()
        fits = self.device.type == "cpu" and self.dtype == torch.float32
        self.onednn = fits and (onednn_serves() if onednn is None else onednn)
        if self.onednn:
            replace_linears(self.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self.optimizer_steps = 0
        self.vocabulary = self.hf.get_output_embeddings().weight.shape[0]
        self.packing = self._packing_agrees() if packing is None else packing

    @classmethod
    def load(cls, folder: Path, config: TrainingConfig, *, temperature: float = 1.0, seed: int = 0) -> Policy:
        """Load a Hugging Face folder.

        Raises:
            PreflightError: when it holds no loadable causal language model, or the device isn't there.
        """
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise PreflightError("training.device=cuda, but torch sees no CUDA device; use cpu or auto")
        torch.manual_seed(seed)
        if device == "cpu":
            keep_freed_memory()
        return cls(load_model(folder, device), config, folder, temperature=temperature)

    # -- updates -------------------------------------------------------------------------------------------------------

    def update(self, items: Sequence[Item]) -> UpdateReport:
        """Train on a step's rows: `config.epochs` passes, each one optimizer step over all micro-batches.

        Raises:
            RunError: a row holds a token id that the model doesn't have.
        """
        started = time.perf_counter()
        self._set_threads()
        used = trainable(items)
        self._check_ids(used)
        report = UpdateReport(rows=len(used), skipped_rows=len(items) - len(used))
        report.row_tokens = sum(len(i.row) for i in used)
        budget = self.config.micro_batch_tokens
        batches: list[TreeBatch] | list[PaddedBatch] = (
            tree_batches(used, budget) if self.packing else padded_batches(used, budget)
        )
        report.tokens = sum(b.tokens for b in batches)
        report.micro_batches = len(batches)
        for _ in range(self.config.epochs if batches else 0):
            if (fault := self._epoch(batches, report)) is not None:
                report.refused = fault
                break
        report.seconds = time.perf_counter() - started
        return report

    def _epoch(self, batches: Sequence[TreeBatch | PaddedBatch], report: UpdateReport) -> str | None:
        self.optimizer.zero_grad(set_to_none=True)
        loss, stats = self.accumulate(batches)
        report.losses.append(loss)
        report.stats = stats
        norm = float(nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
        report.grad_norms.append(norm)
        fault = None
        if not math.isfinite(loss):
            fault = f"the loss is {loss}"
        elif not math.isfinite(norm):
            fault = f"the gradient norm is {norm}"
        if fault is None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.grad_clip, torch.tensor(norm))
            report.learning_rate = self._learning_rate()
            for group in self.optimizer.param_groups:
                group["lr"] = report.learning_rate
            self.optimizer.step()
            self.optimizer_steps += 1
            report.optimizer_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return fault

    def _learning_rate(self) -> float:
        """Linear warm-up over `warmup_steps` optimizer steps, then constant."""
        warmup = self.config.warmup_steps
        share = min(1.0, (self.optimizer_steps + 1) / warmup) if warmup else 1.0
        return self.config.learning_rate * share

    def accumulate(self, batches: Sequence[TreeBatch | PaddedBatch]) -> tuple[float, LossStats]:
        """Add the gradient of all micro-batches to the parameters; returns the summed loss and its statistics."""
        total, stats = 0.0, LossStats()
        for batch in batches:
            hidden = self._hidden(batch)
            # The head and the loss run on a detached copy, chunk by chunk, so that only one chunk's logits ever exist;
            # then the collected gradient goes through the body of the model once.
            leaf = hidden.detach().requires_grad_()
            for start, rows, at in chunks(batch.targets):
                t = TargetTensors.of(batch.targets, at, leaf)
                logits = self._logits(leaf[start : start + rows.size])
                logprobs = token_logprobs(logits, rows.index.to(leaf.device), t.ids)
                loss, part = ppo_loss(
                    logprobs,
                    t.old,
                    t.advantages,
                    t.weights,
                    clip_low=self.config.loss.clip_low,
                    clip_high=self.config.loss.clip_high,
                )
                loss.backward()
                total += float(loss.detach())
                stats.add(part)
            hidden.backward(leaf.grad)
        return total, stats

    # -- scoring -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> list[NDArray[np.float64]]:
        """Log-probabilities of each row's trained tokens under the current weights, in the row's order."""
        self._set_threads()
        items = [Item(row, 1.0, 1.0) for row in rows]
        self._check_ids(items)
        out = []
        for item in items:
            batch = padded_batches([item], 1)[0]
            hidden = self._hidden(batch)
            parts = []
            for start, chunk, at in chunks(batch.targets):
                logits = self._logits(hidden[start : start + chunk.size])
                ids = torch.from_numpy(batch.targets.ids[at]).to(self.device)
                parts.append(token_logprobs(logits, chunk.index.to(self.device), ids).double().cpu().numpy())
            out.append(np.concatenate(parts))
        return out

    def score_ids(self, ids: Sequence[int], *, temperature: float | None = None) -> list[float]:
        """Log-probability of each token of `ids` but the first, given those before it (None: the run's temperature)."""
        own = self.temperature
        self.temperature = own if temperature is None else temperature
        try:
            return self.score([whole_row(ids)])[0].tolist()
        finally:
            self.temperature = own

    # -- forward -------------------------------------------------------------------------------------------------------

    def _hidden(self, batch: TreeBatch | PaddedBatch) -> Tensor:
        """Final hidden states [m, d] at the distinct positions that predict trained tokens, in order."""
        ids = torch.from_numpy(batch.ids).to(self.device)
        body = self.hf.base_model
        if isinstance(batch, TreeBatch):
            self.hf.config._attn_implementation = TREE_ATTENTION
            out = body(
                input_ids=ids[None],
                position_ids=torch.from_numpy(batch.positions).to(self.device)[None],
                tree=TreeLayout.of(batch, self.dtype, self.device),
                use_cache=False,
            )
        else:
            self.hf.config._attn_implementation = "sdpa"
            at = torch.arange(ids.shape[1], device=self.device)
            lengths = torch.from_numpy(batch.lengths).to(self.device)
            mask = (at[None] < lengths[:, None]).long()
            out = body(input_ids=ids, attention_mask=mask, use_cache=False)
        states = out.last_hidden_state
        wanted = torch.from_numpy(np.unique(batch.targets.hidden)).to(self.device)
        return states.reshape(-1, states.shape[-1]).index_select(0, wanted)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.hf.get_output_embeddings()(hidden)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def _check_ids(self, items: Sequence[Item]) -> None:
        for item in items:
            if int(item.row.ids.max()) >= self.vocabulary or int(item.row.ids.min()) < 0:
                raise RunError(
                    f"rollout {item.row.rollout_id} recorded a token id outside the model's {self.vocabulary}: "
                    f"the engine serves another model than {self.source}"
                )

    def _packing_agrees(self) -> bool:
        """Whether this model gives the same log-probs packed as alone (not so with position biases of its own)."""
        if _windowed(self.hf.config):
            return False
        start = np.arange(3, 11) % self.vocabulary
        rows = [whole_row(np.concatenate([start, (np.arange(7) * k + 5) % self.vocabulary])) for k in (3, 7)]
        old = self.hf.config._attn_implementation
        try:
            batch = tree_batches([Item(r, 1.0, 1.0) for r in rows], 10_000)[0]
            plain = padded_batches([Item(r, 1.0, 1.0) for r in rows], 10_000)[0]
            with torch.no_grad():
                sums = []
                for b in (batch, plain):
                    (start_at, chunk, at), *_ = chunks(b.targets)
                    logits = self._logits(self._hidden(b)[start_at : start_at + chunk.size])
                    ids = torch.from_numpy(b.targets.ids[at]).to(self.device)
                    found = token_logprobs(logits, chunk.index.to(self.device), ids).double().cpu().numpy()
                    sums.append(np.sort(found))
            return bool(np.max(np.abs(sums[0] - sums[1])) < SELF_CHECK)
        except (TypeError, RuntimeError, ValueError):
            # The model's forward doesn't pass extra arguments on to its attention, or has no such interface.
            return False
        finally:
            self.hf.config._attn_implementation = old

    def _set_threads(self) -> None:
        if self.device.type == "cpu":
            torch.set_num_threads(self.config.threads or os.cpu_count() or 1)

    # -- weights and state ---------------------------------------------------------------------------------------------

    def merged_state(self) -> dict[str, Tensor]:
        """Weights under their Hugging Face names, LoRA merged in; `lm_head.weight` left out when it is tied.

        Tensors share memory with the model where nothing had to be merged: write them before the next update.
        """
        state: dict[str, Tensor] = {}
        deltas: dict[str, Tensor] = {}
        if self.config.lora:
            for name, module in self.model.named_modules():
                if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer"):
                    deltas[name.removeprefix("base_model.model.") + ".weight"] = module.get_delta_weight("default")
        head = {n for n, m in self.hf.named_modules() if m is self.hf.get_output_embeddings()}
        for name, value in self.model.state_dict().items():
            if "lora_" in name:
                continue
            name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            if self.tied and any(name == f"{h}.weight" for h in head):
                continue
            state[name] = (value + deltas[name] if name in deltas else value).detach().contiguous()
        return state

    def save_weights(self, folder: Path) -> None:
        """Write `model.safetensors` (merged) into `folder`."""
        save_file(self.merged_state(), folder / "model.safetensors", metadata={"format": "pt"})

    def save(self, folder: Path, weights: Path | None = None) -> None:
        """Write a loadable Hugging Face folder plus the trainer's state (`trainer.pt`, and `adapter/` with LoRA).

        `weights` is a folder where `save_weights` has put these very weights: the file is linked instead of written
        again.
        """
        try:
            if weights is None:
                raise FileNotFoundError
            os.link(weights / "model.safetensors", folder / "model.safetensors")
        except OSError:
            self.save_weights(folder)
        self.hf.config._attn_implementation = "sdpa"
        self.hf.config.to_json_file(folder / "config.json")
        for path in sorted(self.source.iterdir()) if self.source.is_dir() else []:
            if path.is_file() and path.name.startswith(COPIED):
                (folder / path.name).write_bytes(path.read_bytes())
        if self.config.lora:
            self.model.save_pretrained(folder / "adapter", save_embedding_layers=False)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "optimizer_steps": self.optimizer_steps,
            "onednn": self.onednn,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }
        torch.save(state, folder / "trainer.pt")

    def restore(self, folder: Path) -> None:
        """Take up what `save` wrote: weights or adapter, optimizer, random state.

        Raises:
            RunError: the folder doesn't fit this model or this LoRA setting.
        """
        try:
            if self.config.lora:
                from peft import load_peft_weights, set_peft_model_state_dict

                set_peft_model_state_dict(self.model, load_peft_weights(str(folder / "adapter"), device="cpu"))
            else:
                missing, unexpected = self.hf.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
                lost = [m for m in missing if not (self.tied and m.endswith("lm_head.weight"))]
                if lost or unexpected:
                    raise ValueError(f"weights {(lost + unexpected)[0]} don't match")
            state = torch.load(folder / "trainer.pt", map_location=self.device, weights_only=True)
            self.optimizer.load_state_dict(state["optimizer"])
        except (OSError, ValueError, KeyError, RuntimeError) as e:
            raise RunError(f"checkpoint {folder} can't be taken up with this run file: {str(e).splitlines()[0]}") from e
        self.optimizer_steps = state["optimizer_steps"]
        if state["onednn"] != self.onednn and self.device.type == "cpu":
            # On another kind of CPU the choice would be the other one; the numbers must go on as begun.
            self.onednn = state["onednn"]
            replace_linears(self.model, fast=self.onednn)
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"]:
            torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda_rng"]])

    def checkpoint_bytes(self) -> int:
        """About what `save` writes: merged weights, two optimizer moments and the adapter."""
        weights = sum(p.numel() * p.element_size() for p in self.hf.parameters())
        moments = sum(p.numel() * p.element_size() for p in self.parameters)
        return weights + (3 if self.config.lora else 2) * moments + CHECKPOINT_MARGIN

    def weight_bytes(self) -> int:
        """About what `save_weights` writes."""
        return sum(p.numel() * p.element_size() for p in self.hf.parameters())


def _windowed(config: Any) -> bool:
    """Whether some layers see only a window of earlier tokens, which tree attention doesn't reproduce."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None

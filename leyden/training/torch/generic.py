"""Runner for any causal language model of transformers: its own forward, one sequence at a time, one cache each.

Slower than the fast decoder and without shared prefixes; right for every architecture that transformers can run.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from leyden.training.torch.decoder_weights import TensorSource, WeightsError, check_finite, check_shapes
from leyden.training.torch.scheduler import Chunk, Plan


class GenericRunner:
    """Drives a `PreTrainedModel` in eval mode. Features are the logits themselves."""

    shares_prefixes = False

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        # Newer releases of transformers call it `cache` and warn about the older name.
        named = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"
        self._caches: dict[int, Any] = {}

    def release(self, key: int) -> None:
        self._caches.pop(key, None)

    def logits(self, features: Tensor) -> Tensor:
        return features.clone()

    @torch.inference_mode()
    def forward(self, plan: Plan) -> tuple[list[Chunk], Tensor]:
        from transformers import DynamicCache

        rows = []
        for chunk in plan.chunks:
            key = chunk.sequence.key
            if chunk.start == 0:
                self._caches[key] = DynamicCache(config=self.model.config)
            cache = self._caches[key]
            if cache.get_seq_length() != chunk.start:
                raise RuntimeError(f"a sequence's cache holds {cache.get_seq_length()} tokens, not {chunk.start}")
            ids = torch.tensor(
                [chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]], device=self.model.device
            )
            rows.append(self.model(input_ids=ids, use_cache=True, **{self._cache_name: cache}).logits[0].float())
        return list(plan.chunks), torch.cat(rows)

    def prepare(self, source: TensorSource) -> dict[str, Tensor]:
        """Tensors to copy in, by name. Of parameters that share storage (tied embeddings) one is enough."""
        by_storage: dict[int, list[str]] = {}
        state = self.model.state_dict()
        for name, tensor in state.items():
            by_storage.setdefault(tensor.data_ptr(), []).append(name)
        prepared = {}
        for names in by_storage.values():
            name = next((n for n in names if n in source.shapes), names[0])
            check_shapes(source, {name: tuple(state[name].shape)})
            prepared[name] = check_finite(name, source.get(name)).to(state[name])
        return prepared

    @torch.inference_mode()
    def swap(self, prepared: object) -> None:
        if not isinstance(prepared, dict):
            raise WeightsError("these weights weren't prepared for this model")
        state = self.model.state_dict()
        for name, tensor in prepared.items():
            state[name].copy_(tensor)

"""Loading a Hugging Face folder for training, with LoRA adapters when the run wants them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from leyden.config import TrainingConfig
from leyden.errors import PreflightError


def load_model(folder: Path, device: str) -> nn.Module:
    """A causal language model from a folder, fp32 on a CPU, its own dtype on CUDA."""
    disable_progress_bar()
    try:
        dtype = torch.float32 if device == "cpu" else AutoConfig.from_pretrained(folder).dtype or torch.float32
        model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError) as e:
        raise PreflightError(f"can't load a causal language model from {folder}: {str(e).splitlines()[0]}") from e
    return nn.Module.to(model, device)


def with_lora(model: nn.Module, config: TrainingConfig) -> nn.Module:
    """`model` with adapters as `config.lora` says; only these are trained."""
    from peft import LoraConfig, get_peft_model

    lora = config.lora
    assert lora is not None
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, settings)  # pyright: ignore[reportArgumentType]
    except ValueError as e:
        raise PreflightError(f"training.lora doesn't fit this model: {str(e).splitlines()[0]}") from e

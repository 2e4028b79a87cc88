"""From a model folder to a runner: what that takes, whether it fits, which forward serves it, whether it is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import structlog
import torch

from leyden.errors import PreflightError
from leyden.training.torch.decoder import FastRunner, Runner
from leyden.training.torch.decoder_weights import DecoderSpec, from_module, spec_of
from leyden.training.torch.generic import GenericRunner
from leyden.training.torch.kv import BLOCK, BlockPool, PrefixTree, blocks_for
from leyden.training.torch.scheduler import Scheduler, Sequence

log = structlog.get_logger("engine")

MAX_DEFAULT_MODEL_LEN = 8192
_DEFAULT_SEQUENCE = 2048
"""Tokens per running sequence that the default KV cache has room for."""
_FREE_SHARE = 0.25
"""Largest share of free memory that the default KV cache takes."""
_WEIGHT_COPIES = 2.3
"""Copies of the weights held at the peak of a load: the old or plain ones, the packed ones, and parts on the way."""
_OVERHEAD = 400 << 20
"""Bytes that the libraries and one step's activations take."""
_TOLERANCE = 1e-3
"""Largest difference between the fast decoder's fp32 logits and the model's own."""


@dataclass(frozen=True)
class Sizes:
    """What an engine will hold: lengths in tokens, sizes in bytes."""

    max_model_len: int
    kv_tokens: int
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class LoadedModel:
    """A runner and what the server needs to know about its model."""

    runner: Runner
    sizes: Sizes
    vocab_size: int
    stop_token_ids: frozenset[int]
    tokenizer: Any | None
    fast: bool
    error: float | None
    """Largest logit difference between the fast decoder and the model's own forward; None for the generic runner."""


def plan_sizes(
    *,
    model_positions: int,
    weight_bytes: int,
    kv_token_bytes: int,
    free_bytes: int,
    max_batch: int,
    max_model_len: int | None,
    kv_cache_tokens: int | None,
) -> Sizes:
    """How long sequences may be and how many tokens the KV cache holds.

    Raises:
        PreflightError: when it doesn't fit into `free_bytes`, or `max_model_len` exceeds what the model was made for.
    """
    if max_model_len is not None and max_model_len > model_positions:
        raise PreflightError(
            f"max_model_len is {max_model_len}, but the model was made for {model_positions} positions: lower it"
        )
    length = max_model_len or min(model_positions, MAX_DEFAULT_MODEL_LEN)
    fixed = int(weight_bytes * _WEIGHT_COPIES) + _OVERHEAD
    if kv_cache_tokens is None:
        wanted = max_batch * min(length, _DEFAULT_SEQUENCE)
        kv_cache_tokens = max(BLOCK, min(wanted, int(_FREE_SHARE * free_bytes / kv_token_bytes)))
    kv_tokens = blocks_for(kv_cache_tokens) * BLOCK
    need = fixed + kv_tokens * kv_token_bytes
    if need > free_bytes:
        raise PreflightError(
            f"the engine needs {_gib(need)} of memory ({_gib(fixed)} to load the weights, "
            f"{_gib(kv_tokens * kv_token_bytes)} for {kv_tokens} tokens of KV cache) and {_gib(free_bytes)} is free: "
            "lower kv_cache_tokens or max_batch, use a smaller model, or free memory"
        )
    return Sizes(min(length, kv_tokens), kv_tokens, weight_bytes, kv_tokens * kv_token_bytes)


def load_model(
    folder: Path, *, device: torch.device, max_batch: int, max_model_len: int | None, kv_cache_tokens: int | None
) -> LoadedModel:
    """Load a Hugging Face folder and certify the fast decoder against it, or serve it by its own forward.

    Raises:
        PreflightError: when the folder isn't a model, or memory doesn't suffice.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise PreflightError(f"{folder} isn't a model folder: there is no config.json in it")
    config = AutoConfig.from_pretrained(folder)
    dtype = torch.float32 if device.type == "cpu" else (getattr(config, "dtype", None) or torch.bfloat16)
    positions = int(getattr(config, "max_position_embeddings", 0) or MAX_DEFAULT_MODEL_LEN)
    sizes = plan_sizes(
        model_positions=positions,
        weight_bytes=_weight_count(folder) * dtype.itemsize,
        kv_token_bytes=_kv_token_bytes(config, dtype),
        free_bytes=free_memory(device),
        max_batch=max_batch,
        max_model_len=max_model_len,
        kv_cache_tokens=kv_cache_tokens,
    )
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = model.to(device).eval()
    except (OSError, ValueError) as e:
        raise PreflightError(f"the model in {folder} can't be loaded: {' '.join(str(e).split())}") from e
    stops = _stop_ids(model)
    tokenizer = _tokenizer(folder)
    runner: Runner | None = None
    error = None
    spec = spec_of(config, sizes.max_model_len)
    if spec is not None:
        runner, error = _fast(spec, model, sizes, device, dtype)
    fast = runner is not None
    if runner is None:
        log.warning("the model is served by its own forward, which is slower", model_type=config.model_type)
        runner = GenericRunner(model)
    return LoadedModel(runner, sizes, config.get_text_config().vocab_size, stops, tokenizer, fast, error)


def certify(runner: FastRunner, model: Any, vocab: int, n_blocks: int) -> float:
    """Largest |difference| of logits between `runner` and a transformers model on one random prompt.

    The prompt is read in chunks and its last token alone, so that every kind of attention takes part.
    """
    length = min(3 * BLOCK + 5, n_blocks * BLOCK)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (length,), generator=generator).tolist()
    pool = BlockPool(n_blocks)
    scheduler = Scheduler(pool, PrefixTree(pool), max_batch=1, prefill_tokens=2 * BLOCK)
    sequence = Sequence(0, ids[:-1])
    scheduler.add(sequence)
    rows = []
    with torch.inference_mode():
        while sequence.pending:
            order, features = runner.forward(plan := scheduler.plan())
            rows.append(runner.logits(features))
            for chunk in order:
                scheduler.commit(chunk)
            if plan.chunks and sequence.pending == 0 and len(sequence.tokens) < length:
                sequence.tokens.append(ids[-1])
        expected = model(input_ids=torch.tensor([ids], device=runner.device)).logits[0].float()
        return float((torch.cat(rows) - expected).abs().max())


def free_memory(device: torch.device) -> int:
    """Bytes that can be had: of the GPU, or of the machine within this process's memory limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int(Path(limit_file).read_text())
            used = int(Path(used_file).read_text())
        except (OSError, ValueError):
            continue
        # Without a limit the file holds a number near 2**63; file pages that the limit counts can be dropped.
        if limit < psutil.virtual_memory().total:
            free = min(free, max(0, limit - used))
    return free


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device.

    Raises:
        PreflightError: when that device isn't there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise PreflightError(f"device {name} was asked for, but torch sees no GPU: use device cpu")
    return torch.device(name)


def decoder_of(tokenizer: Any | None) -> Callable[[list[int]], str] | None:
    """Ids to text without special tokens, or None without a tokenizer."""
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def _fast(
    spec: DecoderSpec, model: Any, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> tuple[FastRunner | None, float | None]:
    rotary = model.model.rotary_emb
    n_blocks = sizes.kv_tokens // BLOCK
    runner = FastRunner(
        spec, from_module(model), rotary.inv_freq, float(rotary.attention_scaling), sizes.max_model_len, n_blocks,
        device, dtype,
    )  # fmt: skip
    error = certify(runner, model, spec.vocab, n_blocks)
    # Below fp32 the two forwards round differently at every product; then only gross disagreement says anything.
    if math.isfinite(error) and error <= (_TOLERANCE if dtype == torch.float32 else 1.0):
        return runner, error
    log.warning("the fast decoder disagrees with the model", largest_logit_difference=error)
    return None, None


def _stop_ids(model: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
            break
    return frozenset(found)


def _tokenizer(folder: Path) -> Any | None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _weight_count(folder: Path) -> int:
    """Parameters in the folder's weight files."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    count = 0
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    if not files:
        count = sum(path.stat().st_size for path in folder.glob("*.bin")) // 4
    if count == 0:
        raise PreflightError(f"{folder} isn't a model folder: there are no weights (model.safetensors) in it")
    return count


def _kv_token_bytes(config: Any, dtype: torch.dtype) -> int:
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 1
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or (text.hidden_size // heads)
    return 2 * text.num_hidden_layers * kv_heads * size * dtype.itemsize


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

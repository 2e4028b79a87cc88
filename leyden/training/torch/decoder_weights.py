"""Weights of the fast decoder: what a llama-like model has, read from a folder or a module, checked, fused and packed.

Per layer four matrices remain: q/k/v, output, gate/up, down. The two RMSNorm gains of a layer and the final one are
folded into the matrix behind them, and the rows of q and k are reordered so that rotary pairs are neighbours (the dot
product of q and k doesn't change when both are reordered alike). On the CPU matrices are repacked for oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leyden.errors import LeydenError

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""`model_type`s whose forward the fast decoder knows."""

STATIC_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies don't depend on the length of the sequence."""

_PACK_ROWS = 256
"""Batch size that oneDNN is told to pack for; measured as good as or better than the real one at 1 … 256 rows."""


class WeightsError(LeydenError):
    """Weights that can't be used; names the tensor. Nothing was changed."""


@dataclass(frozen=True)
class DecoderSpec:
    """Shape of a llama-like decoder. Sizes are in elements."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool

    @property
    def q_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size


def spec_of(config: Any, max_model_len: int) -> DecoderSpec | None:
    """The decoder spec of a transformers config, or None when the fast decoder doesn't know the model."""
    if config.model_type not in FAMILIES or getattr(config, "hidden_act", "silu") != "silu":
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in STATIC_ROPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    window = getattr(config, "sliding_window", None)
    windowed = config.model_type == "mistral" or any(kind != "full_attention" for kind in kinds)
    if windowed and window is not None and window < max_model_len:
        return None
    if getattr(config, "quantization_config", None):
        return None
    heads = config.num_attention_heads
    bias = bool(getattr(config, "attention_bias", False))
    return DecoderSpec(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        qkv_bias=bias or config.model_type == "qwen2",
        out_bias=bias and config.model_type != "qwen2",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=config.model_type == "qwen3",
        tied=bool(config.tie_word_embeddings),
    )


def tensor_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model needs, by its Hugging Face name, with its shape; not a tied `lm_head.weight`."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    for i in range(spec.layers):
        at = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{name}.weight"] = (spec.hidden,)
        widths = {"q_proj": spec.q_width, "k_proj": spec.kv_width, "v_proj": spec.kv_width}
        for name, width in widths.items():
            shapes[f"{at}self_attn.{name}.weight"] = (width, spec.hidden)
            if spec.qkv_bias:
                shapes[f"{at}self_attn.{name}.bias"] = (width,)
        shapes[f"{at}self_attn.o_proj.weight"] = (spec.hidden, spec.q_width)
        if spec.out_bias:
            shapes[f"{at}self_attn.o_proj.bias"] = (spec.hidden,)
        if spec.qk_norm:
            shapes[f"{at}self_attn.q_norm.weight"] = (spec.head_size,)
            shapes[f"{at}self_attn.k_norm.weight"] = (spec.head_size,)
        for name, (out, into) in {
            "gate_proj": (spec.inner, spec.hidden),
            "up_proj": (spec.inner, spec.hidden),
            "down_proj": (spec.hidden, spec.inner),
        }.items():
            shapes[f"{at}mlp.{name}.weight"] = (out, into)
            if spec.mlp_bias:
                shapes[f"{at}mlp.{name}.bias"] = (out,)
    return shapes


class Linear:
    """y = x·Wᵀ + b over a weight that was repacked for oneDNN, or left plain on other devices.

    `x` is [rows, in], the result [rows, out], both of the weight's dtype.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, pack: bool) -> None:
        self.packed = pack
        self.bias = bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS) if pack else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x·Wᵀ + b."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return torch.nn.functional.linear(x, self.weight, self.bias) + residual


@dataclass(frozen=True)
class LayerWeights:
    """One layer. `qk_gain` [heads + kv_heads, head_size] multiplies normalised q and k heads; None without q/k norm."""

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    qk_gain: Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    """All weights. `embedding` [vocab, hidden]."""

    embedding: Tensor
    layers: list[LayerWeights]
    head: Linear


class TensorSource:
    """Named tensors with shapes known before they are read."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], get: Callable[[str], Tensor]) -> None:
        self.shapes = shapes
        self.get = get


def from_module(model: torch.nn.Module) -> TensorSource:
    """The parameters of a transformers model."""
    state = model.state_dict()
    return TensorSource({k: tuple(v.shape) for k, v in state.items()}, state.__getitem__)


def from_folder(folder: Path) -> TensorSource:
    """`folder/model.safetensors`, read tensor by tensor.

    Raises:
        WeightsError: when the file isn't there or isn't a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / "model.safetensors"
    if not path.is_file():
        raise WeightsError(f"there is no file model.safetensors in {folder}")
    try:
        file = safe_open(str(path), framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (SafetensorError, OSError) as e:
        raise WeightsError(f"{path} can't be read as safetensors: {e}") from e
    return TensorSource(shapes, file.get_tensor)


def check_shapes(source: TensorSource, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare what `source` has with what is needed.

    Raises:
        WeightsError: naming the first tensor that is missing or has another shape.
    """
    for name, shape in shapes.items():
        found = source.shapes.get(name)
        if found is None:
            raise WeightsError(f"tensor {name} is missing")
        if found != shape:
            raise WeightsError(f"tensor {name} has shape {list(found)}, this model needs {list(shape)}")


def check_finite(name: str, tensor: Tensor) -> Tensor:
    """`tensor`, unless it holds a value that isn't finite.

    Raises:
        WeightsError: naming the tensor.
    """
    # Minimum and maximum pass NaN on, so both being finite means that all are.
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise WeightsError(f"tensor {name} holds values that aren't finite")
    return tensor


def build(source: TensorSource, spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """Read, check, fuse and pack. Takes one extra copy of one layer on the way.

    Raises:
        WeightsError: naming a tensor that is missing, has another shape or isn't finite.
    """
    check_shapes(source, tensor_shapes(spec))
    pack = device.type == "cpu" and torch.backends.mkldnn.is_available() and dtype == torch.float32

    def get(name: str) -> Tensor:
        return check_finite(name, source.get(name)).to(device=device, dtype=torch.float32)

    def linear(parts: list[Tensor], gain: Tensor | None, biases: list[Tensor]) -> Linear:
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        weight = weight if gain is None else weight * gain
        bias = torch.cat(biases).to(dtype) if biases else None
        return Linear(weight.to(dtype), bias, pack)

    def paired(rows: Tensor) -> Tensor:
        heads = rows.view(-1, 2, spec.head_size // 2, *rows.shape[1:])
        return heads.transpose(1, 2).reshape(rows.shape)

    layers = []
    for i in range(spec.layers):
        at, attn, mlp = f"model.layers.{i}.", f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        qkv_bias = [get(f"{attn}{n}_proj.bias") for n in "qkv"] if spec.qkv_bias else []
        if qkv_bias:
            qkv_bias[:2] = [paired(bias) for bias in qkv_bias[:2]]
        gain = None
        if spec.qk_norm:
            q_gain, k_gain = (paired(get(f"{attn}{n}_norm.weight")) for n in "qk")
            gain = torch.cat([q_gain.expand(spec.heads, -1), k_gain.expand(spec.kv_heads, -1)]).to(dtype)
        layers.append(
            LayerWeights(
                qkv=linear(
                    [
                        paired(get(f"{attn}q_proj.weight")),
                        paired(get(f"{attn}k_proj.weight")),
                        get(f"{attn}v_proj.weight"),
                    ],
                    get(f"{at}input_layernorm.weight"),
                    qkv_bias,
                ),
                out=linear([get(f"{attn}o_proj.weight")], None, [get(f"{attn}o_proj.bias")] if spec.out_bias else []),
                gate_up=linear(
                    [get(f"{mlp}gate_proj.weight"), get(f"{mlp}up_proj.weight")],
                    get(f"{at}post_attention_layernorm.weight"),
                    [get(f"{mlp}gate_proj.bias"), get(f"{mlp}up_proj.bias")] if spec.mlp_bias else [],
                ),
                down=linear(
                    [get(f"{mlp}down_proj.weight")], None, [get(f"{mlp}down_proj.bias")] if spec.mlp_bias else []
                ),
                qk_gain=gain,
            )
        )
    embedding = get("model.embed_tokens.weight")
    head = embedding
    if "lm_head.weight" in source.shapes:
        check_shapes(source, {"lm_head.weight": (spec.vocab, spec.hidden)})
        head = get("lm_head.weight")
    packed_head = linear([head], get("model.norm.weight"), [])
    return DecoderWeights(embedding.to(dtype).clone(), layers, packed_head)

"""Linear layers on oneDNN for training in fp32 on a CPU.

torch's own `F.linear` goes to MKL, which on AVX-512 machines reaches about half of what oneDNN does for the same fp32
products at training shapes; figures are in docs/decisions.md. The same arithmetic (fp32 products and sums) in another
order of summation, so results agree to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def onednn_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for fp32 CPU matrices x [n, k] and weight [m, k], either of them possibly a transposed view."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        to_x = onednn_matmul(grad, weight.t()) if ctx.needs_input_grad[0] else None
        to_weight = onednn_matmul(grad.t(), x.t()) if ctx.needs_input_grad[1] else None
        return to_x, to_weight


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with a forward and backward on oneDNN; x [..., k], weight [m, k]."""
    y: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight)  # pyright: ignore[reportAssignmentType]
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


class OneDnnLinear(nn.Linear):
    """An `nn.Linear` that computes on oneDNN; shares the parameters of the layer that it replaces."""

    def forward(self, input: Tensor) -> Tensor:
        return onednn_linear(input, self.weight, self.bias)


def replace_linears(model: nn.Module, *, fast: bool = True) -> int:
    """Replace every plain `nn.Linear` below `model` in place (or back, when not `fast`), keeping parameters, tied
    ones too.

    Returns how many were replaced.
    """
    old, new = (nn.Linear, OneDnnLinear) if fast else (OneDnnLinear, nn.Linear)
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is old:
                layer = new(child.in_features, child.out_features, bias=False, device="meta")
                layer.weight = child.weight
                layer.bias = child.bias
                layer.train(child.training)
                setattr(parent, name, layer)
                count += 1
    return count


def onednn_serves() -> bool:
    """Whether to train on oneDNN here: a CPU of the kind on which it was measured to win, and results that agree to
    1e-5.

    Decided by the kind of CPU and not by a stopwatch, which a busy machine would make say something else after a
    restart: the resumed run's numbers would no longer be those of the uninterrupted one.
    """
    if not torch.backends.mkldnn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator)
    weight = torch.randn(160, 96, generator=generator)
    try:
        with torch.no_grad():
            plain = nn.functional.linear(x, weight)
            pairs = (
                (onednn_matmul(x, weight), plain),
                (onednn_matmul(plain, weight.t()), plain @ weight),
                (onednn_matmul(plain.t(), x.t()), plain.t() @ x),
            )
    except (RuntimeError, AttributeError, NotImplementedError):
        # A private operator: a torch without it, or with another signature, trains on F.linear.
        return False
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max())) for a, b in pairs)

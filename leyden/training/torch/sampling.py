"""Sampling maths: the distribution that a request asked for, one draw from it, and that draw's log-probability.

All functions are pure; randomness comes in as uniform numbers, so a request's draws don't depend on its batch-mates.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PANEL = 256
"""Inverse transform sampling first picks a panel of this many tokens, then a token: two short sums for one long."""


def restrict(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits with every token outside top-k, then outside top-p of what is left, at -inf.

    Args:
        logits: [rows, vocab] float32, after temperature.
        top_k: [rows] int64; 0 means off.
        top_p: [rows] float32 in (0, 1]; 1 means off.

    The most likely token always stays. Of tokens of equal probability at a boundary, those of lower id stay.
    """
    vocab = logits.shape[1]
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    k = torch.where(top_k > 0, top_k, torch.full_like(top_k, vocab)).unsqueeze(1)
    ordered = ordered.masked_fill(rank >= k, -torch.inf)
    probs = ordered.double().softmax(dim=1)
    before = probs.cumsum(dim=1) - probs
    drop = (before >= top_p.double().unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row from softmax(logits), by inverse transform.

    Args:
        logits: [rows, vocab] float32; -inf means impossible.
        uniforms: [rows] float64 in [0, 1).

    Returns:
        Token ids [rows] int64 and their log-probabilities [rows] float32. Impossible tokens are never drawn. Rows that
        hold NaN or +inf come back with a NaN log-probability.
    """
    rows, vocab = logits.shape
    peak = logits.amax(dim=1, keepdim=True)
    mass = (logits - peak).exp_()
    if vocab % _PANEL:
        mass = torch.nn.functional.pad(mass, (0, _PANEL - vocab % _PANEL))
    panels = mass.view(rows, -1, _PANEL)
    panel_mass = panels.sum(dim=2).double()
    upto = panel_mass.cumsum(dim=1)
    total = upto[:, -1:]
    target = uniforms.unsqueeze(1) * total
    panel = torch.searchsorted(upto, target, right=True).clamp_(max=upto.shape[1] - 1)
    into = (target - (upto.gather(1, panel) - panel_mass.gather(1, panel))).clamp_(min=0)
    chosen = panels.gather(1, panel.unsqueeze(2).expand(rows, 1, _PANEL)).squeeze(1)
    within = chosen.double().cumsum(dim=1)
    # Rounding can put the target at or past the panel's end: then the panel's last possible token is the one.
    last = (_PANEL - 1) - (chosen > 0).flip(1).to(torch.uint8).argmax(dim=1, keepdim=True)
    offset = torch.minimum(torch.searchsorted(within, into, right=True), last)
    tokens = (panel * _PANEL + offset).clamp_(max=vocab - 1)
    logprobs = logits.gather(1, tokens) - peak - total.log().float()
    return tokens.squeeze(1), logprobs.squeeze(1)


def sample(
    logits: Tensor, temperature: list[float], top_k: list[int], top_p: list[float], uniforms: list[float]
) -> tuple[list[int], list[float]]:
    """One token per row of `logits` [rows, vocab] float32 (changed in place), with the log-probability of the
    distribution drawn from.

    Temperature 0 takes the most likely token, with the log-probability of the plain softmax. A row whose logits aren't
    finite comes back with a NaN log-probability.
    """
    device = logits.device
    heat = torch.tensor(temperature, dtype=torch.float32, device=device)
    if any(t not in (0.0, 1.0) for t in temperature):
        logits.div_(torch.where(heat > 0, heat, torch.ones_like(heat)).unsqueeze(1))
    shaped = [i for i, t in enumerate(temperature) if t > 0 and (top_k[i] > 0 or top_p[i] < 1)]
    if shaped:
        rows = torch.tensor(shaped, device=device)
        k = torch.tensor([top_k[i] for i in shaped], device=device)
        p = torch.tensor([top_p[i] for i in shaped], dtype=torch.float32, device=device)
        logits[rows] = restrict(logits[rows], k, p)
    tokens, logprobs = draw(logits, torch.tensor(uniforms, dtype=torch.float64, device=device))
    greedy = [i for i, t in enumerate(temperature) if t == 0]
    if greedy:
        rows = torch.tensor(greedy, device=device)
        best = logits[rows]
        top, arg = best.max(dim=1)
        tokens[rows] = arg
        logprobs[rows] = top - best.logsumexp(dim=1)
    return tokens.tolist(), logprobs.tolist()


def chosen_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability [rows] float32 of each row's token under softmax(logits) at temperature 1."""
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=1)

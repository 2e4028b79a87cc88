"""What a client asks for and what is used. Pure."""

from __future__ import annotations

from typing import Any

from leyden.gateway.errors import TooLong
from leyden.schema import Sampling


def effective(
    run: Sampling | None, asked_max_tokens: int | None, prompt_tokens: int, max_model_len: int | None
) -> dict[str, Any]:
    """Sampling parameters of a call: the run's, with `max_tokens` the least of what client, run and context allow.

    Raises:
        TooLong: the prompt leaves no room (400, code context_length_exceeded).
    """
    fixed = run or Sampling()
    limits = [n for n in (asked_max_tokens, fixed.max_tokens) if n is not None]
    if max_model_len is not None:
        room = max_model_len - prompt_tokens
        if room <= 0:
            raise TooLong(prompt_tokens, max_model_len)
        limits.append(room)
    out: dict[str, Any] = {"temperature": fixed.temperature, "top_p": fixed.top_p, "top_k": fixed.top_k}
    if limits:
        out["max_tokens"] = min(limits)
    return out

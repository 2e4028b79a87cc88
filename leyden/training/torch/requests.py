"""What a request asks of the engine and what it gets, and the rules for ending it. Plain data and functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"


@dataclass(frozen=True)
class Params:
    """How to continue one prompt. `top_k` 0 and `top_p` 1 are off; `seed` None draws one."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    prompt_logprobs: bool = False


@dataclass
class Answer:
    """One continuation. `token_ids`, `logprobs` and `versions` agree in length; a sampled stop token is among them.

    `prompt_logprobs` holds one number for each prompt token but the first.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    stop_reason: int | str | None
    cached_tokens: int
    prompt_logprobs: list[float] | None


def stopped_by(tokens: Sequence[int], params: Params, decode: Callable[[list[int]], str] | None) -> int | str | None:
    """The stop token id, or stop string, that the newest of the sampled `tokens` completed."""
    if tokens[-1] in params.stop_token_ids:
        return tokens[-1]
    if not params.stop or decode is None:
        return None
    # A token gives at least one byte of a character of at most four, but for a few that give none: those are the slack.
    window = 4 * max(len(stop) for stop in params.stop) + 16
    return first_stop(decode(list(tokens[-window:])), params.stop)


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The stop string that occurs first in `text`."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def visible_text(text: str, stop_reason: int | str | None) -> str:
    """`text` up to the stop string that ended it."""
    return text.partition(stop_reason)[0] if isinstance(stop_reason, str) else text

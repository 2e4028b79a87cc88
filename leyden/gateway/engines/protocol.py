"""What is asked of an engine and what comes back, whatever the engine. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from leyden.gateway.engines.integrity import Sample
from leyden.gateway.errors import Refused
from leyden.schema import EngineModel

Ids = npt.NDArray[np.int32]
_NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sampling that the run doesn't fix, at values that change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One continuation to be sampled: of token ids, or (`chat`) of messages that the engine renders itself."""

    prompt: Ids
    effective: dict[str, Any]
    """temperature, top_p, top_k (0: off), and max_tokens where there is a limit."""
    stop: list[str]
    stop_token_ids: list[int]
    request_id: str
    response_format: dict[str, Any] | None = None
    chat: Chat | None = None
    trained: bool = True
    """Whether the run wants to train it. If not, a strict server isn't asked for more than its API has."""

    def sampling(self, kind: str) -> dict[str, Any]:
        """Sampling as completions APIs take it. What vLLM isn't told it takes from the model's generation config."""
        out = dict(self.effective)
        if kind == "vllm":
            return out | {"top_k": out["top_k"] or -1, **_NEUTRAL}
        if not out["top_k"]:
            del out["top_k"]
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation in the internal form."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_choice: str
    tool_name: str | None
    parallel_tool_calls: bool


@dataclass(slots=True, kw_only=True)
class Said:
    """A checked answer. In chat the engine tells what it read and how it takes the answer apart."""

    sample: Sample
    prompt: Ids | None = None
    message: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """How one kind of engine is talked to.

    `read` gets the parsed body of a 200 answer, what was asked, and the policy version to stamp where the engine says
    none. It raises nothing: what is missing or contradictory makes the sample untrainable.
    """

    path: Callable[[EngineModel, Ask], str]
    body: Callable[[EngineModel, Ask], dict[str, Any]]
    read: Callable[[Any, Ask, int], Said]
    formats: bool = False
    """Whether answers can be constrained to a format."""
    chats: bool = False
    """Whether it renders and parses conversations itself."""


def check(adapter: Adapter, engine: EngineModel, ask: Ask) -> None:
    """Refuse what this kind of engine can't do.

    Raises:
        Refused: 400, naming what.
    """
    if ask.response_format is not None and not adapter.formats:
        raise Refused(
            f"response_format {ask.response_format['type']} isn't supported here: engines of kind {engine.kind} can't "
            "constrain what they sample; ask for the format in words",
            param="response_format",
            code="unsupported_parameter",
        )
    if ask.chat is not None and not adapter.chats:
        raise Refused(
            f"this call needs an engine that renders conversations itself (it has images, or the run's capture.mode is "
            f"engine), and engines of kind {engine.kind} take token ids only",
            code="unsupported_content",
        )

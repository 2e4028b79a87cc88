"""The one internal request and answer that every dialect translates to and from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from leyden.gateway.errors import Refused

Message = dict[str, Any]
"""`role` (system, user, assistant, tool), `content` (text), and where given `name`, `tool_calls`, `tool_call_id`,
`reasoning_content`. Tool arguments stay the string that the client sent."""


@dataclass(slots=True, kw_only=True)
class ChatRequest:
    """A model call, whatever the dialect."""

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    stop: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    logprobs: bool = False
    requested: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters as the client asked for them."""


@dataclass(slots=True)
class TokenLogprob:
    token: bytes
    logprob: float | None


@dataclass(slots=True, kw_only=True)
class Choice:
    """One answer."""

    call_id: str
    text: str
    reasoning: str | None
    tool_calls: list[dict[str, Any]]
    finish_reason: Literal["stop", "length"]
    completion_tokens: int
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True, kw_only=True)
class Answer:
    """All answers to one request."""

    call_id: str
    created: int
    model: str
    choices: list[Choice]
    prompt_tokens: int


class Dialect(Protocol):
    """One wire API. Methods are pure; the keep-alive, the order and the atomicity of delivery are the gateway's."""

    name: str

    def parse(self, body: Any) -> ChatRequest:
        """Raises Refused, naming the field, for what would change the meaning and isn't supported."""
        ...

    def fingerprint_parts(self, body: dict[str, Any]) -> dict[str, Any]:
        """The part of a request that decides its answer: everything but how it is to be delivered."""
        ...

    def json_answer(self, answer: Answer, request: ChatRequest) -> bytes: ...

    def stream_answer(self, answer: Answer, request: ChatRequest) -> Iterator[bytes]: ...

    def keepalive(self, call_id: str, created: int, request: ChatRequest) -> bytes:
        """A stream event that means nothing to the client."""
        ...

    def error(self, error: Refused) -> bytes:
        """An error as a JSON body."""
        ...

    def stream_error(self, error: Refused) -> bytes:
        """An error inside a stream that has begun."""
        ...

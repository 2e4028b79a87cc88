"""The one internal request and answer that every dialect translates to and from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from leyden.gateway.errors import Refused

Message = dict[str, Any]
"""`role` (system, user, assistant, tool), `content`, and where given `name`, `tool_calls`, `tool_call_id`,
`reasoning_content`. Tool arguments stay the string that the client sent. `content` is text, or, only when it holds
images, a list of {"type": "text", "text"} and {"type": "image", "url"} (a data: or http(s) URL)."""

ToolChoice = Literal["auto", "none", "required"]


@dataclass(slots=True, kw_only=True)
class ModelRequest:
    """A model call, whatever the dialect. `prompt` (text or token ids) takes the place of `messages` for completions.

    `tools` are in OpenAI's form, {"type": "function", "function": {"name", "description", "parameters"}}.
    """

    model: str
    messages: list[Message] = field(default_factory=list)
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None
    """The only tool that may be called; with `tool_choice` "required"."""
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    """{"type": "json_object"} or {"type": "json_schema", "name", "schema"}; None is free text."""
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    stop: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    logprobs: bool = False
    requested: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters as the client asked for them."""
    echo: dict[str, Any] = field(default_factory=dict)
    """What the dialect needs of the request to write its answer."""
    may_be_continued: bool = False
    """Whether a later request may name this one's answer instead of sending the conversation again."""
    instructed: bool = False
    """Whether the first message is for this call alone, not for those that continue it so."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Request headers, names in lower case, without keys."""
    body: dict[str, Any] = field(default_factory=dict)
    """The request as the client sent it."""

    def has_images(self) -> bool:
        return any(isinstance(m.get("content"), list) for m in self.messages)

    def images(self) -> list[str]:
        """URLs of the images, in order."""
        lists = [m["content"] for m in self.messages if isinstance(m.get("content"), list)]
        return [p["url"] for parts in lists for p in parts if p["type"] == "image"]


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
    stop_sequence: str | None = None
    """The one of the request's stop strings that ended the answer."""
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True, kw_only=True)
class Answer:
    """All answers to one request."""

    call_id: str
    created: int
    model: str
    choices: list[Choice]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Refers:
    """Earlier calls of the attempt that a request names: one that it continues, and others whose answers it repeats."""

    continued: str | None = None
    answers: Sequence[str] = ()


NOTHING = Refers()


@dataclass(frozen=True, slots=True)
class Asked:
    """What an earlier call was asked. `instructed`: its first message was for that call alone."""

    messages: Sequence[Message]
    instructed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a dialect may know of a request beside its body."""

    headers: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    """What follows the dialect's prefix, such as `models/NAME:generateContent`."""
    query: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[str, Message] = field(default_factory=dict)
    """What the calls named by `Dialect.refers_to` said, of those that the attempt has."""
    continued: Asked | None = None
    """What the call was asked that the request continues; None when the attempt has no such call."""


EVENTS = b"text/event-stream; charset=utf-8"


class Stream(Protocol):
    """The events of one streamed answer, in order: any number of `keepalive`, then `answer` or `error`."""

    content_type: bytes

    def keepalive(self) -> bytes:
        """An event that means nothing to the client."""
        ...

    def answer(self, answer: Answer) -> Iterator[bytes]: ...

    def error(self, error: Refused) -> bytes: ...


class Dialect(Protocol):
    """One wire API. Methods are pure; when and whether their bytes are sent is the gateway's business."""

    name: str

    def refers_to(self, body: dict[str, Any]) -> Refers:
        """Earlier calls of the attempt that `parse` needs. Unreadable ids are left for `parse` to refuse."""
        ...

    def parse(self, body: dict[str, Any], context: Context) -> ModelRequest:
        """Raises Refused, naming the field, for what would change the meaning and isn't supported."""
        ...

    def fingerprint_parts(self, body: dict[str, Any], context: Context) -> dict[str, Any]:
        """The part of a request that decides its answer: everything but how it is to be delivered."""
        ...

    def json_answer(self, answer: Answer, request: ModelRequest) -> bytes: ...

    def stream(self, call_id: str, created: int, request: ModelRequest) -> Stream: ...

    def error(self, error: Refused) -> bytes:
        """An error as a JSON body."""
        ...

    def models(self, names: Sequence[str], created: int, max_model_len: int | None) -> bytes:
        """The list of served models."""
        ...

    def model(self, name: str, created: int, max_model_len: int | None) -> bytes:
        """One served model."""
        ...

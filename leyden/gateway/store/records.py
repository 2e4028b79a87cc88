"""Plain values that go in and out of the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from leyden.gateway.lifecycle import Phase
from leyden.schema import CallKind, CaptureConfig, Rollout, Sampling

if TYPE_CHECKING:
    from leyden.gateway.store.raw import RawRequest

HASH_BYTES = 16
"""Length of a message hash."""


@dataclass(slots=True)
class MessageRef:
    """A message and the hash of its bytes. Each distinct message is stored once."""

    hash: bytes
    body: bytes


@dataclass(slots=True, kw_only=True)
class CallCommit:
    """A finished call on its way into the store. Arrays are little-endian bytes, as in schema.CallRecord."""

    call_id: str
    rollout_id: str
    attempt_id: str
    seq: int
    dialect: str
    base: str | None
    base_len: int
    prompt_suffix: bytes
    response_ids: bytes
    logprobs: bytes
    versions: bytes
    finish_reason: str
    parent: str | None
    break_reason: str | None
    break_index: int | None
    untrainable: str | None
    requested: dict[str, Any]
    effective: dict[str, Any]
    started_at: float
    ended_at: float
    engine: str | None
    model: str
    request_base: str | None
    request_base_len: int
    request_suffix: list[MessageRef]
    tools: MessageRef | None
    response: dict[str, Any] | None
    fingerprint: bytes
    arrived: str | None = None
    """The call that this one continues, where that only now proves that its answer arrived."""
    raw: RawRequest | None = None
    """What the client sent, without headers."""
    kind: str = CallKind.MAIN
    images: list[str] = field(default_factory=list)
    """References to the images of the request."""
    routed_experts: bytes | None = None
    """As the engine gave them; `routed_format` says dtype and shape, such as `uint8 512,24,8`."""
    routed_format: str | None = None


@dataclass(slots=True, kw_only=True)
class StoredCall:
    """A call as read back, with prompt and messages put together again."""

    call_id: str
    rollout_id: str
    attempt_id: str
    seq: int
    dialect: str
    base: str | None
    base_len: int
    prompt_ids: bytes
    response_ids: bytes
    logprobs: bytes
    versions: bytes
    finish_reason: str
    parent: str | None
    break_reason: str | None
    break_index: int | None
    delivered: bool
    untrainable: str | None
    reward: float | None
    requested: dict[str, Any]
    effective: dict[str, Any]
    started_at: float
    ended_at: float
    engine: str | None
    model: str
    fingerprint: bytes
    response: dict[str, Any] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    raw: dict[str, Any] | None = None
    """What the client sent."""
    raw_hashes: bytes = b""
    kind: str = CallKind.MAIN
    images: list[str] = field(default_factory=list)
    routed_experts: bytes | None = None
    routed_format: str | None = None
    ordinal: int = 0
    """Place in the order in which the attempt's calls were recorded, from 1."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Where sibling calls were put: their `seq`, and the ordinals of the first and the last."""

    seq: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The attempt that a key belongs to, and how that attempt stands."""

    kind: str
    rollout_id: str
    attempt_id: str
    phase: Phase
    has_grader: bool


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """What serving an attempt's calls takes."""

    rollout_id: str
    attempt_id: str
    phase: Phase
    is_train: bool
    has_grader: bool
    sampling: Sampling | None
    run: str | None
    capture: CaptureConfig = field(default_factory=CaptureConfig)


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt that a write ended, or removed together with its rollout."""

    rollout_id: str
    attempt_id: str
    requeued: bool
    deleted: bool = False
    controller_id: str | None = None
    """Who held it."""


@dataclass(frozen=True, slots=True)
class Late:
    """A write for a closed attempt: counted, not kept. `message` says so to the caller."""

    message: str


@dataclass(frozen=True, slots=True)
class Changed:
    """A rollout after a write, and the attempts that the write ended."""

    rollout: Rollout
    ended: list[Ended] = field(default_factory=list)

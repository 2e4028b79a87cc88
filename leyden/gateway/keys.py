"""Keys and what they may do. Random, stored as SHA-256, compared in constant time, never logged or forwarded."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from leyden.gateway.errors import Conflict, Forbidden
from leyden.gateway.lifecycle import Phase, name_attempt


class KeyKind(StrEnum):
    ADMIN = "admin"
    AGENT = "agent"
    GRADER = "grader"


class Action(StrEnum):
    """What a request wants to do. Everything that isn't listed here is the admin's."""

    MODEL_CALL = "make model calls"
    POST_EVENT = "post events"
    READ_TRAJECTORY = "read a trajectory"
    ADMIN = "use the admin API"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking. Attempt keys name their attempt."""

    kind: KeyKind
    rollout_id: str | None = None
    attempt_id: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The attempt that a request is about; `attempt_id` is None for routes about a whole rollout."""

    rollout_id: str
    attempt_id: str | None = None


def mint(kind: KeyKind) -> str:
    """A new key with 256 random bits. The prefix lets a person tell keys apart without showing the secret."""
    return f"ley-{kind}-{secrets.token_urlsafe(32)}"


def digest(key: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key.encode()).digest()


def same(a: bytes, b: bytes) -> bool:
    return hmac.compare_digest(a, b)


def key_from_headers(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The key of a request: `Authorization: Bearer KEY`, `x-api-key: KEY` or `x-goog-api-key: KEY`; not a blank one."""
    other: str | None = None
    for name, value in headers:
        name = name.lower()
        if name == b"authorization":
            scheme, _, rest = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer" and rest.strip():
                return rest.strip()
        elif name in (b"x-api-key", b"x-goog-api-key") and value.strip():
            other = value.decode("latin-1").strip()
    return other


def authorize(principal: Principal, action: Action, target: Target | None, phase: Phase | None, grader: bool) -> None:
    """Apply the rights table of docs/wire.md.

    Args:
        phase: of the attempt that the key belongs to.
        grader: whether that attempt's run has a grader.

    Raises:
        Forbidden: this key may never do that.
        Conflict: it might have, in an earlier or later phase.
    """
    if principal.kind is KeyKind.ADMIN:
        return
    who = f"the {principal.kind} key of {name_attempt(principal.rollout_id or '', principal.attempt_id or '')}"
    if target is not None and (
        target.rollout_id != principal.rollout_id
        or (target.attempt_id is not None and target.attempt_id != principal.attempt_id)
    ):
        raise Forbidden(f"{who} can't touch another rollout or attempt")
    if principal.kind is KeyKind.AGENT:
        if action is Action.POST_EVENT and grader:
            raise Forbidden(f"{who} can't post events: this run's rewards come from its grader")
        if action not in (Action.MODEL_CALL, Action.POST_EVENT):
            raise Forbidden(f"{who} can't {action}")
        if phase is not Phase.AGENT:
            raise Conflict(f"{who} is no longer valid: its agent phase has ended")
        return
    if action not in (Action.POST_EVENT, Action.READ_TRAJECTORY):
        raise Forbidden(f"{who} can't {action}")
    if action is Action.POST_EVENT and phase is Phase.AGENT:
        raise Conflict(f"{who} opens when its agent has ended and grading begins")
    if phase is Phase.ENDED:
        raise Conflict(f"{who} is no longer valid: the attempt has ended")

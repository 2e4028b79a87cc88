"""What the gateway refuses, with the HTTP status that says so. Every message is one sentence for the caller."""

from __future__ import annotations

from leyden.errors import LeydenError


class Refused(LeydenError):
    """A request that can't be served. `code` and `param` are filled in dialects that have such fields."""

    status = 400

    def __init__(
        self, message: str, *, status: int | None = None, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        if status is not None:
            self.status = status
        self.code = code
        self.param = param
        self.overflow: tuple[int, int] | None = None
        """Of a prompt that doesn't fit: its tokens, and how many there may be."""


class TooLong(Refused):
    """A prompt that leaves no room for an answer. Dialects say it in the words by which their clients know it."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} "
            "tokens. Please reduce the length of the messages.",
            code="context_length_exceeded",
            param="messages",
        )
        self.overflow = (tokens, limit)


class Unauthorized(Refused):
    status = 401


class Forbidden(Refused):
    status = 403


class NotFound(Refused):
    status = 404


class Conflict(Refused):
    status = 409


class Gone(Refused):
    """What the request is about was deleted while it ran."""

    status = 410


class Invalid(Refused):
    status = 422


class StoreUnavailable(Refused):
    """The store can't write just now (full disk, I/O error). Nothing of the refused request was kept."""

    status = 507


class EngineFailed(Refused):
    """The engine gave no usable answer."""

    status = 502

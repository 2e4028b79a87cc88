"""Errors meant for the person reading them: what happened, to what, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LeydenError(Exception):
    """A fault with a one-line explanation. The CLI prints it without a traceback and exits with `exit_code`."""

    exit_code = 1


class ConfigError(LeydenError):
    """The run file, an override or the command line can't be used."""

    exit_code = 2


class PreflightError(LeydenError):
    """Something the run needs isn't there: a model, a command, a port, memory, disk."""

    exit_code = 3


class RunError(LeydenError):
    """The run can't go on; everything recorded so far is kept."""

    exit_code = 4


class GatewayError(LeydenError):
    """The gateway answered a client with an error. `status` is the HTTP status, 0 when it couldn't be reached."""

    exit_code = 5

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`, or None when none is near."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return found[0] if found else None

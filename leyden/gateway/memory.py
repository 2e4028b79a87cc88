"""Recognising a list that begins like one of late, by comparison, so that what was made of its beginning is used again.

A conversation is sent whole with every call. Comparing two lists of parsed JSON takes a tenth of the time of hashing
one, so the cost of a turn is that of its new messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
LISTS = 4
"""Lists kept: a conversation, and the sub-agents that speak in between."""


@dataclass(frozen=True, slots=True)
class Known(Generic[T]):
    """A list of late and what was made of it. `tag` has to be equal too."""

    values: list[Any]
    tag: Any
    made: T


class Memory(Generic[T]):
    """The last few lists, the latest last. Entries don't change, so they may be used from any thread."""

    def __init__(self, size: int = LISTS) -> None:
        self._size = size
        self._known: list[Known[T]] = []

    def match(self, values: Sequence[Any], tag: Any = None) -> tuple[Known[T] | None, int]:
        """The list that `values` begins like for longest, and for how long."""
        best, most = None, 0
        for known in reversed(self._known):
            if known.tag != tag:
                continue
            if not known.values or not values or known.values[0] != values[0]:
                continue
            same = len(known.values)
            if known.values != values[:same]:
                pairs = zip(known.values, values, strict=False)
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(same, len(values)))
            if same > most:
                best, most = known, same
        return best, most

    def keep(self, values: list[Any], made: T, tag: Any = None) -> list[Any]:
        """Remember a list; it takes the place of one that it goes on from, else of the oldest.

        Returns an equal list that shares its elements with the one that it goes on from.
        """
        known, same = self.match(values, tag)
        if known is not None and same == len(known.values):
            self._known.remove(known)
            # The equal part of both is kept once.
            values, tag = [*known.values, *values[same:]], known.tag
        elif len(self._known) >= self._size:
            self._known.pop(0)
        self._known.append(Known(values, tag, made))
        return values

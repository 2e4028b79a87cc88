"""Tells controllers at once which attempts were taken away from them: cancelled, deleted, released, expired."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from leyden.gateway.store.records import Ended
from leyden.schema import AttemptRef

MAX_KEPT = 1000
"""Takings kept for one waiting heartbeat. What is left out is found by the next one, against the store."""


class Taken:
    """What was taken from one controller while its heartbeat waits."""

    def __init__(self) -> None:
        self._refs: list[AttemptRef] = []
        self._some = asyncio.Event()

    def add(self, ref: AttemptRef) -> None:
        if len(self._refs) < MAX_KEPT:
            self._refs.append(ref)
        self._some.set()

    async def wait(self, seconds: float) -> list[AttemptRef]:
        """Until something was taken, but not longer than `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._some.wait()
        except TimeoutError:
            pass
        return self._refs


class Takings:
    """Who waits, by controller. Without a waiting heartbeat nothing is kept: the next one asks the store."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[Taken]] = {}

    @contextmanager
    def watch(self, controller_id: str) -> Iterator[Taken]:
        """Note what is taken from now on, so that nothing falls between a look at the store and the wait."""
        taken = Taken()
        self._waiting.setdefault(controller_id, set()).add(taken)
        try:
            yield taken
        finally:
            others = self._waiting[controller_id]
            others.discard(taken)
            if not others:
                del self._waiting[controller_id]

    def add(self, controller_id: str, ref: AttemptRef) -> None:
        for taken in self._waiting.get(controller_id, ()):
            taken.add(ref)

    def note(self, ended: Sequence[Ended]) -> None:
        for item in ended:
            if item.controller_id is not None:
                self.add(item.controller_id, AttemptRef(rollout_id=item.rollout_id, attempt_id=item.attempt_id))

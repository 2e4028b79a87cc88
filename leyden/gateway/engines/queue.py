"""Whose turn it is at an engine: a limit on what it works on at once, and fairness between rollouts. No I/O."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairQueue:
    """`limit` slots. Rollouts that wait take turns, so that one with many calls doesn't hold up the others."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        return sum(len(q) for q in self._waiting.values())

    @asynccontextmanager
    async def slot(self, owner: str, seconds: float) -> AsyncIterator[None]:
        """Hold a slot for `owner`, waiting for one for at most `seconds`.

        Raises:
            TimeoutError: there was none in that time.
        """
        if self.running < self.limit and not self._waiting:
            self.running += 1
        else:
            async with asyncio.timeout(seconds):
                await self._wait(owner)
        try:
            yield
        finally:
            self.running -= 1
            self._next()

    def resize(self, limit: int) -> None:
        self.limit = limit
        self._next()

    async def _wait(self, owner: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.running -= 1  # The slot was given a moment before the caller left.
                self._next()
            else:
                self._drop(owner, turn)
            raise

    def _drop(self, owner: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(owner)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[owner]

    def _next(self) -> None:
        while self.running < self.limit and self._waiting:
            owner, line = self._waiting.popitem(last=False)
            turn = line.popleft()
            if line:
                self._waiting[owner] = line  # To the end: the others come first.
            if not turn.done():
                self.running += 1
                turn.set_result(None)

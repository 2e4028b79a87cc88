"""Waking those who wait for something to change, without polling."""

from __future__ import annotations

import asyncio
import time


class Signal:
    """Wakes all waiters at each `notify`. Take a `ticket` before looking, then `wait` on it: no change is missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        return self._event

    def notify(self) -> None:
        old, self._event = self._event, asyncio.Event()
        old.set()


async def wait_until(ticket: asyncio.Event, deadline: float) -> bool:
    """Wait for a signal's ticket until `deadline` (monotonic). False when time ran out first."""
    left = deadline - time.monotonic()
    if left <= 0:
        return False
    try:
        async with asyncio.timeout(left):
            await ticket.wait()
    except TimeoutError:
        return False
    return True

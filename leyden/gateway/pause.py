"""Holding model calls back, for as long as an owner keeps its lease."""

from __future__ import annotations

import time

from leyden.gateway.errors import Conflict, StoreUnavailable
from leyden.gateway.signals import Signal, wait_until
from leyden.gateway.store.base import Store
from leyden.schema import PauseRequest, PauseState

_META = "pause"


class Pause:
    """The gate in front of the engines. Held calls wait; they never see an error."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._request: PauseRequest | None = None
        self._expires = 0.0
        self._changed = Signal()
        self.inflight = 0
        """Calls that an engine is working on."""

    async def load(self) -> None:
        """Take up what the store says: a pause from before a restart, or what another gateway was told."""
        saved = await self._store.get_meta(_META)
        self._request = None
        if saved is not None and saved["expires"] > time.time():
            self._request = PauseRequest.model_validate(saved["request"])
            self._expires = saved["expires"]
        self._changed.notify()

    def _active(self) -> PauseRequest | None:
        if self._request is not None and self._expires <= time.time():
            self._request = None
        return self._request

    async def pause(self, request: PauseRequest) -> PauseState:
        """Begin or renew.

        Raises:
            Conflict: somebody else holds the pause.
            StoreUnavailable: nothing is paused that wasn't before.
        """
        current = self._active()
        if current is not None and current.owner != request.owner:
            raise Conflict(f"calls are paused by {current.owner}; {request.owner} can't take that over")
        before = current, self._expires
        self._request, self._expires = request, time.time() + request.lease_seconds
        self._changed.notify()
        try:
            await self._store.set_meta(_META, {"request": request.model_dump(), "expires": self._expires})
        except StoreUnavailable:
            # The owner is told that it failed, so it may never resume.
            self._request, self._expires = before
            self._changed.notify()
            raise
        return self.state()

    async def resume(self, owner: str | None) -> PauseState:
        """End the pause. Naming no owner ends anybody's.

        Raises:
            Conflict: `owner` doesn't hold it.
        """
        current = self._active()
        if current is not None and owner is not None and current.owner != owner:
            raise Conflict(f"calls are paused by {current.owner}; {owner} can't resume them")
        self._request = None
        self._changed.notify()
        await self._store.set_meta(_META, None)
        return self.state()

    def state(self) -> PauseState:
        current = self._active()
        return PauseState(
            paused=current is not None,
            owner=current.owner if current else None,
            lease_expires_at=self._expires if current else None,
            retry_after_seconds=current.retry_after_seconds if current else 5,
            reason=current.reason if current else None,
            inflight=self.inflight,
        )

    def active(self) -> bool:
        """Whether calls are held back now."""
        return self._active() is not None

    async def passed(self) -> None:
        """Wait until calls may go to engines. Count `inflight` up before anything else is awaited."""
        while self._active() is not None:
            ticket = self._changed.ticket()
            await wait_until(ticket, time.monotonic() + self._expires - time.time())

"""Sending an answer: all of it or nothing, with signs of life until it is there.

Until an answer is recorded the client gets nothing that means anything in its dialect: in a stream typed no-op events,
in a JSON answer whitespace. Neither begins before the first keep-alive interval has passed, so that quick errors keep
their status. Later errors are told inside the body, since the status has been sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from leyden.gateway.attempts import Call
from leyden.gateway.dialects.base import Dialect, ModelRequest
from leyden.gateway.errors import Refused

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

QUICK_SECONDS = 0.25
"""An answer that is there so soon is delivered without watching the connection meanwhile."""
PIECE = 64 * 1024
"""Bytes handed over at a time: the transport then makes us wait for slow clients, and a lost one is noticed."""


class ClientGone(Exception):
    """The client closed the connection before it had the whole answer."""


async def send_json(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """A complete JSON answer."""
    start = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Delivery:
    """Delivers one call's answer over one connection."""

    def __init__(
        self, call: Call, dialect: Dialect, request: ModelRequest, receive: Receive, send: Send, keepalive: float
    ) -> None:
        self._call = call
        self._dialect = dialect
        self._request = request
        self._receive = receive
        self._send = send
        self._keepalive = keepalive
        self._stream = dialect.stream(call.call_id, call.created, request) if request.stream else None
        self._begun = False
        self._watch: asyncio.Task[None] | None = None
        """Sees the client leave; made only for answers that take a while."""

    async def run(self) -> bool:
        """Deliver. True when the client got an answer, False when it got an error.

        Raises:
            ClientGone: it got neither, or not all of it.
            asyncio.CancelledError: the call was cancelled; `fail` can still tell the client why.
        """
        try:
            await self._wait()
            try:
                answer = self._call.task.result()
            except Refused as e:
                await self.fail(e)
                return False
            if self._stream is not None:
                body = b"".join(self._stream.answer(answer))
            else:
                body = self._dialect.json_answer(answer, self._request)
            await self._finish(body)
            return True
        finally:
            if self._watch is not None:
                self._watch.cancel()

    async def _wait(self) -> None:
        """Until the call is done, with signs of life.

        Raises:
            ClientGone: the client didn't wait so long.
        """
        begun = time.monotonic()
        await asyncio.wait((self._call.task,), timeout=min(QUICK_SECONDS, self._keepalive))
        while not self._call.task.done():
            if self._watch is None:
                self._watch = asyncio.create_task(_disconnected(self._receive))
            left = self._keepalive - (time.monotonic() - begun)
            if left <= 0:
                await self._sign_of_life()
                begun = time.monotonic()
                continue
            await asyncio.wait((self._call.task, self._watch), timeout=left, return_when="FIRST_COMPLETED")
            if self._watch.done():
                raise ClientGone
        # A connection that was closed a moment ago is known after one turn of the loop.
        await asyncio.sleep(0)
        if self._is_gone():
            raise ClientGone

    def _is_gone(self) -> bool:
        """Whether the client has closed its connection, as far as is known now."""
        if self._watch is not None:
            return self._watch.done()
        # One step of `receive` tells without a task of its own: it ends at once when the connection is closed.
        receiving = self._receive()
        if not isinstance(receiving, Coroutine):
            return False
        try:
            receiving.send(None)
        except StopIteration as e:
            return e.value["type"] == "http.disconnect"
        finally:
            receiving.close()
        return False

    async def fail(self, error: Refused) -> None:
        """Tell the client about an error, with its status if nothing was sent yet."""
        if not self._begun:
            await send_json(self._send, error.status, self._dialect.error(error))
            return
        body = self._stream.error(error) if self._stream is not None else self._dialect.error(error)
        await self._send({"type": "http.response.body", "body": body})

    async def _begin(self, length: int | None = None) -> None:
        self._begun = True
        kind = b"application/json" if self._stream is None else self._stream.content_type
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _sign_of_life(self) -> None:
        if not self._begun:
            await self._begin()
        body = b"\n" if self._stream is None else self._stream.keepalive()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _finish(self, body: bytes) -> None:
        if not self._begun:
            await self._begin(len(body) if self._stream is None else None)
        if len(body) > PIECE and self._watch is None:
            self._watch = asyncio.create_task(_disconnected(self._receive))
        for start in range(0, len(body), PIECE):
            piece = body[start : start + PIECE]
            more = start + PIECE < len(body)
            try:
                await self._send({"type": "http.response.body", "body": piece, "more_body": more})
            except OSError as e:
                raise ClientGone from e
            # Asked at once: after the last piece the server reports the finished exchange as a disconnect.
            if self._watch is not None and self._watch.done():
                raise ClientGone

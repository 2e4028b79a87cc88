"""Sending an answer: all of it or nothing, with signs of life until it is there.

Until an answer is recorded the client gets nothing that means anything in its dialect: in a stream typed no-op events,
in a JSON answer whitespace. Neither begins before the first keep-alive interval has passed, so that quick errors keep
their status. Later errors are told inside the body, since the status has been sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from leyden.gateway.attempts import Call
from leyden.gateway.dialects.base import Dialect, ModelRequest
from leyden.gateway.errors import Refused

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

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

    async def run(self) -> bool:
        """Deliver. True when the client got an answer, False when it got an error.

        Raises:
            ClientGone: it got neither, or not all of it.
            asyncio.CancelledError: the call was cancelled; `fail` can still tell the client why.
        """
        gone = asyncio.create_task(_disconnected(self._receive))
        try:
            while True:
                await asyncio.wait({self._call.task, gone}, timeout=self._keepalive, return_when="FIRST_COMPLETED")
                if gone.done():
                    raise ClientGone
                if self._call.task.done():
                    break
                await self._sign_of_life()
            # A connection that was closed a moment ago is known after one turn of the loop.
            await asyncio.sleep(0)
            if gone.done():
                raise ClientGone
            try:
                answer = self._call.task.result()
            except Refused as e:
                await self.fail(e)
                return False
            if self._stream is not None:
                body = b"".join(self._stream.answer(answer))
            else:
                body = self._dialect.json_answer(answer, self._request)
            await self._finish(body, gone)
            return True
        finally:
            gone.cancel()

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

    async def _finish(self, body: bytes, gone: asyncio.Task[None]) -> None:
        if not self._begun:
            await self._begin(len(body) if self._stream is None else None)
        for start in range(0, len(body), PIECE):
            piece = body[start : start + PIECE]
            more = start + PIECE < len(body)
            try:
                await self._send({"type": "http.response.body", "body": piece, "more_body": more})
            except OSError as e:
                raise ClientGone from e
            # Asked at once: after the last piece the server reports the finished exchange as a disconnect.
            if gone.done():
                raise ClientGone

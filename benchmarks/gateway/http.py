"""As little of HTTP/1.1 as two programs of ours need to not be what is measured."""

from __future__ import annotations

import asyncio
from typing import cast


class Message:
    """Takes bytes until one message (head and Content-Length body) is whole."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._body_at = -1
        self._end = -1

    def feed(self, data: bytes) -> tuple[bytes, bytes] | None:
        """The head and the body, once they are there; what comes after stays for the next message."""
        self._data += data
        if self._end < 0:
            found = self._data.find(b"\r\n\r\n")
            if found < 0:
                return None
            head = bytes(self._data[:found]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            self._body_at, self._end = found + 4, found + 4 + length
        if len(self._data) < self._end:
            return None
        head, body = bytes(self._data[: self._body_at]), bytes(self._data[self._body_at : self._end])
        del self._data[: self._end]
        self._body_at = self._end = -1
        return head, body


class Connection(asyncio.Protocol):
    """One keep-alive connection that sends a request and waits for its answer."""

    def __init__(self) -> None:
        self._message = Message()
        self._answer: asyncio.Future[tuple[bytes, bytes]] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        whole = self._message.feed(data)
        if whole is not None and self._answer is not None and not self._answer.done():
            self._answer.set_result(whole)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the server closed the connection"))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        assert self.transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        head, body = await self._answer
        return int(head[9:12]), body

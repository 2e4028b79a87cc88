"""HTTP/1.1 to engines: JSON posted over connections that stay open. On httptools, which the server side uses too.

A general client (aiohttp) takes 76 µs of CPU for an exchange, this 20 µs; see docs/decisions.md. What it doesn't do, no
engine needs: redirects, cookies, proxies. It asks for no compression, and undoes it where it comes all the same.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import ssl
import zlib
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import httptools

CONNECT_SECONDS = 10.0
MAX_IDLE = 256
"""Open connections kept per engine for the next calls."""
MAX_ANSWER = 1 << 30
"""Bytes. A long answer with its log-probs and routed experts has millions; one that goes on for ever is a fault."""

Stage = Literal["before", "within"]


class Broken(Exception):
    """The exchange failed: `before` any byte of an answer, or `within` it."""

    def __init__(self, why: str, stage: Stage) -> None:
        super().__init__(why)
        self.stage: Stage = stage


@dataclass(frozen=True, slots=True)
class _Server:
    host: str
    port: int
    tls: bool
    head: bytes
    """The part of every request's head that is the same."""
    prefix: str
    """Path of the endpoint itself."""


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time. Implements httptools' callbacks."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._begun = False
        self._framed = False
        """Whether the answer's head says where its body ends."""
        self._encoding = b""
        self.status = 0
        self.reusable = False

    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: tuple[bytes, ...]) -> tuple[int, bytes]:
        """Send a request and wait for its answer: status and body.

        Raises:
            Broken: there is none.
        """
        if not self.open() or self._transport is None:
            raise Broken("the connection was closed", "before")
        self._pieces, self._size, self.status = [], 0, 0
        self._begun = self._framed = self.reusable = False
        self._encoding = b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.writelines(request)
        try:
            await self._done
        finally:
            self._done = None
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        return self.status, _decoded(body, self._encoding) if self._encoding else body

    # -- asyncio -------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._done is None:
            self.close()  # Nothing was asked.
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(f"what it sent isn't HTTP: {e}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self.status >= 200 and not self._framed:
            self.on_message_complete()  # An answer without a length ends with its connection.
        self._fail(f"it closed the connection{f': {exc}' if exc else ''}")

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(Broken(why, "within" if self._begun else "before"))

    # -- httptools -----------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if 14 <= len(name) <= 17:
            name = name.lower()
            if name in (b"content-length", b"transfer-encoding"):
                self._framed = True
            elif name == b"content-encoding" and value.lower() != b"identity":
                self._encoding = value.lower()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MAX_ANSWER:
            self._fail(f"its answer is longer than {MAX_ANSWER // 2**20} MiB")
            self.close()
            return
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self.status < 200:
            self.status = 0  # The answer itself is still to come.
            return
        self.reusable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def _decoded(body: bytes, encoding: bytes) -> bytes:
    """A body that was compressed although nothing said that it might be; proxies before engines do so.

    Raises:
        Broken: it can't be taken apart.
    """
    if encoding not in (b"gzip", b"x-gzip", b"deflate"):
        raise Broken(f"its answer is encoded as {encoding.decode('latin-1')}, which nobody asked for", "within")
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        out = unpacker.decompress(body, MAX_ANSWER)
    except zlib.error as e:
        raise Broken(f"its answer isn't the {encoding.decode()} that it says: {e}", "within") from None
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise Broken(f"its {encoding.decode()} answer is cut short, or longer than {MAX_ANSWER // 2**20} MiB", "within")
    return out


class HttpClient:
    """Posts JSON. `headers` go with every request."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers
        self._servers: dict[str, _Server] = {}
        self._idle: dict[str, deque[_Connection]] = {}

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def keep(self, bases: Collection[str]) -> None:
        """Close what is open to servers other than these."""
        for base in self._servers.keys() - bases:
            del self._servers[base]
            for connection in self._idle.pop(base, ()):
                connection.close()

    async def post(self, base: str, path: str, data: bytes, seconds: float) -> tuple[int, bytes]:
        """Status and body of the answer to `data`; see `_ask`."""
        return await self._ask(b"POST", base, path, data, seconds)

    async def get(self, base: str, path: str, seconds: float) -> tuple[int, bytes]:
        """Status and body of what is at `path`; see `_ask`."""
        return await self._ask(b"GET", base, path, b"", seconds)

    async def _ask(self, method: bytes, base: str, path: str, data: bytes, seconds: float) -> tuple[int, bytes]:
        """Status and body of the answer. Cancelling closes the connection, which tells the engine to stop.

        Raises:
            TimeoutError: there was none within `seconds`.
            Broken: the connection failed, or the answer is in no form that can be read.
            ValueError: `base` isn't a URL.
        """
        server = self._servers.get(base)
        if server is None:
            server = self._servers[base] = _server(base, self._headers)
        head = b"%s %s HTTP/1.1\r\n%scontent-length: %d\r\n\r\n" % (
            method,
            (server.prefix + path).encode(),
            server.head,
            len(data),
        )
        idle = self._idle.setdefault(base, deque())
        connection = None
        deadline = _Deadline(seconds)
        try:
            while True:
                known = connection = _take(idle)
                try:
                    if connection is None:
                        connection = await _connect(server, min(seconds, CONNECT_SECONDS))
                    answer = await connection.exchange((head, data))
                    break
                except Broken as e:
                    # A server may close a connection that it has kept open for long just as it is used again.
                    if known is None or e.stage == "within":
                        raise
        except BaseException as e:
            if connection is not None:
                connection.close()
            if isinstance(e, asyncio.CancelledError) and deadline.passed():
                raise TimeoutError from None
            raise
        finally:
            deadline.end()
        if connection.reusable and self._idle.get(base) is idle and len(idle) < MAX_IDLE:
            idle.append(connection)
        else:
            connection.close()
        return answer


class _Deadline:
    """Cancels the task that made it after `seconds`: asyncio.timeout in fewer steps."""

    def __init__(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._before = task.cancelling()
        self._passed = False
        self._timer = asyncio.get_running_loop().call_later(max(seconds, 0), self._cancel)

    def _cancel(self) -> None:
        self._passed = True
        self._task.cancel()

    def passed(self) -> bool:
        """Whether the deadline, and nothing else, cancelled the task; takes that cancellation back."""
        return self._passed and self._task.uncancel() <= self._before

    def end(self) -> None:
        self._timer.cancel()


def _take(idle: deque[_Connection]) -> _Connection | None:
    """The connection that was used last, so that those beyond need grow old."""
    while idle:
        connection = idle.pop()
        if connection.open():
            return connection
    return None


async def _connect(server: _Server, seconds: float) -> _Connection:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            _, connection = await loop.create_connection(
                _Connection, server.host, server.port, ssl=_tls() if server.tls else None
            )
    except TimeoutError:
        raise Broken(f"no connection within {seconds:.3g} s", "before") from None
    except (OSError, ssl.SSLError) as e:
        raise Broken(str(e) or type(e).__name__, "before") from e
    return connection


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _server(base: str, headers: dict[str, str]) -> _Server:
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{base!r} isn't an http:// or https:// URL")
    own = dict(headers)
    if parts.username is not None:
        user = f"{parts.username}:{parts.password or ''}".encode()
        own["authorization"] = f"Basic {base64.b64encode(user).decode()}"
    own["host"] = parts.netloc.rpartition("@")[2]
    lines = "".join(f"{name}: {value}\r\n" for name, value in own.items())
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return _Server(parts.hostname, port, parts.scheme == "https", lines.encode(), parts.path.rstrip("/"))

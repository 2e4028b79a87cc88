"""The HTTP client to engines, against a server that answers byte by byte as the test says."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from leyden.gateway.engines.http import Broken, HttpClient

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Server:
    """Sends `answers` one after the other; None closes the connection instead."""

    def __init__(self, answers: list[bytes | None], *, close: bool = False, one_by_one: bool = False) -> None:
        self.answers, self.close, self.one_by_one = list(answers), close, one_by_one
        self.requests: list[bytes] = []
        self.connections = 0
        self.asked, self.gone = asyncio.Event(), asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"content-length"))
                self.requests.append(head + await reader.readexactly(length))
                self.asked.set()
                answer = self.answers.pop(0) if self.answers else b""
                if answer is None:
                    return
                for piece in [answer[i : i + 1] for i in range(len(answer))] if self.one_by_one else [answer]:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()


@asynccontextmanager
async def talking(
    *answers: bytes | None, close: bool = False, one_by_one: bool = False
) -> AsyncIterator[tuple[HttpClient, Server]]:
    server = Server(list(answers), close=close, one_by_one=one_by_one)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    client = HttpClient({"authorization": "Bearer engine-key"})
    try:
        yield client, server
    finally:
        client.close()
        listener.close()


async def test_a_request_carries_path_headers_and_body() -> None:
    async with talking(OK) as (client, server):
        assert await client.post(server.url, "/completions", b'{"prompt":[1]}', 5) == (200, b"{}")
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/completions HTTP/1.1"
    assert b"authorization: Bearer engine-key" in lines and b"content-length: 14" in lines
    assert f"host: {server.url[7:-3]}".encode() in lines and body == b'{"prompt":[1]}'


async def test_calls_one_after_another_share_a_connection() -> None:
    async with talking(OK, OK, OK) as (client, server):
        for _ in range(3):
            await client.post(server.url, "/x", b"{}", 5)
        assert server.connections == 1


@pytest.mark.parametrize(
    ("answer", "close", "expected"),
    [
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
            False,
            (200, b"abcde"),
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, False, (200, b"{}")),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nwait", False, (503, b"wait")),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", True, (200, b"until the end")),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, (204, b"")),
    ],
    ids=["chunked", "after 100", "an error status", "no length", "no body"],
)
async def test_answers_are_read_in_every_framing(answer: bytes, close: bool, expected: tuple[int, bytes]) -> None:
    async with talking(answer, close=close) as (client, server):
        assert await client.post(server.url, "/x", b"{}", 5) == expected


PLAIN = '{"text": "你🌍"}'.encode()


def coded(encoding: str, body: bytes) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-encoding: {encoding}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "answer",
    [
        coded("gzip", gzip.compress(PLAIN, mtime=0)),
        coded("GZIP", gzip.compress(PLAIN, mtime=0)),
        coded("deflate", zlib.compress(PLAIN)),
        coded("identity", PLAIN),
    ],
    ids=["gzip", "in capitals", "deflate", "identity"],
)
async def test_compression_that_nobody_asked_for_is_undone(answer: bytes) -> None:
    async with talking(answer, OK) as (client, server):
        assert await client.post(server.url, "/x", b"{}", 5) == (200, PLAIN)
        assert await client.post(server.url, "/x", b"{}", 5) == (200, b"{}")
        assert server.connections == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (coded("br", b"\x0b\x02\x80{}\x03"), "encoded as br"),
        (coded("gzip", b"{}"), "isn't the gzip"),
        (coded("gzip", gzip.compress(PLAIN, mtime=0)[:-9]), "cut short"),
    ],
)
async def test_an_encoding_that_cant_be_undone_is_named(answer: bytes, words: str) -> None:
    async with talking(answer) as (client, server):
        with pytest.raises(Broken, match=words) as broken:
            await client.post(server.url, "/x", b"{}", 5)
        assert broken.value.stage == "within"


async def test_an_answer_may_come_byte_by_byte() -> None:
    whole = f"HTTP/1.1 200 OK\r\ncontent-length: {len(PLAIN)}\r\n\r\n".encode() + PLAIN
    async with talking(whole, one_by_one=True) as (client, server):
        assert await client.post(server.url, "/x", b"{}", 5) == (200, PLAIN)


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
async def test_silence_times_out_however_far_the_answer_came(begun: bytes) -> None:
    async with talking(begun) as (client, server):
        with pytest.raises(TimeoutError):
            await client.post(server.url, "/x", b"{}", 0.05)
        await asyncio.wait_for(server.gone.wait(), 5)


async def test_what_is_got_carries_no_body() -> None:
    async with talking(OK) as (client, server):
        assert await client.get(server.url, "/models", 5) == (200, b"{}")
    assert server.requests[0].startswith(b"GET /v1/models HTTP/1.1\r\n") and server.requests[0].endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "stage"),
    [
        (None, "before"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "within"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nhalf", "within"),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "within"),
        (b"\x16\x03\x01 this isn't HTTP\r\n\r\n", "within"),
    ],
    ids=["closed at once", "a short body", "a short chunk", "half a head", "not HTTP"],
)
async def test_a_broken_answer_says_how_far_it_came(answer: bytes | None, stage: str) -> None:
    async with talking(answer, close=True) as (client, server):
        with pytest.raises(Broken) as broken:
            await client.post(server.url, "/x", b"{}", 5)
        assert broken.value.stage == stage
        assert server.connections == 1


async def test_a_kept_connection_that_the_server_closed_is_replaced_without_a_word() -> None:
    async with talking(OK, None, OK) as (client, server):
        await client.post(server.url, "/x", b"1", 5)
        assert await client.post(server.url, "/x", b"22", 5) == (200, b"{}")
        assert server.connections == 2 and server.requests[-1].endswith(b"22")


async def test_connection_close_is_obeyed() -> None:
    last = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
    async with talking(last, OK) as (client, server):
        await client.post(server.url, "/x", b"{}", 5)
        await client.post(server.url, "/x", b"{}", 5)
        assert server.connections == 2


async def test_a_silent_server_times_out_and_is_hung_up_on() -> None:
    async with talking(b"") as (client, server):
        with pytest.raises(TimeoutError):
            await client.post(server.url, "/x", b"{}", 0.05)
        await asyncio.wait_for(server.gone.wait(), 5)


async def test_cancelling_hangs_up() -> None:
    async with talking(b"") as (client, server):
        asking = asyncio.create_task(client.post(server.url, "/x", b"{}", 60))
        await asyncio.wait_for(server.asked.wait(), 5)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(server.gone.wait(), 5)


async def test_nobody_there_and_no_url() -> None:
    client = HttpClient({})
    with pytest.raises(Broken) as broken:
        await client.post("http://127.0.0.1:9", "/x", b"{}", 5)
    assert broken.value.stage == "before"
    with pytest.raises(ValueError, match="isn't an http"):
        await client.post("engine:8000", "/x", b"{}", 5)


async def test_engines_that_are_not_used_any_more_are_let_go() -> None:
    async with talking(OK, OK) as (client, server):
        await client.post(server.url, "/x", b"{}", 5)
        client.keep({server.url})
        assert not server.gone.is_set()
        client.keep(())
        await asyncio.wait_for(server.gone.wait(), 5)
        assert await client.post(server.url, "/x", b"{}", 5) == (200, b"{}")


async def test_credentials_in_the_url_are_sent_as_such() -> None:
    async with talking(OK) as (client, server):
        await client.post(server.url.replace("://", "://me:secret@"), "/x", b"{}", 5)
        assert b"authorization: Basic bWU6c2VjcmV0\r\n" in server.requests[0]

"""The one way out of a sandbox: connections to the gateway's address inside it are carried to the gateway.

A sandbox has a network of its own with nothing in it. Before the agent starts, a socket that listens at the gateway's
host and port *in that network* is brought out here, and whatever connects to it is joined to the real gateway. So the
agent's base URL stays the same, nothing runs inside for it, and no other address exists there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from leyden.controller.sandbox import SandboxError

CONNECTIONS = 64
"""Open at once for one sandbox. More wait to be accepted: the controller's files aren't the agent's to use up."""

SETUP_SECONDS = 20.0
CONNECT_SECONDS = 10.0
_CHUNK = 256 * 1024
_HELPER = Path(__file__).with_name("enter_network.py")

T = TypeVar("T")


def gateway_address(url: str) -> tuple[str, int]:
    """Host and port of the gateway."""
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)


def inner_host(host: str) -> str:
    """The address to listen at inside, for a client that is told `host`. Names lead to 127.0.0.1 there.

    Raises:
        SandboxError: an address that a sandbox's network can't be given.
    """
    if ":" in host:
        if host != "::1":
            raise SandboxError(f"the gateway's address {host} can't be had in a sandbox: give it by name or as IPv4")
        return host
    return host if re.fullmatch(r"[\d.]+", host) else "127.0.0.1"


Start = Callable[[list[str], Sequence[int]], subprocess.Popen[bytes]]
"""Starts a command as a process of the step, with files to pass on."""


class Enclosure:
    """One step's sandbox while it runs: bwrap held back until its network is there, then the bridge."""

    def __init__(self, gateway_url: str) -> None:
        self._gate = Gate()
        self._bridge = Bridge(*gateway_address(gateway_url))

    async def start(self, bwrap: Callable[[list[str]], list[str]], start: Start) -> subprocess.Popen[bytes]:
        """Start bwrap, whose command is made by `bwrap` from options to add, and let its program run.

        Raises:
            SandboxError: the sandbox can't be made; the log may say more.
            OSError: bwrap or the helper can't be started.
        """
        process = start(bwrap(self._gate.options), self._gate.pass_fds)
        self._gate.started()
        await self._bridge.listen(await self._gate.process(), start)
        self._gate.open()
        return process

    def close(self) -> None:
        self._bridge.close()
        self._gate.close()


class Gate:
    """Keeps a sandbox from running its program until its network is there. Options for bwrap in `options`."""

    def __init__(self) -> None:
        self._info, self._info_write = os.pipe()
        self._block_read, self._block = os.pipe()
        self.pass_fds = (self._info_write, self._block_read)
        self.options = ["--info-fd", str(self._info_write), "--block-fd", str(self._block_read)]
        self._open = {self._info, self._info_write, self._block_read, self._block}

    def started(self) -> None:
        """bwrap has its ends."""
        self._close(self._info_write)
        self._close(self._block_read)

    async def process(self) -> int:
        """The sandbox's first process, once there is one.

        Raises:
            SandboxError: bwrap ended, or took too long.
        """
        said = b""
        os.set_blocking(self._info, False)
        while True:
            part = await _when_readable(self._info, lambda: os.read(self._info, 4096))
            said += part
            try:
                return int(json.loads(said)["child-pid"])
            except ValueError:
                if not part:
                    raise SandboxError("bwrap ended before there was a sandbox") from None

    def open(self) -> None:
        """Let the program run."""
        try:
            os.write(self._block, b".")
        except BrokenPipeError:
            pass

    def close(self) -> None:
        for fd in list(self._open):
            self._close(fd)

    def _close(self, fd: int) -> None:
        if fd in self._open:
            self._open.discard(fd)
            os.close(fd)


class Bridge:
    """Carries one sandbox's connections to the gateway at `host`:`port`."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._slots = asyncio.Semaphore(CONNECTIONS)
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, pid: int, start: Start) -> None:
        """Listen in the network of process `pid`, by a helper that is started there.

        Raises:
            SandboxError: the helper failed.
        """
        ours, its = socket.socketpair()
        try:
            with its:
                command = [sys.executable, "-I", "-S", str(_HELPER), str(pid), inner_host(self._host), str(self._port)]
                helper = start([*command, str(its.fileno())], (its.fileno(),))
            ours.setblocking(False)
            _, fds, _, _ = await _when_readable(ours.fileno(), lambda: socket.recv_fds(ours, 1, 1))
        finally:
            ours.close()
        try:
            # It ends right after its answer, or has ended without one.
            helper.wait(1)
        except subprocess.TimeoutExpired:
            helper.kill()
        if not fds:
            raise SandboxError("the gateway can't be reached from it")
        self._listener = socket.socket(fileno=fds[0])
        self._listener.setblocking(False)
        self._own(asyncio.create_task(self._accept(self._listener)))

    def close(self) -> None:
        """Cut all connections."""
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                # Out of files, or a client that left already.
                self._slots.release()
                await asyncio.sleep(0.05)
                continue
            self._own(asyncio.create_task(self._carry(connection)))

    async def _carry(self, connection: socket.socket) -> None:
        writers: list[asyncio.StreamWriter] = []
        try:
            inside, to_inside = await asyncio.open_connection(sock=connection)
            writers.append(to_inside)
            async with asyncio.timeout(CONNECT_SECONDS):
                outside, to_outside = await asyncio.open_connection(self._host, self._port)
            writers.append(to_outside)
            await asyncio.gather(_pump(inside, to_outside), _pump(outside, to_inside))
        except (OSError, TimeoutError):
            pass
        finally:
            for writer in writers:
                writer.transport.abort()
            connection.close()
            self._slots.release()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()


async def _when_readable(fd: int, read: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        async with asyncio.timeout(SETUP_SECONDS):
            await ready
        return read()
    except TimeoutError as e:
        raise SandboxError(f"it wasn't ready within {SETUP_SECONDS:g} s") from e
    finally:
        loop.remove_reader(fd)

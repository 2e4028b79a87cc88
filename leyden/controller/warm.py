"""Warm start of Python agents: from a fork server that has done their imports (see fork_server.py).

A server belongs to an interpreter, a list of modules and the part of the environment that all agents share: what they
read while being imported. Whatever doesn't fit, or can't be forked safely, starts cold, and a line in the log says why.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import orjson
import structlog

from leyden.controller.commands import Command
from leyden.controller.processes import Forked, ProcessTable, Tree, spawn

MAX_SERVERS = 4
MAX_STARTS = 3
"""Starts of one server; when it ended that often, its agents start cold."""
IMPORT_SECONDS = 120.0
ANSWER_SECONDS = 20.0

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Program:
    """What a command has Python run. `argv` is sys.argv as the interpreter would set it."""

    interpreter: str
    kind: Literal["file", "code", "module"]
    what: str
    argv: tuple[str, ...]


def python_program(command: Command) -> Program | None:
    """The program of a `python FILE …`, `python -c CODE …` or `python -m MODULE …`. None for all else."""
    if command.shell or len(command.argv) < 2 or not _PYTHON.fullmatch(Path(command.argv[0]).name):
        return None
    interpreter, first, *rest = command.argv
    if first in ("-c", "-m"):
        if not rest:
            return None
        return Program(interpreter, "code" if first == "-c" else "module", rest[0], (first, *rest[1:]))
    return None if first.startswith("-") else Program(interpreter, "file", first, (first, *rest))


class _Refused(Exception):
    """Agents can't start from this server. The text says why."""


class _Server:
    """One fork server. Ended with the controller."""

    def __init__(self, interpreter: str, modules: tuple[str, ...], env: Mapping[str, str], table: ProcessTable) -> None:
        self._command = [interpreter, str(Path(__file__).with_name("fork_server.py"))]
        self._modules = modules
        self._env = dict(env)
        self._table = table
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._starts = 0
        self.refused: str | None = None

    async def fork(
        self, tree: Tree, program: Program, env: dict[str, str], cwd: Path, fds: list[int], enter: Callable[[int], None]
    ) -> Forked:
        """An agent of `tree`. `enter` is called with its process id before it runs.

        Raises:
            _Refused: it has to start cold.
        """
        async with self._turn:
            if self.refused is not None:
                raise _Refused(self.refused)
            wanted = {"kind": program.kind, "what": program.what, "argv": program.argv, "env": env, "cwd": str(cwd)}
            try:
                if self._channel is None:
                    await self._start()
                channel, loop = self._channel, asyncio.get_running_loop()
                assert channel is not None
                with _in_memory(orjson.dumps(wanted)) as file:
                    socket.send_fds(channel, [b"fork"], [*fds, file.fileno()])
                async with asyncio.timeout(ANSWER_SECONDS):
                    agent = Forked(int(await _receive(channel)))
                self._table.adopt(tree, agent)
                try:
                    enter(agent.pid)
                except OSError:
                    agent.kill()
                    raise
                finally:
                    await loop.sock_sendall(channel, b"go")
                return agent
            except (TimeoutError, EOFError, ConnectionError, BlockingIOError) as e:
                self.close()
                raise _Refused(f"the fork server didn't answer ({type(e).__name__})") from None
            except (_Refused, asyncio.CancelledError):
                self.close()
                raise

    async def _start(self) -> None:
        if self._starts >= MAX_STARTS:
            self.refused = f"the fork server ended {MAX_STARTS} times"
            raise _Refused(self.refused)
        self._starts += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            argv = [*self._command, str(theirs.fileno()), *self._modules]
            self._process = spawn(
                argv, env=self._env, cwd="/", stdout=2, stderr=2, pass_fds=[theirs.fileno()], subreaper=False
            )
        self._table.exempt(self._process.pid)
        self._channel = ours
        async with asyncio.timeout(IMPORT_SECONDS):
            said = await _receive(ours)
        if said != b"ok":
            self.refused = said.decode("utf-8", "replace")
            raise _Refused(self.refused)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._table.unexempt(self._process.pid)
            self._process = None


async def _receive(channel: socket.socket) -> bytes:
    said = await asyncio.get_running_loop().sock_recv(channel, 4096)
    if not said:
        raise EOFError
    return said


def _in_memory(data: bytes) -> IO[bytes]:
    file = os.fdopen(os.memfd_create("leyden-agent", os.MFD_CLOEXEC), "wb")
    file.write(data)
    file.flush()
    return file


class WarmStarter:
    """The fork servers of a controller."""

    def __init__(self, table: ProcessTable) -> None:
        self._table = table
        self._servers: dict[tuple[str, tuple[str, ...], frozenset[tuple[str, str]]], _Server] = {}
        self._said: set[str] = set()

    async def start(
        self,
        tree: Tree,
        command: Command,
        modules: list[str],
        *,
        shared_env: dict[str, str],
        env: dict[str, str],
        cwd: Path,
        stdout: int,
        stderr: int,
        enter: Callable[[int], None],
    ) -> Forked | None:
        """`command` as a process of `tree`, from a fork server with `modules`; None when it has to start cold.

        Raises:
            OSError: `enter` failed.
        """
        program = python_program(command)
        try:
            if program is None:
                raise _Refused("the command isn't `python FILE`, `python -m MODULE` or `python -c CODE`")
            if not os.path.isdir(cwd):  # noqa: ASYNC240
                return None
            key = (program.interpreter, tuple(modules), frozenset(shared_env.items()))
            server = self._servers.get(key)
            if server is None:
                if len(self._servers) >= MAX_SERVERS:
                    raise _Refused(f"{MAX_SERVERS} fork servers run already, with other modules or environments")
                server = self._servers[key] = _Server(program.interpreter, tuple(modules), shared_env, self._table)
            return await server.fork(tree, program, env, cwd, [stdout, stderr], enter)
        except _Refused as e:
            self.refuse(str(e), modules)
            return None

    def refuse(self, why: str, modules: list[str]) -> None:
        """Say, once, that agents start cold."""
        if why not in self._said:
            self._said.add(why)
            _log.warning("agents start cold", why=why, preload=modules)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()

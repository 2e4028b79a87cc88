"""The gateway as an ASGI app and as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
import uvloop

from leyden.gateway.admin import build_admin
from leyden.gateway.agent import PREFIXES, AgentApp
from leyden.gateway.delivery import Receive, Send, send_json
from leyden.gateway.lean import started
from leyden.gateway.options import GatewayOptions, admin_key, bind
from leyden.gateway.service import Gateway
from leyden.gateway.store.address import shown

SHUTDOWN_SECONDS = 3
"""How long running requests may go on when the gateway is asked to stop. What was acknowledged is on disk already."""

App = Callable[[MutableMapping[str, Any], Receive, Send], Any]


def build_app(gateway: Gateway) -> App:
    """Agent routes by prefix, everything else to the admin API."""
    agent, admin = AgentApp(gateway), build_admin(gateway)

    async def app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await admin(scope, receive, send)
        elif scope["path"].startswith(PREFIXES):
            await agent(scope, receive, send)
        elif scope["method"] == "HEAD":
            await send_json(send, 200, b"")
        else:
            await admin(scope, receive, send)

    return app


class _Server(uvicorn.Server):
    """A server that says when it is ready, and leaves signals to its starter.

    uvicorn's own handling raises the signal again once it has stopped serving, before the store is closed.
    """

    def __init__(self, app: App) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="off",
                proxy_headers=False,
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def running_gateway(options: GatewayOptions) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway that answers at the URL given with it, in this event loop, until the block is left.

    Raises:
        PreflightError: it can't start; the message is one sentence.
    """
    async with _serving(options) as (gateway, url, _, _):
        yield gateway, url


@asynccontextmanager
async def _serving(options: GatewayOptions) -> AsyncIterator[tuple[Gateway, str, _Server, asyncio.Task[None]]]:
    key, made = admin_key(options)
    listener = bind(options.host, options.port)
    try:
        gateway = await Gateway.open(options, key)
    except BaseException:
        listener.close()
        raise
    if made is not None:
        print(f"Admin key, shown this once and kept in {made}: {key}", flush=True)
    try:
        server = _Server(build_app(gateway))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        ready = asyncio.create_task(server.ready.wait())
        await asyncio.wait({serving, ready}, return_when="FIRST_COMPLETED")
        ready.cancel()
        try:
            yield gateway, _url(listener), server, serving
        finally:
            server.should_exit = True
            await serving
    finally:
        await gateway.close()
        listener.close()


def run_gateway(options: GatewayOptions) -> int:
    """Run a gateway until SIGINT or SIGTERM. Returns the exit code.

    Raises:
        PreflightError: it can't start; the message is one sentence.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    async def main() -> None:
        async with _serving(options) as (_, url, server, serving):

            def stop() -> None:
                server.should_exit = True

            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop)
            started()
            print(f"Leyden gateway at {url}, store {shown(options.store)}", flush=True)
            if options.ready_file is not None:
                text = json.dumps({"url": url, "pid": os.getpid()})
                part = options.ready_file.with_name(options.ready_file.name + ".part")
                part.write_text(text)
                part.replace(options.ready_file)
            await asyncio.shield(serving)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.suppress(KeyboardInterrupt):
        runner.run(main())
    return 0

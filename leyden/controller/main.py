"""The controller's process: claims attempts by long poll, keeps their leases, stops cleanly.

`serve` is the whole program; `run_controller` is the same inside an event loop that exists already, without the guard
that ends orphaned agents should this process be killed (see guard.py).
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from leyden.client import LeydenClient
from leyden.config import ControllerConfig
from leyden.controller.attempt import AttemptRun, Backend
from leyden.controller.bridge import CONNECTIONS
from leyden.controller.guard import guarded
from leyden.controller.local import LocalBackend, LocalOptions
from leyden.controller.processes import ProcessTable
from leyden.controller.reconcile import Fleet
from leyden.controller.uploads import Uploads
from leyden.errors import ConfigError, GatewayError, LeydenError, PreflightError
from leyden.schema import AttemptRef, Claim, ClaimRequest, Heartbeat

POLL_SECONDS = 5.0
"""Length of one long poll for work. Short: a poll whose controller died may still be given a lease at its end."""

HEARTBEAT_SECONDS = 1.0
"""Longest time between heartbeats whatever the lease. The gateway holds each back to tell of a lost attempt at once."""

STOP_SECONDS = 10.0
"""Longest graceful stop. Leases of what isn't reported by then are released, or run out."""

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class ControllerOptions:
    """How a controller runs.

    `base_dir` is where relative commands are found (the run file's folder); `work_dir` gets workspaces and logs.
    `agent_url` is the gateway's address as agents reach it, when it differs. `admin_key` defaults to LEYDEN_ADMIN_KEY.
    No sandbox shows the folders `hidden`.
    """

    gateway_url: str
    work_dir: Path
    admin_key: str = field(default_factory=lambda: os.environ.get("LEYDEN_ADMIN_KEY", ""), repr=False)
    base_dir: Path = field(default_factory=Path.cwd)
    controller_id: str = field(default_factory=socket.gethostname)
    agent_url: str | None = None
    hidden: tuple[Path, ...] = ()
    config: ControllerConfig = field(default_factory=ControllerConfig)
    start_patience: float = 60.0
    """Seconds that the gateway may take to answer at the start: it may be loading a tokenizer just then."""


def serve(options: ControllerOptions) -> int:
    """Run a controller until SIGTERM or SIGINT, in a child process of its own that leaves nothing behind.

    Call it from the main thread, outside any event loop. Returns the exit code.
    """
    return guarded(lambda: asyncio.run(run_controller(options, exclusive=True)))


async def run_controller(options: ControllerOptions, *, exclusive: bool = False) -> int:
    """Run a controller until SIGTERM or SIGINT, or until the task is cancelled; returns the exit code.

    A fault that ends it is printed as one sentence on standard error. `exclusive` says that this process has no
    children but the controller's.
    """
    try:
        if sys.platform != "linux":
            raise PreflightError("the local backend needs Linux: it finds an agent's processes through /proc")
        if not options.admin_key:
            raise ConfigError("the controller needs the gateway's admin key: set LEYDEN_ADMIN_KEY")
        _allow_files((6 + 2 * CONNECTIONS) * options.config.concurrency + 256)
        url = (options.agent_url or options.gateway_url).rstrip("/")
        local = LocalOptions(url, options.base_dir, options.work_dir, options.config.log_bytes, options.hidden)
        uploads = Uploads()
        backend = LocalBackend(local, ProcessTable(exclusive=exclusive), uploads)
        patience = options.config.lease_seconds + 30
        async with LeydenClient(options.gateway_url, options.admin_key, patience=patience) as client:
            controller = Controller(options, backend, client, uploads)
            await controller.run()
    except LeydenError as e:
        print(f"leyden controller: {e}", file=sys.stderr)
        return e.exit_code
    return 0


def _allow_files(needed: int) -> None:
    """Raise the limit of open files as far as it is needed and allowed: each attempt has pipes, a log and a watch."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Controller:
    """Claims attempts, runs each in a task of its own, and keeps their leases."""

    def __init__(
        self, options: ControllerOptions, backend: Backend, client: LeydenClient, uploads: Uploads | None = None
    ) -> None:
        self._options = options
        self._uploads = uploads or Uploads()
        self._config = options.config
        self._backend = backend
        self._client = client
        self._fleet = Fleet(options.config.concurrency)
        self._runs: dict[tuple[str, str], AttemptRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._room_made = asyncio.Event()
        self._stop = asyncio.Event()
        self._model: str | None = None

    def stop(self) -> None:
        """Stop claiming, end the attempts, report them for another try."""
        self._stop.set()

    async def run(self) -> None:
        """Until `stop`, SIGTERM or SIGINT.

        Raises:
            GatewayError: the gateway can't be reached at the start, or refuses the key or the claims.
        """
        await self._greet()
        loop = asyncio.get_running_loop()
        handled: list[int] = []
        for signum in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(signum, self.stop)
                handled.append(signum)
            except (ValueError, RuntimeError):
                # Not the main thread: whoever embeds the controller stops it.
                pass
        claiming = asyncio.create_task(self._claim_loop())
        beating = asyncio.create_task(self._heartbeat_loop())
        uploading = asyncio.create_task(self._uploads.run(self._client, self._options.controller_id))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({claiming, beating, uploading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in (claiming, beating, uploading):
                if task.done():
                    task.result()
        finally:
            stopping.cancel()
            claiming.cancel()
            uploading.cancel()
            try:
                await self._stop_attempts()
            finally:
                beating.cancel()
                self._backend.close()
                await asyncio.gather(claiming, beating, uploading, stopping, return_exceptions=True)
                for signum in handled:
                    loop.remove_signal_handler(signum)

    async def _greet(self) -> None:
        deadline = time.monotonic() + self._options.start_patience
        waiting = False
        while True:
            try:
                await self._client.healthz()
                break
            except GatewayError as e:
                if e.status not in (0, 502, 503, 504) or time.monotonic() > deadline:
                    raise
                if not waiting:
                    _log.info("waiting for the gateway", url=self._client.url, seconds=self._options.start_patience)
                    waiting = True
                await asyncio.sleep(0.1)
        released = await self._client.restarted(self._options.controller_id)
        _log.info("controller started", controller=self._options.controller_id, released=released)

    async def _claim_loop(self) -> None:
        delay = 0.1
        while True:
            room = self._fleet.room()
            if room == 0:
                self._room_made.clear()
                await self._room_made.wait()
                continue
            asked = time.monotonic()
            request = ClaimRequest(
                controller_id=self._options.controller_id,
                limit=min(room, 1000),
                lease_seconds=self._config.lease_seconds,
                wait_seconds=POLL_SECONDS,
            )
            try:
                claims = await self._client.claim(request)
            except GatewayError as e:
                if 0 < e.status < 500:
                    raise
                _log.warning("can't claim work, trying again", why=str(e))
                await asyncio.sleep(delay)
                delay = min(delay * 2, 5.0)
                continue
            delay = 0.1
            if claims and self._model is None:
                await self._learn_model()
            self._start(claims)
            if not claims and time.monotonic() - asked < 0.5:
                # A gateway that answers a long poll at once (it is stopping, say) must not be asked in a hot loop.
                await asyncio.sleep(0.25)

    def _start(self, claims: list[Claim]) -> None:
        by_ref = {(c.rollout.rollout_id, c.attempt_id): c for c in claims}
        for ref in self._fleet.admit(by_ref):
            run = AttemptRun(
                by_ref[ref],
                self._backend,
                self._client,
                controller_id=self._options.controller_id,
                model=self._model,
                keep_workspaces=self._config.keep_workspaces,
            )
            self._runs[ref] = run
            task = asyncio.create_task(run.run(), name=f"attempt {ref[0]}/{ref[1]}")
            self._tasks.add(task)
            task.add_done_callback(lambda task, ref=ref: self._ended(task, ref))

    def _ended(self, task: asyncio.Task[None], ref: tuple[str, str]) -> None:
        self._tasks.discard(task)
        self._runs.pop(ref, None)
        self._fleet.release(ref)
        self._room_made.set()
        if not task.cancelled() and task.exception() is not None:
            _log.error("attempt failed in the controller", rollout=ref[0], exc_info=task.exception())

    async def _learn_model(self) -> None:
        """The name that agents are told. Without one they still run: LEYDEN_MODEL is then not set."""
        try:
            async with asyncio.timeout(5):
                models = await self._client.models()
        except (GatewayError, TimeoutError) as e:
            _log.warning("can't learn the model's name", why=str(e) or "no answer in time")
            return
        if models:
            self._model = models[0].model

    async def _heartbeat_loop(self) -> None:
        every = min(self._config.lease_seconds / 3, HEARTBEAT_SECONDS)
        next_one = time.monotonic() + every
        while True:
            # The gateway answers at the end of the time, or at once when it takes an attempt away.
            await asyncio.sleep(max(0.0, next_one - time.monotonic()))
            next_one = time.monotonic() + every
            self._backend.tidy()
            held = sorted(self._fleet.held)
            if not held:
                continue
            beat = Heartbeat(
                controller_id=self._options.controller_id,
                lease_seconds=self._config.lease_seconds,
                attempts=[AttemptRef(rollout_id=r, attempt_id=a) for r, a in held],
                wait_seconds=every,
            )
            try:
                reply = await self._client.heartbeat(beat)
            except GatewayError as e:
                # Agents go on: the gateway decides about their leases when it is back, and says so.
                _log.warning("heartbeat failed", why=str(e))
                continue
            if reply.lost:
                next_one = time.monotonic()
            for ref in self._fleet.lost((r.rollout_id, r.attempt_id) for r in reply.lost):
                self._runs[ref].lose()

    async def _stop_attempts(self) -> None:
        self._fleet.stopping = True
        deadline = time.monotonic() + STOP_SECONDS
        for run in self._runs.values():
            run.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS - 2)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            # Also what a claim that was under way at the stop has been given.
            async with asyncio.timeout(max(1.0, deadline - time.monotonic())):
                await self._client.restarted(self._options.controller_id)
                await self._uploads.send(self._client, self._options.controller_id)
        except (GatewayError, TimeoutError) as e:
            _log.warning("leases or logs weren't handed back; leases will run out", why=str(e) or "no answer in time")

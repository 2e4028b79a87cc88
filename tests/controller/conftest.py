from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from leyden.client import LeydenClient
from leyden.config import ControllerConfig
from leyden.controller.local import LocalBackend, LocalOptions
from leyden.controller.main import Controller, ControllerOptions
from leyden.controller.processes import ProcessTable
from tests.controller.fake import ADMIN_KEY, FakeGateway


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with FakeGateway() as fake:
        yield fake


@pytest.fixture
def running(gateway: FakeGateway, tmp_path: Path) -> Callable[..., object]:
    """A controller in this process, for the length of an `async with`."""

    @asynccontextmanager
    async def run(
        base: Path | None = None, *, exclusive: bool = False, agent_url: str = "", **config: object
    ) -> AsyncIterator[Controller]:
        options = ControllerOptions(
            gateway_url=gateway.url,
            admin_key=ADMIN_KEY,
            controller_id="c1",
            base_dir=base or tmp_path,
            work_dir=tmp_path / "work",
            config=ControllerConfig.model_validate({"concurrency": 4, "lease_seconds": 3, **config}),
        )
        local = LocalOptions(agent_url or gateway.url, options.base_dir, options.work_dir, options.config.log_bytes)
        async with LeydenClient(gateway.url, ADMIN_KEY, patience=20) as client:
            controller = Controller(options, LocalBackend(local, ProcessTable(exclusive=exclusive)), client)
            task = asyncio.create_task(controller.run())
            try:
                yield controller
            finally:
                controller.stop()
                await task

    return run


def alive(text: str) -> list[int]:
    """Processes with `text` on their command line or in their environment, zombies left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == psutil.Process().pid:
                continue
            if any(text in part for part in [*process.cmdline(), *process.environ().values()]):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


async def none_alive(text: str, seconds: float = 20.0) -> bool:
    """Whether `alive(text)` becomes empty."""
    deadline = time.monotonic() + seconds
    while alive(text):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for something that must become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.02)

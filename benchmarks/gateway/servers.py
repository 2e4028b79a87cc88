"""The two gateways under measurement as processes, each driven through its own API."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from leyden.client import LeydenClient
from leyden.models import cache_dir
from leyden.preflight import pick_port
from leyden.schema import ClaimRequest, EngineModel, RolloutCreate, RolloutPatch, RolloutState, StatusPatch

PEER = "agentlightning==1.0.2"
START_SECONDS = 60
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Cost:
    """What a process has used."""

    cpu: float
    """Seconds of all its threads."""
    rss: int
    """Bytes."""


def cost(pid: int) -> Cost:
    """Of a process: CPU to the nanosecond where the kernel says so, resident memory."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = (int(fields[11]) + int(fields[12])) / TICK
    rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # Threads that have ended are in the ticks only.
    return Cost(max(total / 1e9, ticks - 1 / TICK), rss)


@asynccontextmanager
async def process(command: list[str], **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process, ended with its tree when the block is left."""
    running = await asyncio.create_subprocess_exec(*command, start_new_session=True, **options)
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(10):
                await running.wait()
        except TimeoutError:
            os.killpg(running.pid, signal.SIGKILL)
            await running.wait()


@asynccontextmanager
async def fake_engine(tokens: int, hold: float = 0) -> AsyncIterator[str]:
    """The engine's base URL."""
    command = [sys.executable, "-m", "benchmarks.gateway.engine", str(tokens), str(hold)]
    async with process(command, stdout=asyncio.subprocess.PIPE) as running:
        assert running.stdout is not None
        port = int(await asyncio.wait_for(running.stdout.readline(), START_SECONDS))
        yield f"http://127.0.0.1:{port}/v1"


async def _answers(url: str) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session, asyncio.timeout(START_SECONDS):
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/healthz") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)


def post(port: int, path: str, key: str, body: dict[str, Any]) -> str:
    """A request as it goes over the wire."""
    data = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n{data}"


@dataclass(slots=True)
class Leyden:
    """A Leyden gateway with its SQLite store."""

    pid: int
    port: int
    admin: LeydenClient
    key: str = field(repr=False)
    name: str = "leyden"
    after: int = 0
    """Cursor of the ended rollouts that were seen."""
    _open: list[str] = field(default_factory=list)

    async def engine(self, endpoint: str) -> None:
        await self.admin.delete_models()
        await self.admin.register_models([EngineModel(model="policy", endpoint=endpoint, kind="leyden")])

    async def keys(self, count: int) -> list[str]:
        """Keys of that many new running attempts."""
        out: list[str] = []
        while len(out) < count:
            some = min(500, count - len(out))
            made = await self.admin.create_rollouts([RolloutCreate(input=i) for i in range(some)])
            self._open += [r.rollout_id for r in made]
            claims = await self.admin.claim(ClaimRequest(controller_id="bench", limit=some, lease_seconds=3600))
            out += [c.agent_key for c in claims]
        return out

    async def rollouts(self, count: int, bodies: list[list[dict[str, Any]]]) -> list[list[str]]:
        keys = await self.keys(count)
        path = "/openai/v1/chat/completions"
        return [[post(self.port, path, key, b) for b in own] for key, own in zip(keys, bodies, strict=True)]

    async def end(self) -> None:
        """End all running attempts."""
        ended = RolloutPatch(status=StatusPatch(state=RolloutState.SUCCEEDED))
        for rollout_id in self._open:
            await self.admin.patch(rollout_id, ended)
        self._open.clear()


@dataclass(slots=True)
class Peer:
    """Agent Lightning's server; it keeps everything in memory."""

    pid: int
    port: int
    session: aiohttp.ClientSession
    name: str = "peer"

    async def engine(self, endpoint: str) -> None:
        models = [{"model": "policy", "endpoint": endpoint, "version": 0}]
        async with self.session.post(f"http://127.0.0.1:{self.port}/api/models", json=models) as answer:
            answer.raise_for_status()

    async def rollouts(self, count: int, bodies: list[list[dict[str, Any]]]) -> list[list[str]]:
        items = [{"input": i, "config": {}} for i in range(count)]
        async with self.session.post(f"http://127.0.0.1:{self.port}/api/rollouts", json=items) as answer:
            if answer.status >= 400:
                raise RuntimeError(f"the peer refused rollouts: {await answer.text()}")
            made = [r["rollout_id"] for r in await answer.json()]
        paths = [f"/proxy/rollout/{i}/attempt/0/mode/train/openai/v1/chat/completions" for i in made]
        return [[post(self.port, p, "k", b) for b in own] for p, own in zip(paths, bodies, strict=True)]

    async def end(self) -> None:
        """Rollouts of the peer stay."""


@asynccontextmanager
async def leyden(folder: Path, model: Path, *more: str) -> AsyncIterator[Leyden]:
    key, port = secrets.token_urlsafe(24), pick_port("127.0.0.1", 0, "gateway")
    command = [sys.executable, "-m", "leyden", "gateway", "--store", str(folder / f"bench-{port}.sqlite")]
    command += ["--model", str(model), "--served-model-name", "policy", "--port", str(port), *more]
    with (folder / "gateway.log").open("ab") as log:
        async with process(command, env={**os.environ, "LEYDEN_ADMIN_KEY": key}, stdout=log, stderr=log) as running:
            await _answers(f"http://127.0.0.1:{port}")
            async with LeydenClient(f"http://127.0.0.1:{port}", key) as admin:
                yield Leyden(running.pid, port, admin, key)


@asynccontextmanager
async def peer(folder: Path) -> AsyncIterator[Peer]:
    python = await asyncio.to_thread(peer_python)
    port = pick_port("127.0.0.1", 0, "peer")
    command = [str(python), "-m", "agentlightning.server", "host=127.0.0.1", f"port={port}", "key=k"]
    command += ["default_proxy.model_name=policy", f"hydra.run.dir={folder}/peer"]
    with (folder / "peer.log").open("ab") as log:
        async with process(command, stdout=log, stderr=log) as running:
            await _answers(f"http://127.0.0.1:{port}")
            async with aiohttp.ClientSession(headers={"Authorization": "Bearer k"}) as session:
                yield Peer(running.pid, port, session)


def peer_python() -> Path:
    """The interpreter of a virtual environment that holds the peer; made at the first run."""
    folder = cache_dir() / "peer" / PEER.replace("=", "-")
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        found = shutil.which("python3.12") if not list(root.glob("3.12*")) else None
        own = sys.executable if sys.version_info >= (3, 12) else found
        base = own or next((str(p) for p in sorted(root.glob("3.1[2-9]*/bin/python3"))), None)
        if base is None:
            raise SystemExit("the peer needs Python 3.12 or newer; install one")
        print(f"installing {PEER} …", flush=True)
        subprocess.run([base, "-m", "venv", str(folder)], check=True, timeout=300)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", PEER], check=True, timeout=900)
        (folder / ".installed").touch()
    return python


def words(count: int, seed: int) -> str:
    """Text of about `count` tokens."""
    known = "time person year way day thing man world life hand part child eye woman place work week case".split()
    choose = random.Random(seed)
    return " ".join(choose.choice(known) for _ in range(count))

"""`python -m tests.fuzz.run`: malformed and hostile requests to a gateway process whose engine turns hostile half-way.

While the engine is honest no request may be answered with 5xx. Once it lies, 502, 503 and 504 tell the client of the
engine's fault: they are counted apart (`engine_faults`) and allowed on model calls alone. Requests that failed are
kept as files to be sent again: `nc 127.0.0.1 PORT < FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from leyden.client import LeydenClient
from leyden.errors import GatewayError
from leyden.schema import AgentSpec, ClaimRequest, EngineModel, GraderSpec, RolloutConfig, RolloutCreate
from tests.faults.processes import ADMIN, START_SECONDS, GatewayProcess
from tests.fuzz.corpus import ADMIN as ADMIN_SEEDS
from tests.fuzz.corpus import AGENT as AGENT_SEEDS
from tests.fuzz.corpus import Attack, attack
from tests.fuzz.schema import SchemaFuzz
from tests.tiny import make_tiny_model

SECONDS = 10
"""An answer that takes longer is a hang."""
AT_ONCE = 16
EXAMPLES_SHARE = 120
"""Of the requests: those that each operation of the OpenAPI document gets beside them, right and wrong ones each."""
RESET = b"reset"
"""What stands for the answer when the connection was reset: refused before its body was read, as HTTP/1.1 allows."""
MAX_RSS = 1.2e9
TELLTALES = (b"Traceback", b'File "', b"secret-of-the-engine", b"sqlite3.", b"site-packages")
IN_LOG = ("failed inside the gateway", "Traceback", "Exception in ASGI", "Task exception was never retrieved")


class _Gateway(GatewayProcess):
    def __init__(self, store: str, model: Path, log: Path) -> None:
        super().__init__(store, model, log)
        self._command += ["--request-timeout-seconds", "4", "--keepalive-seconds", "1", "--replay-grace-seconds", "0.2"]

    def rss(self) -> int:
        assert self._process is not None
        return psutil.Process(self._process.pid).memory_info().rss


@dataclass
class Tally:
    requests: int = 0
    server_errors: int = 0
    hangs: int = 0
    engine_faults: int = 0
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    by_document: int = 0
    """Of `requests`: those that schemathesis made from the OpenAPI document."""
    document_statuses: Counter[int] = field(default_factory=Counter)


@dataclass
class Keys:
    """Keys of each class and the rollout whose they are."""

    rollout_id: str
    by_class: dict[str, str | None]


async def send(host: str, port: int, a: Attack) -> bytes:
    """All that came back, until the gateway closed the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        size = len(a.data) // a.pieces + 1
        for at in range(0, len(a.data), size):
            writer.write(a.data[at : at + size])
            await writer.drain()
            if a.pieces > 1:
                await asyncio.sleep(0.05)
        if a.hang_up:
            return b""
        if not a.whole:
            await asyncio.sleep(0.05)
            writer.write_eof()
        return await reader.read(-1)
    except ConnectionError:
        return RESET
    finally:
        writer.close()


def fault_of(a: Attack, answer: bytes, lying: bool) -> tuple[int, str | None]:
    """The status and what is wrong with this answer."""
    if a.hang_up or answer is RESET:
        return 0, None
    head, _, body = answer.partition(b"\r\n\r\n")
    first = head.split(b"\r\n")[0].split()
    if len(first) < 2 or not first[1].isdigit():
        return 0, "no answer" if a.whole else None
    status = int(first[1])
    found = next((t for t in TELLTALES if t in answer), None)
    if found is not None:
        return status, f"the answer shows {found.decode()!r}"
    if status >= 500 and not (lying and a.seed.dialect != "admin" and status in (502, 503, 504)):
        return status, f"status {status}"
    if a.kind in ("raw", "pipeline", "method", "old", "path", "header") or not a.whole or status < 400:
        return status, None
    if b"chunked" in head.lower():
        return status, "an error came in chunks"
    try:
        error = json.loads(body)
    except ValueError:
        return status, f"status {status} isn't JSON"
    good = {
        "admin": lambda e: isinstance(e["detail"], str),
        "gemini": lambda e: isinstance(e["error"]["status"], str) and isinstance(e["error"]["message"], str),
        "openai": lambda e: isinstance(e["error"]["message"], str),
        "anthropic": lambda e: e["type"] == "error" and isinstance(e["error"]["message"], str),
    }[a.seed.dialect]
    try:
        fine = good(error)
    except (KeyError, TypeError):
        fine = False
    return status, None if fine else f"status {status} isn't in the shape of {a.seed.dialect}"


class Fuzz:
    def __init__(self, folder: Path, failures: Path, seed: int) -> None:
        self._folder, self._failures, self._seed = folder, failures, seed
        self.tally = Tally()
        self._used: list[str] = []

    async def run(self, count: int) -> Tally:
        model = make_tiny_model(self._folder / "tiny")
        ready, log = self._folder / "engine.ready", self._folder / "gateway.log"
        command = [sys.executable, "-m", "tests.fuzz.engine", str(model), str(ready), str(self._seed)]
        engine = await asyncio.to_thread(subprocess.Popen, command, start_new_session=True)
        gateway = _Gateway(str(self._folder / "store.db"), model, log)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready.exists():
                assert engine.poll() is None and time.monotonic() < deadline, "the engine didn't start"
                await asyncio.sleep(0.05)
            honest, lies = ready.read_text().split()
            gateway.spawn()
            async with aiohttp.ClientSession() as http, LeydenClient(gateway.url, ADMIN) as admin:
                await gateway.ready(http)
                for number, (endpoint, lying) in enumerate([(honest, False), (lies, True)]):
                    await admin.delete_models()
                    await admin.register_models([EngineModel(model="tiny", endpoint=endpoint, kind="leyden")])
                    await self._phase(gateway, admin, count // 2, number, lying)
                await admin.delete_models()
                await admin.register_models([EngineModel(model="tiny", endpoint=honest, kind="leyden")])
                await self._still_serving(gateway, admin, http)
                # Last, since its requests register and remove engines, and pause.
                await asyncio.to_thread(self._by_document, gateway.url, count // EXAMPLES_SHARE)
                await gateway.ready(http)
            self._check_log(log)
        finally:
            gateway.stop()
            engine.kill()
            engine.wait()
        self._check_store()
        return self.tally

    async def _phase(self, gateway: _Gateway, admin: LeydenClient, count: int, number: int, lying: bool) -> None:
        rng = random.Random(self._seed * 2 + number)
        room = asyncio.Semaphore(AT_ONCE)
        host, port = gateway.url.removeprefix("http://").split(":")

        async def one(a: Attack, number: int) -> None:
            async with room:
                try:
                    answer = await asyncio.wait_for(send(host, int(port), a), SECONDS)
                except TimeoutError:
                    self.tally.hangs += 1
                    self._wrong(a, number, "no end of an answer within 10 s")
                    return
            status, wrong = fault_of(a, answer, lying)
            self.tally.statuses[status] += 1
            self.tally.engine_faults += lying and status in (502, 503, 504)
            if wrong is not None:
                self.tally.server_errors += wrong.startswith("status 5")
                self._wrong(a, number, wrong)

        done = 0
        while done < count:
            # Attempts are taken anew now and then: requests end them, and their conversations grow.
            keys = await _keys(admin)
            self._used.append(keys.rollout_id)
            batch = min(250, count - done)
            async with asyncio.TaskGroup() as group:
                for _ in range(batch):
                    kind = rng.choice(["agent"] * 5 + ["admin"] * 3 + ["none", "wrong", "grader", "closed"])
                    seeds = AGENT_SEEDS if kind == "agent" or rng.random() < 0.5 else ADMIN_SEEDS
                    a = attack(rng, rng.choice(seeds), keys.by_class[kind], keys.rollout_id)
                    self.tally.requests += 1
                    self.tally.kinds[a.kind] += 1
                    group.create_task(one(a, self.tally.requests))
            done += batch

    def _by_document(self, url: str, examples: int) -> None:
        made = SchemaFuzz(url, ADMIN, self._seed)
        made.run(examples)
        self.tally.by_document, self.tally.document_statuses = made.requests, made.statuses
        self.tally.requests += made.requests
        self.tally.server_errors += made.server_errors
        self.tally.hangs += made.hangs
        self.tally.wrong += made.wrong

    def _wrong(self, a: Attack, number: int, what: str) -> None:
        self._failures.mkdir(parents=True, exist_ok=True)
        file = self._failures / f"{number}.http"
        file.write_bytes(a.data)
        self.tally.wrong.append(f"{what}: {a.kind} {a.seed.method} {a.seed.path}, request in {file}")

    async def _still_serving(self, gateway: _Gateway, admin: LeydenClient, http: aiohttp.ClientSession) -> None:
        keys = await _keys(admin)
        url = f"{gateway.url}/openai/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "still there?"}]}
        headers = {"Authorization": f"Bearer {keys.by_class['agent']}"}
        async with http.post(url, json=body, headers=headers, timeout=aiohttp.ClientTimeout(SECONDS)) as answer:
            if answer.status != 200:
                self.tally.wrong.append(f"the gateway no longer serves: {await answer.text()}")
        if gateway.rss() > MAX_RSS:
            self.tally.wrong.append(f"the gateway holds {gateway.rss() / 1e6:.0f} MB")
        await admin.trajectory(keys.rollout_id)
        for rollout_id in self._used:
            try:
                await admin.trajectory(rollout_id)
            except GatewayError as e:
                if e.status != 404:  # Some were deleted, with the admin's key.
                    self.tally.wrong.append(f"a trajectory can't be read: {e}")

    def _check_log(self, log: Path) -> None:
        text = log.read_text(errors="replace")
        for words in IN_LOG:
            if words in text:
                self.tally.wrong.append(f"the gateway's log says {words!r} {text.count(words)} times")
        # The innermost line and the error of each kind of traceback.
        ends = re.findall(r"Traceback .*?\n((?:  .*\n)+)(\S.*)", text)
        for where, error in sorted({(where.splitlines()[-2].strip(), error) for where, error in ends if where})[:20]:
            self.tally.wrong.append(f"in the gateway's log: {error} at {where}")

    def _check_store(self) -> None:
        db = sqlite3.connect(self._folder / "store.db")
        found = db.execute("PRAGMA integrity_check").fetchone()[0]
        db.close()
        if found != "ok":
            self.tally.wrong.append(f"the store isn't whole: {found}")


async def _keys(admin: LeydenClient) -> Keys:
    """A fresh attempt's keys, and one of an attempt that has ended."""
    spec = RolloutConfig(agent=AgentSpec(command=["true"]), grader=GraderSpec(command=["true"]))
    pair: list[Any] = []
    for _ in range(2):
        made = await admin.create_rollouts([RolloutCreate(input={}, config=spec)])
        wanted = made[0].rollout_id
        for _ in range(20):
            claims = await admin.claim(ClaimRequest(controller_id="keys", limit=1000, lease_seconds=3600))
            mine = [c for c in claims if c.rollout.rollout_id == wanted]
            if mine:
                pair.append(mine[0])
                break
    live, ended = pair
    await admin.delete(ended.rollout.rollout_id)
    classes = {"agent": live.agent_key, "grader": live.grader_key, "closed": ended.agent_key}
    return Keys(live.rollout.rollout_id, {**classes, "none": None, "wrong": "ley-agent-wrong", "admin": ADMIN})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--failures", type=Path, default=Path(tempfile.gettempdir()) / f"leyden-fuzz-{os.getpid()}")
    given = parser.parse_args()
    sys.setrecursionlimit(20_000)
    folder = Path(tempfile.mkdtemp(prefix="leyden-fuzz-"))
    try:
        tally = asyncio.run(Fuzz(folder, given.failures, given.seed).run(given.requests))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for line in tally.wrong[:40]:
        print(line)
    print(f"seed {given.seed}, statuses {dict(sorted(tally.statuses.items()))}, kinds {dict(tally.kinds)}")
    print(f"by the document {tally.by_document}, statuses {dict(sorted(tally.document_statuses.items()))}")
    print(f"engine_faults={tally.engine_faults} wrong={len(tally.wrong)}")
    print(f"fuzz: requests={tally.requests} server_errors={tally.server_errors} hangs={tally.hangs}")
    return bool(tally.wrong or tally.requests < given.requests)


if __name__ == "__main__":
    sys.exit(main())

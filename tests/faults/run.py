"""Kills gateways with SIGKILL under load and checks that nothing acknowledged is lost or doubled.

`make faults`: 64 clients make model calls and post rewards, first through one gateway on SQLite, then through two on
PostgreSQL, while one gateway after the other is killed at a random moment and started again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from leyden.client import LeydenClient
from leyden.schema import CallRecord, EngineModel, Event
from tests.faults.clients import Acknowledged, Client
from tests.faults.processes import ADMIN, Engine, GatewayProcess
from tests.postgres import postgres_server
from tests.tiny import make_tiny_model

CLIENTS = 64
RESTART_LIMIT = 2.0
EARLY = 0.1
"""Share of kills that come before the gateway has finished starting."""
UP_SECONDS = (0.02, 0.9)
"""How long a gateway is left alone after its start."""


@dataclass
class Result:
    """What a run on one store showed."""

    store: str
    kills: int = 0
    calls: int = 0
    events: int = 0
    repeated: int = 0
    unmarked: int = 0
    """Calls whose answer arrived although the store doesn't know: the kill came between the two."""
    restarts: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def line(self) -> str:
        return (
            f"{self.store}: kills={self.kills} calls={self.calls} events={self.events} repeated={self.repeated} "
            f"lost={len(self.lost)} doubled={len(self.doubled)} unexpected={len(self.unexpected)} "
            f"unmarked={self.unmarked} restart_median_s={statistics.median(self.restarts):.2f} "
            f"restart_max_s={max(self.restarts):.2f}"
        )

    def passed(self) -> bool:
        return not (self.lost or self.doubled or self.unexpected) and max(self.restarts) <= RESTART_LIMIT


async def kill_again_and_again(
    gateways: Sequence[GatewayProcess], kills: int, http: aiohttp.ClientSession, result: Result
) -> None:
    chance = random.Random(kills)
    while result.kills < kills:
        gateway = gateways[result.kills % len(gateways)]
        gateway.kill()
        result.kills += 1
        begun = time.monotonic()
        gateway.spawn()
        if chance.random() < EARLY and result.kills < kills:
            await asyncio.sleep(chance.uniform(0, RESTART_LIMIT / 2))
            gateway.kill()
            result.kills += 1
            begun = time.monotonic()
            gateway.spawn()
        await gateway.ready(http)
        result.restarts.append(time.monotonic() - begun)
        await asyncio.sleep(chance.uniform(*UP_SECONDS))


async def run_on(name: str, stores: Sequence[str], model: Path, folder: Path, kills: int, clients: int) -> Result:
    """Run clients and kills on gateways with `stores` (one address a gateway), then check what was recorded."""
    result, seen = Result(name), Acknowledged()
    engine = Engine(folder, model)
    gateways = [GatewayProcess(s, model, folder / f"gateway{i}.log") for i, s in enumerate(stores)]
    timeout = aiohttp.ClientTimeout(total=30)
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            for gateway in gateways:
                gateway.spawn()
                await gateway.ready(http)
            async with LeydenClient(gateways[0].url, ADMIN) as admin:
                await admin.register_models([EngineModel(model="tiny", endpoint=engine.endpoint, kind="leyden")])
            crowd = [Client(i, [g.url for g in gateways], http, seen) for i in range(clients)]
            async with asyncio.TaskGroup() as group:
                for client in crowd:
                    group.create_task(client.run())
                await asyncio.sleep(1)
                await kill_again_and_again(gateways, kills, http, result)
                for client in crowd:
                    client.stop = True
            log = await asyncio.to_thread(engine.log.read_text)
            await check(gateways[-1].url, seen, log, result)
    finally:
        for gateway in gateways:
            gateway.stop()
        engine.stop()
    return result


async def check(url: str, seen: Acknowledged, log: str, result: Result) -> None:
    """Compare what clients were told, what the engine said (its `log`), and what is recorded."""
    said = {line["text"]: line for line in map(json.loads, log.splitlines())}
    result.calls, result.events, result.repeated = len(seen.calls), len(seen.events), seen.repeated
    result.unexpected = seen.unexpected
    by_rollout: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for asked, (rollout, call, text) in seen.calls.items():
        by_rollout[rollout].append((asked, call, text))
    async with LeydenClient(url, ADMIN) as admin:
        for rollout, acknowledged in by_rollout.items():
            trajectory = await admin.trajectory(rollout, content=True)
            events = await admin.events(rollout, "reward")
            check_calls(rollout, acknowledged, trajectory.calls, said, result)
            check_events(rollout, seen, events, trajectory.reward, result)


def check_calls(
    rollout: str, acknowledged: list[tuple[str, str, str]], calls: list[CallRecord], said: dict, result: Result
) -> None:
    kept = {c.call_id: c for c in calls}
    answers = Counter((c.raw or {})["messages"][-1]["content"] for c in calls if c.response is not None)
    for asked, call_id, text in acknowledged:
        call = kept.get(call_id)
        truth = said.get(text)
        if call is None or truth is None:
            result.lost.append(f"call {call_id} of {rollout} ({asked}) isn't recorded as the client got it")
            continue
        same = _ids(call.response_ids) == truth["ids"] and _ids(call.prompt_ids) == truth["prompt"]
        if not same or call.untrainable is not None or len(call.logprobs) != len(call.response_ids):
            result.lost.append(f"call {call_id} of {rollout} ({asked}) differs from what the engine said")
        if answers[asked] != 1:
            result.doubled.append(f"request {asked} of {rollout} has {answers[asked]} recorded answers")
        result.unmarked += not call.delivered
    if len({call_id for _, call_id, _ in acknowledged}) != len(acknowledged):
        result.doubled.append(f"two requests of {rollout} got the same call")


def check_events(rollout: str, seen: Acknowledged, events: list[Event], reward: float | None, result: Result) -> None:
    counts = Counter(e.data["number"] for e in events)
    for number in (n for r, n in seen.events if r == rollout):
        if counts[number] == 0:
            result.lost.append(f"reward {number} of {rollout} isn't recorded")
    result.doubled += [f"reward {n} of {rollout} is recorded {c} times" for n, c in counts.items() if c > 1]
    if rollout in seen.rewards and reward not in (seen.rewards[rollout], events[-1].data["value"]):
        result.lost.append(f"{rollout} has reward {reward}, not the last that was posted")


def _ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


async def main(kills: int, clients: int, stores: Sequence[str]) -> list[Result]:
    out = []
    with tempfile.TemporaryDirectory(prefix="leyden-faults-") as name:
        folder = Path(name)
        model = make_tiny_model(folder / "tiny")
        if "sqlite" in stores:
            (folder / "sqlite").mkdir()
            store = str(folder / "sqlite" / "store.db")
            out.append(await run_on("sqlite", [store], model, folder / "sqlite", kills, clients))
            print(out[-1].line(), flush=True)
        if "postgres" in stores:
            (folder / "postgres").mkdir()
            with postgres_server() as new_database:
                url = new_database()
                out.append(await run_on("postgres", [url, url], model, folder / "postgres", kills, clients))
            print(out[-1].line(), flush=True)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100, help="for each store")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--store", choices=["sqlite", "postgres"], action="append")
    given = parser.parse_args()
    results = asyncio.run(main(given.kills, given.clients, given.store or ["sqlite", "postgres"]))
    for result in results:
        for problem in (result.lost + result.doubled + result.unexpected)[:20]:
            print(f"  {result.store}: {problem}")
    print(
        f"faults: kills={sum(r.kills for r in results)} lost={sum(len(r.lost) for r in results)} "
        f"doubled={sum(len(r.doubled) for r in results)} restart_s={max(max(r.restarts) for r in results):.2f}"
    )
    sys.exit(0 if all(r.passed() for r in results) else 1)

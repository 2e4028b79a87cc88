"""`make bench-controller`: Leyden's local controller beside Agent Lightning's, in one run on one machine.

Both work off 200 queued rollouts whose agent does nothing, 16 at once, each with its own gateway. Leyden's agent is
`/bin/true`; the peer runs Python classes only, so its agent is a class whose `run` returns at once, and Leyden is
measured with that very class too: an interpreter each, and from a fork server. The peer polls; it is given an interval
of 50 ms instead of its default of 10 s, which is best for it. Wall time is from the request that queues the rollouts to
the last one ended. CPU is that of the controller and of all that it started; the gateway's is told apart. Both take
turns three times with fresh processes; figures are medians.

Then Leyden alone: how long from queued to started and from exit to recorded when nothing else runs, and 1,000 rollouts
queued before a controller comes up.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway.servers import TICK, Leyden, Peer, leyden, peer, peer_python, process
from leyden.controller.processes import children
from leyden.schema import RolloutConfig, RolloutCreate
from tests.real_tokenizers import tokenizer_folder

ROLLOUTS, QUEUED, AT_ONCE = 200, 1000, 16
GOAL = 20
POLL = 0.05
"""Seconds between two looks of the peer's controller."""
IDLE = 20
WAIT_SECONDS = 300

AGENT = "class Agent:\n    def run(self):\n        return None\n"


@dataclass(slots=True)
class Spent:
    """What working off the rollouts took, per rollout in milliseconds."""

    wall: float
    cpu: float
    gateway_cpu: float

    def line(self, name: str) -> str:
        return (
            f"{name}: {self.wall:.2f} ms a rollout, CPU {self.cpu:.2f} ms of the controller and its agents, "
            f"{self.gateway_cpu:.2f} ms of the gateway"
        )


def tree(pid: int) -> Iterator[int]:
    yield pid
    for child in children(pid):
        yield from tree(child)


def cpu(pid: int) -> float:
    """Seconds that a process, its descendants, and those of them that have ended and were waited for have used."""
    total = 0.0
    for one in tree(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / TICK
    return total


@asynccontextmanager
async def our_controller(gateway: Leyden, folder: Path, *more: str, at_once: int = AT_ONCE) -> AsyncIterator[int]:
    command = [sys.executable, "-m", "leyden", "controller", "--gateway", gateway.admin.url, "--base-dir", str(folder)]
    command += ["--work-dir", str(folder / "work"), "--concurrency", str(at_once), *more]
    with (folder / "controller.log").open("ab") as log:
        env = {**os.environ, "LEYDEN_ADMIN_KEY": gateway.key}
        async with process(command, env=env, stdout=log, stderr=log) as running:
            yield running.pid


async def enqueue(gateway: Leyden, count: int, config: dict[str, Any]) -> list[str]:
    parsed = RolloutConfig.model_validate(config)
    made = await gateway.admin.create_rollouts([RolloutCreate(input={"i": i}, config=parsed) for i in range(count)])
    return [r.rollout_id for r in made]


async def all_ended(gateway: Leyden, count: int) -> None:
    """Wait until that many more rollouts than before have ended."""
    seen = 0
    async with asyncio.timeout(WAIT_SECONDS):
        while seen < count:
            page = await gateway.admin.terminal(gateway.after, wait_seconds=10)
            gateway.after = page.next_after
            seen += len(page.items)


async def ours(gateway: Leyden, controller: int, config: dict[str, Any]) -> Spent:
    await enqueue(gateway, AT_ONCE, config)  # Not measured: it warms up.
    await all_ended(gateway, AT_ONCE)
    before, gateway_before, begun = cpu(controller), cpu(gateway.pid), time.monotonic()
    await enqueue(gateway, ROLLOUTS, config)
    await all_ended(gateway, ROLLOUTS)
    return per_rollout(begun, cpu(controller) - before, cpu(gateway.pid) - gateway_before)


async def peers(folder: Path, config: dict[str, Any]) -> Spent:
    async with peer(folder) as gateway:
        python = await asyncio.to_thread(peer_python)
        command = [str(python), "-m", "agentlightning.controller", "runner_type=local", "agl_server.key=k"]
        command += [f"agl_server.url=http://127.0.0.1:{gateway.port}", f"local_runner.poll_interval={POLL}"]
        command += [f"local_runner.maximum_size={AT_ONCE}", f"hydra.run.dir={folder}/peer-controller"]
        with (folder / "peer-controller.log").open("ab") as log:
            async with process(command, cwd=folder, env=with_path(folder), stdout=log, stderr=log) as controller:
                await peer_work(gateway, AT_ONCE, config)
                before, gateway_before, begun = cpu(controller.pid), cpu(gateway.pid), time.monotonic()
                await peer_work(gateway, ROLLOUTS, config)
                return per_rollout(begun, cpu(controller.pid) - before, cpu(gateway.pid) - gateway_before)


def with_path(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder)}


async def peer_work(gateway: Peer, count: int, config: dict[str, Any]) -> None:
    url = f"http://127.0.0.1:{gateway.port}/api/rollouts"
    items = [{"input": {"i": i}, "config": config} for i in range(count)]
    async with gateway.session.post(url, json=items) as answer:
        answer.raise_for_status()
        made = [r["rollout_id"] for r in await answer.json()]
    waiting = set(made)
    async with asyncio.timeout(WAIT_SECONDS):
        while waiting:
            await asyncio.sleep(0.1)
            for state in ("queuing", "running"):
                params = {"state_in": state, "limit": "1"}
                async with gateway.session.get(url, params=params) as answer:
                    answer.raise_for_status()
                    if await answer.json():
                        break
            else:
                waiting.clear()
    for rollout_id in made[:: max(1, count // 10)]:
        async with gateway.session.get(f"{url}/{rollout_id}") as answer:
            state = (await answer.json())["rollout"]["status"]["state"]
            if state != "succeeded":
                raise SystemExit(f"a rollout of the peer is {state}: see what its agent said")


def per_rollout(begun: float, cpu_seconds: float, gateway_cpu: float) -> Spent:
    scale = 1000 / ROLLOUTS
    return Spent((time.monotonic() - begun) * scale, cpu_seconds * scale, gateway_cpu * scale)


async def idle(gateway: Leyden) -> tuple[list[float], list[float]]:
    """Milliseconds from queued to started, and from exit to recorded, one rollout at a time."""
    started, recorded = [], []
    for _ in range(IDLE):
        (rollout_id,) = await enqueue(gateway, 1, {"agent": {"command": "exec date +%s.%N;"}})
        await all_ended(gateway, 1)
        detail = await gateway.admin.rollout(rollout_id)
        (attempt,) = detail.attempt_details
        assert attempt.log_tail is not None and attempt.ended_at is not None
        # The agent says the time when it runs, and exits at once: one moment serves for both.
        said = float(attempt.log_tail)
        started.append((said - detail.rollout.status.created_at) * 1000)
        recorded.append((attempt.ended_at - said) * 1000)
    return started, recorded


async def queued(gateway: Leyden, folder: Path) -> int:
    """How many of 1,000 rollouts queued before the controller came up didn't start in their turn."""
    started = folder / "started"
    await enqueue(gateway, QUEUED, {"agent": {"command": ["sh", "-c", f"echo {{{{ input.i }}}} >> {started}"]}})
    begun = time.monotonic()
    async with our_controller(gateway, folder):
        await all_ended(gateway, QUEUED)
    order = [int(line) for line in started.read_text().splitlines()]
    # Those that run at once write in any order.
    early = sum(abs(place - number) >= 2 * AT_ONCE for place, number in enumerate(order))
    print(f"{len(order)} queued rollouts: {time.monotonic() - begun:.1f} s with the controller's start, {early} early")
    return early + abs(QUEUED - len(set(order)))


def middle(spent: Sequence[Spent]) -> Spent:
    return Spent(*(statistics.median(getattr(s, n) for s in spent) for n in ("wall", "cpu", "gateway_cpu")))


async def main(repeats: int) -> int:
    model = await asyncio.to_thread(tokenizer_folder, "qwen3")
    with tempfile.TemporaryDirectory(prefix="leyden-bench-") as name:
        folder = Path(name)
        (folder / "idle_agent.py").write_text(AGENT)
        as_class = {"local": {"agent_class": "idle_agent:Agent"}}
        preloaded = {"local": {**as_class["local"], "preload": ["json"]}}
        runs: list[tuple[Spent, ...]] = []
        for _ in range(repeats):
            async with leyden(folder, model) as gateway, our_controller(gateway, folder) as controller:
                true = await ours(gateway, controller, {"agent": {"command": ["/bin/true"]}})
                cold = await ours(gateway, controller, as_class)
                warm = await ours(gateway, controller, preloaded)
            runs.append((true, cold, warm, await peers(folder, as_class)))
        true, cold, warm, theirs = (middle(spent) for spent in zip(*runs, strict=True))
        async with leyden(folder, model) as gateway:
            async with our_controller(gateway, folder):
                started, recorded = await idle(gateway)
            out_of_turn = await queued(gateway, folder)
    print(true.line("leyden, /bin/true"))
    print(cold.line("leyden, Python class, cold"))
    print(warm.line("leyden, Python class, warm"))
    print(theirs.line("peer, Python class"))
    for what, times in (("queued → started", started), ("exit → recorded", recorded)):
        print(f"{what} when idle: median {statistics.median(times):.1f} ms, longest {max(times):.1f} ms")
    ratio = theirs.wall / true.wall
    print(
        f"bench-controller: overhead_ratio={ratio:.1f} ms_per_rollout={true.wall:.2f} "
        f"peer_ms_per_rollout={theirs.wall:.2f} cpu_ratio={theirs.cpu / true.cpu:.1f} "
        f"class_ratio={theirs.wall / cold.wall:.1f} "
        f"warm_class_ratio={theirs.wall / warm.wall:.1f} started_ms={statistics.median(started):.1f} "
        f"recorded_ms={statistics.median(recorded):.1f} queued={QUEUED} out_of_turn={out_of_turn}"
    )
    return 0 if ratio >= GOAL and out_of_turn == 0 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    sys.exit(asyncio.run(main(parser.parse_args().repeats)))

"""Kills controllers with SIGKILL at random moments and checks that nothing is lost, mixed or leaked.

`make faults-controller`: two controllers share 200 rollouts through one gateway. Every agent makes two model calls, and
posts an event after each; it leaves a daemon behind that has a session of its own. Now the controller proper is killed,
now its guard, while they work; it comes back at once under its own name, or as another one, so that its attempts'
leases have to run out.

lost: rollouts that didn't end exactly once, with success. mixed: events or calls that stand with an attempt other than
the one that made them, or a last attempt without all of its own. leaked: processes that outlived their controller.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
import psutil

from leyden.client import LeydenClient
from leyden.schema import AgentSpec, EngineModel, RetryPolicy, RolloutConfig, RolloutCreate, RolloutState
from tests.faults.processes import ADMIN, Engine, GatewayProcess
from tests.tiny import make_tiny_model

AT_ONCE = 4
LEASE_SECONDS = 3.0
GONE_SECONDS = 5.0
"""In which a killed controller's processes must have ended: its guard's, or its own, graceful stop."""
PATIENCE_SECONDS = 900
ATTEMPTS = 100
"""More than any rollout can lose to kills."""
CALLS = 2
LIFE_SECONDS = (1.0, 6.0)
"""Between two kills of a controller. It needs one to start, an agent needs three."""
EVENTS = "SELECT rollout_id, attempt_id, data FROM events WHERE event_type IN ('note', 'reward')"
MARK = "FAULT_RUN_INCARNATION"

AGENT = """
import http.client, json, os, subprocess, time
from urllib.parse import urlsplit

subprocess.Popen(["setsid", "sleep", "600"])
url = urlsplit(os.environ["LEYDEN_EVENT_URL"])
key = os.environ["LEYDEN_KEY"]
me = {"rollout": os.environ["LEYDEN_ROLLOUT_ID"], "attempt": os.environ["LEYDEN_ATTEMPT_ID"]}

def post(path, body):
    gateway = http.client.HTTPConnection(url.netloc, timeout=60)
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    gateway.request("POST", path, json.dumps(body), headers)
    answer = gateway.getresponse()
    text = answer.read()
    assert answer.status == 200, (answer.status, text)

for number in range(CALLS):
    said = json.dumps({**me, "call": number})
    post("/openai/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": said}]})
    post(url.path, {"event_type": "note", "data": {**me, "call": number}})
    time.sleep(1.2)
post(url.path, {"event_type": "reward", "data": {**me, "value": float(me["attempt"])}})
""".replace("CALLS", str(CALLS))


@dataclass
class Result:
    kills: int = 0
    attempts: int = 0
    late: int = 0
    """Writes of attempts that were over, refused and counted."""
    lost: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)

    def line(self) -> str:
        return (
            f"faults-controller: kills={self.kills} lost={len(self.lost)} mixed={len(self.mixed)} "
            f"leaked={len(self.leaked)} attempts={self.attempts} late_writes={self.late}"
        )

    def passed(self) -> bool:
        return not (self.lost or self.mixed or self.leaked)


class ControllerProcess:
    """`leyden controller` as a user starts it, again and again."""

    def __init__(self, number: int, url: str, folder: Path) -> None:
        self._number = number
        self._url = url
        self._folder = folder
        self._lives = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._name = f"controller{number}"

    @property
    def mark(self) -> str:
        return f"{self._folder.name}.{self._number}.{self._lives}"

    def spawn(self, *, new_name: bool) -> None:
        self._lives += 1
        if new_name:
            self._name = f"controller{self._number}.{self._lives}"
        command = [sys.executable, "-m", "leyden", "controller", "--gateway", self._url, "--concurrency", str(AT_ONCE)]
        command += ["--base-dir", str(self._folder), "--work-dir", str(self._folder / f"work{self._number}")]
        command += ["--controller-id", self._name, "--lease-seconds", str(LEASE_SECONDS)]
        env = {**os.environ, "LEYDEN_ADMIN_KEY": ADMIN, MARK: self.mark}
        with (self._folder / f"controller{self._number}.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def kill(self, *, guard: bool) -> None:
        """SIGKILL for the controller proper, or for the guard above it."""
        assert self._process is not None and self._process.poll() is None, "the controller ended by itself"
        below = psutil.Process(self._process.pid).children()
        victim = self._process.pid if guard or not below else below[0].pid
        os.kill(victim, signal.SIGKILL)

    async def gone(self, mark: str) -> list[str]:
        """What is left of a killed life after the time that it has to end."""
        assert self._process is not None
        await asyncio.to_thread(self._process.wait, 30)
        deadline = time.monotonic() + GONE_SECONDS
        while left := await asyncio.to_thread(marked, mark):
            if time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.1)
        return []

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(30)


def marked(mark: str) -> list[str]:
    """Processes that were started under `mark`, zombies left out."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(f"{folder.name} {(folder / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    return found


async def kill_again_and_again(
    controller: ControllerProcess, kills: int, chance: random.Random, ended: asyncio.Event, result: Result
) -> None:
    """Kill a controller until all rollouts have ended, but not more often than `kills`."""
    controller.spawn(new_name=False)
    for _ in range(kills):
        await asyncio.sleep(chance.uniform(*LIFE_SECONDS))
        if ended.is_set():
            break
        mark = controller.mark
        controller.kill(guard=chance.random() < 0.3)
        result.kills += 1
        result.leaked += await controller.gone(mark)
        controller.spawn(new_name=chance.random() < 0.3)


async def all_ended(admin: LeydenClient, rollouts: set[str], ended: asyncio.Event, result: Result) -> None:
    after, times = 0, Counter[str]()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while set(times) != rollouts and time.monotonic() < deadline:
        page = await admin.terminal(after, wait_seconds=5)
        times.update(i.rollout_id for i in page.items)
        result.lost += [
            f"{i.rollout_id} has {i.state} ({i.outcome})" for i in page.items if i.state is not RolloutState.SUCCEEDED
        ]
        after = page.next_after
    ended.set()
    result.lost += [f"{r} hasn't ended" for r in rollouts - set(times)]
    result.lost += [f"{r} has ended {n} times" for r, n in times.items() if n > 1]


async def check(admin: LeydenClient, store: Path, rollouts: set[str], result: Result) -> None:
    """What each attempt wrote, against where it stands."""
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as db:
        for rollout_id, attempt_id, data in db.execute(EVENTS):
            said = orjson.loads(data)
            if (said["rollout"], said["attempt"]) != (rollout_id, attempt_id):
                result.mixed.append(f"an event of {said} stands with {rollout_id}/{attempt_id}")
    for rollout_id in rollouts:
        detail = await admin.rollout(rollout_id)
        last = detail.attempts[-1]
        result.attempts += len(detail.attempts)
        result.late += sum(a.late_writes for a in detail.attempt_details)
        unended = [a.attempt_id for a in detail.attempt_details if a.ended_at is None]
        if unended or detail.rollout.status.reward != float(last):
            result.mixed.append(f"{rollout_id}: reward {detail.rollout.status.reward}, attempts without end {unended}")
        trajectory = await admin.trajectory(rollout_id, content=True)
        calls = [orjson.loads((c.raw or {})["messages"][-1]["content"]) for c in trajectory.calls]
        expected = [{"rollout": rollout_id, "attempt": last, "call": n} for n in range(CALLS)]
        if calls != expected:
            result.mixed.append(f"{rollout_id}/{last} has calls {calls}")
        notes = [e.data["call"] for e in await admin.events(rollout_id, "note")]
        if notes != list(range(CALLS)):
            result.mixed.append(f"{rollout_id}/{last} has notes {notes}")


async def main(kills: int, count: int) -> Result:
    result, chance, ended = Result(), random.Random(count), asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="leyden-faults-") as name:
        folder = Path(name)
        model = make_tiny_model(folder / "tiny")
        (folder / "agent.py").write_text(AGENT)
        engine = Engine(folder, model)
        gateway = GatewayProcess(str(folder / "store.db"), model, folder / "gateway.log")
        controllers = [ControllerProcess(i, gateway.url, folder) for i in range(2)]
        try:
            gateway.spawn()
            async with aiohttp.ClientSession() as http:
                await gateway.ready(http)
            async with LeydenClient(gateway.url, ADMIN) as admin:
                await admin.register_models([EngineModel(model="tiny", endpoint=engine.endpoint, kind="leyden")])
                retry = RetryPolicy(infra=ATTEMPTS, backoff_seconds=0.1, backoff_max_seconds=1)
                config = RolloutConfig(agent=AgentSpec(command=["python", "agent.py"]), retry=retry)
                made = await admin.create_rollouts([RolloutCreate(input=i, config=config) for i in range(count)])
                rollouts = {r.rollout_id for r in made}
                async with asyncio.TaskGroup() as group:
                    group.create_task(all_ended(admin, rollouts, ended, result))
                    for i, controller in enumerate(controllers):
                        share = (kills + i) // len(controllers)
                        group.create_task(kill_again_and_again(controller, share, chance, ended, result))
                await check(admin, folder / "store.db", rollouts, result)
                for controller in controllers:
                    controller.stop()
                    result.leaked += await controller.gone(controller.mark)
        finally:
            for controller in controllers:
                controller.stop()
            gateway.stop()
            engine.stop()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rollouts", type=int, default=200)
    given = parser.parse_args()
    outcome = asyncio.run(main(given.kills, given.rollouts))
    for problem in (outcome.lost + outcome.mixed + outcome.leaked)[:20]:
        print(f"  {problem}")
    print(outcome.line())
    sys.exit(0 if outcome.passed() and outcome.kills == given.kills else 1)

"""What was acknowledged survives: kills, restarts, a full disk. And what refuses to start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from leyden.client import LeydenClient
from leyden.errors import GatewayError, PreflightError
from leyden.gateway.errors import StoreUnavailable
from leyden.gateway.options import GatewayOptions, admin_key, bind
from leyden.gateway.store.base import open_store
from leyden.gateway.store.ddl import MIGRATIONS
from leyden.schema import (
    ClaimRequest,
    EngineModel,
    EventCreate,
    Outcome,
    OutcomeReport,
    PauseRequest,
    RolloutCreate,
    RolloutState,
)
from tests.gateway.conftest import ADMIN, MakeWorld, World, on_sqlite
from tests.gateway.scripted_engine import Reply, ScriptedEngine

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
START = """
import sys, json
from pathlib import Path
from leyden.gateway.app import run_gateway
from leyden.gateway.options import GatewayOptions
store, model, ready = map(Path, sys.argv[1:4])
sys.exit(run_gateway(GatewayOptions(store=store, model_folder=model, model_name="tiny", ready_file=ready)))
"""


def launch(store: Path, model: Path, ready: Path) -> tuple[subprocess.Popen[bytes], str]:
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-c", START, str(store), str(model), str(ready)]
    process = subprocess.Popen(command, env={**os.environ, "LEYDEN_ADMIN_KEY": ADMIN})
    deadline = time.monotonic() + 60
    while not ready.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return process, json.loads(ready.read_text())["url"]


async def test_acknowledged_calls_and_rewards_survive_kill_9(
    tmp_path: Path, model_folder: Path, tokenizer: Any
) -> None:
    store, ready = tmp_path / "s.db", tmp_path / "ready.json"
    async with ScriptedEngine(tokenizer) as engine, aiohttp.ClientSession() as http:
        process, url = await asyncio.to_thread(launch, store, model_folder, ready)
        got: list[str] = []
        rewards: list[int] = []
        try:
            async with LeydenClient(url, ADMIN, patience=0) as admin:
                await admin.register_models([EngineModel(model="tiny", endpoint=engine.endpoint)])
                await admin.create_rollouts([RolloutCreate(input=i, rollout_id=f"r{i}") for i in range(3)])
                claims = await admin.claim(ClaimRequest(controller_id="c", limit=3, lease_seconds=600))

                async def talk(index: int) -> None:
                    headers = {"x-api-key": claims[index].agent_key}
                    rollout_id = claims[index].rollout.rollout_id
                    number = 0
                    while True:
                        number += 1
                        body = {"messages": [{"role": "user", "content": f"{index} {number}"}]}
                        try:
                            async with http.post(f"{url}/openai/v1/chat/completions", json=body, headers=headers) as a:
                                answer = await a.json()
                                got.append(answer["id"].removeprefix("chatcmpl-"))
                            event = EventCreate(event_type="reward", data={"value": number, "index": index})
                            await admin.post_event(rollout_id, "0", event)
                            rewards.append(index)
                        except (aiohttp.ClientError, GatewayError):
                            return

                talking = asyncio.gather(*[talk(i) for i in range(3)])
                await asyncio.sleep(1.5)
                process.send_signal(signal.SIGKILL)
                await asyncio.wait_for(talking, 20)
        finally:
            process.kill()
            process.wait()
        assert len(got) > 10
        process, url = await asyncio.to_thread(launch, store, model_folder, ready)
        try:
            async with LeydenClient(url, ADMIN) as admin:
                found = []
                for claim in claims:
                    found += (await admin.trajectory(claim.rollout.rollout_id)).calls
                kept = {c.call_id for c in found}
                assert set(got) <= kept
                # A kill may come between an answer and the note that it arrived: at most the last of each agent.
                assert sum(not c.delivered for c in found) <= 2 * len(claims)
                events = [e for c in claims for e in await admin.events(c.rollout.rollout_id, "reward")]
                assert len(events) >= len(rewards)
                assert (await admin.models())[0].endpoint == engine.endpoint
                async with http.post(
                    f"{url}/openai/v1/chat/completions", json=BODY, headers={"x-api-key": claims[0].agent_key}
                ) as answer:
                    assert answer.status == 200
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, 20) == 0
        finally:
            process.kill()
            process.wait()


async def test_a_restart_continues_conversations_and_replays_answers(world_maker: MakeWorld) -> None:
    async with world_maker() as world:
        claim = await world.claim(lease=60)
        world.engine.say("first")
        await world.chat(claim.agent_key, BODY)
        before = (await world.admin.trajectory(claim.rollout.rollout_id)).calls
        await world.admin.pause(PauseRequest(owner="t", lease_seconds=60))
        # As after a kill between the recording of an answer and its delivery.
        store = world.gateway.store
        await store.db.write(lambda db: db.execute("UPDATE calls SET delivered = 0"))
        await store.db.write(lambda db: db.execute("UPDATE attempts SET delivered = 0"))
    async with world_maker(replay_grace_seconds=5) as world:
        assert (await world.admin.proxy_state()).owner == "t"
        status, body = await world.chat(claim.agent_key, BODY)  # answered from the record, although paused
        assert status == 200 and body["choices"][0]["message"]["content"] == "first"
        assert world.engine.requests == []
        await world.admin.resume()
        messages = [*BODY["messages"], {"role": "assistant", "content": "first"}, {"role": "user", "content": "y"}]
        await world.chat(claim.agent_key, {"messages": messages})
        first, second = (await world.admin.trajectory(claim.rollout.rollout_id)).calls
        assert first == before[0] and second.parent == first.call_id and second.seq == 1
        assert second.prompt_ids.startswith(first.prompt_ids + first.response_ids)
        await world.admin.post_event(claim.rollout.rollout_id, "0", EventCreate(event_type="reward", data={"value": 1}))
        done = OutcomeReport(controller_id="c1", outcome=Outcome.OK)
        assert (await world.admin.outcome(claim.rollout.rollout_id, "0", done)).status.state is RolloutState.SUCCEEDED


async def test_a_continuation_proves_that_an_answer_arrived(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = await world.claim()
    world.engine.say("first")

    async def full(*_: Any) -> None:
        raise StoreUnavailable("the disk is full for a moment")

    with monkeypatch.context() as patched:
        patched.setattr(world.gateway.store, "mark_delivered", full)
        await world.chat(claim.agent_key, BODY)
    assert [c.delivered for c in (await world.admin.trajectory(claim.rollout.rollout_id)).calls] == [False]
    messages = [*BODY["messages"], {"role": "assistant", "content": "first"}, {"role": "user", "content": "y"}]
    await world.chat(claim.agent_key, {"messages": messages})
    assert [c.delivered for c in (await world.admin.trajectory(claim.rollout.rollout_id)).calls] == [True, True]


@on_sqlite
async def test_a_full_disk_refuses_keeps_and_recovers(world: World) -> None:
    claim = await world.claim()
    assert (await world.chat(claim.agent_key, BODY))[0] == 200
    store = world.gateway.store

    def fill(db: sqlite3.Connection) -> None:
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")

    await store.db.write(fill)
    big: dict[str, Any] = {"messages": [{"role": "user", "content": "filler " * 200}], "max_tokens": 9}
    refused = 0
    for i in range(60):
        messages = [*big["messages"], {"role": "user", "content": str(i) * 50}]
        status, body = await world.chat(claim.agent_key, {**big, "messages": messages})
        if status == 507:
            refused += 1
            assert "disk" in body["error"]["message"]
            break
        assert status == 200
    assert refused == 1
    with pytest.raises(GatewayError, match="disk"):
        many = [RolloutCreate(input="x" * 5000) for _ in range(50)]
        await world.admin._call("POST", "/api/rollouts", [m.model_dump(mode="json") for m in many], retry=False)
    assert (await world.admin.healthz())["status"] == "ok"
    kept = (await world.admin.trajectory(claim.rollout.rollout_id)).calls
    await store.db.write(lambda db: db.execute("PRAGMA max_page_count = 1000000"))
    assert (await world.chat(claim.agent_key, big))[0] == 200
    after = (await world.admin.trajectory(claim.rollout.rollout_id)).calls
    assert after[: len(kept)] == kept and len(after) == len(kept) + 1


async def test_a_conversation_costs_what_is_new_in_it(world: World) -> None:
    claim = await world.claim()
    messages: list[dict[str, Any]] = []
    for turn in range(12):
        messages.append({"role": "user", "content": f"turn {turn} " + "z" * 60})
        world.engine.say(Reply(f"answer {turn}"))
        await world.chat(claim.agent_key, {"messages": messages})
        messages.append({"role": "assistant", "content": f"answer {turn}"})

    def sizes(db: sqlite3.Connection) -> list[tuple[int, int]]:
        rows = db.execute("SELECT length(prompt_suffix), length(request_suffix) FROM calls ORDER BY seq")
        return [tuple(r) for r in rows]

    store = world.gateway.store
    tokens, hashes = zip(*(await store.db.read(sizes))[1:], strict=True)
    assert max(tokens) - min(tokens) < 40 and set(hashes) == {32}
    last = (await world.admin.trajectory(claim.rollout.rollout_id, content=True)).calls[-1]
    assert (last.request or {})["messages"] == messages[:-1]
    assert len(np.frombuffer(last.prompt_ids, "<i4")) == len(world.engine.requests[-1]["prompt"])


def test_what_refuses_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def options(**more: Any) -> GatewayOptions:
        return GatewayOptions(store=tmp_path / "a" / "s.db", model_folder=tmp_path, model_name="m", **more)

    for key in (None, "", "   "):
        for env in ("", "  "):
            monkeypatch.setenv("LEYDEN_ADMIN_KEY", env)
            for host in ("0.0.0.0", "::", "", "192.0.2.7", "gateway.example"):
                with pytest.raises(PreflightError, match="admin key must be given"):
                    admin_key(options(host=host, admin_key=key))
    assert options().host == "127.0.0.1"
    made, path = admin_key(options(admin_key=" "))
    assert path is not None and stat.S_IMODE(path.stat().st_mode) == 0o600
    for host in ("127.0.0.1", "127.8.8.8", "localhost", "::1"):
        assert admin_key(options(host=host, admin_key="")) == (made, None)
    monkeypatch.setenv("LEYDEN_ADMIN_KEY", "given")
    assert admin_key(options(host="0.0.0.0")) == ("given", None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PreflightError, match="can't listen on"):
            bind("127.0.0.1", taken.getsockname()[1])
    store = open_store(tmp_path / "s.db")
    try:
        with pytest.raises(PreflightError, match="in use by another gateway"):
            open_store(tmp_path / "s.db")
    finally:
        store.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match="can't write the store"):
        open_store(tmp_path / "file" / "s.db")
    (tmp_path / "junk.db").write_bytes(b"not a database" * 100)
    with pytest.raises(PreflightError, match="can't open the store"):
        open_store(tmp_path / "junk.db")


def test_a_store_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path / "s.db").close()
    with sqlite3.connect(tmp_path / "s.db") as db:
        db.execute("INSERT INTO migrations VALUES (?, 0)", (len(MIGRATIONS) + 1,))
    db.close()
    with pytest.raises(PreflightError, match="newer Leyden"):
        open_store(tmp_path / "s.db")

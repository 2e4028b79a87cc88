"""The record read back: training rows made again, and exported files."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from leyden.cli import app, export, rows
from leyden.cli.reader import StoreReader
from leyden.gateway.store.address import StoreAddress
from leyden.gateway.store.base import open_store
from leyden.gateway.store.records import CallCommit
from leyden.schema import (
    EventCreate,
    OutcomeReport,
    RolloutCreate,
    RolloutMetadata,
    RolloutState,
    StatusPatch,
    Trajectory,
)
from leyden.training.rows import build_rows, digest
from tests.gateway.conftest import ADMIN, MakeWorld, World
from tests.gateway.scripted_engine import Reply

USER = {"role": "user", "content": "x"}


async def talk(world: World, number: int) -> Trajectory:
    """An ended rollout with a conversation of three turns, a branch, and an answer that nobody can train on."""
    metadata = RolloutMetadata(run="r", step=number)
    claim = await world.claim(rollout_id=f"r{number}", metadata=metadata)
    messages: list[dict[str, Any]] = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"é {number} {turn}"})
        world.engine.say(Reply(f"answer {turn}"))
        assert (await world.chat(claim.agent_key, {"messages": messages}))[0] == 200
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    world.engine.say(Reply("aside"), Reply("unlogged", drop=("logprobs",)))
    await world.chat(claim.agent_key, {"messages": [*messages[:2], {"role": "user", "content": "other"}]})
    await world.chat(claim.agent_key, {"messages": [USER]})
    await world.admin.post_event(f"r{number}", "0", EventCreate(event_type="reward", data={"value": 1 / 3}))
    await world.admin.outcome(f"r{number}", "0", OutcomeReport(controller_id="c1", outcome="ok"))  # type: ignore[arg-type]
    return await world.admin.trajectory(f"r{number}", content=True)


async def command(arguments: list[str]) -> Any:
    """The `leyden` command, in a thread without an event loop."""
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


async def test_rows_made_again_from_any_store_are_the_same_to_the_last_bit(
    world_maker: MakeWorld, store: StoreAddress, new_database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[list[CallCommit]] = []
    async with world_maker() as world:
        commit = world.gateway.store.commit_calls

        async def recording(batch: Any) -> Any:
            commits.append(list(batch))
            return await commit(batch)

        monkeypatch.setattr(world.gateway.store, "commit_calls", recording)
        live = [await talk(world, i) for i in range(3)]
        expected = {t.rollout_id: digest(build_rows(t, max_row_tokens=4096)[0]) for t in live}
        assert len(set(expected.values())) == 3 and all(len(build_rows(t, max_row_tokens=4096)[0]) == 2 for t in live)
        assert await rows.digests(world.admin, max_row_tokens=4096) == expected
        assert await rows.digests(world.admin, max_row_tokens=4096, step=1) == {"r1": expected["r1"]}
        shorter = await rows.digests(world.admin, max_row_tokens=60)
        assert shorter != expected
    async with world_maker() as world:  # after a restart
        assert await rows.digests(world.admin, max_row_tokens=4096) == expected
    for address in (tmp_path / "copy.db", new_database()):  # written anew, into either kind
        with closing(open_store(address)) as copy:
            for number in range(3):
                await copy.create_rollouts([RolloutCreate(input=1, rollout_id=f"r{number}")], None)
                await copy.patch(f"r{number}", StatusPatch(state=RolloutState.RUNNING))
            for batch in commits:
                await copy.commit_calls(batch)
                await copy.mark_delivered(batch[0].rollout_id, "0", [c.call_id for c in batch])
            for number in range(3):
                await copy.patch(f"r{number}", StatusPatch(state=RolloutState.SUCCEEDED))
            assert await rows.digests(StoreReader(copy), max_row_tokens=4096) == expected


async def test_an_export_holds_what_was_recorded(world_maker: MakeWorld, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(export, "CALLS_AT_ONCE", 4)  # several parts
    async with world_maker() as world:
        live = [await talk(world, i) for i in range(3)]
        await world.admin.create_rollouts([RolloutCreate(input={"q": "queued"}, rollout_id="queued")])
        assert await export.write(world.admin, tmp_path / "out", content=True) == (4, 15)
        address = world.options.store
    rollouts = {r["rollout_id"]: r for r in pq.read_table(tmp_path / "out" / "rollouts.parquet").to_pylist()}
    assert set(rollouts) == {"queued", "r0", "r1", "r2"}
    assert orjson.loads(rollouts["queued"]["input"]) == {"q": "queued"}
    assert rollouts["r1"]["reward"] == 1 / 3 and rollouts["r1"]["step"] == 1 and rollouts["r1"]["outcome"] == "ok"
    table = pq.ParquetFile(tmp_path / "out" / "calls.parquet")
    assert table.num_row_groups > 1
    exported = {c["call_id"]: c for c in table.read().to_pylist()}
    assert len(exported) == 15
    for trajectory in live:
        for call in trajectory.calls:
            got = exported[call.call_id]
            assert got["prompt_ids"] == np.frombuffer(call.prompt_ids, "<i4").tolist()
            assert got["response_ids"] == np.frombuffer(call.response_ids, "<i4").tolist()
            assert np.float32(got["logprobs"]).tobytes() == call.logprobs
            assert (got["parent"], got["delivered"], got["untrainable"]) == (
                call.parent,
                call.delivered,
                call.untrainable,
            )
            assert orjson.loads(got["raw"]) == call.raw and orjson.loads(got["response"]) == call.response
    again = await command(["export", str(tmp_path / "again"), "--store", str(address), "--no-content"])
    assert again.exit_code == 0 and "rollouts=4 calls=15" in again.output, again.output
    without = pq.read_table(tmp_path / "again" / "calls.parquet")
    assert without["raw"].null_count == 15 and without["prompt_ids"].equals(table.read()["prompt_ids"])


async def test_the_rebuild_command_compares_with_what_was_trained(
    world_maker: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    async with world_maker(store=run / "store.sqlite") as world:
        live = [await talk(world, i) for i in range(2)]
    trained = {t.rollout_id: build_rows(t, max_row_tokens=8192)[1].digest for t in live}
    record = {"kind": "step", "step": 0, "row_digests": trained}
    (run / "metrics.jsonl").write_bytes(orjson.dumps(record) + b"\n")
    same = await command(["rows", "rebuild", "--run", str(run)])
    assert same.exit_code == 0 and "rollouts=2 compared=2 digest=" in same.output, same.output
    assert (await command(["rows", "rebuild", "--run", str(run)])).output == same.output
    record["row_digests"] = {**trained, "r1": "0" * 32}
    (run / "metrics.jsonl").write_bytes(orjson.dumps(record) + b"\n")
    other = await command(["rows", "rebuild", "--run", str(run)])
    assert other.exit_code != 0
    assert ADMIN not in other.output

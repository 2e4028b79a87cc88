"""Reads a run's record: from its gateway while that is up, from its store file otherwise."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeVar

import orjson

from leyden.client import LeydenClient, Reader
from leyden.errors import ConfigError, GatewayError
from leyden.gateway.errors import Refused
from leyden.gateway.store.address import StoreAddress, is_postgres
from leyden.gateway.store.base import Store, open_store
from leyden.schema import LogPart, LogText, Rollout, RolloutDetail, RolloutPage, RolloutState, Trajectory

T = TypeVar("T")


def find_run(run: Path | None) -> Path:
    """The run's folder: the given one, or the newest under `runs/`.

    Raises:
        ConfigError: when there is none.
    """
    if run is not None:
        if not run.is_dir():
            raise ConfigError(f"no run folder {run}")
        return run
    stores = sorted(Path("runs").glob("*/store.sqlite"), key=lambda p: p.stat().st_mtime)
    if not stores:
        raise ConfigError("there is no run under runs/ here: give one with --run DIR")
    return stores[-1].parent


@asynccontextmanager
async def open_reader(
    run_dir: Path | None, gateway: str | None, address: StoreAddress | None = None
) -> AsyncIterator[Reader]:
    """A reader of the gateway at `gateway` (admin key in LEYDEN_ADMIN_KEY), of the store at `address`, or of the run in
    `run_dir`. A SQLite store can't be read while its gateway runs.

    Raises:
        ConfigError, GatewayError: when neither can be had, or the record doesn't know what is asked for.
    """
    if gateway is not None:
        async with LeydenClient(gateway, os.environ.get("LEYDEN_ADMIN_KEY", ""), patience=5) as client:
            yield client
        return
    if address is not None:
        with closing(_existing(address)) as store:
            yield StoreReader(store)
        return
    run_dir = find_run(run_dir)
    try:
        url = orjson.loads((run_dir / "gateway.json").read_bytes())["url"]
        key = orjson.loads((run_dir / "keys.json").read_bytes())["admin"]
    except (OSError, orjson.JSONDecodeError, KeyError):
        url = key = ""
    if url:
        async with LeydenClient(url, key, patience=0) as client:
            # A port may belong to somebody else by now: only a gateway that takes this run's key is this run's.
            try:
                await client.stats()
            except GatewayError:
                pass
            else:
                yield client
                return
    if not (run_dir / "store.sqlite").is_file():
        raise ConfigError(f"{run_dir} has no store.sqlite: no rollout was recorded there")
    with closing(open_store(run_dir / "store.sqlite")) as store:
        yield StoreReader(store)


def _existing(address: StoreAddress) -> Store:
    if not is_postgres(address) and not Path(address).is_file():
        raise ConfigError(f"there is no store {address}")
    return open_store(address)


class StoreReader:
    """The same answers from a store that no gateway has open."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def page(
        self,
        *,
        state_in: list[str] | None = None,
        run: str | None = None,
        step: int | None = None,
        is_train: bool | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> RolloutPage:
        states = [RolloutState(s) for s in state_in] if state_in else None
        return await _plain(self._store.page(states, run, step, is_train, limit, cursor))

    async def rollout(self, rollout_id: str) -> RolloutDetail:
        return await _plain(self._store.detail(rollout_id))

    async def trajectory(self, rollout_id: str, *, content: bool = False) -> Trajectory:
        return await _plain(self._store.trajectory(rollout_id, content=content))

    async def log(self, rollout_id: str, attempt_id: str, *, part: LogPart = "agent", start: int = 0) -> LogText:
        return await _plain(self._store.log(rollout_id, attempt_id, part, start))


async def all_rollouts(reader: Reader, **which: Any) -> AsyncIterator[Rollout]:
    """Every rollout, newest first; `which` narrows it as `Reader.page` does."""
    cursor: str | None = None
    while True:
        page = await reader.page(**which, limit=200, cursor=cursor)
        for rollout in page.items:
            yield rollout
        cursor = page.next_cursor
        if cursor is None:
            return


async def _plain(work: Awaitable[T]) -> T:
    try:
        return await work
    except Refused as e:
        raise GatewayError(str(e), e.status) from e

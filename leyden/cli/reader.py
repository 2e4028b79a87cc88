"""Reads a run's record: from its gateway while that is up, from its store file otherwise."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import orjson

from leyden.client import LeydenClient
from leyden.errors import ConfigError, GatewayError
from leyden.schema import RolloutDetail, RolloutPage, RolloutState, Trajectory

T = TypeVar("T")


@dataclass(frozen=True)
class Reader:
    """What the looking commands ask. `page` takes state, step, training-or-not, limit and cursor."""

    page: Callable[[list[str] | None, int | None, bool | None, int, str | None], Awaitable[RolloutPage]]
    detail: Callable[[str], Awaitable[RolloutDetail]]
    trajectory: Callable[[str], Awaitable[Trajectory]]


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
async def open_reader(run_dir: Path | None, gateway: str | None) -> AsyncIterator[Reader]:
    """A reader of the gateway at `gateway` (admin key in LEYDEN_ADMIN_KEY), or of the run in `run_dir`.

    Raises:
        ConfigError, GatewayError: when neither can be had, or the record doesn't know what is asked for.
    """
    if gateway is not None:
        async with LeydenClient(gateway, os.environ.get("LEYDEN_ADMIN_KEY", ""), patience=5) as client:
            yield _of_client(client)
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
                yield _of_client(client)
                return
    if not (run_dir / "store.sqlite").is_file():
        raise ConfigError(f"{run_dir} has no store.sqlite: no rollout was recorded there")
    from leyden.gateway.store.sqlite import SqliteStore

    store = SqliteStore(run_dir / "store.sqlite")
    try:
        yield _of_store(store)
    finally:
        store.close()


def _of_client(client: LeydenClient) -> Reader:
    return Reader(
        page=lambda states, step, train, limit, cursor: client.page(
            state_in=states, step=step, is_train=train, limit=limit, cursor=cursor
        ),
        detail=client.rollout,
        trajectory=lambda rollout_id: client.trajectory(rollout_id, content=True),
    )


def _of_store(store: SqliteStore) -> Reader:  # noqa: F821  (imported only when a store is opened)
    from leyden.gateway.errors import Refused

    async def plain(work: Awaitable[T]) -> T:
        try:
            return await work
        except Refused as e:
            raise GatewayError(str(e), e.status) from e

    return Reader(
        page=lambda states, step, train, limit, cursor: plain(
            store.page([RolloutState(s) for s in states] if states else None, None, step, train, limit, cursor)
        ),
        detail=lambda rollout_id: plain(store.detail(rollout_id)),
        trajectory=lambda rollout_id: plain(store.trajectory(rollout_id, content=True)),
    )

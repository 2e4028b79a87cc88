"""The store: what the gateway keeps, in a SQLite file or in a PostgreSQL database that several gateways share.

The SQL is in the modules beside this one, once for both. Every write is durable when it returns, and is all or nothing.
Methods raise leyden.gateway.errors.Refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson

from leyden.errors import PreflightError
from leyden.gateway.dialects.base import Asked
from leyden.gateway.errors import Conflict
from leyden.gateway.store import attempts, calls, events, logs, retention, rollouts
from leyden.gateway.store.address import StoreAddress, is_postgres
from leyden.gateway.store.connection import Connection, Database, Work
from leyden.gateway.store.database import SqliteDatabase
from leyden.gateway.store.records import AttemptInfo, CallCommit, Changed, Ended, KeyOwner, Late, Recorded, StoredCall
from leyden.schema import (
    Claim,
    ClaimRequest,
    EngineModel,
    Event,
    Heartbeat,
    HeartbeatReply,
    LogPart,
    LogPiece,
    LogSize,
    LogText,
    OutcomeReport,
    PhaseReport,
    RewardData,
    Rollout,
    RolloutCreate,
    RolloutDetail,
    RolloutPage,
    RolloutState,
    StatusPatch,
    TerminalPage,
    Trajectory,
)

T = TypeVar("T")


def open_store(address: StoreAddress) -> Store:
    """Open or make a store.

    Raises:
        PreflightError: it can't be used; one sentence.
    """
    if not is_postgres(address):
        return Store(SqliteDatabase(Path(address)))
    try:
        from leyden.gateway.store.postgres import PostgresDatabase
    except ImportError as e:
        raise PreflightError(f"a PostgreSQL store needs leyden[postgres]: pip install 'leyden[postgres]' ({e})") from e
    return Store(PostgresDatabase(str(address)))


DELIVERY_SECONDS = 0.5
"""How long after its recording an answer of another gateway may still be on its way to the client there."""


class Store:
    """Open with `open_store`."""

    def __init__(self, database: Database) -> None:
        self.db = database
        self._arrived: list[tuple[str, str, str]] = []
        """(rollout, attempt, call) of answers that the next write notes."""
        self._noting: asyncio.Task[None]

    @property
    def shared(self) -> bool:
        """Whether other gateways may use it too."""
        return self.db.shared

    def notes(self) -> AsyncIterator[list[str]]:
        """What other gateways changed: ["queue"], ["terminal"], ["models"], ["meta", key], ["left", rollout, attempt,
        phase]; [] when some may have been missed."""
        return self.db.notes()

    def close(self) -> None:
        self.db.close()

    async def _write(self, work: Work[T | Late], *, quick: bool = False) -> T:
        """Run a write; one that came too late was counted durably and is refused."""
        result = await self.db.write(work, quick=quick)
        if isinstance(result, Late):
            raise Conflict(result.message)
        return result

    # -- rollouts ------------------------------------------------------------------------------------------------------

    async def create_rollouts(self, items: Sequence[RolloutCreate], idempotency_key: str | None) -> list[Rollout]:
        return await self._write(lambda db: rollouts.create(db, items, idempotency_key))

    async def list_rollouts(self, states: Sequence[RolloutState] | None, run: str | None, limit: int) -> list[Rollout]:
        return await self.db.read(lambda db: rollouts.oldest_first(db, states, run, limit))

    async def page(
        self,
        states: Sequence[RolloutState] | None,
        run: str | None,
        step: int | None,
        is_train: bool | None,
        limit: int,
        cursor: str | None,
    ) -> RolloutPage:
        return await self.db.read(lambda db: rollouts.page(db, states, run, step, is_train, limit, cursor))

    async def terminal(self, after: int, limit: int, run: str | None) -> TerminalPage:
        return await self.db.read(lambda db: rollouts.terminal(db, after, limit, run))

    async def detail(self, rollout_id: str) -> RolloutDetail:
        return await self.db.read(lambda db: rollouts.detail(db, rollout_id))

    async def patch(self, rollout_id: str, status: StatusPatch) -> Changed:
        return await self._write(lambda db: attempts.patch(db, rollout_id, status))

    async def delete(self, rollout_id: str) -> list[Ended]:
        return await self._write(lambda db: attempts.delete(db, rollout_id))

    # -- execution -----------------------------------------------------------------------------------------------------

    async def claim(self, request: ClaimRequest) -> list[Claim]:
        return await self._write(lambda db: attempts.claim(db, request))

    async def next_due(self) -> float | None:
        return await self.db.read(attempts.next_due)

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        return await self._write(lambda db: attempts.heartbeat(db, beat))

    async def release(self, controller_id: str) -> list[Ended]:
        return await self._write(lambda db: attempts.release(db, controller_id))

    async def expire(self, now: float) -> list[Ended]:
        return await self._write(lambda db: attempts.expire(db, now))

    async def next_expiry(self) -> float | None:
        return await self.db.read(attempts.next_expiry)

    async def renew_all(self, now: float) -> None:
        await self._write(lambda db: attempts.renew_all(db, now))

    async def end_abandoned(self, before: float) -> list[Ended]:
        """End some of the rollouts that nobody has touched since `before`."""
        return await self._write(lambda db: retention.end_abandoned(db, before))

    async def delete_old(self, before: float) -> int:
        """Delete some of the rollouts that ended before `before`."""
        return await self._write(lambda db: retention.delete_old(db, before))

    async def report_phase(self, rollout_id: str, attempt_id: str, report: PhaseReport) -> None:
        await self._write(lambda db: attempts.report_phase(db, rollout_id, attempt_id, report))

    async def report_outcome(self, rollout_id: str, attempt_id: str, report: OutcomeReport) -> Changed:
        if self.shared:
            await self._deliveries(rollout_id, attempt_id)
        return await self._write(lambda db: attempts.report_outcome(db, rollout_id, attempt_id, report))

    async def _deliveries(self, rollout_id: str, attempt_id: str) -> None:
        """Give other gateways a moment to note what they have just delivered: after the end it would be too late."""
        await self.db.settled()
        since = time.time() - DELIVERY_SECONDS
        while time.time() < since + 2 * DELIVERY_SECONDS:
            if not await self.db.read(lambda db: calls.on_their_way(db, rollout_id, attempt_id, since)):
                return
            await asyncio.sleep(DELIVERY_SECONDS / 10)

    async def append_log(self, rollout_id: str, attempt_id: str, piece: LogPiece) -> LogSize:
        return await self._write(lambda db: logs.append(db, rollout_id, attempt_id, piece))

    async def log(self, rollout_id: str, attempt_id: str, part: LogPart, start: int) -> LogText:
        return await self.db.read(lambda db: logs.read(db, rollout_id, attempt_id, part, start))

    async def key_owner(self, key_hash: bytes) -> KeyOwner | None:
        """The attempt of a key, or None for a key that was never given out."""
        return await self.db.read(lambda db: attempts.owner_of(db, key_hash))

    async def attempt_info(self, rollout_id: str, attempt_id: str) -> AttemptInfo:
        return await self.db.read(lambda db: attempts.info(db, rollout_id, attempt_id))

    async def count_late(self, rollout_id: str, attempt_id: str) -> None:
        await self._write(lambda db: attempts.count_late(db, rollout_id, attempt_id))

    # -- calls and events ----------------------------------------------------------------------------------------------

    async def commit_calls(self, batch: Sequence[CallCommit]) -> Recorded:
        """Store the sibling calls of one request, undelivered."""
        return await self._write(lambda db: calls.commit(db, batch), quick=True)

    async def mark_delivered(self, rollout_id: str, attempt_id: str, call_ids: Sequence[str]) -> None:
        """Note that the client has these answers. Calls are recorded, and answered, in groups: what is noted in one
        turn of the event loop is one write."""
        if not self._arrived:
            self._noting = asyncio.create_task(self._note())  # It begins with the loop's next turn.
        self._arrived += [(rollout_id, attempt_id, call_id) for call_id in call_ids]
        await asyncio.shield(self._noting)

    async def _note(self) -> None:
        arrived, self._arrived = self._arrived, []
        await self._write(lambda db: calls.mark_delivered(db, arrived), quick=True)

    async def abandon(self, call_ids: Sequence[str]) -> None:
        await self._write(lambda db: calls.abandon(db, call_ids))

    async def take_over(self, call_id: str) -> bool | None:
        """Whether this gateway may give a recorded answer to its client; None when another may be about to."""
        return await self.db.write(lambda db: calls.take_over(db, call_id))

    async def attempt_calls(self, rollout_id: str, attempt_id: str, *, after: int = 0) -> list[StoredCall]:
        """Recorded calls with their messages; only those with an ordinal above `after`."""
        return await self.db.read(lambda db: calls.of_attempt(db, rollout_id, attempt_id, content=True, after=after))

    async def asked(self, rollout_id: str, attempt_id: str, call_id: str) -> Asked | None:
        """What one call of an attempt was asked."""
        return await self.db.read(lambda db: calls.asked(db, rollout_id, attempt_id, call_id))

    async def trajectory(self, rollout_id: str, *, content: bool) -> Trajectory:
        def work(db: Connection) -> Trajectory:
            return calls.trajectory(db, rollouts.rollout_row(db, rollout_id), content=content)

        await self.db.settled()
        return await self.db.read(work)

    async def add_event(
        self,
        rollout_id: str,
        attempt_id: str,
        event_type: str,
        data: dict[str, Any],
        reward: RewardData | None,
        idempotency_key: str | None,
    ) -> Event:
        return await self._write(
            lambda db: events.add(db, rollout_id, attempt_id, event_type, data, reward, idempotency_key)
        )

    async def events(self, rollout_id: str, event_type: str | None, *, triplet: bool) -> bytes:
        """Events of the last attempt, as JSON."""
        await self.db.settled()
        return await self.db.read(lambda db: events.of_last_attempt(db, rollout_id, event_type, triplet=triplet))

    # -- engines and service -------------------------------------------------------------------------------------------

    async def upsert_models(self, models: Sequence[EngineModel]) -> None:
        def work(db: Connection) -> None:
            db.executemany(
                "INSERT INTO models (model, endpoint, body) VALUES (?, ?, ?)"
                " ON CONFLICT (model, endpoint) DO UPDATE SET body = excluded.body",
                [(m.model, m.endpoint, m.model_dump_json()) for m in models],
            )
            db.notify("models")

        await self._write(work)

    async def models(self) -> list[EngineModel]:
        return await self.db.read(
            lambda db: [EngineModel.model_validate_json(r[0]) for r in db.execute("SELECT body FROM models")]
        )

    async def remove_models(self, model: str | None, endpoint: str | None) -> None:
        """Forget engines: those of a model, at an endpoint, or all."""
        given = {"model": model, "endpoint": endpoint}
        named = {column: value for column, value in given.items() if value is not None}
        where = "".join(f" AND {column} = ?" for column in named)

        def work(db: Connection) -> None:
            db.execute(f"DELETE FROM models WHERE 1 = 1{where}", tuple(named.values()))
            db.notify("models")

        await self._write(work)

    async def get_meta(self, key: str) -> Any:
        def work(db: Connection) -> Any:
            row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            return orjson.loads(row[0]) if row else None

        return await self.db.read(work)

    async def set_meta(self, key: str, value: Any) -> None:
        body = orjson.dumps(value).decode()

        def work(db: Connection) -> None:
            db.execute(
                "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (key, body),
            )
            db.notify("meta", key)

        await self._write(work)

    async def stats(self) -> dict[str, Any]:
        """Counts over everything recorded."""

        def work(db: Connection) -> dict[str, Any]:
            late = db.execute("SELECT coalesce(sum(late_writes), 0) FROM attempts WHERE late_writes > 0").fetchone()[0]
            recorded, delivered = db.execute(
                "SELECT coalesce(sum(calls), 0), coalesce(sum(delivered), 0) FROM attempts"
            ).fetchone()
            states = {r[0]: r[1] for r in db.execute("SELECT state, count(*) FROM rollouts GROUP BY state")}
            return {
                "calls": int(recorded),
                "delivered": int(delivered),
                "uncaptured": calls.untrainable_counts(db),
                "late_writes": int(late),
                "rollouts": {str(s): states.get(str(s), 0) for s in RolloutState},
            }

        return await self.db.read(work)

"""SQL of rollouts: creating, listing, ending. Every function works on an open connection inside a transaction."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import TypeAdapter

from leyden.gateway.errors import Conflict, Invalid, NotFound
from leyden.gateway.store.connection import Connection, Row
from leyden.schema import (
    TERMINAL_STATES,
    Attempt,
    Outcome,
    Rollout,
    RolloutConfig,
    RolloutCreate,
    RolloutDetail,
    RolloutMetadata,
    RolloutPage,
    RolloutState,
    RolloutStatus,
    TerminalItem,
    TerminalPage,
)

_ROLLOUTS = TypeAdapter(list[Rollout])
_CALLS = "(SELECT a.calls FROM attempts a WHERE a.rollout_id = r.rollout_id AND a.attempt_id = r.last_attempt_id)"
_SELECT = f"SELECT r.*, {_CALLS} AS recorded FROM rollouts r"
"""Rollouts, and how many calls the last attempt of each has recorded."""
IDEMPOTENCY_SECONDS = 7 * 24 * 3600
"""How long a repeated request is recognised."""


def to_rollout(row: Row) -> Rollout:
    return Rollout(
        rollout_id=row["rollout_id"],
        input=orjson.loads(row["input"]),
        is_train=bool(row["is_train"]),
        config=RolloutConfig.model_validate_json(row["config"]),
        metadata=RolloutMetadata.model_validate_json(row["metadata"]),
        status=RolloutStatus(
            state=RolloutState(row["state"]),
            last_attempt_id=row["last_attempt_id"],
            outcome=Outcome(row["outcome"]) if row["outcome"] else None,
            error_message=row["error_message"],
            reward=row["reward"],
            calls=row["recorded"] or 0,
            k8s_job_name=row["k8s_job_name"],
            version=row["version"],
            created_at=row["created_at"],
            updated_at=row["updated_at"],
        ),
    )


def to_attempt(row: Row) -> Attempt:
    return Attempt(
        **{name: row[name] for name in Attempt.model_fields if name != "outcome"},
        outcome=Outcome(row["outcome"]) if row["outcome"] else None,
    )


def rollout_row(db: Connection, rollout_id: str, *, lock: bool = False) -> Row:
    row = db.execute(f"{_SELECT} WHERE r.rollout_id = ?{db.FOR_UPDATE if lock else ''}", (rollout_id,)).fetchone()
    if row is None:
        raise NotFound(f"there is no rollout {rollout_id}")
    return row


def create(db: Connection, items: Sequence[RolloutCreate], idempotency_key: str | None) -> list[Rollout]:
    """Enqueue `items`, once: a known `rollout_id` gives the existing rollout, a known key gives its first answer."""
    try:
        values = [i.model_dump(mode="json") for i in items]
    except ValueError as e:
        raise Invalid(f"the request can't be stored as JSON: {e}") from None
    body_hash = hash_body(values)
    if idempotency_key is not None:
        known = recall(db, f"rollouts:{idempotency_key}", body_hash)
        if known is not None:
            return [to_rollout(rollout_row(db, rollout_id)) for rollout_id in known]
    out = []
    now = time.time()
    for item in items:
        rollout_id = item.rollout_id or uuid.uuid4().hex
        existing = db.execute(f"{_SELECT} WHERE r.rollout_id = ?", (rollout_id,)).fetchone()
        if existing is None:
            metadata = item.metadata or RolloutMetadata()
            try:
                input_json = orjson.dumps(item.input).decode()
            except (TypeError, orjson.JSONEncodeError) as e:
                raise Invalid(f"the input of rollout {rollout_id} can't be stored as JSON: {e}") from e
            db.execute(
                "INSERT INTO rollouts (rollout_id, input, is_train, config, metadata, run, step, state, created_at,"
                " updated_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (rollout_id) DO NOTHING",
                (
                    rollout_id,
                    input_json,
                    item.is_train,
                    (item.config or RolloutConfig()).model_dump_json(),
                    metadata.model_dump_json(exclude_none=True),
                    metadata.run,
                    metadata.step,
                    RolloutState.QUEUING,
                    now,
                    now,
                ),
            )
            existing = rollout_row(db, rollout_id)
        out.append(to_rollout(existing))
    if idempotency_key is not None:
        remember(db, f"rollouts:{idempotency_key}", body_hash, [r.rollout_id for r in out])
    db.notify("queue")
    return out


def hash_body(value: Any) -> bytes:
    """What a repeated request is recognised by.

    Raises:
        Invalid: the value can't be stored as JSON.
    """
    try:
        return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).digest()
    except TypeError as e:
        raise Invalid(f"the request can't be stored as JSON: {e}") from None


def recall(db: Connection, key: str, body_hash: bytes) -> Any:
    """The answer that was given to this idempotency key, or None.

    Raises:
        Conflict: the key was used with another body.
    """
    row = db.execute("SELECT body_hash, answer FROM idempotency WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    if row["body_hash"] != body_hash:
        raise Conflict("this Idempotency-Key was used with another body; take a new key for a new request")
    return orjson.loads(row["answer"])


def remember(db: Connection, key: str, body_hash: bytes, answer: Any) -> None:
    now = time.time()
    db.execute("DELETE FROM idempotency WHERE created_at < ?", (now - IDEMPOTENCY_SECONDS,))
    db.execute("INSERT INTO idempotency VALUES (?, ?, ?, ?)", (key, body_hash, orjson.dumps(answer).decode(), now))


def _filter(
    states: Sequence[RolloutState] | None, run: str | None, step: int | None = None, is_train: bool | None = None
) -> tuple[str, list[Any]]:
    clauses, values = ["1 = 1"], []
    if states:
        clauses.append(f"state IN ({', '.join('?' * len(states))})")
        values.extend(str(s) for s in states)
    for column, value in (("run", run), ("step", step), ("is_train", is_train)):
        if value is not None:
            clauses.append(f"{column} = ?")
            values.append(value)
    return " AND ".join(clauses), values


def oldest_first(db: Connection, states: Sequence[RolloutState] | None, run: str | None, limit: int) -> list[Rollout]:
    where, values = _filter(states, run)
    rows = db.execute(f"{_SELECT} WHERE {where} ORDER BY r.seq LIMIT ?", (*values, limit))
    return [to_rollout(r) for r in rows]


def page(
    db: Connection,
    states: Sequence[RolloutState] | None,
    run: str | None,
    step: int | None,
    is_train: bool | None,
    limit: int,
    cursor: str | None,
) -> RolloutPage:
    where, values = _filter(states, run, step, is_train)
    before, extra = "", []
    if cursor is not None:
        if not cursor.isdecimal() or int(cursor) >= 2**63:
            raise Invalid(f"cursor {cursor!r} isn't one that this gateway gave")
        before, extra = " AND seq < ?", [int(cursor)]
    rows = db.execute(
        f"{_SELECT} WHERE {where}{before} ORDER BY r.seq DESC LIMIT ?", (*values, *extra, limit + 1)
    ).fetchall()
    counts_where, counts_values = _filter(None, run, step, is_train)
    by_state = {str(s): 0 for s in RolloutState}
    counted = db.execute(f"SELECT state, count(*) FROM rollouts WHERE {counts_where} GROUP BY state", counts_values)
    by_state.update({r[0]: r[1] for r in counted})
    total = sum(n for s, n in by_state.items() if not states or s in {str(x) for x in states})
    return RolloutPage(
        items=[to_rollout(r) for r in rows[:limit]],
        next_cursor=str(rows[limit - 1]["seq"]) if len(rows) > limit else None,
        total=total,
        by_state=by_state,
    )


def terminal(db: Connection, after: int, limit: int, run: str | None) -> TerminalPage:
    where, values = ("WHERE t.run = ?", [run]) if run is not None else ("WHERE 1 = 1", [])
    rows = db.execute(
        f"SELECT t.seq AS cursor, r.*, {_CALLS} AS recorded FROM terminal t"
        " JOIN rollouts r ON r.rollout_id = t.rollout_id"
        f" {where} AND t.seq > ? ORDER BY t.seq LIMIT ?",
        (*values, after, limit),
    ).fetchall()
    total = db.execute(f"SELECT count(*) FROM terminal t {where}", values).fetchone()[0]
    items = []
    for row in rows:
        metadata = RolloutMetadata.model_validate_json(row["metadata"])
        items.append(
            TerminalItem(
                rollout_id=row["rollout_id"],
                state=RolloutState(row["state"]),
                data_id=str((metadata.model_extra or {}).get("data_id") or metadata.task_id or ""),
                is_train=bool(row["is_train"]),
                outcome=Outcome(row["outcome"]) if row["outcome"] else None,
                reward=row["reward"],
                calls=row["recorded"] or 0,
                metadata=metadata,
            )
        )
    return TerminalPage(items=items, next_after=rows[-1]["cursor"] if rows else after, total_terminal=total)


def detail(db: Connection, rollout_id: str) -> RolloutDetail:
    row = rollout_row(db, rollout_id)
    attempts = db.execute("SELECT * FROM attempts WHERE rollout_id = ? ORDER BY started_at, attempt_id", (rollout_id,))
    details = [to_attempt(r) for r in attempts]
    return RolloutDetail(rollout=to_rollout(row), attempts=[a.attempt_id for a in details], attempt_details=details)


def set_state(db: Connection, rollout_id: str, state: RolloutState, **columns: Any) -> None:
    """Move a rollout to `state`, setting `columns` too; a terminal state takes the next place in completion order."""
    sets = "".join(f", {name} = ?" for name in columns)
    db.execute(
        f"UPDATE rollouts SET state = ?, version = version + 1, updated_at = ?{sets} WHERE rollout_id = ?",
        (str(state), time.time(), *columns.values(), rollout_id),
    )
    if state in TERMINAL_STATES:
        # Readers follow this list by its numbers: they must become visible in their order.
        db.own("terminal")
        db.execute(
            "INSERT INTO terminal (rollout_id, run) SELECT rollout_id, run FROM rollouts WHERE rollout_id = ?",
            (rollout_id,),
        )
        db.notify("terminal")
    elif state is RolloutState.QUEUING:
        db.notify("queue")


def delete(db: Connection, rollout_id: str) -> None:
    """Remove a rollout and everything recorded for it; messages that others use too stay."""
    hashes = [r[0] for r in db.execute("SELECT hash FROM message_uses WHERE rollout_id = ?", (rollout_id,))]
    for table in ("rollouts", "attempts", "keys", "events", "calls", "message_uses", "terminal", "logs"):
        db.execute(f"DELETE FROM {table} WHERE rollout_id = ?", (rollout_id,))
    # Somebody may be recording a call with one of these messages: it is there before its use is noted.
    db.own("messages")
    db.executemany(
        "DELETE FROM messages WHERE hash = ?"
        " AND NOT EXISTS (SELECT 1 FROM message_uses u WHERE u.hash = messages.hash)",
        [(h,) for h in hashes],
    )

"""SQL of model calls: storing them in O(new tokens), putting prompts and messages together again."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from typing import Any

import orjson

from leyden.gateway.lifecycle import Phase, name_attempt
from leyden.gateway.store.attempts import attempt_row, count_late
from leyden.gateway.store.records import CallCommit, Late, MessageRef, StoredCall
from leyden.schema import CallRecord, Trajectory

HASH_BYTES = 16
"""Length of a message hash."""
_ID_BYTES = 4


def commit(db: sqlite3.Connection, calls: Sequence[CallCommit]) -> Late | None:
    """Store the sibling calls of one request, if their attempt is still in its agent phase.

    A call that continues another proves that the other's answer arrived: it is marked delivered.
    """
    rollout_id, attempt_id = calls[0].rollout_id, calls[0].attempt_id
    phase = Phase(attempt_row(db, rollout_id, attempt_id)["phase"])
    if phase is not Phase.AGENT:
        count_late(db, rollout_id, attempt_id)
        return Late(f"{name_attempt(rollout_id, attempt_id)} ended while this call was running; it wasn't recorded")
    for call in calls:
        _insert(db, call)
    base = calls[0].parent
    if base is not None:
        mark_delivered(db, rollout_id, attempt_id, [base])
    db.execute(
        "UPDATE attempts SET calls = calls + ? WHERE rollout_id = ? AND attempt_id = ?",
        (len(calls), rollout_id, attempt_id),
    )
    db.execute("UPDATE rollouts SET calls = calls + ? WHERE rollout_id = ?", (len(calls), rollout_id))
    return None


def _insert(db: sqlite3.Connection, call: CallCommit) -> None:
    refs = [*call.request_suffix, *([call.tools] if call.tools else [])]
    db.executemany("INSERT OR IGNORE INTO messages VALUES (?, ?)", [(r.hash, r.body.decode()) for r in refs])
    db.executemany("INSERT OR IGNORE INTO message_uses VALUES (?, ?)", [(call.rollout_id, r.hash) for r in refs])
    row = {
        **{name: getattr(call, name) for name in CallCommit.__slots__},
        "requested": orjson.dumps(call.requested).decode(),
        "effective": orjson.dumps(call.effective).decode(),
        "response": orjson.dumps(call.response).decode() if call.response is not None else None,
        "request_suffix": b"".join(r.hash for r in call.request_suffix),
        "tools": call.tools.hash if call.tools else None,
        "delivered": 0,
    }
    names = list(row)
    db.execute(
        f"INSERT INTO calls ({', '.join(names)}) VALUES ({', '.join(':' + n for n in names)})",
        row,
    )
    db.execute(
        "INSERT INTO events (rollout_id, attempt_id, event_type, timestamp, call_id)"
        " VALUES (?, ?, 'model_request', ?, ?)",
        (call.rollout_id, call.attempt_id, call.ended_at, call.call_id),
    )


def mark_delivered(db: sqlite3.Connection, rollout_id: str, attempt_id: str, call_ids: Sequence[str]) -> None:
    """Note that the client has these answers. A closed attempt stays as it is: what a trainer reads doesn't change."""
    changed = 0
    for call_id in call_ids:
        changed += db.execute(
            "UPDATE calls SET delivered = 1 WHERE call_id = ? AND delivered = 0 AND rollout_id = ? AND EXISTS"
            " (SELECT 1 FROM attempts a WHERE a.rollout_id = ? AND a.attempt_id = ? AND a.ended_at IS NULL)",
            (call_id, rollout_id, rollout_id, attempt_id),
        ).rowcount
    if changed:
        db.execute(
            "UPDATE attempts SET delivered = delivered + ? WHERE rollout_id = ? AND attempt_id = ?",
            (changed, rollout_id, attempt_id),
        )


def of_attempt(db: sqlite3.Connection, rollout_id: str, attempt_id: str, *, content: bool) -> list[StoredCall]:
    """All calls of an attempt in order of arrival, prompts whole; with `content`, messages and tools too."""
    rows = db.execute(
        "SELECT * FROM calls WHERE rollout_id = ? AND attempt_id = ? ORDER BY rowid", (rollout_id, attempt_id)
    ).fetchall()
    bodies = _Bodies(db)
    prompts: dict[str, bytes] = {}
    requests: dict[str, bytes] = {}
    out = []
    # Bases are committed before what builds on them, so one pass in order of insertion resolves every chain.
    by_id = {row["call_id"]: row for row in rows}
    for row in rows:
        prefix = b""
        if row["base"] is not None:
            whole = prompts[row["base"]] + by_id[row["base"]]["response_ids"]
            prefix = whole[: row["base_len"] * _ID_BYTES]
        prompts[row["call_id"]] = prefix + row["prompt_suffix"]
        hashes = row["request_suffix"]
        if row["request_base"] is not None:
            hashes = requests[row["request_base"]][: row["request_base_len"] * HASH_BYTES] + hashes
        requests[row["call_id"]] = hashes
        out.append(_stored(row, prompts[row["call_id"]]))
        if content:
            out[-1].messages = [bodies[hashes[i : i + HASH_BYTES]] for i in range(0, len(hashes), HASH_BYTES)]
            out[-1].tools = bodies[row["tools"]] if row["tools"] is not None else None
            out[-1].response = orjson.loads(row["response"]) if row["response"] is not None else None
    return sorted(out, key=lambda c: (c.seq, c.call_id))


class _Bodies(dict[bytes, Any]):
    """Message bodies by hash, read as they are needed."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __missing__(self, key: bytes) -> Any:
        row = self._db.execute("SELECT body FROM messages WHERE hash = ?", (key,)).fetchone()
        self[key] = value = orjson.loads(row[0])
        return value


def _stored(row: sqlite3.Row, prompt: bytes) -> StoredCall:
    same = (
        "call_id rollout_id attempt_id seq dialect base base_len response_ids logprobs versions finish_reason parent"
        " break_reason break_index untrainable reward started_at ended_at engine model fingerprint"
    ).split()
    return StoredCall(
        **{name: row[name] for name in same},
        prompt_ids=prompt,
        delivered=bool(row["delivered"]),
        requested=orjson.loads(row["requested"]),
        effective=orjson.loads(row["effective"]),
    )


def trajectory(db: sqlite3.Connection, rollout: sqlite3.Row, *, content: bool) -> Trajectory:
    """The last attempt as the trainer reads it."""
    rollout_id, attempt_id = rollout["rollout_id"], rollout["last_attempt_id"]
    calls = of_attempt(db, rollout_id, attempt_id, content=content) if attempt_id is not None else []
    same = [f for f in CallRecord.__struct_fields__ if f not in ("request", "response")]
    return Trajectory(
        rollout_id=rollout_id,
        attempt_id=attempt_id or "",
        outcome=rollout["outcome"],
        reward=rollout["reward"],
        calls=[
            CallRecord(
                **{name: getattr(call, name) for name in same},
                request={"messages": call.messages, "tools": call.tools} if content else None,
                response=call.response if content else None,
            )
            for call in calls
        ],
    )


def untrainable_counts(db: sqlite3.Connection) -> dict[str, int]:
    """Calls that must not be trained, by kind of reason (the part before the colon)."""
    out: dict[str, int] = {}
    for reason, count in db.execute(
        "SELECT untrainable, count(*) FROM calls WHERE untrainable IS NOT NULL GROUP BY untrainable"
    ):
        kind = reason.partition(":")[0]
        out[kind] = out.get(kind, 0) + count
    return out


def message_ref(value: Any) -> MessageRef:
    """A message with the hash that it is stored under."""
    body = orjson.dumps(value)
    return MessageRef(hashlib.blake2b(body, digest_size=HASH_BYTES).digest(), body)

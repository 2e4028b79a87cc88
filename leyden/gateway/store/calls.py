"""SQL of model calls: storing them in O(new tokens), putting prompts and messages together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from leyden.gateway.dialects.base import Asked
from leyden.gateway.lifecycle import Phase, name_attempt
from leyden.gateway.store.attempts import attempt_row, count_late
from leyden.gateway.store.connection import Connection, Row
from leyden.gateway.store.raw import put_together
from leyden.gateway.store.records import HASH_BYTES, CallCommit, Late, Recorded, StoredCall
from leyden.schema import CallRecord, Trajectory

_ID_BYTES = 4
_AT_ONCE = 256
"""Calls that one statement marks."""


def commit(db: Connection, calls: Sequence[CallCommit]) -> Recorded | Late:
    """Store the sibling calls of one request, if their attempt is still in its agent phase.

    `seq` is what the gateway proposed, or the next free one when another gateway used that meanwhile.
    """
    rollout_id, attempt_id = calls[0].rollout_id, calls[0].attempt_id
    where, this = "WHERE rollout_id = ? AND attempt_id = ?", (rollout_id, attempt_id)
    counted = db.execute(
        f"UPDATE attempts SET calls = calls + ? {where} AND phase = ? RETURNING calls", (len(calls), *this, Phase.AGENT)
    ).fetchall()
    if not counted:
        attempt_row(db, rollout_id, attempt_id)  # Says so when it is gone.
        count_late(db, rollout_id, attempt_id)
        return Late(f"{name_attempt(rollout_id, attempt_id)} ended while this call was running; it wasn't recorded")
    seq, last = calls[0].seq, counted[0][0]
    if db.shared and db.execute(f"SELECT 1 FROM calls {where} AND seq = ? LIMIT 1", (*this, seq)).fetchone():
        seq = db.execute(f"SELECT max(seq) + 1 FROM calls {where}", this).fetchone()[0]
    first = last - len(calls) + 1
    _store_messages(db, rollout_id, calls)
    for ordinal, call in enumerate(calls, start=first):
        db.execute(_INSERT, _values(call, seq, ordinal, db.origin))
    if calls[0].arrived is not None:
        mark_delivered(db, [(rollout_id, attempt_id, calls[0].arrived)])
    return Recorded(seq, first, last)


def _store_messages(db: Connection, rollout_id: str, calls: Sequence[CallCommit]) -> None:
    """Write what isn't stored yet of messages, tools and raw requests; siblings have the same."""
    call = calls[0]
    refs = {r.hash: r.body for r in call.request_suffix}
    if call.tools is not None:
        refs[call.tools.hash] = call.tools.body
    if call.raw is not None:
        refs[call.raw.head.hash] = call.raw.head.body
        refs.update((r.hash, r.body) for r in call.raw.refs[call.raw.base_len :])
    db.share("messages")
    # In one order, so that gateways that write the same messages at once don't wait for each other in a circle.
    hashes = sorted(refs)
    db.executemany(
        "INSERT INTO messages (hash, body) VALUES (?, ?) ON CONFLICT DO NOTHING",
        [(h, refs[h].decode()) for h in hashes],
    )
    db.executemany(
        "INSERT INTO message_uses (rollout_id, hash) VALUES (?, ?) ON CONFLICT DO NOTHING",
        [(rollout_id, h) for h in hashes],
    )


_COLUMNS = (
    "call_id rollout_id attempt_id seq ordinal dialect base base_len prompt_suffix response_ids logprobs versions"
    " finish_reason parent break_reason break_index untrainable kind images routed_experts routed_format requested"
    " effective started_at ended_at engine model request_base request_base_len request_suffix tools response"
    " fingerprint gateway raw_head raw_fields raw_base raw_base_len raw_suffix delivered"
).split()
_INSERT = f"INSERT INTO calls ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


def _values(call: CallCommit, seq: int, ordinal: int, origin: str) -> tuple[Any, ...]:
    """A row of `calls`, in the order of `_COLUMNS`."""
    raw = call.raw
    return (
        call.call_id,
        call.rollout_id,
        call.attempt_id,
        seq,
        ordinal,
        call.dialect,
        call.base,
        call.base_len,
        call.prompt_suffix,
        call.response_ids,
        call.logprobs,
        call.versions,
        call.finish_reason,
        call.parent,
        call.break_reason,
        call.break_index,
        call.untrainable,
        str(call.kind),
        orjson.dumps(call.images).decode() if call.images else None,
        call.routed_experts,
        call.routed_format,
        orjson.dumps(call.requested).decode(),
        orjson.dumps(call.effective).decode(),
        call.started_at,
        call.ended_at,
        call.engine,
        call.model,
        call.request_base,
        call.request_base_len,
        b"".join([r.hash for r in call.request_suffix]),
        call.tools.hash if call.tools else None,
        orjson.dumps(call.response).decode() if call.response is not None else None,
        call.fingerprint,
        origin,
        raw.head.hash if raw else None,
        raw.fields if raw else None,
        raw.base if raw else None,
        raw.base_len if raw else 0,
        raw.hashes()[raw.base_len * HASH_BYTES :] if raw else None,
        0,
    )


def mark_delivered(db: Connection, arrived: Sequence[tuple[str, str, str]]) -> None:
    """Note that clients have these answers, given as (rollout, attempt, call).

    A closed attempt stays as it is: what a trainer reads doesn't change.
    """
    counts: dict[tuple[str, str], int] = {}
    for start in range(0, len(arrived), _AT_ONCE):
        ids = [call_id for _, _, call_id in arrived[start : start + _AT_ONCE]]
        # Lengths are powers of two, so that there are few different statements.
        ids += ids[-1:] * ((1 << (len(ids) - 1).bit_length()) - len(ids))
        changed = db.execute(
            f"UPDATE calls SET delivered = 1 WHERE call_id IN ({', '.join('?' * len(ids))})"
            " AND delivered = 0 AND EXISTS"
            " (SELECT 1 FROM attempts a WHERE a.rollout_id = calls.rollout_id AND a.attempt_id = calls.attempt_id"
            " AND a.ended_at IS NULL) RETURNING rollout_id, attempt_id",
            ids,
        ).fetchall()
        for rollout_id, attempt_id in changed:
            counts[rollout_id, attempt_id] = counts.get((rollout_id, attempt_id), 0) + 1
    db.executemany(
        "UPDATE attempts SET delivered = delivered + ? WHERE rollout_id = ? AND attempt_id = ?",
        [(count, *whose) for whose, count in sorted(counts.items())],
    )


def of_attempt(db: Connection, rollout_id: str, attempt_id: str, *, content: bool, after: int = 0) -> list[StoredCall]:
    """Calls of an attempt, prompts whole; with `content`, messages, tools and raw requests too.

    In order of arrival. `after` leaves out those that were recorded up to that ordinal.
    """
    where, this = "WHERE rollout_id = ? AND attempt_id = ?", (rollout_id, attempt_id)
    if after and not db.execute(f"SELECT 1 FROM attempts {where} AND calls > ?", (*this, after)).fetchone():
        return []
    rows = db.execute(f"SELECT * FROM calls {where} ORDER BY ordinal", this).fetchall()
    bodies = _Bodies(db)
    prompts: dict[str, bytes] = {}
    requests: dict[str, bytes] = {}
    raws: dict[str, bytes] = {}
    out = []
    # Bases are recorded before what builds on them, so one pass in that order resolves every chain.
    by_id = {row["call_id"]: row for row in rows}
    for row in rows:
        call_id = row["call_id"]
        prefix = b""
        if row["base"] is not None:
            whole = prompts[row["base"]] + by_id[row["base"]]["response_ids"]
            prefix = whole[: row["base_len"] * _ID_BYTES]
        prompts[call_id] = prefix + row["prompt_suffix"]
        requests[call_id] = _chained(requests, row["request_base"], row["request_base_len"], row["request_suffix"])
        raws[call_id] = _chained(raws, row["raw_base"], row["raw_base_len"], row["raw_suffix"] or b"")
        if row["ordinal"] <= after:
            continue
        out.append(_stored(row, prompts[call_id], raws[call_id]))
        if content:
            _fill(out[-1], row, requests[call_id], bodies)
    return sorted(out, key=lambda c: (c.seq, c.call_id))


def asked(db: Connection, rollout_id: str, attempt_id: str, call_id: str) -> Asked | None:
    """What one call was asked, read along the calls that it shares messages with; None when there is no such call."""
    chain: list[Row] = []
    at: str | None = call_id
    while at is not None:
        row = db.execute(
            "SELECT request_base, request_base_len, request_suffix, raw_head, raw_fields FROM calls"
            " WHERE call_id = ? AND rollout_id = ? AND attempt_id = ?",
            (at, rollout_id, attempt_id),
        ).fetchone()
        if row is None:
            return None
        chain.append(row)
        at = row["request_base"]
    hashes = b""
    for row in reversed(chain):
        hashes = hashes[: row["request_base_len"] * HASH_BYTES] + row["request_suffix"]
    bodies = _Bodies(db)
    first = chain[0]
    # Long instructions are stored by themselves, as a field.
    instructed = first["raw_head"] is not None and (
        bool(bodies[first["raw_head"]].get("instructions"))
        or any(name == "instructions" for name, *_ in orjson.loads(first["raw_fields"]))
    )
    return Asked([bodies[hashes[i : i + HASH_BYTES]] for i in range(0, len(hashes), HASH_BYTES)], instructed)


def _chained(known: dict[str, bytes], base: str | None, base_len: int, suffix: bytes) -> bytes:
    return known[base][: base_len * HASH_BYTES] + suffix if base is not None else suffix


def _fill(call: StoredCall, row: Row, hashes: bytes, bodies: _Bodies) -> None:
    call.messages = [bodies[hashes[i : i + HASH_BYTES]] for i in range(0, len(hashes), HASH_BYTES)]
    call.tools = bodies[row["tools"]] if row["tools"] is not None else None
    call.response = orjson.loads(row["response"]) if row["response"] is not None else None
    if row["raw_head"] is not None:
        call.raw = put_together(bodies[row["raw_head"]], row["raw_fields"], call.raw_hashes, bodies.__getitem__)


class _Bodies(dict[bytes, Any]):
    """Message bodies by hash, read as they are needed."""

    def __init__(self, db: Connection) -> None:
        self._db = db

    def __missing__(self, key: bytes) -> Any:
        row = self._db.execute("SELECT body FROM messages WHERE hash = ?", (key,)).fetchone()
        self[key] = value = orjson.loads(row[0])
        return value


def _stored(row: Row, prompt: bytes, raw_hashes: bytes) -> StoredCall:
    same = (
        "call_id rollout_id attempt_id seq dialect base base_len response_ids logprobs versions finish_reason parent"
        " break_reason break_index untrainable reward started_at ended_at engine model fingerprint"
        " kind routed_experts routed_format ordinal"
    ).split()
    return StoredCall(
        **{name: row[name] for name in same},
        prompt_ids=prompt,
        raw_hashes=raw_hashes,
        images=orjson.loads(row["images"]) if row["images"] else [],
        delivered=bool(row["delivered"]),
        requested=orjson.loads(row["requested"]),
        effective=orjson.loads(row["effective"]),
    )


def trajectory(db: Connection, rollout: Row, *, content: bool) -> Trajectory:
    """The last attempt as the trainer reads it."""
    rollout_id, attempt_id = rollout["rollout_id"], rollout["last_attempt_id"]
    calls = of_attempt(db, rollout_id, attempt_id, content=content) if attempt_id is not None else []
    same = [f for f in CallRecord.__struct_fields__ if f not in ("request", "response", "raw")]
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
                raw=call.raw,
            )
            for call in calls
        ],
    )


def abandon(db: Connection, call_ids: Sequence[str]) -> None:
    """Note that the client of these answers went away without them."""
    for call_id in call_ids:
        db.execute("UPDATE calls SET abandoned = 1 WHERE call_id = ? AND delivered = 0", (call_id,))


def take_over(db: Connection, call_id: str) -> bool | None:
    """Take on the delivery of a recorded answer that never arrived. None while its gateway may still be at it."""
    row = db.execute(
        f"SELECT gateway, abandoned, delivered FROM calls WHERE call_id = ?{db.FOR_UPDATE}", (call_id,)
    ).fetchone()
    if row is None or row["delivered"]:
        return False
    if not row["abandoned"] and row["gateway"] not in (None, db.origin) and db.is_alive(row["gateway"]):
        return None
    db.execute("UPDATE calls SET gateway = ?, abandoned = 0 WHERE call_id = ?", (db.origin, call_id))
    return True


def on_their_way(db: Connection, rollout_id: str, attempt_id: str, since: float) -> bool:
    """Whether calls recorded since then have an answer of which no delivery is known."""
    found = db.execute(
        "SELECT 1 FROM calls WHERE rollout_id = ? AND attempt_id = ? AND ended_at >= ? AND delivered = 0"
        " AND response IS NOT NULL LIMIT 1",
        (rollout_id, attempt_id, since),
    )
    return found.fetchone() is not None


def untrainable_counts(db: Connection) -> dict[str, int]:
    """Calls that must not be trained, by kind of reason (the part before the colon)."""
    out: dict[str, int] = {}
    for reason, count in db.execute(
        "SELECT untrainable, count(*) FROM calls WHERE untrainable IS NOT NULL GROUP BY untrainable"
    ):
        kind = reason.partition(":")[0]
        out[kind] = out.get(kind, 0) + count
    return out

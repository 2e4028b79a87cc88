"""SQL of attempts' logs: pieces of what agents and graders printed, as their controller sends them."""

from __future__ import annotations

from leyden.gateway.errors import Conflict
from leyden.gateway.lifecycle import name_attempt
from leyden.gateway.store.attempts import attempt_row
from leyden.gateway.store.connection import Connection
from leyden.schema import LogPart, LogPiece, LogSize, LogText

MAX_READ = 1 << 20
"""Bytes of one answer."""


def append(db: Connection, rollout_id: str, attempt_id: str, piece: LogPiece) -> LogSize:
    """Add a piece, also after the attempt has ended: a log is no part of what is trained. A repeated one adds nothing.

    Raises:
        Conflict: the attempt is another controller's, or bytes before the piece are missing.
    """
    row = attempt_row(db, rollout_id, attempt_id)
    who = name_attempt(rollout_id, attempt_id)
    if row["controller_id"] != piece.controller_id:
        raise Conflict(f"{who} is controller {row['controller_id']}'s, not {piece.controller_id}'s")
    size = _size(db, rollout_id, attempt_id, piece.part)
    if piece.start > size:
        raise Conflict(f"the {piece.part}'s log of {who} has {size} bytes; a piece from {piece.start} on leaves a gap")
    fresh = piece.data[size - piece.start :]
    if fresh or piece.last:
        db.execute(
            "INSERT INTO logs (rollout_id, attempt_id, part, start, data, is_last) VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (rollout_id, attempt_id, part, start) DO UPDATE SET data = excluded.data,"
            " is_last = excluded.is_last",
            (rollout_id, attempt_id, piece.part, size, fresh, int(piece.last)),
        )
    return LogSize(size=size + len(fresh))


def read(db: Connection, rollout_id: str, attempt_id: str, part: LogPart, start: int) -> LogText:
    """A log from its byte `start` on, as far as it was sent."""
    attempt_row(db, rollout_id, attempt_id, lock=False)
    where, values = "rollout_id = ? AND attempt_id = ? AND part = ?", (rollout_id, attempt_id, part)
    size = _size(db, rollout_id, attempt_id, part)
    done = db.execute(f"SELECT 1 FROM logs WHERE {where} AND is_last = 1", values).fetchone() is not None
    found = bytearray()
    rows = db.execute(
        f"SELECT start, data FROM logs WHERE {where} AND start + length(data) > ? ORDER BY start", (*values, start)
    )
    for at, data in rows:
        found += data[max(0, start - at) :]
        if len(found) >= MAX_READ:
            break
    text = bytes(found[:MAX_READ])
    return LogText(text, start + len(text), done and start + len(text) >= size)


def _size(db: Connection, rollout_id: str, attempt_id: str, part: LogPart) -> int:
    row = db.execute(
        "SELECT start + length(data) FROM logs WHERE rollout_id = ? AND attempt_id = ? AND part = ?"
        " ORDER BY start DESC LIMIT 1",
        (rollout_id, attempt_id, part),
    ).fetchone()
    return row[0] if row else 0

"""SQL of forgetting what nobody came back to and what ended long ago: a little at a time, one gateway at a time."""

from __future__ import annotations

from leyden.gateway.lifecycle import Ending, name_attempt
from leyden.gateway.store import attempts, rollouts
from leyden.gateway.store.connection import Connection
from leyden.gateway.store.records import Ended
from leyden.schema import TERMINAL_STATES, Outcome, RolloutState

AT_ONCE = 20
"""Rollouts that one transaction ends or deletes; other writes wait for it."""


def end_abandoned(db: Connection, before: float) -> list[Ended]:
    """End rollouts for which nothing has happened since `before`: never claimed, or running without a lease.

    Attempts with a lease end by it.
    """
    if not db.try_own("retention"):
        return []
    out: list[Ended] = []
    waiting = db.execute(
        "SELECT rollout_id FROM rollouts WHERE state = ? AND updated_at < ? ORDER BY updated_at"
        f" LIMIT ?{db.SKIP_LOCKED}",
        (RolloutState.QUEUING, before, AT_ONCE),
    ).fetchall()
    for row in waiting:
        reason = "abandoned: no controller took it before its time ran out"
        outcome = str(Outcome.CANCELLED)
        rollouts.set_state(db, row[0], RolloutState.FAILED, outcome=outcome, error_message=reason)
        out.append(Ended(row[0], "", requeued=False))
    silent = db.execute(
        f"{attempts.OPEN} AND a.lease_expires_at IS NULL AND r.state = ? AND r.updated_at < ? AND NOT EXISTS"
        " (SELECT 1 FROM events e WHERE e.rollout_id = a.rollout_id AND e.attempt_id = a.attempt_id"
        " AND e.timestamp >= ?) AND NOT EXISTS (SELECT 1 FROM calls c WHERE c.rollout_id = a.rollout_id"
        f" AND c.attempt_id = a.attempt_id AND c.ended_at >= ?) ORDER BY r.updated_at LIMIT ?{db.SKIP_LOCKED}",
        (RolloutState.RUNNING, before, before, before, AT_ONCE),
    ).fetchall()
    for row in silent:
        reason = f"abandoned: nothing was heard of {name_attempt(row['rollout_id'], row['attempt_id'])}"
        out.append(attempts.end(db, row, Ending(Outcome.CANCELLED, reason), state=RolloutState.FAILED))
    return out


def delete_old(db: Connection, before: float) -> int:
    """Delete rollouts that ended before `before`, with all that was recorded for them. Returns how many."""
    if not db.try_own("retention"):
        return 0
    old = db.execute(
        "SELECT rollout_id FROM rollouts WHERE state IN (?, ?) AND updated_at < ? ORDER BY updated_at"
        f" LIMIT ?{db.SKIP_LOCKED}",
        (*TERMINAL_STATES, before, AT_ONCE),
    ).fetchall()
    for row in old:
        rollouts.delete(db, row[0])
    return len(old)

"""SQL of attempts: claiming, leases, phases, outcomes. Decisions are those of leyden.gateway.lifecycle."""

from __future__ import annotations

import time

import orjson

from leyden.gateway import keys
from leyden.gateway.errors import Conflict, NotFound
from leyden.gateway.lifecycle import (
    ENGINE_FAILED,
    AttemptFacts,
    Ending,
    Phase,
    backoff,
    check_holder,
    name_attempt,
    next_state,
    plan_patch,
    settle,
)
from leyden.gateway.store import rollouts
from leyden.gateway.store.connection import Connection, Row
from leyden.gateway.store.records import AttemptInfo, Changed, Ended, KeyOwner, Late
from leyden.schema import (
    AttemptRef,
    Claim,
    ClaimRequest,
    Heartbeat,
    HeartbeatReply,
    Outcome,
    OutcomeReport,
    PhaseReport,
    RolloutConfig,
    RolloutState,
    StatusPatch,
)

MAX_EXPIRED = 100
"""Attempts ended by one sweep; the next one comes soon."""
OPEN = "SELECT a.*, r.config FROM rollouts r JOIN attempts a ON a.rollout_id = r.rollout_id WHERE a.ended_at IS NULL"


def attempt_row(db: Connection, rollout_id: str, attempt_id: str, *, lock: bool = True) -> Row:
    """An attempt with its rollout's config. In a write, nobody else changes either until it is done."""
    row = db.execute(
        "SELECT a.*, r.config, r.is_train, r.run FROM rollouts r JOIN attempts a ON a.rollout_id = r.rollout_id"
        f" WHERE a.rollout_id = ? AND a.attempt_id = ?{db.FOR_UPDATE if lock else ''}",
        (rollout_id, attempt_id),
    ).fetchone()
    if row is None:
        rollouts.rollout_row(db, rollout_id)
        raise NotFound(f"rollout {rollout_id} has no attempt {attempt_id}")
    return row


def info(db: Connection, rollout_id: str, attempt_id: str) -> AttemptInfo:
    row = attempt_row(db, rollout_id, attempt_id, lock=False)
    config = RolloutConfig.model_validate_json(row["config"])
    return AttemptInfo(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        phase=Phase(row["phase"]),
        is_train=bool(row["is_train"]),
        has_grader=config.grader is not None,
        sampling=config.sampling,
        run=row["run"],
        capture=config.capture,
    )


def owner_of(db: Connection, key_hash: bytes) -> KeyOwner | None:
    row = db.execute("SELECT * FROM keys WHERE hash = ?", (key_hash,)).fetchone()
    if row is None or not keys.same(row["hash"], key_hash):
        return None
    attempt = info(db, row["rollout_id"], row["attempt_id"])
    return KeyOwner(row["kind"], attempt.rollout_id, attempt.attempt_id, attempt.phase, attempt.has_grader)


def count_late(db: Connection, rollout_id: str, attempt_id: str) -> None:
    db.execute(
        "UPDATE attempts SET late_writes = late_writes + 1 WHERE rollout_id = ? AND attempt_id = ?",
        (rollout_id, attempt_id),
    )


def start(
    db: Connection,
    rollout_id: str,
    attempt_id: str | None,
    controller_id: str | None,
    lease_seconds: float | None,
) -> str:
    """Start the next attempt of a queuing rollout and move the rollout to running. Returns the attempt's id."""
    now = time.time()
    if attempt_id is None:
        attempt_id = str(db.execute("SELECT count(*) FROM attempts WHERE rollout_id = ?", (rollout_id,)).fetchone()[0])
    if db.execute(
        "SELECT 1 FROM attempts WHERE rollout_id = ? AND attempt_id = ?", (rollout_id, attempt_id)
    ).fetchone():
        raise Conflict(f"rollout {rollout_id} already had an attempt {attempt_id}")
    db.execute(
        "INSERT INTO attempts (rollout_id, attempt_id, controller_id, phase, started_at, lease_seconds,"
        " lease_expires_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            rollout_id,
            attempt_id,
            controller_id,
            Phase.AGENT,
            now,
            lease_seconds,
            now + lease_seconds if lease_seconds else None,
        ),
    )
    rollouts.set_state(
        db,
        rollout_id,
        RolloutState.RUNNING,
        last_attempt_id=attempt_id,
        outcome=None,
        error_message=None,
        reward=None,
    )
    return attempt_id


def claim(db: Connection, request: ClaimRequest) -> list[Claim]:
    """Lease the oldest queuing rollouts to a controller, each as a new attempt with new keys."""
    waiting = db.execute(
        f"SELECT rollout_id FROM rollouts WHERE state = ? AND not_before <= ? ORDER BY seq LIMIT ?{db.SKIP_LOCKED}",
        (RolloutState.QUEUING, time.time(), request.limit),
    ).fetchall()
    claims = []
    for (rollout_id,) in waiting:
        attempt_id = start(db, rollout_id, None, request.controller_id, request.lease_seconds)
        rollout = rollouts.to_rollout(rollouts.rollout_row(db, rollout_id))
        agent_key = _new_key(db, keys.KeyKind.AGENT, rollout_id, attempt_id)
        grader_key = _new_key(db, keys.KeyKind.GRADER, rollout_id, attempt_id) if rollout.config.grader else None
        claims.append(Claim(rollout=rollout, attempt_id=attempt_id, agent_key=agent_key, grader_key=grader_key))
    return claims


def next_due(db: Connection) -> float | None:
    """When the next of the rollouts that wait before another attempt may be claimed. None: none waits."""
    return db.execute(
        "SELECT min(not_before) FROM rollouts WHERE state = ? AND not_before > ?", (RolloutState.QUEUING, time.time())
    ).fetchone()[0]


def _new_key(db: Connection, kind: keys.KeyKind, rollout_id: str, attempt_id: str) -> str:
    key = keys.mint(kind)
    db.execute("INSERT INTO keys VALUES (?, ?, ?, ?)", (keys.digest(key), str(kind), rollout_id, attempt_id))
    return key


def end(
    db: Connection,
    row: Row,
    ending: Ending,
    *,
    state: RolloutState | None = None,
    reported: Outcome | None = None,
    report: OutcomeReport | None = None,
) -> Ended:
    """Close an attempt and move its rollout on: to `state`, or to where its outcome leads."""
    rollout_id, attempt_id = row["rollout_id"], row["attempt_id"]
    db.execute(
        "UPDATE attempts SET phase = ?, outcome = ?, reported = ?, reason = ?, exit_code = ?, signal = ?, log_tail = ?,"
        " ended_at = ?, lease_expires_at = NULL WHERE rollout_id = ? AND attempt_id = ?",
        (
            Phase.ENDED,
            str(ending.outcome),
            str(reported) if reported else None,
            ending.reason,
            report.exit_code if report else None,
            report.signal if report else None,
            report.log_tail if report else None,
            time.time(),
            rollout_id,
            attempt_id,
        ),
    )
    if state is None:
        config = RolloutConfig.model_validate_json(row["config"])
        attempts = db.execute("SELECT count(*) FROM attempts WHERE rollout_id = ?", (rollout_id,)).fetchone()[0]
        state = next_state(ending.outcome, attempts, config.retry)
        if state is RolloutState.QUEUING:
            due = time.time() + backoff(attempts, config.retry)
            db.execute("UPDATE rollouts SET not_before = ? WHERE rollout_id = ?", (due, rollout_id))
    error = None if ending.outcome is Outcome.OK else ending.reason
    rollouts.set_state(db, rollout_id, state, outcome=str(ending.outcome), error_message=error)
    db.notify("left", rollout_id, attempt_id, Phase.ENDED)
    if report is None and row["controller_id"] is not None:
        db.notify("taken", row["controller_id"], rollout_id, attempt_id)
    return Ended(rollout_id, attempt_id, requeued=state is RolloutState.QUEUING, controller_id=row["controller_id"])


def _engine_failure(db: Connection, rollout_id: str, attempt_id: str) -> str | None:
    """What the attempt's last call says of its engine, when that gave no answer."""
    last = db.execute(
        "SELECT untrainable FROM calls WHERE rollout_id = ? AND attempt_id = ? ORDER BY seq DESC LIMIT 1",
        (rollout_id, attempt_id),
    ).fetchone()
    return last[0] if last and (last[0] or "").startswith(ENGINE_FAILED) else None


def _blamed(db: Connection, rollout_id: str, attempt_id: str) -> str | None:
    """Why the attempt's last reward event has `source: infra`, if it does."""
    last = db.execute(
        "SELECT data FROM events WHERE rollout_id = ? AND attempt_id = ? AND event_type = 'reward'"
        " ORDER BY seq DESC LIMIT 1",
        (rollout_id, attempt_id),
    ).fetchone()
    data = orjson.loads(last[0]) if last else {}
    if data.get("source") != "infra":
        return None
    return str(data.get("reason") or data.get("message") or "no reason was given")


def report_outcome(db: Connection, rollout_id: str, attempt_id: str, report: OutcomeReport) -> Changed | Late:
    row = attempt_row(db, rollout_id, attempt_id)
    phase = Phase(row["phase"])
    if phase is Phase.ENDED and row["controller_id"] == report.controller_id and row["reported"] == report.outcome:
        return Changed(rollouts.to_rollout(rollouts.rollout_row(db, rollout_id)))  # The report was repeated.
    try:
        check_holder(rollout_id, attempt_id, row["controller_id"], report.controller_id, phase)
    except Conflict as e:
        count_late(db, rollout_id, attempt_id)
        return Late(str(e))
    config = RolloutConfig.model_validate_json(row["config"])
    facts = AttemptFacts(
        config.grader is not None,
        row["reward"],
        row["delivered"],
        phase is Phase.GRADING,
        _engine_failure(db, rollout_id, attempt_id),
        _blamed(db, rollout_id, attempt_id),
    )
    ended = end(db, row, settle(report.outcome, report.reason, facts), reported=report.outcome, report=report)
    return Changed(rollouts.to_rollout(rollouts.rollout_row(db, rollout_id)), [ended])


def report_phase(db: Connection, rollout_id: str, attempt_id: str, report: PhaseReport) -> Late | None:
    row = attempt_row(db, rollout_id, attempt_id)
    try:
        check_holder(rollout_id, attempt_id, row["controller_id"], report.controller_id, Phase(row["phase"]))
    except Conflict as e:
        count_late(db, rollout_id, attempt_id)
        return Late(str(e))
    db.execute(
        "UPDATE attempts SET phase = ? WHERE rollout_id = ? AND attempt_id = ?", (Phase.GRADING, rollout_id, attempt_id)
    )
    db.notify("left", rollout_id, attempt_id, Phase.GRADING)
    return None


def patch(db: Connection, rollout_id: str, status: StatusPatch) -> Changed:
    row = rollouts.rollout_row(db, rollout_id, lock=True)
    stored = Outcome(row["outcome"]) if row["outcome"] else None
    plan = plan_patch(rollout_id, RolloutState(row["state"]), status.state, status.outcome, stored)
    ended: list[Ended] = []
    if plan.start:
        start(db, rollout_id, status.last_attempt_id, None, None)
    elif plan.end is not None and plan.outcome is not None:
        reason = status.error_message
        open_attempt = db.execute(
            f"{OPEN} AND a.rollout_id = ?{db.FOR_UPDATE}",
            (rollout_id,),
        ).fetchone()
        if open_attempt is not None:
            ended.append(end(db, open_attempt, Ending(plan.outcome, reason), state=plan.end))
        else:
            rollouts.set_state(db, rollout_id, plan.end, outcome=str(plan.outcome), error_message=reason)
    if status.state is not None and status.state not in (RolloutState(row["state"]), RolloutState.RUNNING):
        details = {"k8s_job_name": status.k8s_job_name}
    else:
        details = {"k8s_job_name": status.k8s_job_name, "error_message": status.error_message}
    for column, value in details.items():
        if value is not None:
            db.execute(
                f"UPDATE rollouts SET {column} = ?, version = version + 1, updated_at = ? WHERE rollout_id = ?",
                (value, time.time(), rollout_id),
            )
    return Changed(rollouts.to_rollout(rollouts.rollout_row(db, rollout_id)), ended)


def delete(db: Connection, rollout_id: str) -> list[Ended]:
    rollouts.rollout_row(db, rollout_id, lock=True)
    open_attempts = db.execute(
        "SELECT attempt_id, controller_id FROM attempts WHERE rollout_id = ? AND ended_at IS NULL", (rollout_id,)
    ).fetchall()
    rollouts.delete(db, rollout_id)
    for row in open_attempts:
        db.notify("left", rollout_id, row[0], Phase.ENDED, "deleted")
        if row[1] is not None:
            db.notify("taken", row[1], rollout_id, row[0])
    return [Ended(rollout_id, r[0], requeued=False, deleted=True, controller_id=r[1]) for r in open_attempts]


def heartbeat(db: Connection, beat: Heartbeat) -> HeartbeatReply:
    lost: list[AttemptRef] = []
    expires = time.time() + beat.lease_seconds
    for ref in beat.attempts:
        done = db.execute(
            "UPDATE attempts SET lease_expires_at = ?, lease_seconds = ? WHERE rollout_id = ? AND attempt_id = ?"
            " AND controller_id = ? AND ended_at IS NULL",
            (expires, beat.lease_seconds, ref.rollout_id, ref.attempt_id, beat.controller_id),
        )
        if done.rowcount == 0:
            lost.append(ref)
    return HeartbeatReply(lost=lost)


def release(db: Connection, controller_id: str) -> list[Ended]:
    """End what an earlier process of this controller held."""
    rows = db.execute(f"{OPEN} AND a.controller_id = ? ORDER BY r.seq{db.FOR_UPDATE}", (controller_id,)).fetchall()
    reason = f"controller {controller_id} restarted while it ran this attempt"
    return [end(db, row, Ending(Outcome.INFRA, reason)) for row in rows]


def expire(db: Connection, now: float) -> list[Ended]:
    """End attempts whose lease ran out. One gateway at a time does so."""
    if not db.try_own("sweep"):
        return []
    rows = db.execute(
        f"{OPEN} AND a.lease_expires_at <= ? ORDER BY r.seq LIMIT ?{db.SKIP_LOCKED}", (now, MAX_EXPIRED)
    ).fetchall()
    out = []
    for row in rows:
        who = name_attempt(row["rollout_id"], row["attempt_id"])
        reason = f"controller {row['controller_id']} stopped sending heartbeats for {who}"
        out.append(end(db, row, Ending(Outcome.INFRA, reason)))
    return out


def next_expiry(db: Connection) -> float | None:
    return db.execute("SELECT min(lease_expires_at) FROM attempts WHERE ended_at IS NULL").fetchone()[0]


def renew_all(db: Connection, now: float) -> None:
    """Give every lease its full length again, after a time in which no heartbeat could arrive."""
    db.execute(
        "UPDATE attempts SET lease_expires_at = ? + lease_seconds"
        " WHERE ended_at IS NULL AND lease_expires_at < ? + lease_seconds",
        (now, now),
    )

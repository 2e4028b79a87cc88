"""SQL of events: rewards and other reports of agents and graders; model calls appear among them when read."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import numpy as np
import orjson

from leyden.gateway.errors import Invalid
from leyden.gateway.lifecycle import Phase, name_attempt
from leyden.gateway.store import calls, rollouts
from leyden.gateway.store.attempts import attempt_row, count_late
from leyden.gateway.store.connection import Connection
from leyden.gateway.store.records import Late, StoredCall
from leyden.schema import Event, RewardData

MODEL_REQUEST = "model_request"
"""Type of the events that are the attempt's calls."""
_CALL_ID = re.compile(r"[0-9a-f]{32}(?:-\d+)?$")
"""What remains of an answer's id without the prefix that its dialect puts before it."""


def add(
    db: Connection,
    rollout_id: str,
    attempt_id: str,
    event_type: str,
    data: dict[str, Any],
    reward: RewardData | None,
    idempotency_key: str | None,
) -> Event | Late:
    """Append an event to an open attempt."""
    row = attempt_row(db, rollout_id, attempt_id)
    body_hash = rollouts.hash_body([event_type, data])
    scope = f"event:{rollout_id}:{attempt_id}:{idempotency_key}"
    if idempotency_key is not None:
        known = rollouts.recall(db, scope, body_hash)
        if known is not None:
            return Event.model_validate(known)
    if Phase(row["phase"]) is Phase.ENDED:
        count_late(db, rollout_id, attempt_id)
        return Late(f"{name_attempt(rollout_id, attempt_id)} has ended; this event came too late and was counted")
    if reward is not None:
        _reward(db, rollout_id, attempt_id, reward)
    event = Event(event_type=event_type, rollout_id=rollout_id, attempt_id=attempt_id, timestamp=time.time(), data=data)
    db.execute(
        "INSERT INTO events (rollout_id, attempt_id, event_type, timestamp, data) VALUES (?, ?, ?, ?, ?)",
        (rollout_id, attempt_id, event_type, event.timestamp, orjson.dumps(data).decode()),
    )
    if idempotency_key is not None:
        rollouts.remember(db, scope, body_hash, event.model_dump(mode="json"))
    return event


def _reward(db: Connection, rollout_id: str, attempt_id: str, reward: RewardData) -> None:
    """Give calls and attempt their rewards, by the rules of RewardData."""
    per_call = dict(reward.per_call or {})
    whole = reward.value
    if reward.call_id is not None and reward.value is not None:
        per_call[reward.call_id], whole = reward.value, None
    elif whole is None:
        whole = sum(per_call.values())
        if not math.isfinite(whole):
            raise Invalid("the rewards in per_call have no finite sum; give a value beside them")
    for given, value in per_call.items():
        found = _CALL_ID.search(given)
        done = db.execute(
            "UPDATE calls SET reward = ? WHERE call_id = ? AND rollout_id = ? AND attempt_id = ?",
            (value, found[0] if found else given, rollout_id, attempt_id),
        )
        if done.rowcount == 0:
            raise Invalid(f"{name_attempt(rollout_id, attempt_id)} has no call {given}")
    if whole is not None:
        db.execute(
            "UPDATE attempts SET reward = ? WHERE rollout_id = ? AND attempt_id = ?", (whole, rollout_id, attempt_id)
        )
        db.execute(
            "UPDATE rollouts SET reward = ? WHERE rollout_id = ? AND last_attempt_id = ?",
            (whole, rollout_id, attempt_id),
        )


def of_last_attempt(db: Connection, rollout_id: str, event_type: str | None, *, triplet: bool) -> bytes:
    """Events of the last attempt as a JSON array, in order.

    With `triplet`, model calls are cut down to what training takes, and those that must not be trained are left out.
    """
    attempt_id = rollouts.rollout_row(db, rollout_id)["last_attempt_id"]
    if attempt_id is None:
        return b"[]"
    where, values = ("AND event_type = ?", [event_type]) if event_type else ("", [])
    rows = db.execute(
        f"SELECT * FROM events WHERE rollout_id = ? AND attempt_id = ? {where} ORDER BY seq",
        (rollout_id, attempt_id, *values),
    ).fetchall()
    found = [(row["timestamp"], row["event_type"], orjson.loads(row["data"])) for row in rows]
    if event_type in (None, MODEL_REQUEST):
        recorded = calls.of_attempt(db, rollout_id, attempt_id, content=not triplet)
        for call in sorted(recorded, key=lambda c: c.ordinal):
            if not triplet:
                found.append((call.ended_at, MODEL_REQUEST, _model_request(call)))
            elif call.delivered and call.untrainable is None:
                found.append((call.ended_at, MODEL_REQUEST, _triplet(call)))
    out = [
        {"event_type": kind, "rollout_id": rollout_id, "attempt_id": attempt_id, "timestamp": at, "data": data}
        for at, kind, data in sorted(found, key=lambda item: item[0])
    ]
    return orjson.dumps(out, option=orjson.OPT_SERIALIZE_NUMPY)


def _server(call: StoredCall) -> dict[str, Any]:
    versions = np.frombuffer(call.versions, "<i4")
    return {"model": call.model, "version": int(versions.min()) if len(versions) else None}


def _triplet(call: StoredCall) -> dict[str, Any]:
    return {
        "prompt_token_ids": np.frombuffer(call.prompt_ids, "<i4"),
        "response_token_ids": np.frombuffer(call.response_ids, "<i4"),
        "response_log_probs": np.frombuffer(call.logprobs, "<f4"),
        "server": _server(call),
    }


def _model_request(call: StoredCall) -> dict[str, Any]:
    logprobs = [{"logprob": float(x)} for x in np.frombuffer(call.logprobs, "<f4")]
    prompt, completion = len(call.prompt_ids) // 4, len(call.response_ids) // 4
    return {
        "call_id": call.call_id,
        "delivered": call.delivered,
        "untrainable": call.untrainable,
        "request": {"model": call.model, "messages": call.messages, "tools": call.tools, **call.requested},
        "response": {
            "id": f"chatcmpl-{call.call_id}",
            "prompt_token_ids": np.frombuffer(call.prompt_ids, "<i4"),
            "choices": [
                {
                    "index": 0,
                    "message": call.response,
                    "finish_reason": call.finish_reason,
                    "token_ids": np.frombuffer(call.response_ids, "<i4"),
                    "logprobs": {"content": logprobs},
                }
            ],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        },
        "server": _server(call),
    }

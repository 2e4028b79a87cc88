"""Asynchronous client of the gateway's admin API, used by controller, trainer and command line.

Proxy settings of the environment are not used: the gateway is reached directly. Calls that are safe to repeat are
retried on connection errors and 5xx for up to `patience` seconds, so a gateway restart doesn't fail a run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
import msgspec
import orjson
from pydantic import BaseModel, TypeAdapter

from leyden.errors import GatewayError
from leyden.schema import (
    LOG_COMPLETE,
    LOG_NEXT,
    Claim,
    ClaimRequest,
    EngineModel,
    Event,
    EventCreate,
    Heartbeat,
    HeartbeatReply,
    LogPart,
    LogPiece,
    LogText,
    OutcomeReport,
    PauseRequest,
    PauseState,
    PhaseReport,
    RegisteredEngine,
    Rollout,
    RolloutCreate,
    RolloutDetail,
    RolloutPage,
    RolloutPatch,
    TerminalPage,
    Trajectory,
)

_ROLLOUTS = TypeAdapter(list[Rollout])
_EVENTS = TypeAdapter(list[Event])
_CLAIMS = TypeAdapter(list[Claim])
_MODELS = TypeAdapter(list[RegisteredEngine])
_TRAJECTORY = msgspec.msgpack.Decoder(Trajectory)


class Reader(Protocol):
    """The part of LeydenClient that only looks. A closed run's store is read through the same methods."""

    async def page(
        self,
        *,
        state_in: list[str] | None = None,
        run: str | None = None,
        step: int | None = None,
        is_train: bool | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> RolloutPage: ...
    async def rollout(self, rollout_id: str) -> RolloutDetail: ...
    async def trajectory(self, rollout_id: str, *, content: bool = False) -> Trajectory: ...
    async def log(self, rollout_id: str, attempt_id: str, *, part: LogPart = "agent", start: int = 0) -> LogText: ...


class LeydenClient:
    """One gateway, one key. Use as an async context manager.

    Every method raises GatewayError: `status` is the gateway's HTTP status, or 0 when it couldn't be reached.
    """

    def __init__(self, url: str, key: str, *, timeout: float = 60, patience: float = 30) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._timeout = timeout
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"}, connector=aiohttp.TCPConnector(limit=256)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- rollouts ------------------------------------------------------------------------------------------------------

    async def create_rollouts(self, items: list[RolloutCreate], idempotency_key: str | None = None) -> list[Rollout]:
        """Enqueue. Safe to repeat when every item has a `rollout_id`, or with an `idempotency_key`."""
        safe = idempotency_key is not None or all(i.rollout_id for i in items)
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        body = [i.model_dump(mode="json", exclude_none=True) for i in items]
        return _ROLLOUTS.validate_json(await self._call("POST", "/api/rollouts", body, retry=safe, headers=headers))

    async def rollout(self, rollout_id: str) -> RolloutDetail:
        return RolloutDetail.model_validate_json(await self._call("GET", f"/api/rollouts/{rollout_id}"))

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
        query = {"run": run, "step": step, "is_train": is_train, "limit": limit, "cursor": cursor, "state_in": state_in}
        return RolloutPage.model_validate_json(await self._call("GET", "/api/rollouts/page", query=query))

    async def terminal(
        self, after: int = 0, *, limit: int = 1000, wait_seconds: float = 0, run: str | None = None
    ) -> TerminalPage:
        query = {"after": after, "limit": limit, "wait_seconds": wait_seconds, "run": run}
        body = await self._call("GET", "/api/rollouts/terminal", query=query, wait=wait_seconds)
        return TerminalPage.model_validate_json(body)

    async def patch(self, rollout_id: str, patch: RolloutPatch) -> Rollout:
        body = patch.model_dump(mode="json", exclude_unset=True)
        return Rollout.model_validate_json(await self._call("PATCH", f"/api/rollouts/{rollout_id}", body, retry=False))

    async def delete(self, rollout_id: str) -> None:
        await self._call("DELETE", f"/api/rollouts/{rollout_id}")

    async def events(self, rollout_id: str, event_type: str | None = None) -> list[Event]:
        query = {"event_type": event_type}
        return _EVENTS.validate_json(await self._call("GET", f"/api/rollouts/{rollout_id}/events", query=query))

    async def post_event(
        self, rollout_id: str, attempt_id: str, event: EventCreate, *, key: str | None = None, once: str | None = None
    ) -> Event:
        """Post an event, as the holder of `key` when given. `once` names it, so that a repeat has no second effect."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if once:
            headers["Idempotency-Key"] = once
        path = f"/api/rollouts/{rollout_id}/attempt/{attempt_id}/events"
        body = event.model_dump(mode="json")
        return Event.model_validate_json(await self._call("POST", path, body, retry=once is not None, headers=headers))

    async def trajectory(self, rollout_id: str, *, content: bool = False) -> Trajectory:
        """All calls of the last attempt; with `content`, their messages too."""
        query = {"content": int(content)}
        return _TRAJECTORY.decode(await self._call("GET", f"/api/rollouts/{rollout_id}/trajectory", query=query))

    async def log(self, rollout_id: str, attempt_id: str, *, part: LogPart = "agent", start: int = 0) -> LogText:
        """What the attempt's agent or grader printed, as far as its controller sent it, from byte `start` on."""
        path = f"/api/rollouts/{rollout_id}/attempt/{attempt_id}/log"
        text, headers = await self._answer("GET", path, query={"part": part, "start": start})
        return LogText(text, int(headers[LOG_NEXT]), headers[LOG_COMPLETE] == "1")

    # -- execution -----------------------------------------------------------------------------------------------------

    async def claim(self, request: ClaimRequest) -> list[Claim]:
        """Long-poll for work. Not retried: a lost answer's leases run out."""
        body = request.model_dump(mode="json")
        return _CLAIMS.validate_json(
            await self._call("POST", "/api/claims", body, retry=False, wait=request.wait_seconds)
        )

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        body = beat.model_dump(mode="json")
        return HeartbeatReply.model_validate_json(
            await self._call("POST", "/api/heartbeats", body, retry=False, wait=beat.wait_seconds)
        )

    async def restarted(self, controller_id: str) -> int:
        """Release what an earlier process of this controller held. Returns how many attempts."""
        return orjson.loads(await self._call("POST", f"/api/controllers/{controller_id}/restarted", {}))["released"]

    async def phase(self, rollout_id: str, attempt_id: str, report: PhaseReport) -> None:
        await self._call("POST", f"/api/rollouts/{rollout_id}/attempt/{attempt_id}/phase", report)

    async def outcome(self, rollout_id: str, attempt_id: str, report: OutcomeReport) -> Rollout:
        path = f"/api/rollouts/{rollout_id}/attempt/{attempt_id}/outcome"
        return Rollout.model_validate_json(await self._call("POST", path, report))

    async def append_log(self, rollout_id: str, attempt_id: str, piece: LogPiece) -> None:
        await self._call("POST", f"/api/rollouts/{rollout_id}/attempt/{attempt_id}/log", piece)

    # -- engines and service -------------------------------------------------------------------------------------------

    async def register_models(self, models: list[EngineModel]) -> None:
        await self._call("POST", "/api/models", [m.model_dump(mode="json") for m in models])

    async def models(self) -> list[RegisteredEngine]:
        return _MODELS.validate_json(await self._call("GET", "/api/models"))

    async def delete_models(self, model: str | None = None, endpoint: str | None = None) -> None:
        """Forget engines: those of a model, at an endpoint, or all."""
        await self._call("DELETE", "/api/models", query={"model": model, "endpoint": endpoint})

    async def pause(self, request: PauseRequest) -> PauseState:
        return PauseState.model_validate_json(await self._call("POST", "/proxy/pause", request))

    async def resume(self) -> PauseState:
        return PauseState.model_validate_json(await self._call("POST", "/proxy/resume", {}))

    async def proxy_state(self) -> PauseState:
        return PauseState.model_validate_json(await self._call("GET", "/proxy/state"))

    async def stats(self) -> dict[str, Any]:
        return orjson.loads(await self._call("GET", "/api/stats"))

    async def healthz(self) -> dict[str, Any]:
        return orjson.loads(await self._call("GET", "/healthz", retry=False))

    # -- transport -----------------------------------------------------------------------------------------------------

    async def _call(self, method: str, path: str, body: BaseModel | Any = None, **more: Any) -> bytes:
        return (await self._answer(method, path, body, **more))[0]

    async def _answer(
        self,
        method: str,
        path: str,
        body: BaseModel | Any = None,
        *,
        query: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        retry: bool = True,
        wait: float = 0,
    ) -> tuple[bytes, Mapping[str, str]]:
        if self._session is None:
            raise RuntimeError("LeydenClient is used outside its `async with` block")
        if isinstance(body, BaseModel):
            body = body.model_dump(mode="json")
        data = None if body is None else orjson.dumps(body)
        params = [(k, str(v).lower() if isinstance(v, bool) else str(v)) for k, vs in (query or {}).items()
                  for v in (vs if isinstance(vs, list) else [vs]) if v is not None]  # fmt: skip
        deadline = time.monotonic() + (self._patience if retry else 0)
        delay = 0.1
        while True:
            try:
                async with self._session.request(
                    method,
                    self.url + path,
                    data=data,
                    params=params,
                    headers={"Content-Type": "application/json", **(headers or {})},
                    timeout=aiohttp.ClientTimeout(total=self._timeout + wait),
                ) as answer:
                    payload = await answer.read()
                    if answer.status < 400:
                        return payload, answer.headers
                    error = GatewayError(f"{method} {path}: {_detail(payload)} (HTTP {answer.status})", answer.status)
                    if answer.status < 500:
                        raise error
            except (aiohttp.ClientError, TimeoutError) as e:
                why = str(e) or type(e).__name__
                error = GatewayError(f"can't reach the gateway at {self.url} for {method} {path}: {why}")
            if time.monotonic() + delay > deadline:
                raise error
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)


def _detail(payload: bytes) -> str:
    try:
        detail = orjson.loads(payload)["detail"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return payload[:300].decode("utf-8", "replace") or "no detail given"
    return detail if isinstance(detail, str) else orjson.dumps(detail).decode()

"""The admin API as a FastAPI app, with its OpenAPI document at /openapi.json for the admin."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import Body, Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from leyden.gateway.errors import Invalid, Refused
from leyden.gateway.keys import Action, Target, key_from_headers
from leyden.gateway.service import Gateway
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
    Int64,
    LogPart,
    LogPiece,
    LogSize,
    OutcomeReport,
    PauseRequest,
    PauseState,
    PhaseReport,
    RegisteredEngine,
    RewardData,
    Rollout,
    RolloutCreate,
    RolloutDetail,
    RolloutPage,
    RolloutPatch,
    RolloutState,
    StatusPatch,
    TerminalPage,
)

MAX_WAIT_SECONDS = 60
_encode = msgspec.msgpack.Encoder().encode


class Problem(BaseModel):
    """What the body of an error is."""

    detail: str


class ResumeRequest(BaseModel):
    owner: str | None = None


_PROBLEM = {"content": {"application/json": {"schema": Problem.model_json_schema()}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "refused; `detail` says why", **_PROBLEM},
    # FastAPI documents a shape of its own for this one otherwise.
    422: {"description": "the request isn't valid; `detail` names the first field", **_PROBLEM},
    "5XX": {"description": "the store can't do it now", **_PROBLEM},
}


class _Msgpack(Response):
    media_type = "application/msgpack"


def _key(request: Request) -> str | None:
    return key_from_headers(request.headers.raw)


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


Service = Annotated[Gateway, Depends(_gateway)]
Key = Annotated[str | None, Depends(_key)]
Once = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=200)]
States = Annotated[list[str] | None, Query(description="repeated, or separated by commas")]


async def _admin(gateway: Service, key: Key) -> None:
    await gateway.authorize(key, Action.ADMIN)


async def _may_post(rollout_id: str, attempt_id: str, gateway: Service, key: Key) -> None:
    await gateway.authorize(key, Action.POST_EVENT, Target(rollout_id, attempt_id))


async def _may_read(rollout_id: str, gateway: Service, key: Key) -> None:
    await gateway.authorize(key, Action.READ_TRAJECTORY, Target(rollout_id))


def _states(given: list[str] | None) -> list[RolloutState] | None:
    names = [name for item in given or [] for name in item.split(",") if name]
    try:
        return [RolloutState(name) for name in names] or None
    except ValueError:
        known = ", ".join(RolloutState)
        raise Invalid(f"state_in names a state that doesn't exist; there are {known}") from None


def build_admin(gateway: Gateway) -> FastAPI:
    """The app for `gateway`."""
    app = FastAPI(
        title="Leyden gateway", version="0.1.0", docs_url=None, redoc_url=None, openapi_url=None, responses=_ERRORS
    )
    app.state.gateway = gateway
    app.exception_handler(Refused)(_on_refused)
    app.exception_handler(RequestValidationError)(_on_invalid)
    app.exception_handler(HTTPException)(_on_http)
    app.exception_handler(Exception)(_on_fault)
    only_admin = [Depends(_admin)]

    @app.get("/openapi.json", dependencies=only_admin, include_in_schema=False)
    async def document() -> dict[str, Any]:
        return app.openapi()

    @app.get("/healthz")
    async def healthz() -> Response:
        status = {"status": "ok" if gateway.fault is None else "faulty", "fault": gateway.fault}
        return JSONResponse({**status, "model": gateway.options.model_name, "family": gateway.renderer.family},
                            200 if gateway.fault is None else 500)  # fmt: skip

    @app.post("/api/rollouts", status_code=201, dependencies=only_admin)
    async def create_rollouts(items: list[RolloutCreate], idempotency_key: Once = None) -> list[Rollout]:
        return await gateway.create(items, idempotency_key)

    @app.get("/api/rollouts", dependencies=only_admin)
    async def list_rollouts(
        state_in: States = None, run: str | None = None, limit: Annotated[int, Query(ge=1, le=100_000)] = 1000
    ) -> list[Rollout]:
        return await gateway.store.list_rollouts(_states(state_in), run, limit)

    @app.get("/api/rollouts/page", dependencies=only_admin)
    async def page(
        state_in: States = None,
        run: str | None = None,
        step: Int64 | None = None,
        is_train: bool | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
        cursor: str | None = None,
    ) -> RolloutPage:
        return await gateway.store.page(_states(state_in), run, step, is_train, limit, cursor)

    @app.get("/api/rollouts/terminal", dependencies=only_admin)
    async def terminal(
        after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
        wait_seconds: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)] = 0,
        run: str | None = None,
    ) -> TerminalPage:
        return await gateway.terminal(after, limit, wait_seconds, run)

    @app.get("/api/rollouts/{rollout_id}", dependencies=only_admin)
    async def detail(rollout_id: str) -> RolloutDetail:
        return await gateway.store.detail(rollout_id)

    @app.patch("/api/rollouts/{rollout_id}", dependencies=only_admin)
    async def patch(rollout_id: str, body: RolloutPatch) -> Rollout:
        return await gateway.patch(rollout_id, body.status or StatusPatch())

    @app.delete("/api/rollouts/{rollout_id}", status_code=204, dependencies=only_admin)
    async def delete(rollout_id: str) -> Response:
        await gateway.delete(rollout_id)
        return Response(status_code=204)

    @app.get("/api/rollouts/{rollout_id}/events", dependencies=only_admin, response_model=list[Event])
    async def events(rollout_id: str, event_type: str | None = None, format: str | None = None) -> Response:
        if format not in (None, "triplet"):
            raise Invalid(f"format {format!r} doesn't exist; there is triplet")
        body = await gateway.store.events(rollout_id, event_type, triplet=format == "triplet")
        return Response(body, media_type="application/json")

    @app.post("/api/rollouts/{rollout_id}/attempt/{attempt_id}/events", dependencies=[Depends(_may_post)])
    async def post_event(rollout_id: str, attempt_id: str, body: EventCreate, idempotency_key: Once = None) -> Event:
        reward = _reward(body.data) if body.event_type == "reward" else None
        if body.event_type == "model_request":
            raise Invalid("model_request events are the gateway's own record of calls and can't be posted")
        return await gateway.store.add_event(
            rollout_id, attempt_id, body.event_type, body.data, reward, idempotency_key
        )

    @app.get("/api/rollouts/{rollout_id}/trajectory", dependencies=[Depends(_may_read)], response_class=_Msgpack)
    async def trajectory(rollout_id: str, content: bool = False) -> Response:
        found = await gateway.store.trajectory(rollout_id, content=content)
        return _Msgpack(_encode(found))

    _add_execution(app, gateway)
    _add_service(app, gateway)
    return app


def _add_execution(app: FastAPI, gateway: Gateway) -> None:
    only_admin = [Depends(_admin)]

    @app.post("/api/claims", dependencies=only_admin)
    async def claim(body: ClaimRequest, request: Request) -> list[Claim]:
        return await gateway.claim(body, request.is_disconnected)

    @app.post("/api/heartbeats", dependencies=only_admin)
    async def heartbeat(body: Heartbeat) -> HeartbeatReply:
        return await gateway.heartbeat(body)

    @app.post("/api/controllers/{controller_id}/restarted", dependencies=only_admin)
    async def restarted(controller_id: str) -> dict[str, int]:
        return {"released": await gateway.release(controller_id)}

    @app.post("/api/rollouts/{rollout_id}/attempt/{attempt_id}/phase", status_code=204, dependencies=only_admin)
    async def phase(rollout_id: str, attempt_id: str, body: PhaseReport) -> Response:
        await gateway.report_phase(rollout_id, attempt_id, body)
        return Response(status_code=204)

    @app.post("/api/rollouts/{rollout_id}/attempt/{attempt_id}/log", dependencies=only_admin)
    async def append_log(rollout_id: str, attempt_id: str, body: LogPiece) -> LogSize:
        return await gateway.store.append_log(rollout_id, attempt_id, body)

    @app.get(
        "/api/rollouts/{rollout_id}/attempt/{attempt_id}/log",
        dependencies=only_admin,
        response_class=PlainTextResponse,
    )
    async def log(
        rollout_id: str,
        attempt_id: str,
        part: LogPart = "agent",
        start: Annotated[int, Query(ge=0, lt=2**40)] = 0,
    ) -> Response:
        found = await gateway.store.log(rollout_id, attempt_id, part, start)
        headers = {LOG_NEXT: str(found.next_start), LOG_COMPLETE: str(int(found.complete))}
        return Response(found.data, media_type="text/plain", headers=headers)

    @app.post("/api/rollouts/{rollout_id}/attempt/{attempt_id}/outcome", dependencies=only_admin)
    async def outcome(rollout_id: str, attempt_id: str, body: OutcomeReport) -> Rollout:
        return await gateway.report_outcome(rollout_id, attempt_id, body)


def _add_service(app: FastAPI, gateway: Gateway) -> None:
    only_admin = [Depends(_admin)]

    @app.post("/api/models", status_code=201, dependencies=only_admin)
    async def register(body: list[EngineModel]) -> list[RegisteredEngine]:
        await gateway.register(body)
        return gateway.registered()

    @app.get("/api/models", dependencies=only_admin)
    async def models() -> list[RegisteredEngine]:
        return gateway.registered()

    @app.delete("/api/models", status_code=204, dependencies=only_admin)
    async def remove(model: str | None = None, endpoint: str | None = None) -> Response:
        await gateway.remove_engines(model, endpoint)
        return Response(status_code=204)

    @app.post("/proxy/pause", dependencies=only_admin)
    async def pause(body: Annotated[PauseRequest | None, Body()] = None) -> PauseState:
        return await gateway.pause.pause(body or PauseRequest())

    @app.post("/proxy/resume", dependencies=only_admin)
    async def resume(body: Annotated[ResumeRequest | None, Body()] = None) -> PauseState:
        return await gateway.pause.resume(body.owner if body else None)

    @app.get("/proxy/state", dependencies=only_admin)
    async def state() -> PauseState:
        return gateway.pause.state()

    @app.get("/api/stats", dependencies=only_admin)
    async def stats() -> dict[str, Any]:
        return await gateway.stats()


def _reward(data: dict[str, Any]) -> RewardData:
    try:
        return RewardData.model_validate(data)
    except ValidationError as e:
        raise Invalid(_sentence("the reward event's data", e.errors())) from None


def _sentence(what: str, errors: Any) -> str:
    first = errors[0]
    where = ".".join(str(p) for p in first["loc"])
    return f"{what} isn't valid: {where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse({"detail": error.message}, error.status)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": _sentence("the request", error.errors())}, 422)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail if error.status_code != 404 else f"there is nothing at {request.url.path}"
    return JSONResponse({"detail": detail}, error.status_code, headers=error.headers)


async def _on_fault(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": f"the gateway failed on this request: {type(error).__name__}"}, 500)

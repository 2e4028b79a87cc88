"""Talking to engines over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Collection
from typing import Any

import orjson

from leyden.gateway.engines.completions import EMBEDDED, SERVER
from leyden.gateway.engines.http import Broken, HttpClient
from leyden.gateway.engines.protocol import Adapter, Ask, Said, check
from leyden.gateway.engines.sglang import SGLANG
from leyden.gateway.errors import EngineFailed, Refused
from leyden.schema import EngineModel

_LARGE = 256_000
"""Bytes of JSON above which decoding leaves the event loop."""
ADAPTERS: dict[str, Adapter] = {"leyden": EMBEDDED, "vllm": SERVER, "openai": SERVER, "sglang": SGLANG}


class EngineUnreachable(EngineFailed):
    """No byte of an answer arrived: asking again can't give a second answer to the same question."""


class EngineTimeout(EngineFailed):
    status = 504


class EngineClient:
    """Talks to engines. Environment proxies aren't used; the engine key is sent to engines only."""

    def __init__(self, engine_key: str | None) -> None:
        headers = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
        if engine_key:
            headers["authorization"] = f"Bearer {engine_key}"
        self._http = HttpClient(headers)

    def close(self) -> None:
        self._http.close()

    def keep(self, endpoints: Collection[str]) -> None:
        """Close what is open to engines other than these."""
        bases = {_base(e) for e in endpoints} | {_server(e) for e in endpoints}
        self._http.keep(bases | {f"{server}/v1" for server in bases})

    async def sample(self, engine: EngineModel, ask: Ask, seconds: float) -> Said:
        """Ask for one continuation. Cancelling closes the connection, which tells the engine to stop.

        Raises:
            EngineUnreachable: worth asking again, here or elsewhere.
            EngineTimeout: silent for `seconds`.
            Refused: the engine said no, or can't do this, or its answer broke off.
        """
        adapter = ADAPTERS[engine.kind]
        check(adapter, engine, ask)
        value = await self.post(engine, adapter.path(engine, ask), adapter.body(engine, ask), seconds)
        said = adapter.read(value, ask, engine.version)
        if said.sample.finish_reason == "error":
            why = said.sample.untrainable or "it says so"
            raise EngineFailed(f"the engine at {engine.endpoint} gave no usable answer: {why}")
        return said

    async def post(self, engine: EngineModel, path: str, body: dict[str, Any], seconds: float) -> Any:
        """A JSON exchange; raises what `sample` raises."""
        base = _server(engine.endpoint) if engine.kind == "sglang" else _base(engine.endpoint)
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return await self._read(engine, self._http.post(base, path, data, seconds), seconds)

    async def models(self, engine: EngineModel, seconds: float) -> Any:
        """What the engine says of the models that it serves; raises what `sample` raises."""
        base = _base(engine.endpoint)
        if engine.kind == "sglang":
            base = f"{_server(engine.endpoint)}/v1"
        return await self._read(engine, self._http.get(base, "/models", seconds), seconds)

    async def _read(self, engine: EngineModel, exchange: Awaitable[tuple[int, bytes]], seconds: float) -> Any:
        try:
            status, payload = await exchange
        except TimeoutError:
            raise EngineTimeout(f"the engine at {engine.endpoint} gave no answer within {seconds:.3g} s") from None
        except Broken as e:
            if e.stage == "within":
                raise EngineFailed(f"the engine at {engine.endpoint} broke off in the middle of its answer: {e}") from e
            raise EngineUnreachable(f"can't reach the engine at {engine.endpoint}: {e}") from e
        except ValueError as e:
            raise EngineUnreachable(f"can't reach the engine at {engine.endpoint}: {e}") from e
        return await _answer(engine, status, payload)


def _base(endpoint: str) -> str:
    return endpoint.rstrip("/")


def _server(endpoint: str) -> str:
    """The address without OpenAI's base path, which SGLang's own API isn't below."""
    return _base(endpoint).removesuffix("/v1")


async def _answer(engine: EngineModel, status: int, payload: bytes) -> Any:
    if status in (502, 503, 504):
        raise EngineUnreachable(f"the engine at {engine.endpoint} answered {status}: {_detail(payload)}")
    if status >= 300:
        # A refusal of the request is the client's to see; anything else is a fault between gateway and engine.
        shown = status if status in (400, 413, 422) else 502
        raise Refused(f"the engine answered {status}: {_detail(payload)}", status=shown)
    try:
        return _parse(payload) if len(payload) < _LARGE else await asyncio.to_thread(_parse, payload)
    except (ValueError, RecursionError):
        raise EngineFailed(f"the engine at {engine.endpoint} gave an answer that isn't JSON") from None


def _parse(payload: bytes) -> Any:
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError:
        return json.loads(payload)  # Engines written in Python may spell a missing log-prob NaN, which isn't JSON.


def _detail(payload: bytes) -> str:
    """The readable part of an error body, whatever shape it has."""
    text = payload[:2000].decode("utf-8", "replace").strip()
    try:
        value: Any = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return text or "no detail given"
    for name in ("error", "detail", "message"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    return value if isinstance(value, str) else text

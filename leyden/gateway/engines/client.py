"""Talking to engines over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import orjson

from leyden.gateway.engines.completions import EMBEDDED, SERVER
from leyden.gateway.engines.protocol import Adapter, Ask, Said, check
from leyden.gateway.engines.sglang import SGLANG
from leyden.gateway.errors import EngineFailed, Refused
from leyden.schema import EngineModel

MAX_CONNECTIONS = 2048
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
        headers = {"Content-Type": "application/json"}
        if engine_key:
            headers["Authorization"] = f"Bearer {engine_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            trust_env=False,
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )

    async def close(self) -> None:
        await self._session.close()

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
        base = engine.endpoint.rstrip("/")
        if engine.kind == "sglang":
            base = base.removesuffix("/v1")
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        started = False
        try:
            async with asyncio.timeout(seconds):
                async with self._session.post(base + path, data=data) as answer:
                    started = True
                    payload = await answer.read()
                    status = answer.status
        except TimeoutError:
            raise EngineTimeout(f"the engine at {engine.endpoint} gave no answer within {seconds:.3g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as e:
            why = str(e) or type(e).__name__
            if started:
                raise EngineFailed(
                    f"the engine at {engine.endpoint} broke off in the middle of its answer: {why}"
                ) from e
            raise EngineUnreachable(f"can't reach the engine at {engine.endpoint}: {why}") from e
        return await _read(engine, status, payload)


async def _read(engine: EngineModel, status: int, payload: bytes) -> Any:
    if status in (502, 503, 504):
        raise EngineUnreachable(f"the engine at {engine.endpoint} answered {status}: {_detail(payload)}")
    if status >= 400:
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

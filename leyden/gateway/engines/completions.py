"""The completions API of docs/wire.md: the embedded engine's, and vLLM's where it has the same."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import orjson

from leyden.gateway.errors import EngineFailed, Refused
from leyden.schema import EngineModel

MAX_CONNECTIONS = 2048
_LARGE = 256_000
"""Bytes of JSON above which decoding leaves the event loop."""


class EngineUnreachable(EngineFailed):
    """No byte of an answer arrived: asking again can't give a second answer to the same question."""


class EngineTimeout(EngineFailed):
    status = 504


@dataclass(slots=True)
class Completion:
    """An answer as the engine gave it, unchecked."""

    choice: Any
    usage: Any
    version: int


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

    async def complete(
        self,
        engine: EngineModel,
        prompt: npt.NDArray[np.int32],
        effective: dict[str, Any],
        stop: list[str],
        stop_token_ids: list[int],
        request_id: str,
        seconds: float,
    ) -> Completion:
        """Ask for one continuation. Cancelling closes the connection, which tells the engine to stop.

        Raises:
            EngineUnreachable: worth asking again, here or elsewhere.
            EngineTimeout: silent for `seconds`.
            Refused: the engine said no, or its answer broke off.
        """
        body = {
            "model": engine.model,
            "prompt": prompt,
            **{k: v for k, v in effective.items() if k != "top_k" or v},
            "stop_token_ids": stop_token_ids,
            "logprobs": 0,
            "return_token_ids": True,
            "request_id": request_id,
        }
        if stop:
            body["stop"] = stop
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        url = f"{engine.endpoint.rstrip('/')}/completions"
        started = False
        try:
            async with asyncio.timeout(seconds):
                async with self._session.post(url, data=data) as answer:
                    started = True
                    payload = await answer.read()
                    status = answer.status
        except TimeoutError:
            raise EngineTimeout(f"the engine at {engine.endpoint} gave no answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as e:
            why = str(e) or type(e).__name__
            if started:
                raise EngineFailed(
                    f"the engine at {engine.endpoint} broke off in the middle of its answer: {why}"
                ) from e
            raise EngineUnreachable(f"can't reach the engine at {engine.endpoint}: {why}") from e
        return await _read(engine, status, payload)


async def _read(engine: EngineModel, status: int, payload: bytes) -> Completion:
    if status in (502, 503, 504):
        raise EngineUnreachable(f"the engine at {engine.endpoint} answered {status}: {_detail(payload)}")
    if status >= 400:
        # A refusal of the request is the client's to see; anything else is a fault between gateway and engine.
        shown = status if status in (400, 413, 422) else 502
        raise Refused(f"the engine answered {status}: {_detail(payload)}", status=shown)
    try:
        value = _parse(payload) if len(payload) < _LARGE else await asyncio.to_thread(_parse, payload)
        choice, usage, version = value["choices"][0], value.get("usage"), value.get("weight_version")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise EngineFailed(f"the engine at {engine.endpoint} gave an answer without choices") from None
    known = isinstance(version, int) and not isinstance(version, bool)
    return Completion(choice, usage, version if known else engine.version)


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

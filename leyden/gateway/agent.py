"""The routes that agents use, as a plain ASGI app: no framework between a model call and its answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import unquote

import orjson

from leyden.gateway.attempts import Call, LiveAttempt
from leyden.gateway.calls import closed_error
from leyden.gateway.delivery import ClientGone, Delivery, Receive, Send, send_json
from leyden.gateway.dialects.base import ChatRequest, Dialect
from leyden.gateway.dialects.openai_chat import OpenAIChat
from leyden.gateway.errors import NotFound, Refused
from leyden.gateway.keys import Action, Target, key_from_headers
from leyden.gateway.service import Gateway

log = logging.getLogger("leyden.gateway")

MAX_BODY = 64 * 1024 * 1024
_LARGE = 256_000
"""Bytes of JSON above which decoding leaves the event loop."""
_OPENAI = re.compile(
    r"^(?:/proxy/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+)/mode/(?:train|val))?/openai/v1/(?P<rest>.*)$"
)
PREFIXES = ("/openai/", "/proxy/rollout/")


class AgentApp:
    """Serves everything under `PREFIXES`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._openai = OpenAIChat()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        if method == "HEAD":
            # Harnesses probe with HEAD before their first call, some without a key.
            await send_json(send, 200, b"")
            return
        dialect: Dialect = self._openai
        found = _OPENAI.match(path)
        try:
            if found is None:
                raise NotFound(f"there is nothing at {unquote(path)}")
            target = Target(unquote(found["rollout"]), unquote(found["attempt"])) if found["rollout"] else None
            key = key_from_headers(scope["headers"])
            rest = found["rest"].rstrip("/")
            if rest == "chat/completions":
                _only(method, "POST")
                await self._call(key, target, dialect, receive, send)
            elif rest == "models" or rest.startswith("models/"):
                _only(method, "GET")
                await self._models(key, target, unquote(rest.removeprefix("models").lstrip("/")), send)
            else:
                raise NotFound(f"there is nothing at {unquote(path)}")
        except ClientGone:
            return
        except Refused as e:
            await send_json(send, e.status, dialect.error(e))

    async def _models(self, key: str | None, target: Target | None, name: str, send: Send) -> None:
        """The served model; a single one by any name, since any name is served."""
        await self._gateway.authorize(key, Action.MODEL_CALL, target)

        def entry(model: str) -> dict[str, Any]:
            length = self._gateway.max_model_len()
            created = int(self._gateway.started_at)
            return {"id": model, "object": "model", "created": created, "owned_by": "leyden", "max_model_len": length}

        served = self._gateway.options.model_name
        body = entry(name) if name else {"object": "list", "data": [entry(served)]}
        await send_json(send, 200, orjson.dumps(body))

    async def _call(
        self, key: str | None, target: Target | None, dialect: Dialect, receive: Receive, send: Send
    ) -> None:
        gateway = self._gateway
        live = await gateway.attempt_for_call(key, target)
        body = await _read_json(receive)
        request = dialect.parse(body)
        parts = orjson.dumps(dialect.fingerprint_parts(body), option=orjson.OPT_SORT_KEYS)
        fingerprint = hashlib.sha256(f"{dialect.name}\n{key}\n".encode() + parts).digest()
        call = gateway.begin_call(live, request, dialect.name, fingerprint)
        await self._deliver(live, call, dialect, request, receive, send)

    async def _deliver(
        self, live: LiveAttempt, call: Call, dialect: Dialect, request: ChatRequest, receive: Receive, send: Send
    ) -> None:
        gateway = self._gateway
        delivery = Delivery(call, dialect, request, receive, send, gateway.options.keepalive_seconds)
        try:
            delivered = await delivery.run()
        except ClientGone:
            gateway.abandon(live, call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not call.task.cancelled() or (task is not None and task.cancelling()):
                gateway.abandon(live, call)
                raise
            await delivery.fail(closed_error(live))
        except Exception as e:
            live.drop(call)
            log.exception("call %s of rollout %s failed inside the gateway", call.call_id, live.info.rollout_id)
            await delivery.fail(Refused(f"the gateway failed on this call: {type(e).__name__}", status=500))
        else:
            if delivered:
                await gateway.delivered(live, call)
            else:
                live.drop(call)


def _only(method: str, allowed: str) -> None:
    if method != allowed:
        raise Refused(f"this route takes {allowed}, not {method}", status=405)


async def _read_json(receive: Receive) -> Any:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size > MAX_BODY:
            raise Refused(f"the request body is larger than {MAX_BODY // 2**20} MiB", status=413)
        pieces.append(piece)
        if not message.get("more_body"):
            break
    data = b"".join(pieces)
    try:
        return orjson.loads(data) if size < _LARGE else await asyncio.to_thread(orjson.loads, data)
    except orjson.JSONDecodeError as e:
        raise Refused(f"the request body isn't valid JSON: {e}") from None

"""The routes that agents use, as a plain ASGI app: no framework between a model call and its answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote

import orjson

from leyden.gateway.attempts import Call, LiveAttempt
from leyden.gateway.calls import closed_error
from leyden.gateway.delivery import ClientGone, Delivery, Receive, Send, send_json
from leyden.gateway.dialects.anthropic import AnthropicMessages
from leyden.gateway.dialects.base import NOTHING, Context, Dialect, ModelRequest
from leyden.gateway.dialects.gemini import COUNT, GENERATE, STREAM, Gemini
from leyden.gateway.dialects.openai_chat import OpenAIChat
from leyden.gateway.dialects.openai_completions import OpenAICompletions
from leyden.gateway.dialects.openai_responses import OpenAIResponses
from leyden.gateway.errors import NotFound, Refused
from leyden.gateway.keys import Action, Target, key_from_headers
from leyden.gateway.service import Gateway

log = logging.getLogger("leyden.gateway")

MAX_BODY = 64 * 1024 * 1024
TOO_DEEP = "the request body is nested too deeply"
_LARGE = 256_000
"""Bytes of JSON above which decoding leaves the event loop."""
_ROUTE = re.compile(
    r"^(?:/proxy/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+)/mode/(?:train|val))?"
    r"/(?P<family>openai(?=/v1/)|anthropic(?=/v1/)|gemini(?=/v1(?:alpha|beta)?/))/\w+/(?P<rest>.*)$"
)
_ANY_MODEL = re.compile(r"^models/.+:(?=\w+$)")
"""In paths that name the model before the method."""
PREFIXES = ("/openai/", "/anthropic/", "/gemini/", "/proxy/rollout/")
_SECRET_HEADERS = frozenset({"authorization", "x-api-key", "x-goog-api-key", "cookie", "proxy-authorization"})


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One HTTP request of an agent."""

    headers: Mapping[str, str]
    key: str | None
    target: Target | None
    rest: str
    query: Mapping[str, str]
    receive: Receive
    send: Send


class AgentApp:
    """Serves everything under `PREFIXES`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        chat, messages, gemini = OpenAIChat(), AnthropicMessages(), Gemini()
        self._calls: dict[tuple[str, str], Dialect] = {
            ("openai", "chat/completions"): chat,
            ("openai", "completions"): OpenAICompletions(),
            ("openai", "responses"): OpenAIResponses(),
            ("anthropic", "messages"): messages,
            ("gemini", f"models/*:{GENERATE}"): gemini,
            ("gemini", f"models/*:{STREAM}"): gemini,
        }
        self._counts: dict[tuple[str, str], AnthropicMessages | Gemini] = {
            ("anthropic", "messages/count_tokens"): messages,
            ("gemini", f"models/*:{COUNT}"): gemini,
        }
        self._families: dict[str, Dialect] = {"openai": chat, "anthropic": messages, "gemini": gemini}
        """The dialects of model lists and of errors about paths."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        if method == "HEAD":
            # Harnesses probe with HEAD before their first call, some without a key.
            await send_json(send, 200, b"")
            return
        found = _ROUTE.match(path)
        dialect = self._families.get(found["family"] if found else path.split("/")[1])
        dialect = dialect or self._families["openai"]
        try:
            if found is None:
                raise NotFound(f"there is nothing at {unquote(path)}")
            headers = _headers(scope["headers"])
            if headers.get("upgrade", "").lower() == "websocket":
                raise Refused("WebSockets aren't served here; use HTTP", status=426)
            target = Target(unquote(found["rollout"]), unquote(found["attempt"])) if found["rollout"] else None
            query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
            rest = unquote(found["rest"]).rstrip("/")
            key = key_from_headers(scope["headers"])
            if key is None and found["family"] == "gemini":
                key = query.get("key", "").strip() or None  # As its own clients send it.
            exchange = _Exchange(headers, key, target, rest, query, receive, send)
            route = (found["family"], _ANY_MODEL.sub(r"models/*:", rest))
            if route in self._calls:
                dialect = self._calls[route]
                _only(method, "POST")
                await self._call(exchange, dialect)
            elif route in self._counts:
                _only(method, "POST")
                await self._count(exchange, self._counts[route])
            elif rest == "models" or rest.startswith("models/"):
                _only(method, "GET")
                await self._models(exchange, dialect)
            else:
                raise NotFound(f"there is nothing at {unquote(path)}")
        except ClientGone:
            return
        except Refused as e:
            await send_json(send, e.status, dialect.error(e))
        except Exception as e:
            if _too_deep(e):
                await send_json(send, 400, dialect.error(Refused(TOO_DEEP)))
                return
            log.exception("%s %s failed inside the gateway", method, path)
            fault = Refused(f"the gateway failed on this request: {type(e).__name__}", status=500)
            await send_json(send, 500, dialect.error(fault))

    async def _models(self, exchange: _Exchange, dialect: Dialect) -> None:
        """The served model; a single one by any name, since any name is served."""
        gateway = self._gateway
        principal = await gateway.authorize(exchange.key, Action.MODEL_CALL, exchange.target)
        created, length = int(gateway.started_at), gateway.max_model_len()
        name = exchange.rest.removeprefix("models").lstrip("/")
        if name:
            body = dialect.model(name, created, length)
        else:
            body = dialect.models(await gateway.model_names(principal, exchange.target), created, length)
        await send_json(exchange.send, 200, body)

    async def _count(self, exchange: _Exchange, dialect: AnthropicMessages | Gemini) -> None:
        """How long a prompt would be. Not a call: nothing is recorded."""
        live = await self._gateway.attempt_for_call(exchange.key, exchange.target)
        request = dialect.parse(await _read_json(exchange.receive), Context(path=exchange.rest))
        tokens = await self._gateway.count_tokens(live, request)
        await send_json(exchange.send, 200, dialect.token_count(tokens))

    async def _call(self, exchange: _Exchange, dialect: Dialect) -> None:
        gateway = self._gateway
        live = await gateway.attempt_for_call(exchange.key, exchange.target)
        body = await _read_json(exchange.receive)
        refers = dialect.refers_to(body)
        answers, continued = await gateway.referred(live, refers) if refers is not NOTHING else ({}, None)
        context = Context(
            headers={k: v for k, v in exchange.headers.items() if k not in _SECRET_HEADERS},
            path=exchange.rest,
            query=exchange.query,
            answers=answers,
            continued=continued,
        )
        request = dialect.parse(body, context)
        request.headers, request.body = context.headers, body
        parts = orjson.dumps(dialect.fingerprint_parts(body, context))
        fingerprint = hashlib.sha256(f"{dialect.name}\n{exchange.key}\n".encode() + parts).digest()
        call = await gateway.begin_call(live, request, dialect.name, fingerprint)
        await self._deliver(live, call, dialect, request, exchange.receive, exchange.send)

    async def _deliver(
        self, live: LiveAttempt, call: Call, dialect: Dialect, request: ModelRequest, receive: Receive, send: Send
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
            if _too_deep(e):
                await delivery.fail(Refused(TOO_DEEP))
                return
            log.exception("call %s of rollout %s failed inside the gateway", call.call_id, live.info.rollout_id)
            await delivery.fail(Refused(f"the gateway failed on this call: {type(e).__name__}", status=500))
        else:
            if delivered:
                await gateway.delivered(live, call)
            else:
                live.drop(call)


def _too_deep(error: Exception) -> bool:
    """Whether a value was nested deeper than can be worked on. Found where it happens: a look first costs each call."""
    return isinstance(error, RecursionError) or (isinstance(error, TypeError) and "Recursion limit" in str(error))


def _headers(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}


def _only(method: str, allowed: str) -> None:
    if method != allowed:
        raise Refused(f"this route takes {allowed}, not {method}", status=405)


async def _read_json(receive: Receive) -> dict[str, Any]:
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
        body = orjson.loads(data) if size < _LARGE else await asyncio.to_thread(orjson.loads, data)
    except orjson.JSONDecodeError as e:
        raise Refused(f"the request body isn't valid JSON: {e}") from None
    if not isinstance(body, dict):
        raise Refused("the request body must be a JSON object")
    return body

"""An engine that says what a test tells it to, over real HTTP, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

END = 2
"""<|im_end|> of tests.tiny."""


@dataclass
class Reply:
    """What to answer. `text` is tokenised and closed with END; `override` replaces fields of the choice."""

    text: str = "ok"
    ids: list[int] | None = None
    finish_reason: str = "stop"
    stop_reason: Any = None
    delay: float = 0
    status: int = 200
    error: Any = None
    cut: bool = False
    """Close the connection in the middle of the body."""
    reset: bool = False
    """Close the connection before any byte of an answer."""
    close: bool = True
    override: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    top: dict[str, Any] = field(default_factory=dict)
    """Replaces fields beside `choices`."""


class ScriptedEngine:
    """Serve with `async with`; queue answers with `say`. Without any left it answers "ok"."""

    def __init__(self, tokenizer: Any, version: int = 7) -> None:
        self.tokenizer = tokenizer
        self.version = version
        self.replies: deque[Reply] = deque()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborted = 0
        self.running = 0
        self.default = Reply()
        self.endpoint = ""
        self._runner: web.AppRunner | None = None

    def say(self, *replies: Reply | str) -> None:
        self.replies.extend(Reply(r) if isinstance(r, str) else r for r in replies)

    async def __aenter__(self) -> ScriptedEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.endpoint = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        reply = self.replies.popleft() if self.replies else self.default
        self.running += 1
        try:
            if reply.delay:
                await asyncio.sleep(reply.delay)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        if reply.reset:
            assert request.transport is not None
            request.transport.abort()
            raise asyncio.CancelledError
        if reply.status != 200:
            return web.json_response(reply.error, status=reply.status)
        payload = json.dumps(self._answer(body, reply)).encode()
        if reply.cut:
            response = web.StreamResponse(headers={"Content-Length": str(len(payload))})
            await response.prepare(request)
            await response.write(payload[: len(payload) // 2])
            assert request.transport is not None
            request.transport.abort()
            return response
        return web.Response(body=payload, content_type="application/json")

    def _answer(self, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        ids = reply.ids
        if ids is None:
            ids = self.tokenizer.encode(reply.text, add_special_tokens=False) + ([END] if reply.close else [])
        choice = {
            "index": 0,
            "text": reply.text,
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.stop_reason,
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.5 - i / 100 for i in range(len(ids))]},
            "prompt_token_ids": body["prompt"],
            "token_versions": [self.version] * len(ids),
            **reply.override,
        }
        for name in reply.drop:
            choice.pop(name)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        return {"id": "x", "choices": [choice], "usage": usage, "weight_version": self.version, **reply.top}

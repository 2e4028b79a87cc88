"""`python -m tests.fuzz.engine MODEL_FOLDER READY SEED`: an engine that lies when the request's model is "liar"."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.faults.engine import _Tokenizer
from tests.gateway.scripted_engine import Reply, ScriptedEngine


class LyingEngine(ScriptedEngine):
    """Honest at /v1, a liar at /liar/v1."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        super().__init__(tokenizer)
        self._random = random.Random(seed)

    async def start(self, port: int = 0) -> None:
        await super().start(port)
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/liar/v1/completions", self._lie)
        self.liar = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.liar.setup()
        await web.TCPSite(self.liar, "127.0.0.1", 0).start()
        self.lies = f"http://127.0.0.1:{self.liar.addresses[0][1]}/liar/v1"

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.requests.clear()
        self.headers.clear()
        return await super()._complete(request)

    async def _lie(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        rng = self._random
        odd = rng.choice([None, [], {}, "", "x", -1, 2**70, float("nan"), float("inf"), [None], ["a"], [[1]], [10**9]])
        names = ["text", "finish_reason", "stop_reason", "token_ids", "logprobs", "prompt_token_ids", "token_versions"]
        what = rng.randrange(9)
        reply = Reply("".join(rng.choice("ab <|im_end|>{}\ud7ff\n") for _ in range(rng.randrange(30))))
        if what == 0:
            return web.Response(text="<html>Traceback secret-of-the-engine</html>", content_type="text/html")
        if what == 1:
            return web.json_response({"error": {"message": odd}}, status=rng.choice([200, 400, 404, 429, 500, 503]))
        if what == 2:
            return web.Response(body=rng.choice([b"", b"{", b"null", b"[]", b"\xff", b"[" * 5000]))
        if what == 3:
            assert request.transport is not None
            request.transport.abort()
        if what == 4:
            reply.override = {rng.choice(names): odd, rng.choice(names): odd}
        if what == 5:
            reply.drop = (rng.choice(names),)
        if what == 6:
            reply.top = {rng.choice(["choices", "usage", "id", "weight_version"]): odd}
        if what == 7:
            reply.ids = [rng.choice([-1, 0, 1, 5, 319, 320, 10**6, 2**31, 2**63]) for _ in range(rng.randrange(9))]
        if what == 8:
            reply.override = {"logprobs": {"token_logprobs": [rng.choice([float("nan"), 1.0, -1e300, None, "x"])] * 3}}
        return web.json_response(self._answer(body, reply))


async def main(folder: Path, ready: Path, seed: int) -> None:
    engine = LyingEngine(_Tokenizer(folder), seed)
    await engine.start()
    part = ready.with_suffix(".part")
    await asyncio.to_thread(part.write_text, f"{engine.endpoint} {engine.lies}")
    part.replace(ready)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))

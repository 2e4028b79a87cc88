"""The HTTP side of publishing, against a small server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from leyden.errors import RunError
from leyden.training.torch.publish import HttpEngine, parse_prompt_logprobs


def test_both_shapes_of_prompt_logprobs() -> None:
    assert parse_prompt_logprobs([None, -1.5, -2], [4, 5, 6]) == [-1.5, -2.0]
    vllm = [None, {"9": {"logprob": -9.0}, "5": {"logprob": -1.5, "rank": 2}}]
    assert parse_prompt_logprobs(vllm, [4, 5]) == [-1.5]
    with pytest.raises(ValueError, match="2 prompt log-probs for 3 tokens"):
        parse_prompt_logprobs([None, -1.0], [4, 5, 6])


async def test_the_engine_api_is_spoken_as_documented(tmp_path: Path) -> None:
    seen: list[tuple[str, str | None, object]] = []

    async def load(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("Authorization"), await request.json()))
        return web.json_response({"version": 3, "seconds": 0.1})

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        assert (body["prompt"], body["max_tokens"], body["prompt_logprobs"], body["model"]) == ([1, 2], 1, 0, "m")
        return web.json_response({"choices": [{"prompt_logprobs": [None, -0.5]}]})

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "weight_version": 3})

    app = web.Application()
    app.add_routes([web.post("/v1/load_weights", load), web.post("/v1/completions", complete)])
    app.add_routes([web.get("/health", health)])
    async with TestServer(app) as server:
        engine = HttpEngine(str(server.make_url("/v1")), "secret", "m")
        await engine.load_weights(tmp_path, 3)
        assert seen == [("/v1/load_weights", "Bearer secret", {"path": str(tmp_path), "version": 3})]
        assert await engine.prompt_logprobs([1, 2]) == [-0.5]
        assert await engine.version() == 3
        card = engine.announce(3)
        assert (card.endpoint, card.version, card.kind) == (f"{str(server.make_url('')).rstrip('/')}/v1", 3, "leyden")


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [(400, "no folder", r"refused /v1/load_weights \(HTTP 400\): no folder"), (200, "<html>", "other than JSON")],
)
async def test_refusals_are_one_sentence(tmp_path: Path, status: int, body: str, message: str) -> None:
    async def load(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    app = web.Application()
    app.add_routes([web.post("/v1/load_weights", load)])
    async with TestServer(app) as server:
        with pytest.raises(RunError, match=message):
            await HttpEngine(str(server.make_url("")), "", "m").load_weights(tmp_path, 1)


async def test_an_engine_that_is_being_restarted_is_waited_for() -> None:
    async def health(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": 1})

    app = web.Application()
    app.add_routes([web.get("/health", health)])
    server = TestServer(app)
    await server.start_server()
    port = server.port
    await server.close()
    engine = HttpEngine(f"http://127.0.0.1:{port}", "", "m", patience=20)
    waiting = asyncio.create_task(engine.version())
    await asyncio.sleep(0.2)
    again = web.Application()
    again.add_routes([web.get("/health", health)])
    second = TestServer(again, port=port)
    await second.start_server()
    assert await waiting == 1
    await second.close()
    with pytest.raises(RunError, match="can't reach the engine"):
        await HttpEngine(f"http://127.0.0.1:{port}", "", "m", patience=0).version()

"""The engine as a process, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

torch = pytest.importorskip("torch")

from leyden.errors import ConfigError, PreflightError  # noqa: E402
from leyden.training.torch.server import EngineOptions, bind, check_options, is_loopback, parse_options  # noqa: E402
from tests.tiny import make_tiny_model  # noqa: E402

KEY = "engine-test-key"
KILLER = """
import sys
from leyden.training.torch import decoder, server
fine = decoder.FastRunner.forward
def fail(self, plan):
    if any(c.sequence.key >= 0 and 7 in c.sequence.tokens[:1] and len(c.sequence.tokens) > 1 for c in plan.chunks):
        raise MemoryError("out of memory for the test")
    return fine(self, plan)
decoder.FastRunner.forward = fail
sys.exit(server.main(sys.argv[1:]))
"""


class Server:
    """A server process and its address."""

    def __init__(
        self, folder: Path, logs: Path, *arguments: str, key: str | None = KEY, code: str | None = None
    ) -> None:
        start = ["-c", code] if code else ["-m", "leyden.training.torch.server"]
        environment = {k: v for k, v in os.environ.items() if k != "LEYDEN_ENGINE_KEY"}
        environment |= {"LEYDEN_ENGINE_KEY": key} if key else {}
        self.log = logs / "engine.log"
        command = [sys.executable, *start, "--model", str(folder), "--served-model-name", "tiny", "--threads", "1"]
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen([*command, *arguments], stderr=stream, env=environment)
        deadline = time.monotonic() + 120
        while "engine ready" not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        ready = json.loads(next(line for line in self.log.read_text().splitlines() if "engine ready" in line))
        self.url = ready["url"].removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        method = "GET" if body is None else "POST"
        async with aiohttp.ClientSession(headers={**self.headers, **headers}) as session:
            async with session.request(method, self.url + path, json=body) as response:
                return response.status, await response.json()

    async def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        status, answer = await self.call("/v1/completions", {"prompt": prompt, "logprobs": 0, **body})
        assert status == 200, answer
        return answer

    async def until(self, gauge: str, value: int, seconds: float = 10) -> None:
        """Wait until a metric has reached a value exactly."""
        deadline = time.monotonic() + seconds
        while (await self.call("/metrics"))[1][gauge] != value:
            assert time.monotonic() < deadline, f"{gauge} never became {value}"
            await asyncio.sleep(0.01)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), with_weights=True, max_position_embeddings=100_000)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--max-model-len", "20000", "--kv-cache-tokens", "32768", "--max-batch", "8")
    made = Server(folder, tmp_path_factory.mktemp("logs"), *arguments)
    yield made
    if made.process.poll() is None:
        assert made.end() == 0


async def test_a_completion_says_everything(server: Server) -> None:
    answer = await server.complete([5, 6, 7], max_tokens=6, seed=1, stop_token_ids=[], n=2, prompt_logprobs=0)
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["weight_version"] == 0 and [c["index"] for c in answer["choices"]] == [0, 1]
    first = answer["choices"][0]
    assert len(first["token_ids"]) == len(first["logprobs"]["token_logprobs"]) == len(first["token_versions"]) == 6
    assert first["prompt_token_ids"] == [5, 6, 7] and first["finish_reason"] == "length"
    assert first["prompt_logprobs"][0] is None and len(first["prompt_logprobs"]) == 3
    assert "prompt_logprobs" not in answer["choices"][1]
    assert isinstance(first["text"], str)
    again = await server.complete([5, 6, 7], max_tokens=6, seed=1, stop_token_ids=[])
    assert again["choices"][0]["token_ids"] == first["token_ids"]


async def test_stop_strings_end_at_the_token_that_completes_them(server: Server) -> None:
    free = (await server.complete("yes", max_tokens=40, seed=3, stop_token_ids=[]))["choices"][0]
    # Only a stop string within the plain part of the text can be compared.
    stop = free["text"][4:7]
    held = (await server.complete("yes", max_tokens=40, seed=3, stop_token_ids=[], stop=stop))["choices"][0]
    assert held["finish_reason"] == "stop" and held["stop_reason"] == stop
    assert held["text"] == free["text"].partition(stop)[0]
    assert held["token_ids"] == free["token_ids"][: len(held["token_ids"])]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": [5] * 20000}, 400, "maximum context length is 20000 tokens"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [5, 100000]}, 400, "token id 100000"),
        ({"prompt": [5], "temperature": -1}, 400, "temperature"),
        ({"prompt": [5], "top_p": 0}, 400, "top_p"),
        ({"prompt": [5], "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"prompt": [5], "logprobs": 3}, 400, "log-probs"),
        ({"prompt": [5], "model": "other"}, 404, "other"),
        ({"prompt": "x", "n": 0}, 400, "n"),
        ({"max_tokens": 4}, 400, "prompt"),
    ],
)
async def test_refusals_are_sentences(server: Server, body: dict[str, Any], status: int, words: str) -> None:
    got, answer = await server.call("/v1/completions", body)
    assert got == status and words in answer["error"]["message"]


async def test_keys(server: Server) -> None:
    for wrong in ("Bearer nope", "", "Bearer é"):
        assert (await server.call("/metrics", Authorization=wrong))[0] == 401
    assert (await server.call("/metrics", Authorization="", **{"x-api-key": KEY}))[0] == 200
    assert (await server.call("/health", Authorization=""))[0] == 200
    status, models = await server.call("/v1/models")
    assert status == 200 and models["data"][0]["id"] == "tiny" and models["data"][0]["max_model_len"] == 20000


async def test_a_client_that_leaves_frees_its_place(server: Server) -> None:
    task = asyncio.create_task(server.complete([5], max_tokens=19000, stop_token_ids=[]))
    await server.until("running", 1)
    before = (await server.call("/metrics"))[1]["aborted"]
    task.cancel()
    await server.until("running", 0, seconds=1)
    assert (await server.call("/metrics"))[1]["aborted"] == before + 1


async def test_abort_by_request_id(server: Server) -> None:
    task = asyncio.create_task(server.complete([5], max_tokens=19000, stop_token_ids=[], request_id="mine"))
    await server.until("running", 1)
    assert (await server.call("/v1/abort", {"request_id": "other"}))[0] == 404
    assert (await server.call("/v1/abort", {"request_id": "mine"}))[0] == 200
    choice = (await task)["choices"][0]
    assert choice["finish_reason"] == "abort" and len(choice["token_ids"]) == len(choice["token_versions"]) < 19000


async def test_publishing_while_requests_run(server: Server, folder: Path, tmp_path: Path) -> None:
    task = asyncio.create_task(server.complete([5, 9], max_tokens=2000, stop_token_ids=[]))
    await server.until("running", 1)
    other = make_tiny_model(tmp_path / "other", with_weights=True, max_position_embeddings=100_000, seed=8)
    status, loaded = await server.call("/v1/load_weights", {"path": str(other), "version": 4})
    assert status == 200 and loaded["version"] == 4 and loaded["seconds"] < 5
    answer = await task
    versions = answer["choices"][0]["token_versions"]
    assert versions[-1] == answer["weight_version"] == 4 and versions == sorted(versions)
    for path, code in ((str(tmp_path / "nowhere"), 400), (str(tmp_path), 422)):
        status, refused = await server.call("/v1/load_weights", {"path": path, "version": 5})
        assert status == code and str(tmp_path) in refused["error"]["message"]
    assert (await server.call("/metrics"))[1]["weight_version"] == 4


async def test_a_dead_engine_says_so_and_exits(folder: Path, tmp_path: Path) -> None:
    server = Server(folder, tmp_path, "--kv-cache-tokens", "1024", code=KILLER)
    await server.complete([5, 6], max_tokens=2)
    status, answer = await server.call("/v1/completions", {"prompt": [7, 8], "max_tokens": 5})
    assert status == 500 and "out of memory for the test" in answer["error"]["message"]
    assert (await server.call("/health"))[0] == 503
    assert server.process.wait(30) == 1


async def test_sigterm_hands_over_what_there_is(folder: Path, tmp_path: Path) -> None:
    server = Server(folder, tmp_path, "--max-model-len", "50000", "--kv-cache-tokens", "50000", key=None)
    task = asyncio.create_task(server.complete([5], stop_token_ids=[]))
    await server.until("running", 1)
    assert await asyncio.to_thread(server.end) == 0
    assert (await task)["choices"][0]["finish_reason"] == "abort"


def test_a_port_in_use_is_named(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PreflightError, match=f"port {port}"):
            bind("127.0.0.1", port)


def test_options() -> None:
    assert parse_options(["--model", "m", "--port", "5", "--max-batch", "3"]) == EngineOptions("m", port=5, max_batch=3)
    with pytest.raises(ConfigError, match="LEYDEN_ENGINE_KEY"):
        check_options(EngineOptions("m", host="0.0.0.0"), None)
    check_options(EngineOptions("m", host="0.0.0.0"), "key")
    check_options(EngineOptions("m", host="::1"), None)
    with pytest.raises(ConfigError, match="max_batch"):
        check_options(EngineOptions("m", max_batch=0), None)
    assert is_loopback("127.3.2.1") and not is_loopback("example.org")

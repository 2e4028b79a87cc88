"""Generated tokens per second: the embedded engine, by HTTP, beside `transformers.generate` in the same run; then the
shares of a training step.

    python benchmarks/bench_engine.py [--model DIR] [--batches 1,8,32,64] [--rounds 3]

Each round sends `batch` requests at once (distinct random prompts of 100 tokens, 64 new tokens, no stop tokens,
temperature 1) to a real server process, then has `generate` do the same; times include reading the prompts. Figures are
medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before torch is imported: threads that wait must not spin beside the server's.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import aiohttp
import psutil

from leyden.models import BUILT_IN, resolve_model

PROMPT_TOKENS = 100
NEW_TOKENS = 64
_START_SECONDS = 300


@dataclass(frozen=True)
class RunningEngine:
    """A server process under measurement."""

    url: str
    pid: int


@contextlib.contextmanager
def engine_server(
    model: Path, *, threads: int | None = None, max_batch: int = 64, version: int = 0
) -> Iterator[RunningEngine]:
    """A server of `model` on a free loopback port, ended on leaving.

    Raises:
        RuntimeError: with the server's last words when it doesn't come up.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "leyden.training.torch.server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", "bench", "--max-batch", str(max_batch), "--version", str(version)]
    command += ["--threads", str(threads)] if threads else []
    # A pipe nobody reads could fill and stall the server, so the log goes to a file.
    log = Path(tempfile.gettempdir()) / f"bench_engine_{port}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stderr=stream, stdout=stream)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while b"engine ready" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the engine didn't start: {log.read_text()[-500:]}")
            time.sleep(0.2)
        yield RunningEngine(f"http://127.0.0.1:{port}/v1", process.pid)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        log.unlink(missing_ok=True)


async def complete_all(url: str, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[dict[str, Any]]:
    """Send all prompts at once; return the answers in order."""

    async def one(session: aiohttp.ClientSession, prompt: list[int]) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 1, "stop_token_ids": [], "logprobs": 0}
        async with session.post(f"{url}/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"the engine answered {response.status}: {answer}")
            return answer

    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        return list(await asyncio.gather(*(one(session, prompt) for prompt in prompts)))


def random_prompts(rng: random.Random, batch: int, vocab: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """`batch` distinct prompts of `length` token ids."""
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(batch)]


def engine_rate(url: str, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> float:
    """Generated tokens per second of one burst of requests."""
    started = time.perf_counter()
    answers = asyncio.run(complete_all(url, prompts, new_tokens))
    seconds = time.perf_counter() - started
    return sum(a["usage"]["completion_tokens"] for a in answers) / seconds


def generate_rate(model: Any, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> float:
    """Generated tokens per second of `transformers.generate` over the same prompts as one batch."""
    import torch

    ids = torch.tensor(prompts)
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    return len(prompts) * new_tokens / (time.perf_counter() - started)


def measure(
    model_dir: Path, batches: list[int], rounds: int, threads: int | None
) -> tuple[dict[int, tuple[float, float]], int]:
    """Median (engine, generate) tokens per second by batch size, and the server's peak resident memory in bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    rng = random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    vocab = model.config.vocab_size
    results = {}
    with engine_server(model_dir, threads=threads, max_batch=max(batches)) as engine:
        engine_rate(engine.url, random_prompts(rng, 2, vocab), 8)
        generate_rate(model, random_prompts(rng, 2, vocab), 8)
        for batch in batches:
            ours, theirs = [], []
            for _ in range(rounds):
                ours.append(engine_rate(engine.url, random_prompts(rng, batch, vocab)))
                theirs.append(generate_rate(model, random_prompts(rng, batch, vocab)))
            results[batch] = (statistics.median(ours), statistics.median(theirs))
            print(
                f"batch {batch:3}: engine {results[batch][0]:7.1f} tok/s, generate {results[batch][1]:7.1f} tok/s, "
                f"ratio {results[batch][0] / results[batch][1]:.2f}  (rounds: {json.dumps([round(x) for x in ours])} "
                f"{json.dumps([round(x) for x in theirs])})",
                flush=True,
            )
        rss = psutil.Process(engine.pid).memory_info().rss
    return results, rss


def step_shares() -> dict[str, float]:
    """Shares of one training step of the calculator example, from one step's record to the next.

    `generation` is time in which the engine answered at least one call, `waiting` the rest of the rollouts (agents and
    graders starting and working), `update` the update with publishing and checkpoint.
    """
    run_file = Path(__file__).resolve().parent.parent / "examples" / "calculator" / "run.yaml"
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"output_dir={folder}/run", "training.steps=2", "validation.tasks=0"]
        command = [sys.executable, "-m", "leyden", "train", str(run_file), *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=1200)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = [r for r in map(json.loads, lines) if r["kind"] == "step"]
    wall = second["time"] - first["time"]
    seconds = second["seconds"]
    print(f"one step of {wall:.1f} s: {json.dumps({k: round(v, 1) for k, v in seconds.items()})}", flush=True)
    return {
        "generation": seconds["generating"] / wall,
        "waiting": (seconds["rollouts"] - seconds["generating"]) / wall,
        "update": (wall - seconds["rollouts"]) / wall,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Tokens per second of the embedded engine beside transformers.generate; shares of a training step."
    )
    parser.add_argument("--model", default=BUILT_IN, help="folder, Hugging Face id, or name")
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--no-step", action="store_true", help="leave the training step out")
    options = parser.parse_args()
    batches = [int(b) for b in options.batches.split(",")]
    results, rss = measure(resolve_model(options.model), batches, options.rounds, options.threads)
    figures = [f"tok_s_{b}={ours:.1f}" for b, (ours, _) in results.items()]
    figures += [f"ratio_{b}={ours / theirs:.2f}" for b, (ours, theirs) in results.items()]
    figures.append(f"rss_mb={rss / 2**20:.0f}")
    if not options.no_step:
        figures += [f"share_{name}={share:.2f}" for name, share in step_shares().items()]
    print("bench-engine:", *figures)


if __name__ == "__main__":
    main()

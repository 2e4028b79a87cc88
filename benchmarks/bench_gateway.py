"""`make bench-gateway`: Leyden's gateway beside Agent Lightning's server, in one run, on the same fake engine.

The workload is that of group-based training: rollouts in groups of 8 that share a prompt of about 500 tokens, 8 calls a
rollout, 100 sampled tokens an answer, calls in a closed loop over 1, 64 and 512 keep-alive connections. Leyden renders
and tokenises the prompts, checks every answer and has it on disk (SQLite, synchronous=FULL) before it is sent; the peer
passes messages on and keeps everything in memory. Each phase has fresh processes, both alternate, figures are medians.
CPU is that of the gateway's process, all threads; "added" latency is over the engine asked directly.

Then Leyden alone: what one more turn costs in conversations that reach 4k and 32k tokens in 100 turns, memory over
10,000 calls of ended rollouts, and 1,000 streams held open at once.

CPU figures hold on a busy machine, those per second don't.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gateway import servers
from benchmarks.gateway.servers import Leyden, Peer, cost, fake_engine, leyden, peer, words
from tests.real_tokenizers import tokenizer_folder

PROMPT, SAMPLED, GROUP, CALLS = 500, 100, 8, 8
CONNECTIONS = (1, 64, 512)
TURNS = 100
GOALS: dict[str, Callable[[float], bool]] = {
    "throughput_ratio": lambda x: x >= 8,
    "cpu_ratio": lambda x: x >= 6,
    "rss_kb_per_call": lambda x: x <= 1,
    "turn_cost_ratio": lambda x: x <= 2,
    "streams_lost": lambda x: x == 0,
}


def bodies(rollouts: int, first: int) -> list[list[dict[str, Any]]]:
    """Requests by rollout. Rollouts of a group share their prompts; the calls of a rollout have different ones."""
    out = []
    for i in range(rollouts):
        seeds = [(first + i // GROUP) * CALLS + c for c in range(CALLS)]
        out.append([{"model": "policy", "messages": [{"role": "user", "content": words(PROMPT, s)}]} for s in seeds])
    return out


async def load(port: int, rollouts: list[list[str]], connections: int) -> dict[str, Any]:
    lines = "\n".join(json.dumps({"rollout": r}) for r in rollouts).encode()
    command = [sys.executable, "-m", "benchmarks.gateway.load", "127.0.0.1", str(port), str(connections)]
    pipe = asyncio.subprocess.PIPE
    async with servers.process(command, stdin=pipe, stdout=pipe) as running:
        said, _ = await asyncio.wait_for(running.communicate(lines), 550)
    if running.returncode:
        raise SystemExit(f"the load on port {port} over {connections} connections failed; what it said is above")
    result = json.loads(said)
    if result["failed"]:
        raise SystemExit(f"{result['failed']} of {result['calls']} calls failed at port {port}")
    return result


async def phase(server: Leyden | Peer, connections: int, calls: int, first: int) -> dict[str, float]:
    count = max(connections, calls // CALLS)
    rollouts = await server.rollouts(count, bodies(count, first))
    before = cost(server.pid)
    result = await load(server.port, rollouts, connections)
    after = cost(server.pid)
    await server.end()
    times = sorted(result["latencies"])
    return {
        "calls": result["calls"],
        "calls_s": result["calls"] / result["seconds"],
        "cpu_ms": (after.cpu - before.cpu) * 1000 / result["calls"],
        "p50_ms": times[len(times) // 2] * 1000,
        "p99_ms": times[int(len(times) * 0.99)] * 1000,
        "rss_kb": (after.rss - before.rss) / 1024 / result["calls"],
    }


async def direct(endpoint: str, calls: int) -> dict[str, float]:
    """The engine asked without a gateway, over one connection."""
    port = int(endpoint.split(":")[2].split("/")[0])
    body = {"model": "m", "prompt": list(range(PROMPT))}
    result = await load(port, [[servers.post(port, "/v1/completions", "k", body)] * calls], 1)
    times = sorted(result["latencies"])
    return {"p50_ms": times[len(times) // 2] * 1000, "p99_ms": times[int(len(times) * 0.99)] * 1000}


async def side_by_side(folder: Path, model: Path, repeats: int) -> dict[str, float]:
    figures: dict[tuple[str, int], list[dict[str, float]]] = {}
    first = 0
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(fake_engine(SAMPLED))
        base = await direct(endpoint, 500)
        for repeat in range(repeats):
            for connections in CONNECTIONS:
                # Fresh processes, and each goes first in turn: what one phase leaves behind doesn't slow the next.
                starts = [lambda: leyden(folder, model), lambda: peer(folder)]
                for start in starts if repeat % 2 == 0 else starts[::-1]:
                    async with start() as server:
                        await server.engine(endpoint)
                        await phase(server, 8, 256, first := first + 1000)  # Not measured: it warms up.
                        calls = {"leyden": 4096, "peer": 1024}[server.name] if connections > 1 else 300
                        measured = await phase(server, connections, calls, first := first + 1000)
                        figures.setdefault((server.name, connections), []).append(measured)
        async with leyden(folder, model) as ours:
            await ours.engine(endpoint)
            await phase(ours, 64, 10_000, first := first + 2000)  # Caches fill.
            memory = await phase(ours, 64, 10_000, first := first + 2000)
    middle = {k: {n: statistics.median(f[n] for f in v) for n in v[0]} for k, v in figures.items()}
    print(f"engine alone: p50 {base['p50_ms']:.2f} ms, p99 {base['p99_ms']:.2f} ms")
    for (name, connections), f in sorted(middle.items(), key=lambda item: (item[0][1], item[0][0])):
        added = ""
        if connections == 1:
            added = f", added p50 {f['p50_ms'] - base['p50_ms']:.2f} ms, p99 {f['p99_ms'] - base['p99_ms']:.2f} ms"
        print(
            f"{name} at {connections} connections: {f['calls_s']:.0f} calls/s, {f['cpu_ms']:.2f} ms CPU a call, "
            f"p50 {f['p50_ms']:.1f} ms, p99 {f['p99_ms']:.1f} ms{added}"
        )
    peer_kb = statistics.mean(f["rss_kb"] for f in figures["peer", 64])
    print(f"memory: leyden {memory['rss_kb']:.2f} KB a call over {memory['calls']:.0f}, peer {peer_kb:.0f} KB")
    l64, p64 = middle["leyden", 64], middle["peer", 64]
    out = {
        "throughput_ratio": l64["calls_s"] / p64["calls_s"],
        "cpu_ratio": p64["cpu_ms"] / l64["cpu_ms"],
        "rss_kb_per_call": max(0.0, memory["rss_kb"]),
    }
    for n in CONNECTIONS:
        out[f"calls_s_{n}"] = middle["leyden", n]["calls_s"]
        out[f"peer_calls_s_{n}"] = middle["peer", n]["calls_s"]
        out[f"cpu_ms_{n}"] = middle["leyden", n]["cpu_ms"]
    return out


async def turns(folder: Path, model: Path, conversations: int, tokens: int) -> float:
    """CPU of the 100th turn over that of the 2nd, in conversations that reach `tokens` tokens."""
    new = max(1, tokens // TURNS - SAMPLED - 10)
    async with fake_engine(SAMPLED) as endpoint, leyden(folder, model) as ours:
        await ours.engine(endpoint)
        keys = await ours.keys(conversations)
        url = f"http://127.0.0.1:{ours.port}/openai/v1/chat/completions"
        spent: dict[int, float] = {}
        async with aiohttp.ClientSession() as session:
            histories: list[list[dict[str, Any]]] = [[] for _ in keys]
            for turn in range(1, TURNS + 1):
                asked = []
                for i, history in enumerate(histories):
                    history.append({"role": "user", "content": words(new, i * 1000 + turn)})
                    asked.append(json.dumps({"model": "policy", "messages": history}))
                before = cost(ours.pid)
                for key, history, data in zip(keys, histories, asked, strict=True):
                    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
                    async with session.post(url, data=data, headers=headers) as answer:
                        assert answer.status == 200, await answer.text()
                        history.append((await answer.json())["choices"][0]["message"])
                spent[turn] = (cost(ours.pid).cpu - before.cpu) * 1000 / len(keys)
    early, late = statistics.median([spent[t] for t in (2, 3, 4)]), statistics.median([spent[t] for t in (98, 99, 100)])
    print(f"a turn of a {tokens // 1000}k-token conversation: {early:.2f} ms CPU at first, {late:.2f} ms at the 100th")
    return late / early


async def held_streams(folder: Path, model: Path, count: int) -> int:
    """Streams that were lost of `count` held open at once for some seconds."""
    async with fake_engine(SAMPLED, hold=8) as endpoint, leyden(folder, model, "--keepalive-seconds", "1") as ours:
        await ours.engine(endpoint)
        keys = await ours.keys(count // 10)
        url = f"http://127.0.0.1:{ours.port}/openai/v1/chat/completions"
        alive = 0

        async def one(session: aiohttp.ClientSession, i: int) -> bool:
            nonlocal alive
            body = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": f"stream {i}"}]}
            headers = {"Authorization": f"Bearer {keys[i // 10]}"}
            async with session.post(url, json=body, headers=headers) as answer:
                text = (await answer.read()).decode()
            events = [json.loads(e[6:]) for e in text.strip().split("\n\n") if e != "data: [DONE]"]
            alive += len(events) > 3
            said = any(c["finish_reason"] for e in events for c in e["choices"])
            return said and text.endswith("data: [DONE]\n\n")

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            whole = await asyncio.gather(*(one(session, i) for i in range(count)))
        recorded = (await ours.admin.stats())["delivered"]
    print(f"held streams: {sum(whole)} of {count} whole, {recorded} recorded and delivered, {alive} with signs of life")
    return count - min(sum(whole), recorded)


async def main(quick: bool) -> int:
    model = await asyncio.to_thread(tokenizer_folder, "qwen3")
    with tempfile.TemporaryDirectory(prefix="leyden-bench-") as name:
        folder = Path(name)
        out = await side_by_side(folder, model, 1 if quick else 3)
        conversations = 8 if quick else 24
        out["turn_cost_ratio_4k"] = await turns(folder, model, conversations, 4_000)
        out["turn_cost_ratio"] = await turns(folder, model, conversations, 32_000)
        out["streams_lost"] = await held_streams(folder, model, 1000)
    short = [f"{name}={out[name]:.2f}" for name, met in GOALS.items() if not met(out[name])]
    if short:
        print(f"short of its goal: {', '.join(short)}")
    order = [*list(GOALS)[:4], *(k for k in out if k not in list(GOALS)[:4])]
    print("bench-gateway: " + " ".join(f"{k}={out[k]:.2f}" for k in order))
    return 1 if short else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repetition, fewer conversations")
    sys.exit(asyncio.run(main(parser.parse_args().quick)))

"""Real harnesses through a real gateway: `python -m tests.conformance.run [--light | --all] [--only NAME]`.

Each harness runs unmodified, in a home of its own, with an attempt's key, and makes three turns with
parallel tool calls. What the gateway recorded of it is then read as a trainer reads it, and judged.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from leyden.client import LeydenClient
from leyden.schema import ClaimRequest, EngineModel, RolloutCreate, RolloutPatch, RolloutState, StatusPatch, Trajectory
from leyden.training.rows import build_rows
from tests.conformance.engine import PlayedModel
from tests.conformance.harnesses import CONTEXT, HARNESSES, INSTALLS, Harness, Place, shown
from tests.conformance.install import InstallError, installed, search_path
from tests.real_tokenizers import tokenizer_folder

FAMILY = "qwen3"
START_SECONDS = 60
_KEPT_ENVIRONMENT = ("LANG", "LC_ALL", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "TMPDIR")


@dataclass(slots=True)
class Result:
    """What one harness did and what was recorded of it."""

    harness: Harness
    error: str | None = None
    seconds: float = 0.0
    calls: int = 0
    segments: int = 0
    uncaptured: list[str] = field(default_factory=list)
    breaks: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    dialects: set[str] = field(default_factory=set)
    rows: int = 0

    @property
    def rows_extra(self) -> int:
        return max(0, self.rows - self.harness.rows)


def judge(result: Result, trajectory: Trajectory, asked: int, answered: int) -> None:
    """Fill `result` with what was recorded.

    `asked` is how many calls reached the engine, `answered` in how many of them it read the results of two tool calls.
    """
    calls = trajectory.calls
    result.calls = len(calls)
    result.kinds.update(str(c.kind) for c in calls)
    result.dialects.update(c.dialect for c in calls)
    result.breaks.update(c.break_reason for c in calls if c.break_reason is not None)
    left_out = [c.untrainable for c in calls if c.untrainable is not None and not c.untrainable.startswith("kind")]
    undelivered = ["not delivered" for c in calls if not c.delivered and c.untrainable is None]
    lost = [f"{asked - len(calls)} calls weren't recorded"] if asked > len(calls) else []
    result.uncaptured = [*left_out, *undelivered, *lost]
    result.segments = sum(c.parent is None and c.kind in ("main", "subagent") for c in calls)
    rows, _ = build_rows(trajectory, max_row_tokens=10**9)
    result.rows = len(rows)
    own = result.kinds["main"] + result.kinds["subagent"]
    if result.error is None and own < result.harness.calls:
        result.error = f"made {own} calls of its own where {result.harness.calls} were expected"
    elif result.error is None and not answered:
        result.error = "the results of its two parallel tool calls didn't come back"
    elif result.error is None and result.rows < result.harness.rows:
        result.error = f"made {result.rows} rows where {result.harness.rows} were expected"


async def run_harness(harness: Harness, gateway: str, admin: LeydenClient, engine: PlayedModel, keep: Path) -> Result:
    result = Result(harness)
    try:
        folder = await asyncio.to_thread(installed, harness.install, INSTALLS[harness.install])
    except InstallError as e:
        result.error = str(e)
        return result
    (rollout,) = await admin.create_rollouts([RolloutCreate(input={"harness": harness.name})])
    (claim,) = await admin.claim(ClaimRequest(controller_id="conformance", lease_seconds=3600, wait_seconds=5))
    here = keep / "".join(c if c.isalnum() else "-" for c in harness.name.lower())
    place = Place(gateway, claim.agent_key, here / "home", here / "work", folder)
    for path in (place.home, place.work):
        path.mkdir(parents=True)
    seen, answered, started = engine.seen, engine.answered, time.monotonic()
    result.error = await _execute(harness, place, here / "output.log")
    result.seconds = time.monotonic() - started
    ended = RolloutPatch(status=StatusPatch(state=RolloutState.SUCCEEDED))
    await admin.patch(rollout.rollout_id, ended)
    trajectory = await admin.trajectory(rollout.rollout_id)
    judge(result, trajectory, engine.seen - seen, engine.answered - answered)
    return result


async def _execute(harness: Harness, place: Place, log: Path) -> str | None:
    """Run the harness to its end, with its whole tree. Returns what went wrong."""
    start = harness.start(place)
    environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    environment |= {
        "PATH": search_path(place.installed),
        "HOME": str(place.home),
        "NO_COLOR": "1",
        "CI": "1",
    } | start.env
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *start.command,
            cwd=place.work,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(harness.seconds):
                code = await process.wait()
        except TimeoutError:
            return f"`{shown(start)}` didn't end within {harness.seconds:g} s; see {log}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if code != 0:
        return f"`{shown(start)}` exited {code}: " + _end_of(log)
    return None


def _end_of(log: Path) -> str:
    return "\n  ".join(["", *log.read_text(errors="replace").strip().splitlines()[-8:]])


async def _started(process: asyncio.subprocess.Process, url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while time.monotonic() < deadline:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/healthz") as answer:
                    if answer.status == 200:
                        return
            if process.returncode is not None:
                break
            await asyncio.sleep(0.1)
    raise SystemExit(f"the gateway didn't start at {url}")


async def conform(chosen: list[Harness], keep: Path) -> list[Result]:
    from transformers import AutoTokenizer

    from leyden.preflight import pick_port

    folder = await asyncio.to_thread(tokenizer_folder, FAMILY)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    key, port = secrets.token_urlsafe(24), pick_port("127.0.0.1", 0, "gateway")
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "leyden", "gateway", "--store", str(keep / "store.sqlite"), "--model", str(folder)]
    command += ["--served-model-name", "policy", "--port", str(port)]
    with (keep / "gateway.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, "LEYDEN_ADMIN_KEY": key}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            await _started(process, url)
            async with PlayedModel(tokenizer, CONTEXT) as engine, LeydenClient(url, key) as admin:
                await admin.register_models(
                    [EngineModel(model="policy", endpoint=engine.endpoint, kind="vllm", max_model_len=CONTEXT)]
                )
                results = []
                for harness in chosen:
                    results.append(await run_harness(harness, url, admin, engine, keep))
                    r = results[-1]
                    print(f"{harness.name}: {r.error or 'ok'} ({r.seconds:.1f} s)", flush=True)
                return results
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(20):
                    await process.wait()
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)


def show(results: list[Result]) -> None:
    table = Table("harness", "dialect", "s", "calls", "kinds", "segments", "rows", "breaks", "not captured")
    for r in results:
        named = lambda c: ", ".join(f"{n} {k}" for k, n in sorted(c.items())) or "-"  # noqa: E731
        rows = f"{r.rows} of {r.harness.rows}" + (f" ({r.harness.reason})" if r.harness.reason else "")
        dialects = ", ".join(sorted(r.dialects))
        table.add_row(
            r.harness.name, dialects, f"{r.seconds:.1f}", str(r.calls), named(r.kinds), str(r.segments), rows,
            named(r.breaks), "; ".join(r.uncaptured) or "0",
        )  # fmt: skip
    Console(width=200).print(table)
    for r in results:
        if r.error:
            print(f"FAILED {r.harness.name}: {r.error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--light", action="store_true", help="the six that install quickly")
    parser.add_argument("--all", action="store_true", help="also those that are large")
    parser.add_argument("--only", action="append", default=[], help="part of a harness's name; may be repeated")
    parser.add_argument("--keep", type=Path, help="folder for homes, logs and the store; a new one under the system's")
    given = parser.parse_args()
    chosen = [h for h in HARNESSES if (given.all or not h.heavy) and (h.light or not given.light)]
    if given.only:
        chosen = [h for h in HARNESSES if any(part.lower() in h.name.lower() for part in given.only)]
    keep = given.keep or Path(tempfile.mkdtemp(prefix="leyden-conformance-"))
    keep.mkdir(parents=True, exist_ok=True)
    results = asyncio.run(conform(chosen, keep))
    show(results)
    failed = sum(r.error is not None for r in results)
    uncaptured = sum(len(r.uncaptured) for r in results)
    extra = sum(r.rows_extra for r in results)
    if failed or uncaptured or extra:
        print(f"homes, logs and the store are in {keep}")
    elif given.keep is None:
        shutil.rmtree(keep, ignore_errors=True)
    name = "conformance-all" if given.all else "conformance"
    calls = sum(r.calls for r in results)
    counts = f"harnesses={len(results)} failed={failed} calls={calls} uncaptured={uncaptured} rows_extra={extra}"
    print(f"{name}: {counts}", flush=True)
    return 1 if failed or uncaptured or extra or not results else 0


if __name__ == "__main__":
    sys.exit(main())

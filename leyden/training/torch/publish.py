"""Publishing weights to an engine, and proof that it serves them.

Servers are known to answer 200 to a reload and then serve something else (tied embeddings that aren't reloaded shift
log-probs by 0.06 to 0.24). So every publish ends with a probe: the engine scores a fixed prompt and must agree with the
policy.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import numpy as np
import orjson
import torch

from leyden.errors import RunError
from leyden.schema import EngineModel
from leyden.training.checkpoint import require_space
from leyden.training.torch.policy import Policy

PROBE_TOKENS = 24
TOLERANCE = 1e-3
"""Largest |log-prob difference| of a probe in fp32; reduced precision gets HALF_TOLERANCE."""
HALF_TOLERANCE = 0.1
LOAD_SECONDS = 600.0
PROBE_SECONDS = 120.0


class EngineHandle(Protocol):
    """What the training loop needs of an engine."""

    async def load_weights(self, folder: Path, version: int) -> None:
        """Serve `folder/model.safetensors` as `version` from the answer on."""
        ...

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """Log-probability of each token but the first, at temperature 1."""
        ...

    async def version(self) -> int | None:
        """The version that it says it serves; None when it doesn't say."""
        ...

    def announce(self, version: int) -> EngineModel:
        """Its registration at the gateway."""
        ...


class HttpEngine:
    """An engine behind docs/wire.md's engine API. Raises RunError in one sentence when it can't be used.

    Everything here may be repeated, so an engine that can't be reached is waited for, up to `patience` seconds: one
    that died is started again by whoever supervises it.
    """

    def __init__(self, url: str, key: str, model: str, *, kind: str = "leyden", patience: float = 120) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._kind = kind
        self._patience = patience
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def load_weights(self, folder: Path, version: int) -> None:
        await self._call("POST", "/v1/load_weights", {"path": str(folder), "version": version}, LOAD_SECONDS)

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        body = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "logprobs": 0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        answer = await self._call("POST", "/v1/completions", body, PROBE_SECONDS)
        try:
            return parse_prompt_logprobs(answer["choices"][0]["prompt_logprobs"], ids)
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise RunError(f"the engine at {self.url} gave no usable prompt_logprobs for the publish probe") from e

    async def version(self) -> int | None:
        return (await self._call("GET", "/health", None, PROBE_SECONDS)).get("weight_version")

    def announce(self, version: int) -> EngineModel:
        fields = {"model": self.model, "endpoint": f"{self.url}/v1", "version": version, "kind": self._kind}
        return EngineModel.model_validate(fields)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> Any:
        deadline = time.monotonic() + self._patience
        timeout = aiohttp.ClientTimeout(total=seconds)
        while True:
            try:
                async with (
                    aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                    session.request(method, self.url + path, json=body) as answer,
                ):
                    payload = await answer.read()
                    if answer.status < 400:
                        return orjson.loads(payload)
                    detail = payload[:300].decode("utf-8", "replace")
                    raise RunError(f"the engine at {self.url} refused {path} (HTTP {answer.status}): {detail}")
            except orjson.JSONDecodeError as e:
                raise RunError(f"the engine at {self.url} answered {path} with something other than JSON") from e
            except TimeoutError as e:
                raise RunError(f"the engine at {self.url} gave no answer to {path} in {seconds:.0f} s") from e
            except aiohttp.ClientError as e:
                if time.monotonic() > deadline:
                    raise RunError(f"can't reach the engine at {self.url}: {str(e) or type(e).__name__}") from e
                await asyncio.sleep(0.5)


def parse_prompt_logprobs(given: list[Any], ids: list[int]) -> list[float]:
    """Log-probs of `ids[1:]` from vLLM's shape: None for the first, then numbers or {token id: {"logprob": x}}."""
    if len(given) != len(ids):
        raise ValueError(f"{len(given)} prompt log-probs for {len(ids)} tokens")
    pairs = zip(given[1:], ids[1:], strict=True)
    return [float(g[str(t)]["logprob"] if isinstance(g, dict) else g) for g, t in pairs]


@dataclass(frozen=True)
class PublishReport:
    """`difference` is the probe's largest |log-prob difference|."""

    version: int
    folder: Path
    seconds: float
    difference: float


def weights_folder(run_dir: Path, version: int) -> Path:
    return run_dir / "weights" / f"v{version}"


async def publish(policy: Policy, engine: EngineHandle, run_dir: Path, version: int) -> PublishReport:
    """Write merged weights to `run_dir/weights/v{version}`, have the engine load them, verify, delete older ones.

    Raises:
        RunError: the disk is full, the engine doesn't take them, or serves something else afterwards.
    """
    started = time.monotonic()
    folder = weights_folder(run_dir, version)
    await asyncio.to_thread(_write, policy, folder)
    await engine.load_weights(folder, version)
    for old in folder.parent.iterdir():
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    difference = await verify(policy, engine, version)
    return PublishReport(version, folder, time.monotonic() - started, difference)


async def verify(policy: Policy, engine: EngineHandle, version: int) -> float:
    """Largest |log-prob difference| between engine and policy on the probe prompt.

    Raises:
        RunError: it is above the tolerance.
    """
    difference = await probe(policy, engine)
    limit = TOLERANCE if policy.dtype in (torch.float32, torch.float64) else HALF_TOLERANCE
    # Written so that NaN fails too.
    if not difference <= limit:
        raise RunError(
            f"the engine doesn't serve the published weights of version {version}: log-probs differ by "
            f"{difference:.3g} on the probe prompt (limit {limit:g}); nothing was sampled from them"
        )
    return difference


async def probe(policy: Policy, engine: EngineHandle) -> float:
    # The last tenth of a vocabulary is often padding that servers refuse.
    ids = np.random.default_rng(0).integers(0, max(1, policy.vocabulary * 9 // 10), PROBE_TOKENS).tolist()
    theirs = await engine.prompt_logprobs(ids)
    ours = await asyncio.to_thread(lambda: policy.score_ids(ids, temperature=1.0))
    return float(np.max(np.abs(np.array(ours) - np.array(theirs))))


def _write(policy: Policy, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    require_space(folder, policy.weight_bytes(), "publishing weights")
    try:
        policy.save_weights(folder)
    except Exception as e:
        # safetensors reports a full disk in an exception of its own.
        raise RunError(f"can't write the weights to publish into {folder}: {e}") from e

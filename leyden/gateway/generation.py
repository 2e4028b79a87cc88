"""Getting one continuation from an engine: which one, when, how often to ask again, and for how long."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from leyden.gateway.engines.client import EngineClient, EngineTimeout, EngineUnreachable
from leyden.gateway.engines.probe import Probes
from leyden.gateway.engines.protocol import Ask, Said
from leyden.gateway.engines.registry import EngineRegistry
from leyden.gateway.errors import EngineFailed, Refused
from leyden.gateway.pause import Pause
from leyden.gateway.signals import wait_until
from leyden.schema import EngineModel

ENGINE_TRIES = 4
RETRY_SECONDS = 0.2
"""Before the second try; doubles. A restarting engine needs longer than this, a dropped connection less."""


@dataclass(slots=True)
class Tries:
    """Since the gateway started."""

    retries: int = 0
    aborts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Asks engines. Waits while paused; asks again only when nothing was generated, or the engine gave it up."""

    engines: EngineRegistry
    client: EngineClient
    probes: Probes
    pause: Pause
    request_timeout: float
    tries: Tries = field(default_factory=Tries)

    async def sample(self, rollout_id: str, model: str, ask: Ask) -> tuple[Said, EngineModel]:
        """One continuation of `ask` by an engine of `model`.

        Raises:
            Refused: why there is none.
        """
        left = self.request_timeout
        failed: list[str] = []
        while True:
            await self.pause.passed()
            engine = self.engines.pick(rollout_id, failed, model)
            if engine is None:
                left = await self._await_engine(model, left)
                continue
            begun = time.monotonic()
            try:
                async with self.engines.queue(engine).slot(rollout_id, left):
                    if self.pause.active():
                        continue  # It began while this call waited for its turn.
                    self.pause.inflight += 1
                    try:
                        said = await self.client.sample(engine, ask, left - (time.monotonic() - begun))
                    finally:
                        self.pause.inflight -= 1
            except EngineUnreachable as e:
                failed.append(engine.endpoint)
                left -= time.monotonic() - begun
                delay = RETRY_SECONDS * 2 ** (len(failed) - 1)
                if len(failed) >= ENGINE_TRIES or left <= delay:
                    raise EngineFailed(f"{e.message} ({len(failed)} tries)", status=502) from e
            except TimeoutError:
                raise EngineTimeout(f"the engine at {engine.endpoint} had no room within {left:g} s") from None
            else:
                if said.sample.finish_reason != "abort":
                    self.probes.begin(engine)
                    if said.sample.untrainable is None:
                        said.sample.untrainable = await self._doubt(ask, engine)
                    return said, engine
                self.tries.aborts += 1
                left -= time.monotonic() - begun
                delay = RETRY_SECONDS
                if left <= delay:
                    raise EngineTimeout(f"the engine kept aborting this call for {self.request_timeout:g} s")
            self.tries.retries += 1
            left -= delay
            await asyncio.sleep(delay)

    async def _await_engine(self, model: str, left: float) -> float:
        """Wait for an engine to be registered; returns the time that is left."""
        begun = time.monotonic()
        ticket = self.engines.changed.ticket()
        if self.engines.serving(model):
            return left
        others = ", ".join(sorted({m.model for m in self.engines.all()}))
        if others and model != self.engines.served_model:
            raise Refused(
                f"capture.routes leads this call to model {model}, which no engine serves; there are {others}"
            )
        if not await wait_until(ticket, begun + left):
            but = f"; there are engines for {others}" if others else ""
            raise EngineFailed(
                f"no engine for model {model} was registered within {self.request_timeout:g} s{but}", status=503
            )
        return max(0.001, left - (time.monotonic() - begun))

    async def _doubt(self, ask: Ask, engine: EngineModel) -> str | None:
        """Why log-probs aren't those of the policy's distribution that the sample was drawn from."""
        used = ask.effective
        if ask.response_format is not None:
            return "constrained sampling: the log-probs aren't those of the model by itself"
        plain = used["temperature"] == 1 and used["top_p"] == 1 and not used["top_k"]
        if plain or used["temperature"] == 0 or not ask.trained:
            return None
        found = await self.probes.of(engine)
        if found.processed:
            return None
        if found.processed is False:
            return (
                "raw log-probs: this engine gives log-probs before temperature and top-p; sample at temperature 1, or "
                "start it so that it gives processed ones (vLLM: --logprobs-mode processed_logprobs)"
            )
        why = f" ({found.detail})" if found.detail else ""
        return (
            "unverified log-probs: this engine didn't show whether its log-probs follow temperature and top-p; sample "
            f"at temperature 1, or see why its probe told nothing{why}"
        )

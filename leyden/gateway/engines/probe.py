"""What an engine can do, found out by asking when it is registered, or before its first call if it was away then.

An engine that gives log-probs before temperature (vLLM's default) looks right at temperature 1 and is wrong at any
other. Two calls tell: for a softmax at temperature T, log p_T(a) - log p_T(b) = (log p(a) - log p(b)) / T for any two
tokens a and b. At T = 0.5 the difference between the two likeliest tokens is twice that at T = 1 if the log-probs are
those of the sampled distribution, and the same if they aren't.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from leyden.gateway.engines.client import ADAPTERS, EngineClient, EngineTimeout, EngineUnreachable
from leyden.gateway.engines.protocol import Ask
from leyden.gateway.engines.registry import length_of
from leyden.gateway.errors import Refused
from leyden.schema import EngineCapability, EngineModel

log = logging.getLogger("leyden.gateway")

PROBE_SECONDS = 5.0
AGAIN_SECONDS = 5.0
"""After which an engine is asked again that couldn't be asked, or whose answers told too little."""
AGAIN_MOST_SECONDS = 600.0
"""The wait doubles up to this for engines that answer, but don't tell: most never will."""
_TOP = 5
_LEAST_GAP = 1e-2
"""Difference of log-probs from which the comparison is sound in low precision."""


class Probes:
    """What is known about engines, by endpoint. Each is asked by one probe at a time, whoever wants to know.

    Args:
        lengths: where context lengths are put that engines tell, by endpoint and model.
    """

    def __init__(
        self, client: EngineClient, prompt: Callable[[], list[int]], lengths: dict[str, dict[str, int]]
    ) -> None:
        self.known: dict[str, EngineCapability] = {}
        self._client = client
        self._prompt = prompt
        self._lengths = lengths
        self._asking: dict[str, asyncio.Task[EngineCapability]] = {}
        self._vain: dict[str, int] = {}
        """By endpoint: how often in a row its answers told too little."""
        self._again: dict[str, float] = {}
        """By endpoint: when it may be asked again."""

    async def of(self, engine: EngineModel) -> EngineCapability:
        """What `engine` can do; it is asked if that isn't known. Ends within two times PROBE_SECONDS."""
        self.begin(engine)
        known = self.known.get(engine.endpoint)
        task = self._asking.get(engine.endpoint)
        if known is not None and (task is None or _settled(known)):
            return known
        assert task is not None
        return await asyncio.shield(task)

    async def learn(self, engine: EngineModel) -> None:
        """Ask `engine` all that isn't known. Ends within three times PROBE_SECONDS."""
        self.begin(engine)
        task = self._asking.get(engine.endpoint)
        if task is not None:
            await asyncio.shield(task)

    def begin(self, engine: EngineModel) -> None:
        """Ask an engine of which too little is known, without waiting for what it says."""
        endpoint = engine.endpoint
        if engine.kind == "leyden" and endpoint not in self.known:
            # Our own protocol: ids, versions, and log-probs of the sampled distribution are what it is.
            self.known[endpoint] = OURS.model_copy()
        known = self.known.get(endpoint)
        if known is not None and (self._is_told(engine, known) or time.time() < self._again.get(endpoint, 0.0)):
            return
        if endpoint not in self._asking:
            self._asking[endpoint] = asyncio.create_task(self._ask(engine))

    def keep(self, endpoints: Collection[str]) -> None:
        """Forget the others."""
        for held in (self.known, self._lengths, self._vain, self._again):
            for endpoint in [e for e in held if e not in endpoints]:
                del held[endpoint]

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_told(self, engine: EngineModel, known: EngineCapability) -> bool:
        return _settled(known) and (engine.max_model_len is not None or engine.endpoint in self._lengths)

    async def _ask(self, engine: EngineModel) -> EngineCapability:
        endpoint = engine.endpoint
        before = found = self.known.get(endpoint)
        away = False
        try:
            if found is None or not _settled(found):
                found = await probe(self._client, engine, self._prompt())
            away = found.reachable is False
            if not away and engine.max_model_len is None and endpoint not in self._lengths:
                lengths = await _lengths(self._client, engine)
                away = lengths is None
                if lengths is not None:
                    self._lengths[endpoint] = lengths
                    found = found.model_copy(update={"max_model_len": length_of(lengths, engine.model)})
        finally:
            del self._asking[endpoint]
        self.known[endpoint] = found
        in_vain = 0 if away or self._is_told(engine, found) else self._vain.get(endpoint, 0) + 1
        self._vain[endpoint] = in_vain
        self._again[endpoint] = time.time() + min(AGAIN_SECONDS * 2.0 ** max(0, in_vain - 1), AGAIN_MOST_SECONDS)
        if before is None or before.detail != found.detail or (_settled(found) and not _settled(before)):
            _report(engine, found)
        return found


OURS = EngineCapability(ids=True, logprobs=True, processed=True)
"""What the embedded engine can do."""


def _settled(found: EngineCapability) -> bool:
    """Whether no more is to be found out about what an engine returns."""
    return found.reachable is not False and (found.processed is not None or found.logprobs is False)


def _report(engine: EngineModel, found: EngineCapability) -> None:
    faults = {
        "didn't answer; it is asked again with the next calls": found.reachable is False,
        "returns no token ids": found.ids is False,
        "returns no log-probs": found.logprobs is False,
        "gives log-probs before temperature, so calls at other temperatures than 1 can't be trained": (
            found.processed is False
        ),
    }
    said = [fault for fault, true in faults.items() if true]
    if not said and found.processed is None:
        said = ["didn't show whether its log-probs follow the temperature; only calls at 1 can be trained"]
    where = f"engine {engine.endpoint} of model {engine.model}"
    if said:
        log.warning("%s %s%s", where, "; ".join(said), f" ({found.detail})" if found.detail else "")
    else:
        log.info("%s returns ids and the log-probs that it samples from", where)


async def _lengths(client: EngineClient, engine: EngineModel) -> dict[str, int] | None:
    """Context lengths by the names of the engine's models, as far as it has a list; None when it couldn't be asked."""
    try:
        value = await client.models(engine, PROBE_SECONDS)
    except (EngineUnreachable, EngineTimeout):
        return None
    except Refused:
        return {}
    listed = value.get("data") if isinstance(value, dict) else None
    entries = [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
    return {
        str(e.get("id")): e["max_model_len"]
        for e in entries
        if type(e.get("max_model_len")) is int and e["max_model_len"] > 0
    }


async def probe(client: EngineClient, engine: EngineModel, prompt: list[int]) -> EngineCapability:
    """Ask `engine` to go on from `prompt`, twice. Raises nothing: what can't be found out stays None."""
    out = EngineCapability(checked_at=time.time())
    tops = []
    for temperature in (1.0, 0.5):
        try:
            value = await _ask(client, engine, prompt, temperature)
        except (EngineUnreachable, EngineTimeout) as e:
            return EngineCapability(reachable=False, detail=e.message, checked_at=time.time())
        except Refused as e:
            out.reachable, out.detail = True, e.message
            return out
        out.reachable = True
        sample = ADAPTERS[engine.kind].read(value, _asked(prompt, temperature), 0).sample
        out.ids, out.logprobs = len(sample.ids) > 0, len(sample.logprobs) > 0
        out.detail = sample.untrainable or ""
        tops.append(_top(engine, value))
    out.processed = processed(*tops)
    return out


def processed(at_one: dict[str, float], at_half: dict[str, float]) -> bool | None:
    """Whether log-probs follow the temperature, from those of the likeliest tokens at T = 1 and T = 0.5."""
    common = sorted(set(at_one) & set(at_half), key=lambda t: -at_one[t])
    if len(common) < 2:
        return None
    a, b = common[0], common[-1]
    gap = at_one[a] - at_one[b]
    if not np.isfinite(gap) or gap < _LEAST_GAP:
        return None
    ratio = (at_half[a] - at_half[b]) / gap
    if abs(ratio - 2) < 0.2:
        return True
    return False if abs(ratio - 1) < 0.2 else None


def _asked(prompt: list[int], temperature: float) -> Ask:
    effective = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "max_tokens": 1}
    ids = np.asarray(prompt, np.int32)
    return Ask(prompt=ids, effective=effective, stop=[], stop_token_ids=[], request_id=f"probe-{temperature}")


async def _ask(client: EngineClient, engine: EngineModel, prompt: list[int], temperature: float) -> Any:
    adapter, ask = ADAPTERS[engine.kind], _asked(prompt, temperature)
    more = {"top_logprobs_num": _TOP} if engine.kind == "sglang" else {"logprobs": _TOP}
    return await client.post(engine, adapter.path(engine, ask), adapter.body(engine, ask) | more, PROBE_SECONDS)


def _top(engine: EngineModel, value: Any) -> dict[str, float]:
    """Log-probs of the likeliest first tokens, by what the engine calls them."""
    try:
        if engine.kind == "sglang":
            entries = value["meta_info"]["output_top_logprobs"][0]
            return {str(e[1]): float(e[0]) for e in entries}
        return {str(k): float(v) for k, v in value["choices"][0]["logprobs"]["top_logprobs"][0].items()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return {}

"""What an engine can do, found out by asking when it is registered.

An engine that gives log-probs before temperature (vLLM's default) looks right at temperature 1 and is wrong at any
other. Two calls tell: for a softmax at temperature T, log p_T(a) - log p_T(b) = (log p(a) - log p(b)) / T for any two
tokens a and b. At T = 0.5 the difference between the two likeliest tokens is twice that at T = 1 if the log-probs are
those of the sampled distribution, and the same if they aren't.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from leyden.gateway.engines.client import ADAPTERS, EngineClient, EngineUnreachable
from leyden.gateway.engines.protocol import Ask, Capability
from leyden.gateway.errors import Refused
from leyden.schema import EngineModel

PROBE_SECONDS = 5.0
_TOP = 5
_LEAST_GAP = 1e-2
"""Difference of log-probs from which the comparison is sound in low precision."""


async def probe(client: EngineClient, engine: EngineModel, prompt: list[int]) -> Capability:
    """Ask `engine` to go on from `prompt`, twice. Raises nothing: what can't be found out stays None."""
    if engine.kind == "leyden":
        # Our own protocol: ids, versions, and log-probs of the sampled distribution are what it is.
        return Capability(ids=True, logprobs=True, processed=True, checked_at=time.time())
    out = Capability(checked_at=time.time())
    tops = []
    for temperature in (1.0, 0.5):
        try:
            value = await _ask(client, engine, prompt, temperature)
        except EngineUnreachable as e:
            return Capability(reachable=False, detail=e.message, checked_at=time.time())
        except Refused as e:
            out.detail = e.message
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

"""Does an engine's answer hold together? Pure; nothing is padded, shifted or guessed.

What the engine says about an answer comes in several places (ids, log-probs, versions, usage). Where they disagree the
call is kept with what was readable, and a reason why it must not be trained.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

_ID_PREFIX = "token_id:"
_ROUNDING = 1e-3
"""Log-probs of certain tokens come out a little above 0 in low precision."""


@dataclass(slots=True)
class Sample:
    """One sampled continuation as recorded. Lengths agree unless `untrainable` says otherwise."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish_reason: str
    stop_reason: Any = None
    untrainable: str | None = None
    nan_logprobs: int = 0
    text: str = ""
    """The engine's own text, for a client to read when there are no ids."""
    routed_experts: bytes | None = None
    """Experts that the tokens were routed to, as the engine gave them; `routed_format` says dtype and shape."""
    routed_format: str | None = None


def empty_sample(reason: str) -> Sample:
    """What is recorded of a call that got no usable answer."""
    return Sample(_ids([]), np.zeros(0, np.float32), _ids([]), "error", untrainable=reason)


@dataclass(slots=True)
class _Faults:
    first: str | None = None

    def add(self, reason: str) -> None:
        self.first = self.first or reason


def read_sample(choice: Any, usage: Any, prompt_ids: npt.NDArray[np.int32], version: int) -> Sample:
    """Read one choice of a completions answer.

    Args:
        prompt_ids: what was sent; an engine that echoes another prompt read something else.
        version: policy version to stamp on tokens when the engine doesn't say it per token.
    """
    if not isinstance(choice, dict):
        return empty_sample("missing field: choices[0]")
    faults = _Faults()
    said = choice.get("logprobs")
    logprobs_field: dict[str, Any] = said if isinstance(said, dict) else {}
    ids = _read_ids(choice, logprobs_field, faults)
    logprobs, nans = _read_logprobs(logprobs_field, len(ids), faults)
    versions = _read_versions(choice.get("token_versions"), version, len(ids), faults)
    echoed = choice.get("prompt_token_ids")
    if echoed is not None and echoed != prompt_ids.tolist():
        faults.add("prompt differs: the engine's prompt_token_ids aren't the ids that it was sent")
    _check_usage(usage, len(prompt_ids), len(ids), faults)
    if not len(ids) and faults.first is None:
        faults.add("empty answer: no token was sampled")
    finish = choice.get("finish_reason")
    experts, shape = _read_experts(choice.get("routed_experts"), faults)
    return Sample(
        ids,
        logprobs,
        versions,
        finish if isinstance(finish, str) else "stop",
        choice.get("stop_reason"),
        faults.first,
        nans,
        text if isinstance(text := choice.get("text"), str) else "",
        experts,
        shape,
    )


def only_one(sample: Sample, others: list[Any]) -> Sample:
    """The sample of the first choice, where the engine gave `others` beside it: one was asked for."""
    if others:
        sample.untrainable = sample.untrainable or f"choices differ: {1 + len(others)} came where one was asked for"
    return sample


def _ids(values: list[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def is_ids(value: Any) -> bool:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return False
    return not value or (min(value) >= 0 and max(value) < 2**31)


def _read_ids(choice: dict[str, Any], logprobs: dict[str, Any], faults: _Faults) -> npt.NDArray[np.int32]:
    value = choice.get("token_ids")
    if value is None:
        # vLLM's return_tokens_as_token_ids puts ids into the token texts.
        tokens = logprobs.get("tokens")
        if (
            isinstance(tokens, list)
            and tokens
            and all(isinstance(t, str) and t.startswith(_ID_PREFIX) and t[len(_ID_PREFIX) :].isdigit() for t in tokens)
        ):
            value = [int(t[len(_ID_PREFIX) :]) for t in tokens]
        else:
            moved = choice.get("provider_specific_fields")
            hint = ""
            if isinstance(moved, dict) and "token_ids" in moved:
                hint = ": a proxy before the engine moved them to provider_specific_fields; register the engine itself"
            faults.add(f"missing field: choices[0].token_ids{hint}")
            return _ids([])
    elif isinstance(tokens := logprobs.get("tokens"), list) and tokens and is_ids(value):
        named = [t for t in tokens if isinstance(t, str) and t.startswith(_ID_PREFIX)]
        if len(named) == len(tokens) and named != [f"{_ID_PREFIX}{i}" for i in value]:
            faults.add("ids differ: choices[0].token_ids aren't those of logprobs.tokens")
    if not is_ids(value):
        faults.add("malformed field: choices[0].token_ids isn't a list of token ids")
        return _ids([])
    return _ids(value)


def _read_logprobs(field_: dict[str, Any], count: int, faults: _Faults) -> tuple[npt.NDArray[np.float32], int]:
    value = field_.get("token_logprobs")
    nothing = np.zeros(0, np.float32)
    if value is None:
        faults.add("missing field: choices[0].logprobs.token_logprobs")
        return nothing, 0
    if not isinstance(value, list) or not (types := set(map(type, value))) <= {float, int, NoneType}:
        faults.add("malformed field: choices[0].logprobs.token_logprobs isn't a list of numbers")
        return nothing, 0
    if len(value) != count:
        faults.add(f"lengths differ: {len(value)} log-probs for {count} token ids")
        return nothing, 0
    if NoneType in types:
        value = [math.nan if x is None else x for x in value]
    # A sum is finite exactly when all of its terms are, as long as they are of the size of log-probs.
    nans = 0
    if not math.isfinite(sum(value)):
        value = [x if math.isfinite(x) else math.nan for x in value]
        nans = sum(map(math.isnan, value))
    if value and (max(value) if not nans else max((x for x in value if x == x), default=0.0)) > _ROUNDING:
        faults.add("malformed field: a log-prob above 0 in choices[0].logprobs.token_logprobs")
    return np.array(value, np.float32), nans


def _read_versions(value: Any, version: int, count: int, faults: _Faults) -> npt.NDArray[np.int32]:
    if value is None:
        versions = np.empty(count, np.int32)
        versions.fill(version)
        return versions
    if not is_ids(value):
        faults.add("malformed field: choices[0].token_versions isn't a list of versions")
        return _ids([])
    if len(value) != count:
        faults.add(f"lengths differ: {len(value)} versions for {count} token ids")
        return _ids([])
    return _ids(value)


def _read_experts(value: Any, faults: _Faults) -> tuple[bytes | None, str | None]:
    """[tokens, layers, experts per token] as nested lists, or base64 of what the engine doesn't describe."""
    if value is None:
        return None, None
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True), "base64 of the engine's"
        array = np.asarray(value, "<i4")
        return array.tobytes(), f"int32 {list(array.shape)}"
    except (ValueError, TypeError, OverflowError):
        faults.add("malformed field: choices[0].routed_experts isn't an array of expert numbers")
        return None, None


def _check_usage(usage: Any, prompt: int, completion: int, faults: _Faults) -> None:
    if not isinstance(usage, dict):
        return
    for name, count in (("prompt_tokens", prompt), ("completion_tokens", completion)):
        said = usage.get(name)
        if said is not None and said != count:
            faults.add(f"usage differs: {name} is {said} for {count} ids")

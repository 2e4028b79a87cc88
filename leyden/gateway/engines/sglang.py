"""SGLang's own `/generate`: token ids in, token ids with log-probs out. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from leyden.gateway.engines.integrity import empty_sample, read_sample
from leyden.gateway.engines.protocol import Adapter, Ask, Said
from leyden.schema import EngineModel


def _path(engine: EngineModel, ask: Ask) -> str:
    return "/generate"


def _body(engine: EngineModel, ask: Ask) -> dict[str, Any]:
    effective = ask.effective
    sampling: dict[str, Any] = {
        "temperature": effective["temperature"],
        "top_p": effective["top_p"],
        "top_k": effective["top_k"] or -1,
        "stop_token_ids": ask.stop_token_ids,
        "skip_special_tokens": False,
    }
    if "max_tokens" in effective:
        sampling["max_new_tokens"] = effective["max_tokens"]
    if ask.stop:
        sampling["stop"] = ask.stop
    if ask.response_format is not None:
        schema = ask.response_format.get("schema", {"type": "object"})
        sampling["json_schema"] = orjson.dumps(schema).decode()
    return {
        "input_ids": ask.prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "rid": ask.request_id,
        "stream": False,
    }


def _read(value: Any, ask: Ask, version: int) -> Said:
    answer: dict[str, Any] = value if isinstance(value, dict) else {}
    info = answer.get("meta_info")
    if not isinstance(info, dict):
        return Said(sample=empty_sample("missing field: meta_info"))
    given = info.get("output_token_logprobs")
    pairs = given if isinstance(given, list) and all(isinstance(p, list) and len(p) >= 2 for p in given) else None
    finish = info.get("finish_reason")
    reason = finish if isinstance(finish, dict) else {"type": finish or "stop"}
    choice: dict[str, Any] = {
        "text": answer.get("text"),
        "finish_reason": reason.get("type"),
        "stop_reason": reason.get("matched"),
        "logprobs": {} if pairs is None else {"token_logprobs": [p[0] for p in pairs]},
        "token_ids": None if pairs is None else [p[1] for p in pairs],
        "routed_experts": info.get("routed_experts"),
    }
    sample = read_sample(choice, _usage(info), ask.prompt, _version(info.get("weight_version"), version))
    ids = answer.get("output_ids")
    if isinstance(ids, list) and pairs is not None and ids != choice["token_ids"]:
        sample.untrainable = sample.untrainable or "ids differ: output_ids aren't those of output_token_logprobs"
    if pairs is None:
        sample.untrainable = "missing field: meta_info.output_token_logprobs"
    return Said(sample=sample)


def _usage(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info.get(name) for name in ("prompt_tokens", "completion_tokens")}


def _version(said: Any, otherwise: int) -> int:
    """SGLang keeps versions as text, "default" before the first update."""
    return int(said) if isinstance(said, str) and said.isdecimal() else otherwise


SGLANG = Adapter(_path, _body, _read, formats=True)

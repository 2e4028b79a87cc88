"""Chat completions of an engine: it renders and parses, and says which tokens it read and sampled. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from leyden.gateway.engines.integrity import empty_sample, is_ids, only_one, read_sample
from leyden.gateway.engines.protocol import Ask, Said
from leyden.schema import EngineModel

PATH = "/chat/completions"


def wire_format(shape: dict[str, Any]) -> dict[str, Any]:
    """A response format as OpenAI-compatible servers take it."""
    if shape["type"] == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": shape["name"], "schema": shape["schema"]}}


def body(engine: EngineModel, ask: Ask) -> dict[str, Any]:
    assert ask.chat is not None
    out: dict[str, Any] = {
        "model": engine.model,
        "messages": [_message(m) for m in ask.chat.messages],
        **ask.sampling(engine.kind),
    }
    if ask.trained or engine.kind != "openai":
        out |= {"logprobs": True, "return_token_ids": True, "request_id": ask.request_id}
    if ask.stop:
        out["stop"] = ask.stop
    if ask.response_format is not None:
        out["response_format"] = wire_format(ask.response_format)
    if ask.chat.tools:
        choice: Any = ask.chat.tool_choice
        if ask.chat.tool_name is not None:
            choice = {"type": "function", "function": {"name": ask.chat.tool_name}}
        out |= {"tools": ask.chat.tools, "tool_choice": choice, "parallel_tool_calls": ask.chat.parallel_tool_calls}
    return out


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [p if p["type"] == "text" else {"type": "image_url", "image_url": {"url": p["url"]}} for p in content]
    return {**message, "content": parts}


def read(value: Any, version: int) -> Said:
    """Ids from the fields that vLLM has for them, log-probs from the chat form, text and calls from the message."""
    try:
        (choice, *others), usage = value["choices"], value.get("usage")
        message = choice["message"]
        content = (choice.get("logprobs") or {}).get("content")
    except (KeyError, ValueError, TypeError, AttributeError):
        return Said(sample=empty_sample("missing field: choices[0].message"))
    logprobs: dict[str, Any] = {}
    if isinstance(content, list) and all(isinstance(c, dict) for c in content):
        logprobs = {"token_logprobs": [c.get("logprob") for c in content], "tokens": [c.get("token") for c in content]}
    given = value.get("prompt_token_ids", choice.get("prompt_token_ids"))
    prompt = np.asarray(given if is_ids(given) else [], np.int32)
    flat = {**choice, "logprobs": logprobs, "prompt_token_ids": None, "text": message.get("content") or ""}
    sample = only_one(read_sample(flat, usage if len(prompt) else None, prompt, version), others)
    if not len(prompt):
        sample.untrainable = sample.untrainable or "missing field: prompt_token_ids"
    return Said(sample=sample, prompt=prompt, message=_said(message))


def _said(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    calls = message.get("tool_calls")
    return {
        "content": message.get("content") if isinstance(message.get("content"), str) else "",
        "reasoning_content": reasoning if isinstance(reasoning, str) else None,
        "tool_calls": [c for c in calls if _is_call(c)] if isinstance(calls, list) else [],
    }


def _is_call(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and all(isinstance(function.get(n), str) for n in ("name", "arguments"))

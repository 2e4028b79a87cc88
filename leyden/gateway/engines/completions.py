"""The completions API of docs/wire.md: the embedded engine's, vLLM's, and that of servers like it. Pure."""

from __future__ import annotations

from typing import Any

from leyden.gateway.engines import chat
from leyden.gateway.engines.integrity import empty_sample, only_one, read_sample
from leyden.gateway.engines.protocol import Adapter, Ask, Said
from leyden.schema import EngineModel


def _path(engine: EngineModel, ask: Ask) -> str:
    return "/completions" if ask.chat is None else chat.PATH


def _body(engine: EngineModel, ask: Ask) -> dict[str, Any]:
    if ask.chat is not None:
        return chat.body(engine, ask)
    body = {
        "model": engine.model,
        "prompt": ask.prompt,
        **ask.sampling(engine.kind),
        "stop_token_ids": ask.stop_token_ids,
        "logprobs": 0,
        "return_token_ids": True,
        "request_id": ask.request_id,
    }
    if ask.stop:
        body["stop"] = ask.stop
    if ask.response_format is not None:
        body["response_format"] = chat.wire_format(ask.response_format)
    return body


def _read(value: Any, ask: Ask, version: int) -> Said:
    said = value.get("weight_version") if isinstance(value, dict) else None
    if type(said) is int:
        version = said
    if ask.chat is not None:
        return chat.read(value, version)
    try:
        (choice, *others), usage = value["choices"], value.get("usage")
    except (KeyError, ValueError, TypeError, AttributeError):
        return Said(sample=empty_sample("missing field: choices"))
    return Said(sample=only_one(read_sample(choice, usage, ask.prompt, version), others))


EMBEDDED = Adapter(_path, _body, _read)
SERVER = Adapter(_path, _body, _read, formats=True, chats=True)

"""OpenAI Completions: text or token ids, continued as they are. JSON and server-sent events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from leyden.gateway.dialects import fields
from leyden.gateway.dialects.base import EVENTS, Answer, Choice, Context, ModelRequest, Stream
from leyden.gateway.dialects.openai_chat import OpenAIChat, common, error_body, usage
from leyden.gateway.errors import Refused

MAX_ID = 2**31 - 1


class OpenAICompletions(OpenAIChat):
    """Implements leyden.gateway.dialects.base.Dialect; errors and model lists are those of chat completions."""

    name = "openai-completions"

    def parse(self, body: dict[str, Any], context: Context) -> ModelRequest:
        if fields.flag(body, "echo"):
            raise fields.unsupported("echo", "the client has the prompt already")
        if body.get("suffix"):
            raise fields.unsupported("suffix", "this model continues text only")
        best_of = fields.count(body, "best_of", 1)
        if best_of is not None and best_of != (fields.count(body, "n", 1) or 1):
            raise fields.unsupported("best_of", "every sample is given back; use n")
        asked = fields.count(body, "logprobs", 0)
        if asked is not None and asked > 1:
            raise fields.unsupported(
                "logprobs", "only log-probabilities of the sampled tokens are recorded; use 0 or 1"
            )
        return ModelRequest(
            model=fields.text(body, "model", "default"),
            prompt=_prompt(body.get("prompt")),
            logprobs=asked is not None,
            **common(body, fields.mapping(body, "stream_options")),
        )

    def json_answer(self, answer: Answer, request: ModelRequest) -> bytes:
        choices = [_choice(i, c, c.text, _finish(c)) for i, c in enumerate(answer.choices)]
        return orjson.dumps(
            {**_head(answer.call_id, answer.created, answer.model), "choices": choices, "usage": usage(answer)}
        )

    def stream(self, call_id: str, created: int, request: ModelRequest) -> Stream:
        return CompletionStream(call_id, created, request)


class CompletionStream:
    """Implements leyden.gateway.dialects.base.Stream."""

    content_type = EVENTS

    def __init__(self, call_id: str, created: int, request: ModelRequest) -> None:
        self._head = _head(call_id, created, request.model)
        self._include_usage = request.include_usage

    def keepalive(self) -> bytes:
        nothing = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
        return fields.event({**self._head, "choices": [nothing]})

    def answer(self, answer: Answer) -> Iterator[bytes]:
        tail: dict[str, Any] = {"usage": None} if self._include_usage else {}
        for index, choice in enumerate(answer.choices):
            yield fields.event({**self._head, "choices": [_choice(index, choice, choice.text, None)], **tail})
            last = {"index": index, "text": "", "logprobs": None, "finish_reason": _finish(choice)}
            yield fields.event({**self._head, "choices": [last], **tail})
        if self._include_usage:
            yield fields.event({**self._head, "choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"

    def error(self, error: Refused) -> bytes:
        return fields.event({"error": error_body(error)})


def _head(call_id: str, created: int, model: str) -> dict[str, Any]:
    return {"id": f"cmpl-{call_id}", "object": "text_completion", "created": created, "model": model}


def _finish(choice: Choice) -> str:
    return choice.finish_reason


def _choice(index: int, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": _logprobs(choice), "finish_reason": finish}


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    tokens = [t.token.decode("utf-8", "replace") for t in choice.logprobs]
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    values = [t.logprob for t in choice.logprobs]
    top = [{token: value} for token, value in zip(tokens, values, strict=True)]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _prompt(value: Any) -> str | list[int]:
    """One prompt; a list of one is one too."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_ID:
        return value
    if isinstance(value, list) and value and all(isinstance(i, str | list) for i in value):
        raise fields.unsupported("prompt", "send one prompt a request; several would be calls of their own")
    raise Refused("prompt must be text or a list of token ids, and not empty", param="prompt")

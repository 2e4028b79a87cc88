"""From a request to the prompt of its call: recognise its conversation, plan, render what is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from leyden.gateway.canonical import request_keys
from leyden.gateway.conversation import Forest, Ids, Request
from leyden.gateway.dialects.base import Message, ModelRequest
from leyden.gateway.errors import Invalid
from leyden.gateway.renderer import ModelRenderer, Prompt, prompt_key
from leyden.schema import CaptureConfig

HASH_MICROS = 0.004
"""To hash a character of a message."""
ENCODE_MICROS = 0.3
"""To encode a character."""
TOOLS_CHARS = 1000
"""Taken for the length of a tool schema."""


async def make_prompt(
    renderer: ModelRenderer,
    forest: Forest,
    request: ModelRequest,
    capture: CaptureConfig,
    *,
    hold: bool = False,
    by_engine: bool = False,
) -> Prompt:
    """The token ids that an engine would read for this request now.

    With `hold` the call that the request continues is reserved (`Forest.reserve`); the caller releases it. With
    `by_engine` the engine renders the prompt, and its ids aren't known yet: there are none.

    Raises:
        Invalid: the model's template can't render the messages, or the call can't be forced.
    """
    if request.prompt is not None:
        return await _given(renderer, forest, request.prompt, hold)
    known, same = forest.requests.match(request.messages, request.tools)
    seen = known.made.keys if known else None
    fresh = _chars(request.messages[same:]) + (0 if known else TOOLS_CHARS * len(request.tools or ()))
    keys = await renderer.run(
        lambda: request_keys(request.messages, request.tools, seen, same), micros=fresh * HASH_MICROS
    )
    plan = forest.plan(request.messages, keys)
    if hold:
        forest.reserve(plan)
    if by_engine:
        return Prompt(np.zeros(0, np.int32), plan, plan.reason)
    try:
        mode = "render" if capture.mode == "render" else "bridge"
        new = _chars(request.messages[plan.start :] if plan.kind == "extend" and mode == "bridge" else request.messages)
        key = prompt_key(request.messages, request.tools) if plan.kind != "extend" else None
        if key is not None and renderer.remembers(key):
            new = 0
        force = renderer.opening(request.tool_name) if request.tool_choice == "required" else None
        prompt = await renderer.run(
            lambda: renderer.render(plan, request.messages, request.tools, mode=mode, force=force, key=key),
            micros=new * ENCODE_MICROS,
        )
    except BaseException:
        if hold:
            forest.release(plan)
        raise
    return prompt


def remember(forest: Forest, request: ModelRequest, prompt: Prompt, hashes: list[bytes]) -> list[Message]:
    """Note a recorded request, so that the next one of its conversation is recognised by its new messages.

    Returns its messages, those that the conversation had before as the same objects.
    """
    if request.prompt is not None:
        return request.messages
    return forest.requests.keep(request.messages, Request(prompt.plan.keys, hashes), request.tools)


async def _given(renderer: ModelRenderer, forest: Forest, given: str | list[int], hold: bool) -> Prompt:
    """A prompt that the client wrote itself, as text or tokens."""
    if isinstance(given, str):
        ids: Ids = await renderer.run(lambda: renderer.encode(given), micros=len(given) * ENCODE_MICROS)
    else:
        size = len(renderer.tokenizer)
        if given and not (0 <= min(given) and max(given) < size):
            raise Invalid(f"prompt: token ids must be from 0 to {size - 1}", status=400)
        ids = np.asarray(given, np.int32)
    if not len(ids):
        raise Invalid("prompt: there must be at least one token", status=400)
    plan = forest.plan_tokens(ids, request_keys([], None))
    if hold:
        forest.reserve(plan)
    return Prompt(ids, plan, None)


def _chars(messages: Sequence[dict[str, Any]]) -> int:
    """About how many characters there are to work on."""
    total = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            total += len(content)
        elif content is not None:
            total += sum(len(p.get("text") or p.get("url") or "") for p in content)
        for call in message.get("tool_calls") or ():
            total += len(call["function"].get("arguments") or "")
    return total + 20 * len(messages)

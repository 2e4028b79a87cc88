"""Messages to tokens and back, for one model folder, off the event loop.

Uses the renderers library: its typed renderer when it knows the model, our ChatML renderer when the template is plain
ChatML (certified at load), else the template itself, which can't extend recorded tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from leyden.errors import PreflightError
from leyden.gateway import chatml
from leyden.gateway.conversation import (
    BREAK_FAMILY,
    BREAK_REASONING,
    BREAK_TRUNCATED,
    Ids,
    Message,
    Plan,
    parse_arguments,
)
from leyden.gateway.errors import Invalid

T = TypeVar("T")
Tools = Sequence[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt, how it was planned, and why it had to be rendered in full although it continues a call."""

    ids: Ids
    plan: Plan
    reason: str | None


@dataclass(slots=True)
class Parsed:
    """What a model said, taken apart."""

    text: str
    reasoning: str | None
    tool_calls: list[dict[str, Any]]

    def message(self) -> Message:
        """As a message of the conversation."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class ModelRenderer:
    """Loads the tokenizer of `folder`. Its methods may take milliseconds to seconds: call them through `run`."""

    def __init__(self, folder: Path, *, threads: int = 2) -> None:
        self.folder = folder
        self.tokenizer = _load_tokenizer(folder)
        self.renderer, self.family = _choose(self.tokenizer, folder)
        config = _read_json(folder / "config.json")
        length = config.get("max_position_embeddings")
        self.max_model_len: int | None = length if isinstance(length, int) else None
        eos = _read_json(folder / "generation_config.json").get("eos_token_id", [])
        self.stop_token_ids = sorted(
            {*self.renderer.get_stop_token_ids(), *(eos if isinstance(eos, list) else [eos])} - {None}
        )
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="leyden-render")

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking work in the bounded pool."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def render(self, plan: Plan, messages: Sequence[Message], tools: Tools) -> Prompt:
        """Carry out `plan`: recorded tokens plus new messages when that is possible, else everything anew."""
        prepared = [_prepare(m) for m in messages]
        listed: Any = list(tools) if tools else None
        reason = plan.reason
        if plan.kind == "extend" and plan.node is not None:
            prompt_ids, response_ids = plan.node.prompt().tolist(), plan.node.response.tolist()
            bridged = self.renderer.bridge_to_next_turn(prompt_ids, response_ids, prepared[plan.start :], tools=listed)
            if bridged is not None:
                return Prompt(np.asarray(bridged.token_ids, np.int32), plan, None)
            reason = self._why_no_bridge(plan)
        try:
            ids = self.renderer.render_ids(prepared, tools=listed, add_generation_prompt=True)
        except Exception as e:  # The template is a program of others, and what it rejects is the request.
            raise Invalid(f"the model's chat template can't render these messages: {e}", status=400) from e
        return Prompt(np.asarray(ids, np.int32), plan, reason)

    def _why_no_bridge(self, plan: Plan) -> str:
        if self.family == "default":
            return BREAK_FAMILY
        if plan.node is not None and plan.node.finish_reason == "length":
            return BREAK_TRUNCATED
        return BREAK_REASONING

    def parse(self, prompt: Ids, response: Ids, tools: Tools, stop: str | None) -> Parsed:
        """Take an answer apart. `stop` is the client's stop string that ended it; it and what follows isn't returned.

        A tool call that can't be parsed is left in the text: nothing that the model said is lost. `tools` is None when
        calls aren't to be looked for.
        """
        listed: Any = list(tools) if tools else None
        ids = response.tolist()
        parsed = self.renderer.parse_response(ids, tools=listed, prompt_ids=prompt.tolist())
        text, calls = self._calls(parsed, ids)
        if not tools and calls:
            text, calls = self._plain_text(ids, parsed.reasoning_content), []
        if stop is not None and stop in text:
            text = text[: text.index(stop)]
        return Parsed(text, parsed.reasoning_content or None, calls)

    def _calls(self, parsed: ParsedResponse, ids: list[int]) -> tuple[str, list[dict[str, Any]]]:
        text, calls = parsed.content, []
        for call in parsed.tool_calls:
            good = call.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
            if good and call.name:
                calls.append(_tool_call(call))
            elif call.token_span is not None:
                text += self.tokenizer.decode(ids[slice(*call.token_span)], skip_special_tokens=False)
            else:
                closed = "" if call.status is ToolCallParseStatus.UNCLOSED_BLOCK else "\n</tool_call>"
                text += f"<tool_call>\n{call.raw}{closed}"
        return text, calls

    def _plain_text(self, ids: list[int], reasoning: str | None) -> str:
        stops = set(self.stop_token_ids)
        end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
        text: str = self.tokenizer.decode(ids[:end], skip_special_tokens=False)
        return text.partition("</think>")[2].lstrip("\n") if reasoning and "</think>" in text else text

    def token_texts(self, ids: Ids) -> list[bytes]:
        """The bytes of each token, where a token need not be a whole character."""
        return [self.tokenizer.decode([int(i)], skip_special_tokens=False).encode() for i in ids]


def _tool_call(call: ParsedToolCall) -> dict[str, Any]:
    arguments = call.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    # Harnesses keep ids that are alphanumeric and at most 40 characters long as they are.
    return {
        "id": f"call{secrets.token_hex(10)}",
        "type": "function",
        "function": {"name": call.name, "arguments": text},
    }


def _prepare(message: Message) -> Any:
    """A message as templates want it: content is text, tool arguments are a mapping where they parse as one."""
    out = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        out["tool_calls"] = [
            {**c, "function": {**c["function"], "arguments": parse_arguments(c["function"].get("arguments"))}}
            for c in message["tool_calls"]
        ]
    return out


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _load_tokenizer(folder: Path) -> Any:
    if not (folder / "tokenizer_config.json").is_file() and not (folder / "tokenizer.json").is_file():
        raise PreflightError(f"the model folder {folder} holds no tokenizer (tokenizer.json); is the path right?")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # transformers raises many kinds; to the person starting the gateway they are one.
        raise PreflightError(f"can't load the tokenizer of {folder}: {' '.join(str(e).split())}") from e
    tokenizer.model_max_length = int(1e30)  # Prompts are measured against the engine's limit, with an error of our own.
    return tokenizer


def _choose(tokenizer: Any, folder: Path) -> tuple[Any, str]:
    """The renderer for this model and the name of its family."""
    from renderers import create_renderer
    from renderers.base import MODEL_RENDERER_MAP
    from renderers.configs import AutoRendererConfig, CustomRendererConfig, DefaultRendererConfig

    name = _read_json(folder / "config.json").get("_name_or_path") or tokenizer.name_or_path
    if name in MODEL_RENDERER_MAP:
        tokenizer.name_or_path = name
        return create_renderer(tokenizer, AutoRendererConfig()), MODEL_RENDERER_MAP[name]
    certified = chatml.certify(tokenizer)
    if certified is not None:
        path = f"{chatml.ChatMLRenderer.__module__}.{chatml.ChatMLRenderer.__name__}"
        settings = {"import_path": path, "default_system": certified.config.default_system}
        return create_renderer(tokenizer, CustomRendererConfig.model_validate(settings)), "chatml"
    if not tokenizer.chat_template:
        raise PreflightError(f"the model in {folder} has no chat template; use an instruction-tuned model")
    return create_renderer(tokenizer, DefaultRendererConfig(reasoning_parser="think")), "default"

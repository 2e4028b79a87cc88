"""Messages to tokens and back, for one model folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import orjson
from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from leyden.gateway import families
from leyden.gateway.canonical import clean_tools, parse_arguments, plain_text
from leyden.gateway.conversation import (
    BREAK_FAMILY,
    BREAK_OPEN_REASONING,
    BREAK_REASONING,
    BREAK_RETOKENISED,
    BREAK_TEMPLATE,
    BREAK_TOKENS,
    BREAK_TRUNCATED,
    Ids,
    Link,
    Message,
    Node,
    Plan,
    link,
)
from leyden.gateway.errors import Invalid
from leyden.gateway.suiting import suited, with_mappings
from leyden.gateway.template import opening
from leyden.gateway.tokens import Codec, IdsCache, load_tokenizer

T = TypeVar("T")
Tools = Sequence[dict[str, Any]] | None
Mode = Literal["bridge", "render"]

TAIL = 256
"""Tokens of a recorded prompt that a renderer is shown when it continues it: more than any opening of an answer."""
INLINE_MICROS = 300
"""Work that takes no longer is done at once: handing it to a thread costs 40 to 150 µs (docs/decisions.md)."""
COMPARED = 64
"""Tokens of text that tell why two prompts differ."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt, how it was planned, and why it had to be rendered in full although it continues a call.

    The last `forced` of `ids` open the answer: they are its beginning when it is parsed.
    """

    ids: Ids
    plan: Plan
    reason: str | None
    forced: int = 0


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
    """Loads the tokenizer of `folder`. Its methods may take milliseconds to seconds: call them through `run`.

    Raises:
        PreflightError: with one sentence.
    """

    def __init__(self, folder: Path, *, threads: int = 2) -> None:
        self.folder = folder
        self.codec = Codec(load_tokenizer(folder))
        self.tokenizer = self.codec.tokenizer
        config = _read_json(folder / "config.json")
        name = config.get("_name_or_path") or self.tokenizer.name_or_path
        self.known = families.choose(self.codec, folder, name)
        self.family = self.known.name
        length = config.get("max_position_embeddings")
        self.max_model_len: int | None = length if isinstance(length, int) else None
        eos = _read_json(folder / "generation_config.json").get("eos_token_id", [])
        stops = {*self.known.renderer.get_stop_token_ids(), *(eos if isinstance(eos, list) else [eos])}
        self.stop_token_ids = sorted(stops - {None})
        self._think = [self.codec.encode(t) for t in ("<think>", "</think>")]
        self._prompts = IdsCache()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="leyden-render")

    async def run(self, work: Callable[[], T], micros: float | None = None) -> T:
        """Do work off the event loop, in the bounded pool; at once when it will take but a few `micros`econds."""
        if micros is not None and micros <= INLINE_MICROS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- messages to tokens --------------------------------------------------------------------------------------------

    def render(
        self,
        plan: Plan,
        messages: Sequence[Message],
        tools: Tools,
        *,
        mode: Mode = "bridge",
        force: Ids | None = None,
        key: bytes | None = None,
    ) -> Prompt:
        """Carry out `plan`: recorded tokens plus new messages when that is possible, else everything anew.

        `key` is the conversation's `prompt_key`, where it is known already.

        Raises:
            Invalid: the template can't render these messages.
        """
        ids, reason = None, plan.reason
        if plan.kind == "extend" and plan.node is not None and mode == "bridge":
            new = messages[plan.start :]
            reason = self._why_not(plan.node, new)
            if reason is None:
                ids = self._continued(plan.node, new, tools)
                if ids is None:
                    reason = BREAK_OPEN_REASONING if self._thought(plan.node) else BREAK_TEMPLATE
        if ids is None:
            ids = self.full(messages, tools, key)
        if force is not None:
            ids = np.concatenate([ids, force])
        return Prompt(ids, plan, reason, 0 if force is None else len(force))

    def full(self, messages: Sequence[Message], tools: Tools, key: bytes | None = None) -> Ids:
        """The whole conversation as the model's template has it. Remembered: the rollouts of a group begin alike.

        Raises:
            Invalid: the template can't render it.
        """
        key = key or prompt_key(messages, tools)
        known = self._prompts.get(key)
        if known is not None:
            return known
        try:
            ids = self._rendered(suited([prepare(m) for m in messages], self.known.manners), clean_tools(tools) or None)
        except Invalid:
            raise
        except Exception as e:  # The template is a program of others, and what it rejects is the request.
            raise Invalid(f"the model's chat template can't render these messages: {e}", status=400) from e
        out = np.asarray(ids, np.int32)
        out.flags.writeable = False
        self._prompts.put(key, out, len(key))
        return out

    def _rendered(self, messages: list[Any], tools: Any) -> list[int]:
        try:
            return self.known.full.render_ids(messages, tools=tools, add_generation_prompt=True)
        except Exception:
            mapped = with_mappings(messages)
            if mapped is None:
                raise
            return self.known.full.render_ids(mapped, tools=tools, add_generation_prompt=True)

    def remembers(self, key: bytes) -> bool:
        """Whether `full` has rendered the conversation with this `prompt_key` lately."""
        return key in self._prompts

    def _continued(self, node: Node, new: Sequence[Message], tools: Tools) -> Ids | None:
        """The recorded tokens of `node`, then `new`; None when the renderer can't."""
        before = node.full()
        tail = before[max(0, node.prompt_len - TAIL) : node.prompt_len].tolist()
        response = before[node.prompt_len :].tolist()
        prepared: Any = suited([prepare(m) for m in new], self.known.manners, start=False)
        renderer = self.known.keeping if self.known.keeping is not None else self.known.renderer
        bridged = renderer.bridge_to_next_turn(tail, response, prepared, tools=clean_tools(tools) or None)
        if bridged is None:
            return None
        ids, shown = bridged.token_ids, len(tail) + len(response)
        if ids[:shown] != tail + response:
            return None
        return np.concatenate([before, np.asarray(ids[shown:], np.int32)])

    def _why_not(self, node: Node, new: Sequence[Message]) -> str | None:
        """Why the recorded tokens of `node` can't be continued by `new`; None when they can."""
        if not self.known.roles:
            return BREAK_FAMILY
        if node.finish_reason == "length":
            return BREAK_TRUNCATED
        roles = {"user" if m["role"] == "system" and not self.known.manners.late_system else m["role"] for m in new}
        if not roles <= self.known.roles:
            return BREAK_TEMPLATE
        if roles & self.known.forgets and self._thought(node):
            return BREAK_REASONING
        return None

    def _thought(self, node: Node) -> bool:
        """Whether sampled reasoning is part of this call's prompt or response."""
        if node.thought is None:
            # Not recursive: conversations may have more calls than Python has stack.
            chain = [node]
            while chain[-1].thought is None and chain[-1].parent is not None:
                chain.append(chain[-1].parent)
            before = False
            for each in reversed(chain):
                if each.thought is None:
                    each.thought = (
                        before or bool(each.answer.get("reasoning_content")) or self._has_think(each.response)
                    )
                before = each.thought
        return bool(node.thought)

    def _has_think(self, ids: Ids) -> bool:
        if all(len(marker) == 1 for marker in self._think):
            return any(bool((ids == marker[0]).any()) for marker in self._think)
        return "</think>" in self.codec.decode(ids.tolist())

    def encode(self, text: str) -> Ids:
        """Text as it is, without a template."""
        return np.asarray(self.codec.encode(text), np.int32)

    def opening(self, tool: str | None) -> Ids | None:
        """Tokens that open a call of `tool`, or of any; None when the model's calls have no opening that is known.

        Models that reason aren't forced: their reasoning comes first, and without it they answer in a way they were
        never trained to. They sample freely.
        """
        if not self.known.hermes or self.known.reasons:
            return None
        return np.asarray(self.codec.encode(opening(tool)), np.int32)

    # -- how prompts relate --------------------------------------------------------------------------------------------

    def relate(self, plan: Plan, prompt: Ids, reason: str | None) -> Link:
        """`link`, and where nothing but the tokens says why they differ, the reason that the texts give."""
        relation = link(plan, prompt, reason)
        if relation.break_reason != BREAK_TOKENS or relation.break_index is None or plan.node is None:
            return relation
        window = slice(relation.break_index, relation.break_index + COMPARED)
        recorded = self.codec.decode(plan.node.full()[window].tolist()).rstrip("\ufffd")
        shown = self.codec.decode(prompt[window].tolist()).rstrip("\ufffd")
        if recorded.startswith(shown) or shown.startswith(recorded):
            why = BREAK_RETOKENISED
        elif plan.node.finish_reason == "length":
            why = BREAK_TRUNCATED
        elif self._thought(plan.node):
            why = BREAK_REASONING
        else:
            why = BREAK_TEMPLATE
        return Link(relation.base, relation.base_len, None, why, relation.break_index)

    # -- tokens to messages --------------------------------------------------------------------------------------------

    def parse(self, prompt: Ids, response: Ids, tools: Tools, stop: str | None, forced: int = 0) -> Parsed:
        """Take an answer apart. `stop` is the client's stop string that ended it; it and what follows isn't returned.

        A tool call that can't be parsed is left in the text: nothing that the model said is lost. `tools` is None when
        calls aren't to be looked for. The last `forced` tokens of the prompt are the beginning of the answer.
        """
        listed: Any = list(tools) if tools else None
        said = len(prompt) - forced
        ids = prompt[said:].tolist() + response.tolist()
        before = prompt[max(0, said - TAIL) : said].tolist()
        try:
            parsed = self.known.renderer.parse_response(ids, tools=listed, prompt_ids=before)
        except Exception:  # The parsers are others'. What one of them trips over is what the model said: text.
            parsed = ParsedResponse(content=self._plain_text(ids, None))
        text, calls = self._calls(parsed, ids)
        if not tools and calls:
            text, calls = self._plain_text(ids, parsed.reasoning_content), []
        if stop is not None and stop in text:
            text = text[: text.index(stop)]
        return Parsed(_utf8(text), _utf8(parsed.reasoning_content or "") or None, calls)

    def _calls(self, parsed: ParsedResponse, ids: list[int]) -> tuple[str, list[dict[str, Any]]]:
        text, calls, end = parsed.content, [], None
        for call in parsed.tool_calls:
            good = call.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
            made = _tool_call(call) if good and call.name else None
            if made is not None:
                calls.append(made)
            elif call.token_span is not None:
                text += self.codec.decode(ids[slice(*call.token_span)])
            else:
                closed = "" if call.status is ToolCallParseStatus.UNCLOSED_BLOCK else "\n</tool_call>"
                text += f"<tool_call>\n{call.raw}{closed}"
            end = call.token_span[1] if call.token_span is not None else end
        if end is not None and self.known.hermes:
            text += self._plain_text(ids[end:], None).rstrip()
        return text, calls

    def text(self, response: Ids, stop: str | None) -> str:
        """An answer to a prompt that the client wrote itself: all of its text, up to the end or `stop`."""
        text = _utf8(self._plain_text(response.tolist(), None))
        return text[: text.index(stop)] if stop is not None and stop in text else text

    def _plain_text(self, ids: list[int], reasoning: str | None) -> str:
        stops = set(self.stop_token_ids)
        end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
        text: str = self.codec.decode(ids[:end])
        return text.partition("</think>")[2].lstrip("\n") if reasoning and "</think>" in text else text

    def token_texts(self, ids: Ids) -> list[bytes]:
        """The bytes of each token, where a token need not be a whole character."""
        return [self.codec.token_bytes(int(i)) for i in ids]


def prompt_key(messages: Sequence[Message], tools: Tools) -> bytes:
    """What a conversation that is rendered in full is remembered by: all of it, as it was sent."""
    return hashlib.blake2b(orjson.dumps([list(messages), list(tools or ())]), digest_size=16).digest()


def _tool_call(call: ParsedToolCall) -> dict[str, Any] | None:
    """A parsed call as a client wants it; None when it can't be written as JSON."""
    arguments = call.arguments
    try:
        text = (
            arguments
            if isinstance(arguments, str)
            else json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        )
        if not text.isascii() and _utf8(text) != text:
            text = json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
    name = call.name
    if not isinstance(name, str) or _utf8(name) != name or _utf8(text) != text:
        return None
    # Harnesses keep ids that are alphanumeric and at most 40 characters long as they are.
    return {
        "id": f"call{secrets.token_hex(10)}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


_SURROGATE = re.compile("[\ud800-\udfff]")


def _utf8(text: str) -> str:
    """Text that can be sent: halves of surrogate pairs, which JSON escapes can spell, are replaced."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def prepare(message: Message) -> Any:
    """A message as templates want it: content is text, tool arguments are a mapping where they parse as one."""
    text = plain_text(message.get("content"))
    if text is None:
        raise Invalid("this model reads text only: images need capture.mode engine", status=400)
    out = {**message, "content": text}
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

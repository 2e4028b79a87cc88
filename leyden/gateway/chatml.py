"""A renderer for models with a plain ChatML template, through the renderers library's extension point.

    <|im_start|>role\ncontent<|im_end|>\n … <|im_start|>assistant\n

It is used only after `certify` has compared it with the model's own template on a set of conversations, token by
token. Plain ChatML templates know nothing of tools: they drop schemas and calls without a word. Here tools are printed
into the system message and calls into the assistant's text in the Hermes form (JSON in <tool_call> tags), which is what
models of this family are taught; without tools every token is the template's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, cast

from renderers.base import (
    Message,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
    ToolSpec,
    reject_assistant_in_extension,
    trim_to_turn_close,
)
from renderers.configs import BaseRendererConfig

START, END = "<|im_start|>", "<|im_end|>"
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


class ChatMLConfig(BaseRendererConfig):
    """`default_system` is the system message that the template adds when a conversation has none; None adds nothing."""

    name: Literal["chatml"] = "chatml"
    default_system: str | None = None
    _internal_fields = frozenset({"default_system"})


class ChatMLRenderer:
    """Implements renderers.base.Renderer."""

    config_class = ChatMLConfig
    is_prefix_stable = True

    def __init__(self, tokenizer: Any, config: ChatMLConfig | None = None) -> None:
        self._tokenizer = tokenizer
        self.config = config or ChatMLConfig()
        self._start = tokenizer.convert_tokens_to_ids(START)
        self._end = tokenizer.convert_tokens_to_ids(END)
        stops = {self._end, tokenizer.eos_token_id} - {None, self._start}
        self._stops: list[int] = sorted(stops)

    def render_ids(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        system: str | None = self.config.default_system
        rest: Sequence[Any] = messages
        if messages and messages[0]["role"] == "system":
            system, rest = _text(messages[0]), messages[1:]
        if tools:
            listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
            system = (system + "\n\n" if system else "") + _TOOLS_HEADER + listed + _TOOLS_FOOTER
        ids = [] if system is None else self._turn("system", system)
        for message in rest:
            ids += self._turn(message["role"], _body(message))
        return ids + self._opening() if add_generation_prompt else ids

    def render(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        ids = self.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return RenderedTokens(token_ids=ids, message_indices=[-1] * len(ids))

    def parse_response(
        self, token_ids: list[int], *, tools: list[ToolSpec] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        end = next((i for i, token in enumerate(token_ids) if token in self._stops), len(token_ids))
        text: str = self._tokenizer.decode(token_ids[:end], skip_special_tokens=False)
        reasoning: str | None = None
        if text.lstrip().startswith("<think>"):
            inside, closed, after = text.lstrip().removeprefix("<think>").partition("</think>")
            if not closed:
                return ParsedResponse(content="", reasoning_content=inside.strip(), reasoning_complete=False)
            reasoning, text = inside.strip(), after.lstrip("\n")
        calls = [_parse_call(match) for match in _CALL.finditer(text)] if tools else []
        if calls:
            text = text[: text.index("<tool_call>")]
        return ParsedResponse(content=text, reasoning_content=reasoning or None, tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        return self._stops

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        if not previous_prompt_ids or not new_messages or reject_assistant_in_extension(new_messages):
            return None
        ids = trim_to_turn_close(previous_prompt_ids, previous_completion_ids, {self._end}, synthesize_close=self._end)
        if ids is None:
            return None
        ids += self._encode("\n")
        for message in new_messages:
            ids += self._turn(message["role"], _body(message))
        ids += self._opening()
        return RenderedTokens(token_ids=ids, message_indices=[-1] * len(ids))

    def _turn(self, role: str, text: str) -> list[int]:
        # The whole turn is one text to the tokenizer, as it is in the template: merges across the parts stay the same.
        return [self._start, *self._encode(f"{role}\n{text}"), self._end, *self._encode("\n")]

    def _opening(self) -> list[int]:
        return [self._start, *self._encode("assistant\n")]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _text(message: Any) -> str:
    return message.get("content") or ""


def _body(message: Any) -> str:
    text = _text(message)
    calls = message.get("tool_calls") or []
    if not calls:
        return text
    blocks = []
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments")
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        blocks.append(f'<tool_call>\n{{"name": {name}, "arguments": {shown}}}\n</tool_call>')
    return "\n".join([text, *blocks] if text else blocks)


def _parse_call(match: re.Match[str]) -> ParsedToolCall:
    raw = match.group(1).strip()
    if not match.group(2):
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.UNCLOSED_BLOCK)
    try:
        value = json.loads(raw)
    except ValueError:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.INVALID_JSON)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.MISSING_NAME)
    return ParsedToolCall(raw=raw, name=value["name"], arguments=value.get("arguments", {}))


_CERTIFICATE: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    [
        {"role": "user", "content": " spaces  and\n\nlines \n"},
        {"role": "assistant", "content": "naïve 你好 🌍 é e\u0301"},
        {"role": "user", "content": "{'json': [1, 2.5]}\t\\n"},
    ],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "<b>c</b>\n"},
        {"role": "system", "content": "late note"},
        {"role": "user", "content": "d"},
    ],
]
"""Conversations on which the renderer must agree with the template before it is used."""


def default_system(tokenizer: Any) -> str | None:
    """The system message that the template puts in front of a conversation without one, read from its rendering."""
    text: str = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    head = f"{START}system\n"
    return text[len(head) : text.index(END)] if text.startswith(head) and END in text else None


def certify(tokenizer: Any) -> ChatMLRenderer | None:
    """A renderer that gives the template's own tokens, or None when this tokenizer's template isn't plain ChatML."""
    vocabulary = tokenizer.get_vocab()
    if START not in vocabulary or END not in vocabulary or not tokenizer.chat_template:
        return None
    probe_tools = [{"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}]
    try:
        renderer = ChatMLRenderer(tokenizer, ChatMLConfig(default_system=default_system(tokenizer)))
        first = _CERTIFICATE[0]
        plain = tokenizer.apply_chat_template(first, tokenize=False)
        if plain != tokenizer.apply_chat_template(first, tools=probe_tools, tokenize=False):
            return None  # The template prints tools in a way of its own.
        for messages in _CERTIFICATE:
            for generate in (False, True):
                want = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=generate, tokenize=True, return_dict=False
                )
                got = renderer.render_ids(cast(list[Message], messages), add_generation_prompt=generate)
                if list(want) != got:
                    return None
    except Exception:  # Templates are programs of others: whatever one raises, it isn't plain ChatML.
        return None
    return renderer

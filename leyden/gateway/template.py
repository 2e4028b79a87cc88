"""A renderer that asks the model's own chat template, for every model that the renderers library has none for.

The template is a program that turns messages into text. What it does with tools, calls, results, reasoning and a
missing system message is learned by rendering a few small conversations (`learn`); how it continues a conversation is
read from a stand-in:

    template([question, MARK, *new messages]) = … MARK <end of turn> the encoding of the new messages

Everything after the mark is what comes after an answer, whatever was said before, if the template only ever appends.
Whether it does is proven per role of the new messages before it is relied on (leyden.gateway.families).

A template that drops tool schemas without a word gets tools in the Hermes form: schemas in the system message, calls
as JSON in <tool_call> tags in the assistant's text. Without tools every token is the template's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from renderers.base import (
    Message,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
    ToolSpec,
    reject_assistant_in_extension,
)
from renderers.configs import BaseRendererConfig
from renderers.parsers import TOOL_PARSERS, get_tool_parser

from leyden.gateway.tokens import Codec

MARK = "q7ZanswerZ7q"
"""Text that nobody writes and no template changes."""
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_TAG = re.compile(r"^(<\|\w+\|>|\[TOOL_CALLS\])\s*")
_TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
PROBE_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "q7Ztool", "description": "d", "parameters": {"type": "object"}}}
]


@dataclass(frozen=True, slots=True)
class Habits:
    """What a template does.

    Attributes:
        tools: it prints tool schemas and calls; otherwise they are printed in the Hermes form.
        tool_role: it prints messages of the role tool; otherwise they go as user messages in <tool_response> tags.
        reasons: it knows of reasoning: prints it, drops it, or opens it.
        forgets: roles of messages after which it no longer prints the reasoning of earlier answers.
        default_system: what it puts into a conversation without a system message; None when nothing.
        end: the special token that ends an answer, as text.
        call_format: how calls are parsed: `hermes`, `json` (the answer is a call, or a list of them) or one of
            renderers.parsers.TOOL_PARSERS; None when unknown.
        hermes_opener: calls begin exactly as in `opening`.
    """

    tools: bool
    tool_role: bool
    reasons: bool
    forgets: frozenset[str]
    default_system: str | None
    end: str
    call_format: str | None
    hermes_opener: bool


class TemplateConfig(BaseRendererConfig):
    """The renderer takes nothing from its config: all it needs is the template's."""

    name: Literal["template"] = "template"


class TemplateRenderer:
    """Implements renderers.base.Renderer. Raises ValueError for templates that it can't work with."""

    config_class = TemplateConfig
    is_prefix_stable = False

    def __init__(self, tokenizer: Any, config: TemplateConfig | None = None) -> None:
        self.config = config or TemplateConfig()
        self.codec = tokenizer if isinstance(tokenizer, Codec) else Codec(tokenizer)
        self.habits = learn(self.ask, self.codec)
        self._end_id: int = self.codec.convert_tokens_to_ids(self.habits.end)
        self._stops = sorted({self._end_id, self.codec.eos_token_id or self._end_id})
        self.piecewise = False
        """Whether turns may be encoded one by one."""
        self.boundary = re.compile(f"({re.escape(self.habits.end)})")
        self._parser = None
        if self.habits.call_format in TOOL_PARSERS:
            self._parser = get_tool_parser(self.habits.call_format, self.codec)

    def use(self, **changes: Any) -> None:
        """Set habits that only a comparison of whole conversations shows."""
        self.habits = replace(self.habits, **changes)

    def ask(self, messages: Sequence[Any], tools: Any = None, generate: bool = False) -> str:
        """The template's text. Raises whatever the template raises."""
        return self.codec.tokenizer.apply_chat_template(
            list(messages), tools=tools or None, add_generation_prompt=generate, tokenize=False
        )

    def render_ids(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        shown, schemas = self.spell_out(messages, tools)
        text = self.ask(shown, schemas, add_generation_prompt)
        return self.codec.encode_parts(text, self.boundary) if self.piecewise else self.codec.encode(text)

    def render(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        ids = self.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return RenderedTokens(token_ids=ids, message_indices=[-1] * len(ids))

    def spell_out(self, messages: Sequence[Any], tools: Any = None) -> tuple[list[Any], Any]:
        """The messages and tools that the template is given: as they are, or with tools written out as text."""
        if self.habits.tools:
            return list(messages), tools
        out = [self._spelled(m) for m in messages]
        if tools:
            system: str | None = self.habits.default_system
            if out and out[0]["role"] == "system":
                system = out.pop(0)["content"]
            listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
            head = (system + "\n\n" if system else "") + _TOOLS_HEADER + listed + _TOOLS_FOOTER
            out.insert(0, {"role": "system", "content": head})
        return out, None

    def _spelled(self, message: Any) -> Any:
        text = message.get("content") or ""
        if message["role"] == "tool":
            if self.habits.tool_role:
                return {"role": "tool", "content": text}
            return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
        calls = message.get("tool_calls")
        if not calls:
            return message if "tool_calls" not in message else {**message, "tool_calls": None}
        blocks = []
        for call in calls:
            function = call["function"]
            arguments = function.get("arguments")
            shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            name = json.dumps(function.get("name"), ensure_ascii=False)
            blocks.append(f'<tool_call>\n{{"name": {name}, "arguments": {shown}}}\n</tool_call>')
        return {"role": "assistant", "content": "\n".join([text, *blocks] if text else blocks)}

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
        tail = self._continuation(new_messages)
        if tail is None:
            return None
        ids = [*previous_prompt_ids, *previous_completion_ids]
        if not previous_completion_ids or previous_completion_ids[-1] not in self._stops:
            ids.append(self._end_id)
        # Encoded together with the end of turn: some tokenizers treat the start of a text differently.
        ids += self.codec.encode(self.habits.end + tail)[1:]
        return RenderedTokens(token_ids=ids, message_indices=[-1] * len(ids))

    def _continuation(self, new_messages: Sequence[Any]) -> str | None:
        """The text from the end of an answer on, when `new_messages` follow it; None when the template refuses."""
        new, _ = self.spell_out(new_messages)
        answer: dict[str, Any] = {"role": "assistant", "content": MARK}
        if new[0]["role"] == "tool" and self.habits.tools:
            count = next((i for i, m in enumerate(new) if m["role"] != "tool"), len(new))
            answer["tool_calls"] = [_stand_in(m, i) for i, m in enumerate(new[:count])]
        try:
            text = self.ask([{"role": "user", "content": "q"}, answer, *new], None, True)
        except Exception:  # Templates are programs of others; what one refuses is rendered in full, and refused there.
            return None
        _, found, after = text.partition(MARK)
        _, ended, tail = after.partition(self.habits.end)
        return tail if found and ended else None

    def parse_response(
        self, token_ids: list[int], *, tools: list[ToolSpec] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        end = next((i for i, token in enumerate(token_ids) if token in self._stops), len(token_ids))
        ids = token_ids[:end]
        text = self.codec.decode(ids)
        reasoning: str | None = None
        prompt_end = self.codec.decode(prompt_ids[-8:]) if prompt_ids else ""
        opened = prompt_end.rstrip("\n").endswith("<think>")
        if opened or text.lstrip().startswith("<think>"):
            inside, closed, after = text.lstrip().removeprefix("<think>").partition("</think>")
            if not closed:
                return ParsedResponse(content="", reasoning_content=inside.strip(), reasoning_complete=False)
            reasoning, text = inside.strip(), after.lstrip("\n")
        calls: list[ParsedToolCall] = []
        if tools and self._parser is not None:
            before = 0 if reasoning is None else _think_end(self.codec, ids)
            rest, calls = self._parser.extract(ids[before:])
            if calls:
                text = self.codec.decode(rest).strip("\n")
                for call in calls:
                    if call.token_span is not None:
                        call.token_span = (call.token_span[0] + before, call.token_span[1] + before)
        elif tools and self.habits.call_format == "hermes":
            text, calls = split_calls(text)
        elif tools and self.habits.call_format == "json":
            text, calls = bare_calls(text)
        return ParsedResponse(content=text, reasoning_content=reasoning or None, tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        return self._stops


def opening(name: str | None) -> str:
    """How a call in the Hermes form begins: of the tool `name`, up to its arguments, or of any."""
    return (
        "<tool_call>\n"
        if name is None
        else f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments":'
    )


def split_calls(text: str) -> tuple[str, list[ParsedToolCall]]:
    """The calls in a text, and the text around them. A call that can't be read stays in the text as it is."""
    calls: list[ParsedToolCall] = []
    outside: list[str] = []
    at = 0
    for match in _CALL.finditer(text):
        call = _read_call(match)
        if call is not None:
            calls.append(call)
            outside.append(text[at : match.start()])
            at = match.end()
    outside.append(text[at:])
    first, *rest = outside
    kept = "".join(part for part in rest if part.strip())
    return (first.removesuffix("\n") if calls else first) + kept, calls


def _read_call(match: re.Match[str]) -> ParsedToolCall | None:
    return _made_call(_json(match.group(1)), match.group(1).strip()) if match.group(2) else None


def bare_calls(text: str) -> tuple[str, list[ParsedToolCall]]:
    """Calls when an answer is nothing else: JSON objects with a name, after a tag at most."""
    body = _TAG.sub("", text.strip(), count=1)
    value = _json(body) if body[:1] in ("{", "[") else None
    made = [_made_call(v) for v in (value if isinstance(value, list) else [value])]
    calls = [c for c in made if c is not None]
    return ("", calls) if calls and len(calls) == len(made) else (text, [])


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return None


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} isn't JSON")


def _made_call(value: Any, raw: str = "") -> ParsedToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ParsedToolCall(raw=raw, name=value["name"], arguments=arguments, status=ToolCallParseStatus.OK)


def _think_end(codec: Codec, ids: list[int]) -> int:
    """How many leading ids reach past </think>."""
    text = ""
    for i, token in enumerate(ids):
        text = text[-16:] + codec.decode([token])
        if "</think>" in text:
            return i + 1
    return 0


def _stand_in(result: Any, index: int) -> dict[str, Any]:
    """A call that a tool result may belong to, for templates that look for one."""
    call_id = result.get("tool_call_id") or f"call{index:05d}"
    function = {"name": result.get("name") or "f", "arguments": {}}
    return {"id": call_id, "type": "function", "function": function}


def learn(ask: Callable[..., str], codec: Codec) -> Habits:
    """Find out what a template does by rendering small conversations.

    Raises:
        ValueError: it can't render even a question and its answer, or doesn't end answers with a special token.
    """

    def tried(messages: Sequence[Any], tools: Any = None) -> str:
        try:
            return ask(messages, tools)
        except Exception:  # Templates are programs of others and raise what they like.
            return ""

    question = {"role": "user", "content": "q7Zquestion"}
    plain = tried([question])
    answered = tried([question, {"role": "assistant", "content": MARK}])
    if not plain or MARK not in answered:
        raise ValueError("the template can't render a question and its answer")
    end = _first_special(answered.partition(MARK)[2], codec)
    if end is None:
        raise ValueError("the template doesn't end an answer with a special token")
    prints_tools = "q7Ztool" in tried([question], PROBE_TOOLS)
    call = {"id": "call00000", "type": "function", "function": {"name": "q7Zcall", "arguments": {"a": "q7Zvalue"}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "q7Zresult", "tool_call_id": "call00000", "name": "q7Zcall"}
    with_call = tried([question, called, result], PROBE_TOOLS)
    tools = prints_tools and "q7Zcall" in with_call and "q7Zvalue" in with_call
    before_result = called if tools else {"role": "assistant", "content": MARK}
    reason = {"reasoning_content": "q7Zreason"}
    thought = {"role": "assistant", "content": MARK, **reason}
    inline = {"role": "assistant", "content": f"<think>\nq7Zreason\n</think>\n\n{MARK}"}
    kept = {
        "user": "q7Zreason" in tried([question, thought, question]),
        "tool": "q7Zreason" in tried([question, {**before_result, **reason}, result]),
        "system": "q7Zreason" in tried([question, thought, {**question, "role": "system"}]),
    }
    drops_inline = "q7Zreason" not in tried([question, inline, question])
    reasons = any(kept.values()) or drops_inline or "<think>" in ask([question], None, True)
    return Habits(
        tools=tools,
        tool_role="q7Zresult" in tried([question, before_result, result]),
        reasons=reasons,
        forgets=frozenset(role for role, printed in kept.items() if reasons and not printed),
        default_system=_default_system(plain, tried([{"role": "system", "content": MARK}, question])),
        end=end,
        call_format=_call_format(with_call, codec) if tools else "hermes",
        hermes_opener=not tools or opening("q7Zcall") in with_call,
    )


def _first_special(text: str, codec: Codec) -> str | None:
    """The special token that `text`, what follows an answer, begins with (after white space at most)."""
    stripped = text.lstrip()
    special = [t for t in codec.all_special_tokens if stripped.startswith(t)]
    added = [str(t) for t in codec.added_tokens_decoder.values() if stripped.startswith(str(t))]
    found = max([*special, *added], key=len, default=None)
    return found if found and stripped == text else None


def _default_system(plain: str, with_system: str) -> str | None:
    """The system message that a template adds by itself, from its renderings without one and with MARK as one."""
    before, found, after = with_system.partition(MARK)
    if not found or not plain.startswith(before) or not plain.endswith(after):
        return None
    size = len(plain) - len(before) - len(after)
    return plain[len(before) : len(before) + size] if size > 0 else None


def _call_format(text: str, codec: Codec) -> str | None:
    """How a template writes calls, found by parsing one that it wrote."""
    if any(c.name == "q7Zcall" and c.arguments == {"a": "q7Zvalue"} for c in split_calls(text)[1]):
        return "hermes"
    if re.search(r'\{"name": "q7Zcall", "(arguments|parameters)": ', text):
        return "json"
    ids = codec.encode(text)
    for name in TOOL_PARSERS:
        _, calls = get_tool_parser(name, codec).extract(ids)
        if any(c.name == "q7Zcall" and c.arguments == {"a": "q7Zvalue"} for c in calls):
            return name
    return None

"""What a call is for. Pure.

A harness makes calls beside its task: titles for sessions, summaries when its context is full, conversations of
sub-agents, probes. Nothing in the dialects says which is which, so it is read, in this order, from what harnesses say
in headers, from the conversation that a call continues, and from the words by which they ask. Words count only where
a wrong guess is unlikely: a call that has tools, or continues another, is never taken for a title, and a task about
summaries isn't one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from leyden.gateway.dialects.base import Message, ModelRequest
from leyden.schema import CallKind

_SESSION_HEADERS = ("x-claude-code-session-id", "x-session-id", "session-id", "session_id", "x-litellm-session-id")
_SUBAGENT_HEADERS = ("x-claude-code-agent-id", "x-parent-session-id", "x-openai-subagent")
_TITLE = re.compile(
    r"title generator|(?:generat|creat|writ|provid|suggest|com)\w*\s[^.\n]{0,60}\btitle\b[^.\n]{0,60}"
    r"\b(?:conversation|thread|session|chat)\b|\b(?:conversation|thread|session|chat) title\b",
)
_SUMMARY = re.compile(
    r"\b(?:summar|compact|condens|distil|checkpoint)\w*[^\n]{0,120}"
    r"\b(?:conversation|context|session|history|handoff|hand-off)\b"
    r"|\b(?:conversation|session) (?:checkpoint|compaction|summary)\b",
)
_SUMMARISER = re.compile(
    r"\bcontext[- ](?:checkpoint|compaction|compression|summar)|\bcontext-aware\b[^\n]{0,20}\bsummary\b"
    r"|\b(?:summari[sz]ation|summari[sz]ing|condens\w+|compaction) (?:agent|assistant)\b|<state_snapshot>",
)
"""What only makers of harnesses say. The other words are also those of tasks about texts."""
_CARRIED = re.compile(r"\bcontinued from a previous\b|\breference only\b|\bproduced a summary\b")
"""How the first message after a compaction tells of the summary that it holds."""
_READ = 4000
"""Characters that are searched at each end of a message: harnesses say what they want before or after the material."""


def session(headers: Mapping[str, str]) -> str | None:
    """The harness's own name for the conversation's session, where it sends one."""
    return next((headers[name] for name in _SESSION_HEADERS if headers.get(name)), None)


def classify(request: ModelRequest, continues: str | None, main_session: str | None) -> CallKind:
    """The kind of a call.

    Args:
        continues: kind of the call whose conversation this one continues, None for a new conversation.
        main_session: session of the attempt's first main call, where one was sent.
    """
    system, user = _asking(request)
    alone = continues is None and not request.tools
    if alone and request.max_tokens == 1:
        return CallKind.OTHER
    if alone and _says(_TITLE, system):
        return CallKind.TITLE
    if _codex_kind(request.headers) == "compact" or _asks_for_summary(request, system, user):
        return CallKind.SUMMARY
    if continues is not None:
        # A conversation goes on after its summary as what it was.
        return CallKind.MAIN if continues == CallKind.SUMMARY else CallKind(continues)
    if alone and _says(_TITLE, user):
        return CallKind.TITLE
    own = session(request.headers)
    if any(request.headers.get(name) for name in _SUBAGENT_HEADERS):
        return CallKind.SUBAGENT
    return CallKind.SUBAGENT if main_session is not None and own is not None and own != main_session else CallKind.MAIN


_HINTS = {
    _TITLE: ("title",),
    _SUMMARY: ("summar", "compact", "condens", "distil", "checkpoint"),
    _SUMMARISER: ("summar", "compact", "condens", "compress", "checkpoint", "snapshot"),
}
"""What a text must hold for its pattern to have a chance. Searching for a pattern costs a hundred times as much."""


def _says(words: re.Pattern[str], text: str) -> bool:
    for hint in _HINTS[words] if text else ():
        if hint in text:
            return words.search(text) is not None
    return False


def _asks_for_summary(request: ModelRequest, system: str, user: str) -> bool:
    """Whether this is the call of a summariser, or a conversation's last message asks for its summary."""
    if not request.tools and (_says(_SUMMARISER, system) or _says(_SUMMARY, system)):
        return True
    goes_on = any(m["role"] == "assistant" for m in request.messages)
    if not _says(_SUMMARISER, user) and not (goes_on and _says(_SUMMARY, user)):
        return False
    return _CARRIED.search(user) is None


def _asking(request: ModelRequest) -> tuple[str, str]:
    """The ends of the first system message, and those of the last message where it is the user's; in lower case."""
    system = next((m for m in request.messages if m["role"] == "system"), None)
    last = request.messages[-1] if request.messages else None
    return _ends(system), _ends(last if last is not None and last["role"] == "user" else None)


def _ends(message: Message | None) -> str:
    text = _text(message) if message is not None else ""
    return (text if len(text) <= 2 * _READ else f"{text[:_READ]}\n{text[-_READ:]}").lower()


def _text(message: Message) -> str:
    content: Any = message.get("content") or ""
    return content if isinstance(content, str) else "".join(p.get("text", "") for p in content)


def _codex_kind(headers: Mapping[str, str]) -> str | None:
    if headers.get("x-openai-subagent") == "compact":
        return "compact"
    metadata = headers.get("x-codex-turn-metadata")
    if metadata is None:
        return None
    try:
        said = orjson.loads(metadata)
    except orjson.JSONDecodeError:
        return None
    kind = said.get("request_kind") if isinstance(said, dict) else None
    return "compact" if isinstance(kind, str) and "compact" in kind else None

"""What a call is for. Pure.

A harness makes calls beside its task: titles for sessions, summaries when its context is full, conversations of
sub-agents, probes. Nothing in the dialects says which is which, so it is read, in this order, from what harnesses say
in headers, from the conversation that a call continues, and from the words by which they ask. Words count only where
a wrong guess is unlikely: a call that has tools, or continues another, is never taken for a title.
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
    re.IGNORECASE,
)
_SUMMARY = re.compile(
    r"\b(?:summar|compact|condens|checkpoint)\w*[^\n]{0,120}\b(?:conversation|context|session|history|handoff|hand-off)\b"
    r"|\b(?:context|conversation|session) (?:checkpoint|compaction|summary)\b",
    re.IGNORECASE,
)
_READ = 4000
"""Characters of a message that are searched: harnesses say what they want at the start."""


def session(headers: Mapping[str, str]) -> str | None:
    """The harness's own name for the conversation's session, where it sends one."""
    return next((headers[name] for name in _SESSION_HEADERS if headers.get(name)), None)


def classify(request: ModelRequest, continues: str | None, main_session: str | None) -> CallKind:
    """The kind of a call.

    Args:
        continues: kind of the call whose conversation this one continues, None for a new conversation.
        main_session: session of the attempt's first main call, where one was sent.
    """
    compaction = _asks_for(request, _SUMMARY, last=True) or _codex_kind(request.headers) == "compact"
    if continues is not None:
        return CallKind.SUMMARY if compaction else CallKind(continues)
    if request.max_tokens == 1 and not request.tools:
        return CallKind.OTHER
    if compaction and (len(request.messages) > 2 or request.tools or _asks_for(request, _SUMMARY, last=False)):
        return CallKind.SUMMARY
    if not request.tools and (_asks_for(request, _TITLE, last=False) or _asks_for(request, _TITLE, last=True)):
        return CallKind.TITLE
    own = session(request.headers)
    if any(request.headers.get(name) for name in _SUBAGENT_HEADERS):
        return CallKind.SUBAGENT
    return CallKind.SUBAGENT if main_session is not None and own is not None and own != main_session else CallKind.MAIN


_HINTS = {_TITLE: ("title",), _SUMMARY: ("summar", "compact", "condens", "checkpoint")}
"""What a text must hold for its pattern to have a chance. Searching for a pattern costs a hundred times as much."""


def _asks_for(request: ModelRequest, words: re.Pattern[str], *, last: bool) -> bool:
    """Whether the system message, or the last of the user's, asks for something in these words."""
    if last:
        asking = next((m for m in reversed(request.messages) if m["role"] in ("user", "system")), None)
    else:
        asking = next((m for m in request.messages if m["role"] == "system"), None)
    if asking is None:
        return False
    text = _text(asking)[:_READ].lower()
    return any(hint in text for hint in _HINTS[words]) and words.search(text) is not None


def _text(message: Message) -> str:
    content: Any = message.get("content") or ""
    return content if isinstance(content, str) else "".join(p.get("text", "") for p in content)


def _codex_kind(headers: Mapping[str, str]) -> str | None:
    if headers.get("x-openai-subagent") == "compact":
        return "compact"
    try:
        said = orjson.loads(headers.get("x-codex-turn-metadata", "null"))
    except orjson.JSONDecodeError:
        return None
    kind = said.get("request_kind") if isinstance(said, dict) else None
    return "compact" if isinstance(kind, str) and "compact" in kind else None

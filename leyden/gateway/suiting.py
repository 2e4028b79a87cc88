"""Messages as a model's template can take them, for templates that refuse some conversations. Pure.

Templates are written for chats: a system message at the start, then user and assistant by turns. Harnesses send notes
of the system between turns, several system messages at the start, and several user messages in a row. A template that
renders those is given them as they are. For one that refuses (or drops their text without a word) they are spelt out,
nothing left out: system messages at the start become one, later ones a marked part of a user's message, and user
messages in a row one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Ask = Callable[[Sequence[Message]], str]
"""A template's text of a conversation; raises whatever the template raises."""


@dataclass(frozen=True, slots=True)
class Manners:
    """Which conversations a template takes: with a system message at the start, with several there, with later ones,
    and with one message of the user after another."""

    system: bool = True
    several_system: bool = True
    late_system: bool = True
    repeated_user: bool = True

    @property
    def all(self) -> bool:
        """Whether messages need no change."""
        return self.system and self.several_system and self.late_system and self.repeated_user


def learn(ask: Ask) -> Manners:
    """Find out by rendering small conversations."""

    def takes(*roles: str) -> bool:
        texts = [f"q7Z{i}q" for i in range(len(roles))]
        try:
            shown = ask([{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)])
        except Exception:  # Templates are programs of others and raise what they like.
            return False
        return all(text in shown for text in texts)

    if not takes("user"):
        return Manners()  # It isn't the roles that it minds.
    late = takes("user", "system", "user") and takes("user", "assistant", "system", "user")
    return Manners(takes("system", "user"), takes("system", "system", "user"), late, takes("user", "user"))


def suited(messages: Sequence[Message], manners: Manners, *, start: bool = True) -> list[Message]:
    """`messages`, whose content is text, as the template takes them. `start`: they are a conversation's first."""
    if manners.all:
        return list(messages)
    out: list[Message] = []
    for message in messages:
        before = out[-1] if out else None
        if message["role"] == "system":
            leading = start and all(m["role"] == "system" for m in out)
            if leading and manners.system and before is not None and not manners.several_system:
                out[-1] = _joined(before, message)
                continue
            if not (manners.system if leading else manners.late_system):
                message = {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
        if message["role"] == "user" and before is not None and before["role"] == "user" and not manners.repeated_user:
            out[-1] = _joined(before, message)
        else:
            out.append(message)
    return out


def _joined(first: Message, second: Message) -> Message:
    return {**first, "content": f"{first['content']}\n\n{second['content']}"}


def with_mappings(messages: Sequence[Message]) -> list[Message] | None:
    """`messages` with all tool arguments as mappings, for templates that go through them; None when they are already.

    What isn't a mapping, such as arguments that were cut off, stays readable under a name of its own.
    """
    changed = False
    out = []
    for message in messages:
        calls = message.get("tool_calls") or []
        if any(not isinstance(c["function"].get("arguments"), dict) for c in calls):
            changed = True
            message = {**message, "tool_calls": [_mapped(c) for c in calls]}
        out.append(message)
    return out if changed else None


def _mapped(call: dict[str, Any]) -> dict[str, Any]:
    given = call["function"].get("arguments")
    if isinstance(given, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": {"arguments": given}}}

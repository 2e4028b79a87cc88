"""What a call is for, and what that changes."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.gateway.classify import classify, session
from leyden.gateway.dialects.base import ModelRequest
from leyden.schema import CallKind, CaptureConfig, RolloutConfig
from leyden.training.rows import build_rows
from tests.gateway.conftest import World

TOOLS: Any = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
TITLE = "You are a title generator. You output ONLY a thread title. Nothing else."
COMPACT = "Your task is to create a detailed summary of the conversation so far, for the next session."

AIDE = "You are a context summarization agent. You get a conversation and write down its state."
LONG = "\n".join(f"[Tool result]: {i}" for i in range(1000))
CARRIED = "This session is continued from a previous one. [CONTEXT COMPACTION, REFERENCE ONLY] The summary: …"


def request(*messages: tuple[str, Any], tools: Any = None, headers: Any = None, **more: Any) -> ModelRequest:
    said = [{"role": role, "content": content} for role, content in messages]
    return ModelRequest(model="m", messages=said, tools=tools, headers=headers or {}, **more)


TASK = [("system", "You are an agent."), ("user", "Fix the bug.")]


@pytest.mark.parametrize(
    ("asked", "continues", "main_session", "kind"),
    [
        (request(*TASK, tools=TOOLS), None, None, "main"),
        (request(("user", "What is 3 times 4?")), None, None, "main"),
        (request(("user", "Write a good title for my essay.")), None, None, "main"),
        (request(("system", TITLE), ("user", "Fix the bug.")), None, None, "title"),
        (request(("user", "Generate a title for this conversation:\n")), None, None, "title"),
        (request(("system", TITLE), ("user", "Fix the bug."), tools=TOOLS), None, None, "main"),
        (request(("system", TITLE), ("user", "Fix the bug.")), "main", None, "main"),
        (request(*TASK, ("assistant", "x"), ("user", COMPACT), tools=TOOLS), "main", None, "summary"),
        (request(*TASK, ("assistant", "x"), ("user", COMPACT)), None, None, "summary"),
        (request(("user", "Summarise the history of Rome.")), None, None, "main"),
        (request(TASK[0], ("user", "Condense the chat history."), tools=TOOLS), None, None, "main"),
        (request(*TASK, ("assistant", "x"), ("tool", COMPACT), tools=TOOLS), "main", None, "main"),
        (request(*TASK, ("assistant", "x"), ("user", "Go on."), tools=TOOLS), "summary", None, "main"),
        (request(("system", AIDE), ("user", LONG)), None, None, "summary"),
        (request(("system", AIDE), ("user", "a"), ("assistant", "b"), ("user", "c")), "summary", None, "summary"),
        (request(("user", f"As a summarization agent, write a context checkpoint.\n{LONG}")), None, None, "summary"),
        (request(("user", f"{LONG}\nNow write a context checkpoint.")), None, None, "summary"),
        (request(("user", f"{LONG}\nGenerate a title for this session.")), None, None, "title"),
        (request(("system", TITLE), ("user", "For:"), ("user", "Summarise the history.")), None, None, "title"),
        (request(("user", CARRIED), ("assistant", "x"), ("user", CARRIED), tools=TOOLS), None, None, "main"),
        (request(*TASK, tools=TOOLS, headers={"x-claude-code-agent-id": "a"}), None, "s", "subagent"),
        (request(*TASK, tools=TOOLS, headers={"x-session-id": "child"}), None, "s", "subagent"),
        (request(*TASK, tools=TOOLS, headers={"x-session-id": "s"}), None, "s", "main"),
        (request(*TASK, tools=TOOLS), "subagent", "s", "subagent"),
        (request(("user", "quota"), max_tokens=1), None, None, "other"),
        (request(*TASK, headers={"x-codex-turn-metadata": '{"request_kind": "compaction"}'}), "main", None, "summary"),
        (request(*TASK, headers={"x-codex-turn-metadata": "{bad"}), "main", None, "main"),
    ],
)  # fmt: skip
def test_kinds(asked: ModelRequest, continues: str | None, main_session: str | None, kind: str) -> None:
    assert classify(asked, continues, main_session) == kind


def test_images_are_read_over() -> None:
    content = [{"type": "image", "url": "data:,"}, {"type": "text", "text": "Generate a title for this conversation:"}]
    assert classify(request(("user", content)), None, None) is CallKind.TITLE


def test_sessions_are_read_from_headers() -> None:
    assert session({"x-claude-code-session-id": "a", "x-session-id": "b"}) == "a"
    assert session({"host": "x"}) is None


@pytest.mark.parametrize("train_titles", [False, True])
async def test_a_title_call_changes_nothing_of_the_main_conversation(world: World, train_titles: bool) -> None:
    capture = CaptureConfig(train_kinds=list(CallKind)) if train_titles else CaptureConfig()
    claim = await world.claim(config=RolloutConfig(capture=capture))
    world.engine.say("first", "A title", "second")
    main: list[Any] = [{"role": role, "content": content} for role, content in TASK]
    side = [{"role": "system", "content": TITLE}, main[1]]
    await world.chat(claim.agent_key, {"messages": main, "tools": TOOLS})
    await world.chat(claim.agent_key, {"messages": side})
    main += [{"role": "assistant", "content": "first"}, {"role": "user", "content": "Go on."}]
    await world.chat(claim.agent_key, {"messages": main, "tools": TOOLS})
    trajectory = await world.admin.trajectory(claim.rollout.rollout_id)
    assert [c.kind for c in trajectory.calls] == ["main", "title", "main"]
    assert [c.untrainable for c in trajectory.calls] == [None, None if train_titles else "kind: title", None]
    rows, report = build_rows(trajectory, max_row_tokens=10_000)
    assert len(rows) == (2 if train_titles else 1)
    one, title, two = trajectory.calls
    assert two.parent == one.call_id and title.parent is None
    assert (one.call_id, two.call_id) in [r.calls for r in rows]
    assert report.dropped == ({} if train_titles else {"kind": 1})
    stats = await world.admin.stats()
    assert stats["uncaptured"] == ({} if train_titles else {"kind": 1})

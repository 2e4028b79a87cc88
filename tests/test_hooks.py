"""Hooks of a user's file: called in a process of their own, and never a reason for a run to end."""

from __future__ import annotations

import json
import textwrap
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from leyden.client import LeydenClient
from leyden.hooks import Hooks
from leyden.schema import (
    Event,
    Rollout,
    RolloutConfig,
    RolloutCreate,
    RolloutDetail,
    RolloutMetadata,
    RolloutState,
    RolloutStatus,
    TerminalItem,
)
from tests.controller.conftest import none_alive, until


class Gateway:
    async def rollout(self, rollout_id: str) -> RolloutDetail:
        status = RolloutStatus(created_at=0, updated_at=0)
        rollout = Rollout(rollout_id=rollout_id, input={"q": 1}, config=RolloutConfig(), status=status)
        return RolloutDetail(rollout=rollout, attempts=["0"])

    async def events(self, rollout_id: str) -> list[Event]:
        data = {"value": 1.0}
        return [Event(event_type="reward", rollout_id=rollout_id, attempt_id="0", timestamp=0, data=data)]


CLIENT = cast(LeydenClient, Gateway())
REQUEST = RolloutCreate(input={"q": 1}, rollout_id="r1", metadata=RolloutMetadata(step=3))


@asynccontextmanager
async def hooks_of(folder: Path, text: str, seconds: float = 20) -> AsyncIterator[tuple[Hooks, list[str]]]:
    said: list[str] = []
    (folder / "hooks.py").write_text(textwrap.dedent(text))
    async with Hooks(folder / "hooks.py", seconds, said.append) as hooks:
        yield hooks, said


def item(rollout_id: str, state: RolloutState) -> TerminalItem:
    return TerminalItem(rollout_id=rollout_id, state=state)


async def test_a_hook_changes_what_is_queued_but_not_its_name(tmp_path: Path) -> None:
    text = """
        import helper
        def on_enqueue(request):
            print("working")
            request["input"]["q"] = helper.VALUE
            request["config"] = {"timeout_seconds": 7}
            request["rollout_id"] = "other"
            request["metadata"] = {"step": 9}
            return request
    """
    (tmp_path / "helper.py").write_text("VALUE = 42")
    async with hooks_of(tmp_path, text) as (hooks, said):
        changed = await hooks.enqueue(REQUEST)
    assert (changed.input, changed.rollout_id, changed.metadata) == ({"q": 42}, "r1", REQUEST.metadata)
    assert changed.config is not None and changed.config.timeout_seconds == 7
    assert REQUEST.input == {"q": 1} and said == []


async def test_hooks_are_told_how_rollouts_ended(tmp_path: Path) -> None:
    text = f"""
        import json
        def note(*what):
            with open({str(tmp_path / "told")!r}, "a") as file:
                print(json.dumps(what), file=file)
        async def on_succeeded(rollout, events):
            note("succeeded", rollout["rollout_id"], events[0]["data"])
        def on_failed(rollout, events):
            note("failed", rollout["rollout_id"], len(events))
    """
    async with hooks_of(tmp_path, text) as (hooks, said):
        assert await hooks.enqueue(REQUEST) is REQUEST
        hooks.ended(CLIENT, item("a", RolloutState.SUCCEEDED))
        hooks.ended(CLIENT, item("b", RolloutState.FAILED))
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert told == [["succeeded", "a", {"value": 1.0}], ["failed", "b", 1]]
    assert said == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('mood')", "KeyError: 'mood'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("return 7", "must return the request"),
        ("return {'input': 1, 'config': {'timeout_seconds': -1}}", "greater than 0"),
        ("return {'input': object()}", "not JSON serializable"),
        ("import os; os._exit(1)", "its process ended"),
    ],
)
async def test_a_failing_hook_is_reported_and_the_rollout_is_queued_as_it_was(
    tmp_path: Path, body: str, words: str
) -> None:
    async with hooks_of(tmp_path, f"def on_enqueue(request):\n    {body}") as (hooks, said):
        assert await hooks.enqueue(REQUEST) is REQUEST
        assert len(said) == 1 and words in said[0] and "r1" in said[0]
        assert await hooks.enqueue(REQUEST) is REQUEST
        assert len(said) == 2


async def test_a_hook_that_hangs_is_ended_with_all_it_started_and_not_called_again(tmp_path: Path) -> None:
    mark = f"600.{uuid.uuid4().int}"
    text = f"""
        import subprocess
        def on_enqueue(request):
            subprocess.run(["sleep", "{mark}"])
        def on_failed(rollout, events):
            open({str(tmp_path / "told")!r}, "w").close()
    """
    async with hooks_of(tmp_path, text, seconds=1) as (hooks, said):
        assert await hooks.enqueue(REQUEST) is REQUEST
        assert "longer than 1 s" in said[0]
        assert await none_alive(mark)
        assert await hooks.enqueue(REQUEST) is REQUEST and len(said) == 1
        hooks.ended(CLIENT, item("b", RolloutState.FAILED))  # The others go on in a new process.
        await until((tmp_path / "told").exists)


async def test_a_file_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    async with hooks_of(tmp_path, "import no_such_module_x") as (hooks, said):
        assert await hooks.enqueue(REQUEST) is REQUEST
    assert len(said) == 1 and "no_such_module_x" in said[0]


async def test_hooks_do_not_see_the_runs_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYDEN_ADMIN_KEY", "secret")
    text = """
        import os
        def on_enqueue(request):
            return {"input": [k for k in os.environ if k.startswith("LEYDEN_")]}
    """
    async with hooks_of(tmp_path, text) as (hooks, _):
        changed: Any = (await hooks.enqueue(REQUEST)).input
    assert changed == []

"""The controller with the real gateway: the same contract from both sides."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from leyden.client import LeydenClient
from leyden.config import ControllerConfig
from leyden.controller.local import LocalBackend, LocalOptions
from leyden.controller.main import Controller, ControllerOptions
from leyden.controller.processes import ProcessTable
from leyden.controller.sandbox import check_sandbox
from leyden.controller.uploads import Uploads
from leyden.errors import PreflightError
from leyden.schema import LogPart, Outcome, RolloutConfig, RolloutCreate, RolloutDetail, RolloutState
from tests.controller.conftest import alive, none_alive, until
from tests.gateway.conftest import ADMIN, World, make_world
from tests.tiny import make_tiny_model

CALL = """
import json, os, urllib.request as u
def post(url, key, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ[key]}
    return json.load(u.urlopen(u.Request(url, json.dumps(body).encode(), headers)))
body = {"model": os.environ["LEYDEN_MODEL"], "messages": [{"role": "user", "content": "hi"}]}
answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", "OPENAI_API_KEY", body)
open("answer.txt", "w").write(answer["choices"][0]["message"]["content"])
"""

REPORT = CALL + 'post(os.environ["AGL_EVENT_URL"], "AGL_KEY", {"event_type": "reward", "data": {"value": 0.75}})'


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    from transformers import AutoTokenizer

    model = make_tiny_model(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    async with make_world(tmp_path / "store.db", model, tokenizer) as w:
        yield w


@asynccontextmanager
async def controlled(world: World, folder: Path) -> AsyncIterator[Controller]:
    config = ControllerConfig(concurrency=4, lease_seconds=5)
    options = ControllerOptions(gateway_url=world.url, admin_key=ADMIN, work_dir=folder, base_dir=folder, config=config)
    uploads = Uploads()
    backend = LocalBackend(LocalOptions(world.url, folder, folder / "work"), ProcessTable(), uploads)
    async with LeydenClient(world.url, ADMIN, patience=10) as client:
        controller = Controller(options, backend, client, uploads)
        task = asyncio.create_task(controller.run())
        try:
            yield controller
        finally:
            controller.stop()
            await task


async def finished(world: World, rollout_id: str) -> RolloutDetail:
    after = 0
    async with asyncio.timeout(60):
        while True:
            page = await world.admin.terminal(after, wait_seconds=10)
            if any(item.rollout_id == rollout_id for item in page.items):
                return await world.admin.rollout(rollout_id)
            after = page.next_after


async def enqueue(
    world: World, command: Any, *, grader: Any = None, sandbox: str = "none", limits: Any = None, **more: Any
) -> str:
    agent = {"command": command, "sandbox": sandbox, "timeout_seconds": 30, "limits": limits or {}}
    spec: dict[str, Any] = {"agent": agent, **more}
    if grader is not None:
        spec["grader"] = {"command": grader}
    item = RolloutCreate(input={"q": 1}, config=RolloutConfig.model_validate(spec))
    (rollout,) = await world.admin.create_rollouts([item], idempotency_key=uuid.uuid4().hex)
    return rollout.rollout_id


async def test_a_graded_rollout_succeeds(world: World, tmp_path: Path) -> None:
    world.engine.say("the answer")
    grade = "import sys; print(len(open('answer.txt').read()))"
    async with controlled(world, tmp_path):
        rollout_id = await enqueue(world, ["python", "-c", CALL], grader=["python", "-c", grade])
        status = (await finished(world, rollout_id)).rollout.status
    assert status.state is RolloutState.SUCCEEDED, status.error_message
    assert (status.outcome, status.reward, status.calls) == (Outcome.OK, len("the answer"), 1)


async def test_a_sandboxed_agent_calls_the_model_and_its_files_are_graded(world: World, tmp_path: Path) -> None:
    try:
        check_sandbox()
    except PreflightError as e:
        pytest.skip(str(e))
    world.engine.say("from inside")
    grade = "print(len(open('answer.txt').read()))"
    async with controlled(world, tmp_path):
        command = ["python", "-c", CALL]
        rollout_id = await enqueue(world, command, grader=["python", "-c", grade], sandbox="bubblewrap")
        status = (await finished(world, rollout_id)).rollout.status
    assert status.state is RolloutState.SUCCEEDED, status.error_message
    assert (status.outcome, status.reward, status.calls) == (Outcome.OK, len("from inside"), 1)


async def test_an_agent_may_report_its_reward_itself(world: World, tmp_path: Path) -> None:
    world.engine.say("yes")
    async with controlled(world, tmp_path):
        status = (await finished(world, await enqueue(world, ["python", "-c", REPORT]))).rollout.status
    assert status.state is RolloutState.SUCCEEDED, status.error_message
    assert status.reward == 0.75


async def test_an_infra_failure_is_tried_again_as_often_as_allowed(world: World, tmp_path: Path) -> None:
    world.engine.say("a", "b", "c")
    async with controlled(world, tmp_path):
        rollout_id = await enqueue(world, ["python", "-c", CALL], grader=["echo", "NaN"], retry={"infra": 2})
        detail = await finished(world, rollout_id)
    assert [(a.attempt_id, a.outcome) for a in detail.attempt_details] == [("0", Outcome.INFRA), ("1", Outcome.INFRA)]
    assert detail.rollout.status.error_message == "grader printed no number (exit code 0): last line was 'NaN'"
    assert detail.rollout.status.reward is None


async def test_a_failed_agent_is_not_tried_again(world: World, tmp_path: Path) -> None:
    async with controlled(world, tmp_path):
        detail = await finished(world, await enqueue(world, "echo oh no; exit 3"))
    assert len(detail.attempt_details) == 1
    attempt = detail.attempt_details[0]
    assert (attempt.outcome, attempt.exit_code, attempt.log_tail) == (Outcome.AGENT_ERROR, 3, "oh no\n")
    assert attempt.reason == "the agent exited with code 3; last line of its log: 'oh no'"


async def test_deleting_a_rollout_ends_its_processes(world: World, tmp_path: Path) -> None:
    async with controlled(world, tmp_path):
        rollout_id = await enqueue(world, "setsid sleep 600 & sleep 601")
        await until(lambda: len(alive(rollout_id)) >= 2)
        await world.admin.delete(rollout_id)
        assert await none_alive(rollout_id)


async def test_a_stopped_controllers_rollout_goes_to_the_next(world: World, tmp_path: Path) -> None:
    async with controlled(world, tmp_path):
        rollout_id = await enqueue(world, "test -e go && exit 4; sleep 600", retry={"infra": 5})
        await until(lambda: alive(rollout_id))
    first = (await world.admin.rollout(rollout_id)).attempt_details[0]
    assert (first.outcome, first.reason) == (Outcome.INFRA, "controller stopped")
    assert not alive(rollout_id)
    async with controlled(world, tmp_path):
        await until(lambda: alive(rollout_id))


OUT_OF_MEMORY = """
import subprocess, sys
eater = subprocess.run([sys.executable, "-c", "x = b'x' * 200_000_000; import time; time.sleep(60)"])
sys.exit(128 - eater.returncode if eater.returncode < 0 else eater.returncode)
"""
BLAME = """
data = {"value": 0.0, "source": "infra", "reason": "the task's database was away"}
post(os.environ["LEYDEN_EVENT_URL"], "LEYDEN_KEY", {"event_type": "reward", "data": data})
"""


@pytest.mark.parametrize(
    "end,outcome,attempts,code,signal,words",
    [
        ("raise ConnectionError('refused by its tool')", Outcome.AGENT_ERROR, 1, 1, None, "refused by its tool"),
        ("raise SystemExit(75)", Outcome.INFRA, 2, 75, None, "exited with code 75 (temporary failure)"),
        ("raise SystemExit(137)", Outcome.AGENT_ERROR, 1, 137, None, "exited with code 137"),
        ("os.kill(os.getpid(), 9)", Outcome.AGENT_ERROR, 1, None, 9, "killed by SIGKILL, perhaps for lack of memory"),
        (OUT_OF_MEMORY, Outcome.AGENT_ERROR, 1, ..., ..., "out of memory (limit 120 MB)"),
        (BLAME, Outcome.INFRA, 2, 0, None, "the reward was reported as the infrastructure's: the task's database was"),
    ],
)
async def test_each_kind_of_failure_has_its_class_and_its_number_of_tries(
    world: World,
    tmp_path: Path,
    end: str,
    outcome: Outcome,
    attempts: int,
    code: int | None,
    signal: int | None,
    words: str,
) -> None:
    """After the first of three calls; none of them leaves a reward that could be trained."""
    world.engine.say("a", "b")
    rest = "\nfor _ in range(2): post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', 'OPENAI_API_KEY', body)"
    later = "" if end is BLAME else rest
    async with controlled(world, tmp_path):
        rollout_id = await enqueue(
            world,
            ["python", "-c", CALL + end + later],
            limits={"memory_mb": 120},
            retry={"infra": 2, "backoff_seconds": 0},
        )
        detail = await finished(world, rollout_id)
    assert [a.outcome for a in detail.attempt_details] == [outcome] * attempts
    last = detail.attempt_details[-1]
    assert words in (last.reason or "")
    assert code is ... or (last.exit_code, last.signal) == (code, signal)
    assert (last.calls, detail.rollout.status.state) == (1, RolloutState.FAILED)
    assert (await world.admin.terminal(0)).items[-1].outcome is outcome


# -- logs --------------------------------------------------------------------------------------------------------------


async def whole_log(world: World, rollout_id: str, part: LogPart = "agent") -> bytes:
    """A log, once its controller has sent all of it."""
    async with asyncio.timeout(60):
        read = b""
        while True:
            text = await world.admin.log(rollout_id, "0", part=part, start=len(read))
            read += text.data
            if text.complete:
                return read
            await asyncio.sleep(0.05)


async def test_a_chatty_agent_neither_blocks_nor_loses_its_log(world: World, tmp_path: Path) -> None:
    """A MiB on each of its outputs: more than any pipe holds."""
    code = """
        import os, sys
        name = os.environ["LEYDEN_ROLLOUT_ID"]
        for i in range(1024):
            for out in (sys.stdout, sys.stderr):
                print(f"{name} {i:05} ".ljust(1023, "."), file=out, flush=True)
    """
    async with controlled(world, tmp_path):
        ids = [await enqueue(world, ["python", "-c", textwrap.dedent(code)]) for _ in range(2)]
        for rollout_id in ids:
            (attempt,) = (await finished(world, rollout_id)).attempt_details
            assert (attempt.exit_code, attempt.signal) == (0, None), attempt
            log = await whole_log(world, rollout_id)
            lines = log.decode().splitlines()
            assert len(log) < 1_001_000 and any("bytes left out here" in line for line in lines)
            # Nothing of the other's, nothing torn but at the cut; both ends are there.
            torn = [line for line in lines if not line.startswith(rollout_id) or len(line) != 1023]
            assert len(torn) <= 4
            assert lines[0].split()[1] == "00000" and lines[-1].split()[1] == "01023"


async def test_logs_are_read_and_followed_from_another_machine(world: World, tmp_path: Path) -> None:
    agent = "echo first words; while ! test -e go; do sleep 0.05; done; printf 'last\\033[2J words\\n'"
    grader = "echo grading; echo 0.5"
    async with controlled(world, tmp_path):
        rollout_id = await enqueue(world, agent, grader=grader)
        command = [sys.executable, "-m", "leyden", "logs", rollout_id, "--gateway", world.url]
        env = {**os.environ, "LEYDEN_ADMIN_KEY": ADMIN}
        following = await asyncio.create_subprocess_exec(*command, "--follow", env=env, stdout=asyncio.subprocess.PIPE)
        try:
            assert following.stdout is not None
            async with asyncio.timeout(60):
                # It's there while the agent still runs.
                assert await following.stdout.readline() == b"first words\n"
                (tmp_path / "work" / "workspaces" / f"{rollout_id}.0" / "go").touch()
                rest, _ = await following.communicate()
        finally:
            if following.returncode is None:
                following.kill()
                await following.wait()
        expected = b"last\x1b[2J words\n--- grader ---\ngrading\n0.5\n"
        assert rest == expected
        assert await whole_log(world, rollout_id, "grader") == b"grading\n0.5\n"
    once = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60):
        said, _ = await once.communicate()
    assert said == b"first words\n" + expected

"""Hooks of a run: functions of a user's Python file, called in a process of their own with a time limit.

    on_enqueue(request) -> request or None    before a rollout is queued; may change `input` and `config`
    on_succeeded(rollout, events)             after it succeeded, with the events of its last attempt
    on_failed(rollout, events)                after it failed

Arguments are plain dicts and lists, as the admin API has them; the functions may be `async`. A hook that raises, takes
too long, ends its process or returns something else is reported and has no other effect. One that took too long isn't
called any more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from pydantic import ValidationError

from leyden.client import LeydenClient
from leyden.errors import GatewayError
from leyden.schema import RolloutConfig, RolloutCreate, RolloutState, TerminalItem

MAX_LINE = 64 * 1024 * 1024
"""Bytes of the longest answer of a hook."""
MAX_WAITING = 10_000
"""Ended rollouts whose hooks are still to be called. Beyond, they are passed over with a word."""
STARTS = 3
"""How often the hooks' process is started again after it ended by itself."""


class HookFailed(Exception):
    """A hook gave no usable result. The text is one sentence."""


class Hooks:
    """The hooks in one file. Use as an async context manager; `report` is told in a sentence what went wrong."""

    def __init__(self, file: Path, timeout: float, report: Callable[[str], None]) -> None:
        self._file = file
        self._timeout = timeout
        self._report = report
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._names: set[str] = set()
        self._lock = asyncio.Lock()
        self._ended: asyncio.Queue[tuple[LeydenClient, TerminalItem]] = asyncio.Queue(MAX_WAITING)
        self._worker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except HookFailed as e:
            self._report(f"hooks: {e}; the run goes on without them")
        self._worker = asyncio.create_task(self._work())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                async with asyncio.timeout(self._timeout):
                    await self._ended.join()
        except TimeoutError:
            self._report(f"hooks: {self._ended.qsize()} ended rollouts weren't told to them in time")
        finally:
            assert self._worker is not None
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            await self._stop()

    async def enqueue(self, request: RolloutCreate) -> RolloutCreate:
        """`request` as `on_enqueue` wants it. Its id and metadata stay."""
        if "on_enqueue" not in self._names:
            return request
        try:
            changed = await self._call("on_enqueue", request.model_dump(mode="json"))
            if changed is None:
                return request
            if not isinstance(changed, dict) or "input" not in changed:
                raise HookFailed("it must return the request, changed or not, or None")
            config = changed.get("config")
            parsed = RolloutConfig.model_validate(config) if config is not None else None
        except (HookFailed, ValidationError) as e:
            why = e.errors()[0]["msg"] if isinstance(e, ValidationError) else e
            self._report(f"on_enqueue failed for {request.rollout_id}, which is queued unchanged: {why}")
            return request
        return request.model_copy(update={"input": changed["input"], "config": parsed})

    def ended(self, client: LeydenClient, item: TerminalItem) -> None:
        """Have the hook for an ended rollout called, some time soon."""
        if _hook_of(item) not in self._names:
            return
        try:
            self._ended.put_nowait((client, item))
        except asyncio.QueueFull:
            self._report(f"{_hook_of(item)} wasn't called for {item.rollout_id}: {MAX_WAITING} others wait for theirs")

    async def _work(self) -> None:
        while True:
            client, item = await self._ended.get()
            name = _hook_of(item)
            try:
                if name in self._names:
                    detail = await client.rollout(item.rollout_id)
                    events = await client.events(item.rollout_id)
                    rollout = detail.rollout.model_dump(mode="json")
                    await self._call(name, rollout, [e.model_dump(mode="json") for e in events])
            except (HookFailed, GatewayError) as e:
                self._report(f"{name} failed for {item.rollout_id}: {e}")
            finally:
                self._ended.task_done()

    async def _call(self, name: str, *args: Any) -> Any:
        async with self._lock:
            if self._process is None:
                await self._start()
            try:
                async with asyncio.timeout(self._timeout):
                    return await self._ask(orjson.dumps({"hook": name, "args": args}))
            except TimeoutError:
                await self._stop()
                self._names.discard(name)
                raise HookFailed(f"it took longer than {self._timeout:g} s and isn't called any more") from None

    async def _ask(self, line: bytes | None) -> Any:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            if line is not None:
                process.stdin.write(line + b"\n")
                await process.stdin.drain()
            said = await process.stdout.readline()
        except (ConnectionError, ValueError) as e:
            await self._stop()
            raise HookFailed(f"its process didn't answer: {e}") from None
        if not said:
            await self._stop()
            raise HookFailed("its process ended")
        answer = orjson.loads(said)
        if "error" in answer:
            raise HookFailed(answer["error"])
        return answer["result"]

    async def _start(self) -> None:
        if self._starts > STARTS:
            self._names.clear()
            raise HookFailed("their process ended too often")
        first = self._starts == 0
        self._starts += 1
        # The run's keys aren't the hooks' business.
        env = {k: v for k, v in os.environ.items() if not k.startswith("LEYDEN_")}
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("hook_process.py")),
            str(self._file),
            stdin=pipe,
            stdout=pipe,
            env=env,
            limit=MAX_LINE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(max(self._timeout, 30)):
                names = set(await self._ask(None))
        except TimeoutError:
            await self._stop()
            raise HookFailed(f"{self._file.name} took too long to load") from None
        except HookFailed as e:
            await self._stop()
            raise HookFailed(f"can't load {self._file.name}: {e}") from None
        if first:
            self._names = names
            if not names:
                self._report(f"hooks: {self._file.name} has none of on_enqueue, on_succeeded, on_failed")

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await process.wait()


def _hook_of(item: TerminalItem) -> str:
    return "on_succeeded" if item.state is RolloutState.SUCCEEDED else "on_failed"

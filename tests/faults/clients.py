"""Clients that go on talking while gateways die under them, and remember what was acknowledged."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.faults.processes import ADMIN

TURNS = 4
THINK_SECONDS = 0.3
"""Longest pause of a client before a request."""
RETRY_SECONDS = 0.1
TRIES = 600
_LOST = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError, json.JSONDecodeError)


@dataclass
class Acknowledged:
    """What clients were told is done."""

    calls: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """By request (its last user message, unlike any other): rollout, call, text."""
    events: list[tuple[str, int]] = field(default_factory=list)
    """(rollout, number of the event)."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The last of each rollout."""
    repeated: int = 0
    """Requests that had to be sent again."""
    unexpected: list[str] = field(default_factory=list)
    """Answers that shouldn't have been given."""


class Client:
    """One agent and its controller: takes a rollout, talks, rewards itself, ends it, takes the next."""

    def __init__(self, number: int, urls: Sequence[str], http: aiohttp.ClientSession, seen: Acknowledged) -> None:
        self._name = f"client{number}"
        self._urls: Iterator[str] = itertools.cycle([*urls[number % len(urls) :], *urls[: number % len(urls)]])
        self._http = http
        self._seen = seen
        self._numbers = itertools.count()
        self._chance = random.Random(number)
        self.stop = False

    async def run(self) -> None:
        while not self.stop:
            (made,) = await self._ask("/api/rollouts", [{"input": self._name, "rollout_id": self._unique()}])
            claims = await self._ask(
                "/api/claims", {"controller_id": self._name, "lease_seconds": 3600, "limit": 1, "wait_seconds": 0}
            )
            if claims:  # Another client may have taken the one that was just made; then there is one of its for later.
                await self._attempt(claims[0])
            assert made

    def _unique(self) -> str:
        return f"{self._name}.{next(self._numbers)}"

    async def _attempt(self, claim: dict[str, Any]) -> None:
        rollout, attempt, key = claim["rollout"]["rollout_id"], claim["attempt_id"], claim["agent_key"]
        messages: list[dict[str, Any]] = []
        for turn in range(TURNS):
            asked = f"question {self._unique()}"
            messages.append({"role": "user", "content": asked})
            call, text = await self._call(key, {"model": "tiny", "messages": messages, "stream": turn % 2 == 1})
            self._seen.calls[asked] = (rollout, call, text)
            messages.append({"role": "assistant", "content": text})
            number = next(self._numbers)
            events = f"/api/rollouts/{rollout}/attempt/{attempt}/events"
            data = {"value": number / 7, "number": number}
            await self._ask(events, {"event_type": "reward", "data": data}, once=f"{rollout}-{number}")
            self._seen.events.append((rollout, number))
            self._seen.rewards[rollout] = data["value"]
            if self.stop:
                return
        outcome = f"/api/rollouts/{rollout}/attempt/{attempt}/outcome"
        await self._ask(outcome, {"controller_id": self._name, "outcome": "ok"})

    async def _ask(self, path: str, body: Any, once: str | None = None) -> Any:
        headers = {"x-api-key": ADMIN, **({"Idempotency-Key": once} if once else {})}

        async def send(url: str) -> Any:
            async with self._http.post(url + path, json=body, headers=headers) as answer:
                return await self._read(answer)

        return await self._until_answered(send)

    async def _call(self, key: str, body: dict[str, Any]) -> tuple[str, str]:
        """A model call, repeated as it is until its whole answer has come: (call id, text)."""

        async def send(url: str) -> tuple[str, str]:
            headers = {"Authorization": f"Bearer {key}"}
            async with self._http.post(f"{url}/openai/v1/chat/completions", json=body, headers=headers) as answer:
                if not body["stream"]:
                    whole = await self._read(answer)
                    return whole["id"].removeprefix("chatcmpl-"), whole["choices"][0]["message"]["content"]
                return _join(await self._read(answer, text=True))

        return await self._until_answered(send)

    async def _read(self, answer: aiohttp.ClientResponse, *, text: bool = False) -> Any:
        body = await answer.read()
        if answer.status >= 400:
            self._seen.unexpected.append(f"{answer.status} {answer.url.path}: {body[:300].decode()}")
            raise aiohttp.ClientPayloadError(f"status {answer.status}")
        return body.decode() if text else json.loads(body)

    async def _until_answered(self, send: Any) -> Any:
        # As agents do between calls. Without it the clients take all of a small machine, and what is measured of a
        # restart is how long it waits for a processor.
        await asyncio.sleep(self._chance.uniform(0, THINK_SECONDS))
        for _ in range(TRIES):
            try:
                return await send(next(self._urls))
            except _LOST:
                self._seen.repeated += 1
                await asyncio.sleep(RETRY_SECONDS)
        raise AssertionError(f"{self._name} got no answer in {TRIES} tries")


def _join(stream: str) -> tuple[str, str]:
    """Id and text of a streamed answer. Raises when its end is missing."""
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise aiohttp.ClientPayloadError("the stream ended early")
    chunks = [json.loads(e) for e in events[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    return chunks[-1]["id"].removeprefix("chatcmpl-"), text

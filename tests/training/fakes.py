"""A gateway and an engine in memory: rollouts end as soon as they are created, sampled from a real tiny model.

What a rollout samples depends on its weights and its id without the replay suffix, so runs can be compared number
by number.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from leyden.errors import GatewayError
from leyden.schema import (
    Attempt,
    CallRecord,
    EngineModel,
    Outcome,
    Rollout,
    RolloutCreate,
    RolloutDetail,
    RolloutPage,
    RolloutState,
    RolloutStatus,
    TerminalItem,
    TerminalPage,
    Trajectory,
)

torch.set_num_threads(1)
"""A model this small only waits on other threads, for ages when the machine is busy."""


class Crash(Exception):
    """The process ends here."""


class FakeEngine:
    """Serves a tiny model; `fault` spoils what it loads."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.weights_version = 0
        self.loads = 0
        self.fault: Callable[[int], None] | None = None
        self.spoil = 0.0

    async def load_weights(self, folder: Path, version: int) -> None:
        if self.fault is not None:
            self.fault(version)
        self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        self.model.tie_weights()
        with torch.no_grad():
            self.model.get_output_embeddings().weight.mul_(1 + self.spoil)
        self.weights_version = version
        self.loads += 1

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        return self.score(ids)[1:]

    async def version(self) -> int | None:
        return self.weights_version

    def announce(self, version: int) -> EngineModel:
        return EngineModel(model="tiny", endpoint="http://127.0.0.1:1/v1", version=version, kind="leyden")

    @torch.no_grad()
    def score(self, ids: list[int]) -> list[float]:
        logp = self.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return [0.0] + [float(logp[i - 1, t]) for i, t in enumerate(ids) if i]

    @torch.no_grad()
    def sample(self, prompt: list[int], n: int, seed: int) -> tuple[list[int], list[float]]:
        rng = np.random.default_rng(seed)
        ids = list(prompt)
        logprobs = []
        for _ in range(n):
            logp = self.model(input_ids=torch.tensor([ids])).logits[0, -1].double().log_softmax(-1).numpy()
            token = int(np.searchsorted(np.cumsum(np.exp(logp)), rng.random() * 0.999999))
            ids.append(token)
            logprobs.append(float(logp[token]))
        return ids[len(prompt) :], logprobs


def reward_small_ids(response: list[int]) -> float:
    """Share of tokens in the lower half of the vocabulary: easy to learn."""
    return sum(t < 140 for t in response) / len(response)


class FakeGateway:
    """The parts of LeydenClient that the loop uses. `outcome` and `reward` may be replaced to script rollouts."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.registered: list[int] = []
        self.rollouts: dict[str, Rollout] = {}
        self.records: dict[str, Trajectory] = {}
        self.ended: list[str] = []
        self.outcome: Callable[[RolloutCreate], tuple[Outcome, str | None]] = lambda _: (Outcome.OK, None)
        self.reward: Callable[[RolloutCreate, list[int]], float | None] = lambda _, response: reward_small_ids(response)
        self.untrainable: str | None = None
        self.hold: Callable[[RolloutCreate], bool] = lambda _: False
        self.before: Callable[[str], None] = lambda _: None
        self.held: list[RolloutCreate] = []

    async def create_rollouts(self, items: list[RolloutCreate], idempotency_key: str | None = None) -> list[Rollout]:
        self.before("create")
        for item in items:
            assert item.rollout_id is not None and item.config is not None and item.metadata is not None
            if item.rollout_id not in self.rollouts:
                status = RolloutStatus(created_at=1.0, updated_at=1.0, state=RolloutState.RUNNING)
                self.rollouts[item.rollout_id] = Rollout(
                    rollout_id=item.rollout_id,
                    input=item.input,
                    is_train=item.is_train,
                    config=item.config,
                    metadata=item.metadata,
                    status=status,
                )
                if not self.hold(item):
                    self._end(item)
        return [self.rollouts[i.rollout_id].model_copy(deep=True) for i in items if i.rollout_id]

    def _end(self, item: RolloutCreate) -> None:
        name = item.rollout_id
        assert name is not None
        base = name.split(".r")[0]
        prompt = [1, 7, 30 + int(item.input["n"])]
        first, first_logprobs = self.engine.sample(prompt, 3, zlib.crc32(base.encode()))
        second_prompt = [*prompt, *first, 9, 9]
        second, second_logprobs = self.engine.sample(second_prompt, 2, zlib.crc32(base.encode()) + 1)
        outcome, reason = self.outcome(item)
        status = self.rollouts[name].status
        status.state = RolloutState.SUCCEEDED if outcome == Outcome.OK else RolloutState.FAILED
        status.outcome, status.error_message, status.calls = outcome, reason, 2
        status.reward = self.reward(item, first + second) if outcome == Outcome.OK else None
        turns = [(prompt, first, first_logprobs, None), (second_prompt, second, second_logprobs, f"{name}/0")]
        self.records[name] = Trajectory(
            rollout_id=name,
            attempt_id="0",
            outcome=outcome.value,
            reward=status.reward,
            calls=[
                CallRecord(
                    call_id=f"{name}/{i}",
                    seq=i,
                    attempt_id="0",
                    dialect="openai-chat",
                    prompt_ids=np.array(p, "<i4").tobytes(),
                    response_ids=np.array(r, "<i4").tobytes(),
                    logprobs=np.array(lp, "<f4").tobytes(),
                    versions=np.full(len(r), self.engine.weights_version, "<i4").tobytes(),
                    finish_reason="stop",
                    parent=parent,
                    untrainable=self.untrainable,
                )
                for i, (p, r, lp, parent) in enumerate(turns)
            ],
        )
        self.ended.append(name)

    async def terminal(
        self, after: int = 0, *, limit: int = 1000, wait_seconds: float = 0, run: str | None = None
    ) -> TerminalPage:
        self.before("terminal")
        items = [self._item(self.rollouts[n]) for n in self.ended[after : after + limit]]
        return TerminalPage(items=items, next_after=after + len(items), total_terminal=len(self.ended))

    def _item(self, r: Rollout) -> TerminalItem:
        return TerminalItem(
            rollout_id=r.rollout_id,
            state=r.status.state,
            is_train=r.is_train,
            outcome=r.status.outcome,
            reward=r.status.reward,
            calls=r.status.calls,
            metadata=r.metadata,
        )

    async def trajectory(self, rollout_id: str, *, content: bool = False) -> Trajectory:
        self.before("trajectory")
        return self.records[rollout_id]

    async def rollout(self, rollout_id: str) -> RolloutDetail:
        if rollout_id not in self.rollouts:
            raise GatewayError("no such rollout", 404)
        attempt = Attempt(attempt_id="0", controller_id="box-1", started_at=1.0)
        return RolloutDetail(rollout=self.rollouts[rollout_id], attempts=["0"], attempt_details=[attempt])

    async def page(self, *, run: str | None = None, limit: int = 50, **_: object) -> RolloutPage:
        items = list(self.rollouts.values())
        return RolloutPage(items=items[:limit], total=len(items), by_state={})

    async def register_models(self, models: list[EngineModel]) -> None:
        self.before("register")
        self.registered.append(models[0].version)

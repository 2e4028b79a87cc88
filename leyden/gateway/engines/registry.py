"""Which engines there are, what they can do, and which one serves a call."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from leyden.gateway.engines.queue import FairQueue
from leyden.gateway.signals import Signal
from leyden.schema import EngineModel, ModelRoute


def route(routes: Sequence[ModelRoute], served_model: str, asked: str) -> ModelRoute:
    """Where a call goes whose client asks for `asked`: the first route that fits, else the served model."""
    for candidate in routes:
        if fnmatchcase(asked, candidate.match):
            return candidate
    return _everything(served_model)


@lru_cache(maxsize=16)
def _everything(served_model: str) -> ModelRoute:
    return ModelRoute(match="*", model=served_model)


def length_of(lengths: Mapping[str, int], model: str) -> int | None:
    """The context of `model` among what its engine says; of the only one that there is, whatever its name."""
    return lengths.get(model, next(iter(lengths.values())) if len(lengths) == 1 else None)


class EngineRegistry:
    """Registered engines, in memory; the store keeps them over restarts."""

    def __init__(self, served_model: str) -> None:
        self.served_model = served_model
        self.changed = Signal()
        self.lengths: dict[str, dict[str, int]] = {}
        """Context lengths that engines themselves tell, by endpoint and model."""
        self._models: list[EngineModel] = []
        self._queues: dict[str, FairQueue] = {}

    def set(self, models: Sequence[EngineModel]) -> None:
        self._models = list(models)
        endpoints = {m.endpoint for m in models}
        self._queues = {e: q for e, q in self._queues.items() if e in endpoints}
        for model in models:
            if model.endpoint in self._queues:
                self._queues[model.endpoint].resize(model.max_concurrency)
        self.changed.notify()

    def all(self) -> list[EngineModel]:
        return list(self._models)

    def serving(self, model: str) -> list[EngineModel]:
        """The engines that are registered for `model`."""
        return [m for m in self._models if m.model == model]

    def max_model_len(self, model: str | None = None) -> int | None:
        """The least context that any engine of `model` has: a prompt within it fits wherever it goes."""
        found = [self._length(m) for m in self.serving(model or self.served_model)]
        return min((n for n in found if n is not None), default=None)

    def _length(self, engine: EngineModel) -> int | None:
        """Its context as registered, else as it says itself."""
        if engine.max_model_len is not None:
            return engine.max_model_len
        told = self.lengths.get(engine.endpoint)
        return length_of(told, engine.model) if told else None

    def queue(self, engine: EngineModel) -> FairQueue:
        queue = self._queues.get(engine.endpoint)
        if queue is None:
            queue = self._queues[engine.endpoint] = FairQueue(engine.max_concurrency)
        return queue

    def waiting(self) -> int:
        """Calls that wait for an engine to have room."""
        return sum(q.waiting for q in self._queues.values())

    def pick(self, rollout_id: str, avoid: Collection[str] = (), model: str | None = None) -> EngineModel | None:
        """The engine of a rollout: always the same one while it is there, so that its cached prefixes are of use.

        Rendezvous hashing: when an engine comes or goes, only the rollouts that it gains or loses move. `avoid` names
        endpoints that just failed; they are chosen only when nothing else is left.
        """
        mine = self.serving(model or self.served_model)
        fresh = [m for m in mine if m.endpoint not in avoid] or mine
        if len(fresh) == 1:
            return fresh[0]

        def weight(engine: EngineModel) -> bytes:
            return hashlib.blake2b(f"{rollout_id}\n{engine.endpoint}".encode(), digest_size=8).digest()

        return max(fresh, key=weight, default=None)

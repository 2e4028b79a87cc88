"""Which engines there are, and which one serves a rollout."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from leyden.gateway.signals import Signal
from leyden.schema import EngineModel


class EngineRegistry:
    """Registered engines, in memory; the store keeps them over restarts."""

    def __init__(self, served_model: str) -> None:
        self.served_model = served_model
        self.changed = Signal()
        self._models: list[EngineModel] = []

    def set(self, models: Sequence[EngineModel]) -> None:
        self._models = list(models)
        self.changed.notify()

    def all(self) -> list[EngineModel]:
        return list(self._models)

    def max_model_len(self) -> int | None:
        """The least context that any engine has: a prompt within it fits wherever it goes."""
        known = [m.max_model_len for m in self._models if m.max_model_len is not None]
        return min(known, default=None)

    def pick(self, rollout_id: str, avoid: Collection[str] = ()) -> EngineModel | None:
        """The engine of a rollout: always the same one while it is there, so that its cached prefixes are of use.

        Rendezvous hashing: when an engine comes or goes, only the rollouts that it gains or loses move. `avoid` names
        endpoints that just failed; they are chosen only when nothing else is left.
        """
        mine = [m for m in self._models if m.model == self.served_model] or self._models
        fresh = [m for m in mine if m.endpoint not in avoid] or mine

        def weight(engine: EngineModel) -> bytes:
            return hashlib.blake2b(f"{rollout_id}\n{engine.endpoint}".encode(), digest_size=8).digest()

        return max(fresh, key=weight, default=None)

"""A store with rollouts that have begun, for tests of what is traced."""

from __future__ import annotations

from typing import Any

from groundwire.adapters.tracing import LLMCall
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.rollout import Rollout

__all__ = ["OpenRollouts"]


class OpenRollouts(MemoryStore):
    """A store in memory."""

    async def start(self, **fields: Any) -> Rollout:
        """Begin a rollout."""
        await self.enqueue([Rollout(**{"task": {}, **fields})])
        [rollout] = await self.dequeue(1)
        return rollout

    async def calls(self, rollout_id: str) -> list[LLMCall]:
        """The calls of a rollout's last attempt."""
        rollout = await self.get(rollout_id)
        assert rollout is not None
        return rollout.calls

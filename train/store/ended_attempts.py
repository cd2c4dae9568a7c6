"""Keeps ended attempts ended.

Agent Lightning treats a late span as a heartbeat: the attempt runs again, and a rollout that waits for its next attempt
is marked as running, so no runner takes it until it times out. Late spans are common: the proxy writes the call that an
interrupted agent had begun.
"""

from __future__ import annotations

from typing import Any

from agentlightning.store.collection_based import CollectionBasedLightningStore

__all__ = ["IgnoreLateSpans"]


class IgnoreLateSpans(CollectionBasedLightningStore[Any]):
    """Base class of stores in which a span does not revive an ended attempt."""

    async def _on_attempt_heartbeat(self, rollout_id: str, attempt_id: str) -> Any:
        key: Any = {"rollout_id": {"exact": rollout_id}, "attempt_id": {"exact": attempt_id}}
        attempt = await self.collections.attempts.get(key)
        if attempt is None or attempt.status in ("failed", "succeeded", "timeout"):
            return None
        return await super()._on_attempt_heartbeat(rollout_id, attempt_id)

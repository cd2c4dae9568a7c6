"""What Agent Lightning's stores do with a span that arrives after its attempt has ended: more than they should.

They take it for a sign of life, and where the rollout already waits for its next attempt they mark it as running. No
runner then takes it, and it is lost until it times out. The proxy writes such spans as a matter of course: the call
that an interrupted agent leaves behind.
"""

from __future__ import annotations

from typing import Any

from agentlightning.store.collection_based import CollectionBasedLightningStore

__all__ = ["IgnoreLateSpans"]


class IgnoreLateSpans(CollectionBasedLightningStore[Any]):
    """A store in which an attempt that has ended stays so."""

    async def _on_attempt_heartbeat(self, rollout_id: str, attempt_id: str) -> Any:
        key: Any = {"rollout_id": {"exact": rollout_id}, "attempt_id": {"exact": attempt_id}}
        attempt = await self.collections.attempts.get(key)
        if attempt is None or attempt.status in ("failed", "succeeded", "timeout"):
            return None
        return await super()._on_attempt_heartbeat(rollout_id, attempt_id)

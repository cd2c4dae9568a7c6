"""The store of a run without an external store: it lives in the trainer's process and ends with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentlightning.store.memory import InMemoryLightningStore

from groundwire.train.store.ended_attempts import IgnoreLateSpans

__all__ = ["MemoryStore"]

_SPAN_BYTES = 64 << 20  # spans are read once, soon after their rollout has ended


class MemoryStore(IgnoreLateSpans, InMemoryLightningStore):
    """Agent Lightning's in-memory store; beyond ``span_bytes`` it drops the oldest spans.

    ``on_attempt_end`` is called with the rollout's id when an attempt has ended, in whichever process its runner is.
    """

    def __init__(self, *, on_attempt_end: Callable[[str], None], span_bytes: int = _SPAN_BYTES) -> None:
        super().__init__(eviction_memory_threshold=span_bytes, safe_memory_threshold=span_bytes // 2)
        self._on_attempt_end = on_attempt_end

    async def update_attempt(self, rollout_id: str, attempt_id: str, **changes: Any) -> Any:
        """Change an attempt; the result is the new attempt."""
        attempt = await super().update_attempt(rollout_id, attempt_id, **changes)
        if attempt.status in ("succeeded", "failed"):
            self._on_attempt_end(rollout_id)
        return attempt

"""The store of a run without an external store: it lives in the trainer's process and ends with it."""

from __future__ import annotations

from agentlightning.store.memory import InMemoryLightningStore

from groundwire.train.store.ended_attempts import IgnoreLateSpans, NotifyAttemptEnd

__all__ = ["SPAN_BYTES", "MemoryStore"]

SPAN_BYTES = 64 << 20
"""Enough for a trainer, which reads the spans once, soon after their rollout has ended."""


class MemoryStore(NotifyAttemptEnd, IgnoreLateSpans, InMemoryLightningStore):
    """Agent Lightning's in-memory store; beyond ``span_bytes`` it drops the oldest spans."""

    def __init__(self, *, span_bytes: int = SPAN_BYTES) -> None:
        super().__init__(eviction_memory_threshold=span_bytes, safe_memory_threshold=span_bytes // 2)

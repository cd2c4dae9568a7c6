"""What the proxy traces as spans in a store object of Agent Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.types import Span

from groundwire.adapters.tracing import LLMCall, to_span
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.tools.secrets import secret_masker
from groundwire.train.store.agent_lightning import read_rollout, span_json
from groundwire.train.store.base import without_secrets

__all__ = ["LightningSpanSink"]


class LightningSpanSink:
    """A :class:`groundwire.adapters.tracing.spans.CallSink` in front of ``store``."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store

    @cached_property
    def _mask(self) -> Callable[[str], str]:
        """Made with the first span: the proxy registers its API key after it is given this sink."""
        return secret_masker()

    async def sampling_of(self, rollout_id: str, attempt_id: str) -> Mapping[str, Any] | None:
        """The attempt's sampling parameters; None unless it is the rollout's last attempt, and has not ended."""
        rollout = await self._store.get_rollout_by_id(rollout_id)
        return None if rollout is None else read_rollout(rollout.model_dump()).open_sampling(attempt_id)

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One number for each (rollout id, attempt id), rising within an attempt."""
        return await self._store.get_many_span_sequence_ids(attempts)

    async def add_calls(self, calls: Sequence[LLMCall]) -> None:
        """Store ``calls``; those that are stored already are skipped."""
        await self.add_annotations([to_span(call) for call in calls])

    async def add_annotations(self, spans: Sequence[SpanRecord]) -> None:
        """Store other ``spans``; those that are stored already are skipped."""
        await self._store.add_many_spans([Span(**span_json(without_secrets(span, self._mask))) for span in spans])

"""What the proxy traces as spans in a store object of Agent Lightning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.adapters.tracing import LLMCall, to_span
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.tools.secrets import secret_masker
from groundwire.train.store.agent_lightning import read_rollout, span_json
from groundwire.train.store.base import without_secrets


class LightningSpanSink:
    """A :class:`groundwire.adapters.tracing.spans.CallSink`, whose methods it has, in front of a ``LightningStore``."""

    def __init__(self, store: Any) -> None:
        self._store, self.reserve_sequence_ids = store, store.get_many_span_sequence_ids

    async def sampling_of(self, rollout_id: str, attempt_id: str) -> Mapping[str, Any] | None:
        rollout = await self._store.get_rollout_by_id(rollout_id)
        return None if rollout is None else read_rollout(rollout.model_dump()).open_sampling(attempt_id)

    async def add_calls(self, calls: Sequence[LLMCall]) -> None:
        await self.add_annotations([to_span(call) for call in calls])

    async def add_annotations(self, spans: Sequence[SpanRecord]) -> None:
        from agentlightning.types import Span

        mask = secret_masker()
        await self._store.add_many_spans([Span(**span_json(without_secrets(span, mask))) for span in spans])

"""Takes in the spans of a request, as JSON or by OTLP. A span that cannot be stored does not affect the others."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pydantic
from agentlightning.semconv import LightningResourceAttributes
from agentlightning.store.base import LightningStore
from agentlightning.types import Span
from agentlightning.utils.otlp import spans_from_proto
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

from groundwire.train.store.limits import (
    MAX_ITEMS,
    MAX_REQUEST_BYTES,
    CheckedSpan,
    RefusedValueError,
    check_id,
    check_request,
    first_problem,
)

__all__ = ["SpanIntake"]

_PART = 200
_IDS = (LightningResourceAttributes.ROLLOUT_ID.value, LightningResourceAttributes.ATTEMPT_ID.value)


class SpanIntake:
    """The spans of one request; each attempt's are stored in their own transactions.

    ``new_ids`` are the span ids that were not in the store before; ``stored`` counts all spans that are in it now,
    ``refused`` those that are not.
    """

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
        self._reasons: list[str] = []
        self.new_ids: list[str] = []
        self.stored = self.refused = 0

    def message(self) -> str:
        """How many spans were refused, and the first reason."""
        others = ", the others are stored" if self.stored else ""
        return f"{self.refused} of {self.refused + self.stored} spans were refused{others}: {self._reasons[0]}"

    async def add_json(self, items: Sequence[Any]) -> None:
        """Store spans that are parsed JSON."""
        for number, item in enumerate(items):
            await _let_others(number)
            try:
                self._accept(CheckedSpan.model_validate(item))
            except ValueError as error:
                self._refuse(1, error)
        await self._store_groups()

    async def add_otlp(self, request: ExportTraceServiceRequest) -> None:
        """Store the spans of an OTLP request; those without a rollout are left out."""
        for number, single in enumerate(_single_spans(request)):
            await _let_others(number)
            try:
                _check_ids(single)
                for span in await spans_from_proto(single, self._store.get_many_span_sequence_ids):
                    self._accept(span)
            except (ValueError, OverflowError) as error:
                self._refuse(1, error)
        await self._store_groups()

    def _accept(self, span: Span) -> None:
        check_request({}, span)
        self._groups[span.rollout_id, span.attempt_id].append(span)

    async def _store_groups(self) -> None:
        for group in _parts(self._groups.values()):
            await asyncio.sleep(0)
            try:
                self.new_ids += [span.span_id for span in await self._store.add_many_spans(group)]
                self.stored += len(group)
            except ValueError as error:  # raised by the stores for an unknown rollout or attempt
                self._refuse(len(group), error)

    def _refuse(self, spans: int, error: Exception) -> None:
        self.refused += spans
        self._reasons.append(first_problem(error) if isinstance(error, pydantic.ValidationError) else str(error))


async def _let_others(number: int) -> None:
    """A pause after some spans, in which the store serves other clients."""
    if number % _PART == 0:
        await asyncio.sleep(0)


def _parts(groups: Iterable[list[Span]]) -> Iterator[list[Span]]:
    for group in groups:
        for start in range(0, len(group), _PART):
            yield group[start : start + _PART]


def _single_spans(request: ExportTraceServiceRequest) -> Iterator[ExportTraceServiceRequest]:
    """A request for each span, with the attributes of its resource."""
    count = size = 0
    for of_resource in request.resource_spans:
        spans = sum(len(of_scope.spans) for of_scope in of_resource.scope_spans)
        count += spans
        # Each stored span contains its resource, so that a large one would be stored many times.
        size += of_resource.ByteSize() + spans * of_resource.resource.ByteSize()
    if count > MAX_ITEMS:
        raise RefusedValueError(f"the request has {count} spans; at most {MAX_ITEMS} are allowed")
    if size > MAX_REQUEST_BYTES:
        raise RefusedValueError(f"the spans with their resources have {size >> 20} MiB; send them in smaller requests")
    for of_resource in request.resource_spans:
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                single = ResourceSpans(resource=of_resource.resource, schema_url=of_resource.schema_url)
                single.scope_spans.append(ScopeSpans(spans=[span]))
                yield ExportTraceServiceRequest(resource_spans=[single])


def _check_ids(single: ExportTraceServiceRequest) -> None:
    """Check the ids before Agent Lightning logs them."""
    [of_resource] = single.resource_spans
    [span] = of_resource.scope_spans[0].spans
    for attribute in (*of_resource.resource.attributes, *span.attributes):
        if attribute.key in _IDS:
            check_id(attribute.key, attribute.value.string_value)

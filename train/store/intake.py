"""Takes in the spans of a request, as JSON or by OTLP. A span that cannot be stored does not affect the others."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pydantic
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from groundwire.train.store.agent_lightning import SpanFields
from groundwire.train.store.limits import MAX_ITEMS, MAX_REQUEST_BYTES, RefusedValueError, check_request, first_problem

_PART = 200
_IDS = ("agentlightning.rollout_id", "agentlightning.attempt_id", "agentlightning.span_sequence_id")
_NANO = 1_000_000_000


class SpanIntake:
    """The spans of one request; each attempt's are stored in their own transactions.

    ``store`` is a :class:`.lightning_store.LightningStore` or has its methods. ``new_ids`` are the span ids that were
    not in the store before; ``stored`` counts all spans that are in it now, ``refused`` those that are not.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self._reasons: list[str] = []
        self.new_ids: list[str] = []
        self.stored = self.refused = 0

    def message(self) -> str:
        """How many spans were refused, and the first reason."""
        others = ", the others are stored" if self.stored else ""
        return f"{self.refused} of {self.refused + self.stored} spans were refused{others}: {self._reasons[0]}"

    async def add_json(self, items: Iterable[Any]) -> None:
        """Store spans that are parsed JSON. A missing number (None) is given."""
        for number, item in enumerate(items):
            if number % _PART == 0:
                await asyncio.sleep(0)  # the store serves other clients
            try:
                await self._accept(item)
            except (ValueError, OverflowError) as error:
                self._refuse(1, error)
        for group in self._groups.values():
            for start in range(0, len(group), _PART):
                await asyncio.sleep(0)
                await self._store_part(group[start : start + _PART])

    async def add_otlp(self, request: ExportTraceServiceRequest) -> None:
        """Store the spans of an OTLP request; those without a rollout are left out."""
        count = size = 0
        for of_resource in request.resource_spans:
            spans = sum(len(of_scope.spans) for of_scope in of_resource.scope_spans)
            count += spans
            # Each stored span contains its resource, so that a large one would be stored many times.
            size += of_resource.ByteSize() + spans * of_resource.resource.ByteSize()
        if count > MAX_ITEMS:
            raise RefusedValueError(f"the request has {count} spans; at most {MAX_ITEMS} are allowed")
        if size > MAX_REQUEST_BYTES:
            raise RefusedValueError(
                f"the spans with their resources have {size >> 20} MiB; send them in smaller requests"
            )
        await self.add_json(span for of_resource in request.resource_spans for span in _spans_of(of_resource))

    async def _accept(self, item: Any) -> None:
        if isinstance(item, dict) and item.get("sequence_id", 0) is None:
            check_request({name: item[name] for name in ("rollout_id", "attempt_id")}, None)
            [number] = await self._store.get_many_span_sequence_ids([(item["rollout_id"], item["attempt_id"])])
            item["sequence_id"] = number
        span = SpanFields.model_validate(item)
        check_request({}, span)
        self._groups[span.rollout_id, span.attempt_id].append(span.model_dump())

    async def _store_part(self, spans: Sequence[dict[str, Any]]) -> None:
        try:
            self.new_ids += await self._store.add_many_spans(spans)
            self.stored += len(spans)
        except ValueError as error:  # raised by the stores for an unknown rollout or attempt
            self._refuse(len(spans), error)

    def _refuse(self, spans: int, error: Exception) -> None:
        self.refused += spans
        self._reasons.append(first_problem(error) if isinstance(error, pydantic.ValidationError) else str(error))


def _spans_of(of_resource: ResourceSpans) -> Iterator[dict[str, Any]]:
    """The spans of one resource as JSON; those without a rollout are left out.

    The resource or the span names the rollout, the attempt and perhaps the sequence number, else that is None.
    """
    resource = _attributes(of_resource.resource.attributes)
    for span in (span for of_scope in of_resource.scope_spans for span in of_scope.spans):
        attributes, context = _attributes(span.attributes), _context(span)
        rollout_id, attempt_id, number = [attributes.get(name, resource.get(name)) for name in _IDS]
        if rollout_id is None or attempt_id is None:
            continue
        yield {
            "name": span.name,
            "rollout_id": str(rollout_id),
            "attempt_id": str(attempt_id),
            "sequence_id": int(str(number)) if str(number).isdecimal() else None,
            "trace_id": context["trace_id"],
            "span_id": context["span_id"],
            "parent_id": span.parent_span_id.hex().rjust(16, "0") if span.parent_span_id else None,
            "attributes": attributes,
            "start_time": span.start_time_unix_nano / _NANO or None,
            "end_time": span.end_time_unix_nano / _NANO or None,
            "status": {"status_code": ("UNSET", "OK", "ERROR")[span.status.code], "description": span.status.message},
            "context": context,
            "parent": None,
            "resource": {"attributes": resource, "schema_url": of_resource.schema_url},
            "events": [
                {
                    "name": event.name,
                    "attributes": _attributes(event.attributes),
                    "timestamp": event.time_unix_nano / _NANO,
                }
                for event in span.events
            ],
            "links": [{"context": _context(link), "attributes": _attributes(link.attributes)} for link in span.links],
        }


def _context(of: Any) -> dict[str, Any]:
    trace_id, span_id = of.trace_id.hex().rjust(32, "0"), of.span_id.hex().rjust(16, "0")
    return {"trace_id": trace_id, "span_id": span_id, "is_remote": False, "trace_state": {}}


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    """An OTLP value as JSON; bytes as hexadecimal."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return None if kind is None else getattr(value, kind)

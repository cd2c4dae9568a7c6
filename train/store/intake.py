"""Takes in the spans of a request, as JSON or by OTLP. A span that cannot be stored does not affect the others."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from groundwire.train.store.agent_lightning import SpanFields
from groundwire.train.store.limits import MAX_ITEMS, MAX_REQUEST_BYTES, BadRequestError, problem

_CHUNK = 50
_IDS = ("agentlightning.rollout_id", "agentlightning.attempt_id", "agentlightning.span_sequence_id")
_NANO = 1_000_000_000


async def store_spans(store: Any, items: Iterable[Mapping[str, Any]]) -> tuple[int, int, str]:
    """Store spans, which are JSON; one whose ``sequence_id`` is None gets the next number of its attempt.

    ``store`` is a :class:`.lightning_store.LightningStore` or has its methods. Returns how many spans are stored, how
    many were refused, and a message about these.
    """
    by_attempt: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    stored, reasons = 0, list[str]()
    for item in items:
        await asyncio.sleep(0)  # the store serves other clients
        try:
            number = item.get("sequence_id")
            span = SpanFields.model_validate({**item, "sequence_id": number or 0}).model_dump()
            ids = (span["rollout_id"], span["attempt_id"])
            if number is None:
                [span["sequence_id"]] = await store.get_many_span_sequence_ids([ids])
            by_attempt[ids].append(span)
        except ValueError as error:
            reasons.append(problem(error))
    for spans in by_attempt.values():
        for start in range(0, len(spans), _CHUNK):  # each in a transaction of its own
            chunk = spans[start : start + _CHUNK]
            await asyncio.sleep(0)
            try:
                await store.add_many_spans(chunk)
                stored += len(chunk)
            except ValueError as error:  # raised by the stores for an unknown rollout or attempt
                reasons += [problem(error)] * len(chunk)
    others = ", the others are stored" if stored else ""
    count = f"{len(reasons)} of {len(reasons) + stored} spans were refused{others}"
    return stored, len(reasons), f"{count}: {reasons[0]}" if reasons else ""


def spans_of(request: ExportTraceServiceRequest) -> Iterator[dict[str, Any]]:
    """The spans of an OTLP request as JSON; those without a rollout are left out. Raises :class:`.BadRequestError`."""
    count = size = 0
    for of_resource in request.resource_spans:
        spans = sum(len(of_scope.spans) for of_scope in of_resource.scope_spans)
        count += spans
        # Each stored span contains its resource, so that a large one would be stored many times.
        size += of_resource.ByteSize() + spans * of_resource.resource.ByteSize()
    if count > MAX_ITEMS:
        raise BadRequestError(f"the request has {count} spans; at most {MAX_ITEMS} are allowed")
    if size > MAX_REQUEST_BYTES:
        raise BadRequestError(f"the spans with their resources have {size >> 20} MiB; send them in smaller requests")
    for of_resource in request.resource_spans:
        yield from _spans_of(of_resource)


def _spans_of(of_resource: ResourceSpans) -> Iterator[dict[str, Any]]:
    """The resource or the span names the rollout, the attempt and perhaps the sequence number, else that is None."""
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

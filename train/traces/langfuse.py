"""Langfuse: traces with their observations and scores, or each alone, as its API, exports and SDK write them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from statistics import fmean
from typing import Any

from groundwire.tools.files import parse_json
from groundwire.train.traces.messages import first, text_of, value_of
from groundwire.train.traces.otlp import read_span
from groundwire.train.traces.record import seconds
from groundwire.train.traces.spans import Item, TracerSpan, each, rollout_of

name, build = "Langfuse", rollout_of
_TYPES = {
    "GENERATION", "TOOL", "AGENT", "EVALUATOR", "GUARDRAIL", "SPAN", "EVENT", "CHAIN", "RETRIEVER", "EMBEDDING",
}  # fmt: skip
_LISTS = {"input", "output", "tags", "traceTags", "comments", "metadata", "modelParameters"}
"""Columns that may have lists and are no scores."""


def takes(record: Any) -> bool:
    """Whether ``record`` is a trace, an observation, a score, or what a client sends of them."""
    if not isinstance(record, Mapping):
        return False
    if isinstance(batch := record.get("batch"), list):
        return any(isinstance(event, Mapping) and takes(event.get("body")) for event in batch)
    keys = set(map(_camel, record))
    is_trace = "observations" in keys and ("id" in keys or isinstance(record.get("trace"), Mapping))
    is_trace = is_trace or {"id", "timestamp", "bookmarked", "input"} <= keys
    is_part = "traceId" in keys and "id" in keys and (record.get("type") in _TYPES or {"name", "value"} <= keys)
    return is_trace or is_part


def split(record: Mapping[str, Any], _: str, unread: Counter[str]) -> Iterator[tuple[str, Item]]:
    """Each observation and score with its trace."""
    if isinstance(batch := record.get("batch"), list):
        bodies: list[Any] = [event.get("body") for event in batch if isinstance(event, Mapping)]
        if others := len(batch) - sum(map(takes, bodies)):
            unread["Langfuse events of another form"] += others
        for body in filter(takes, bodies):
            yield from split(body, _, unread)
        return
    fields = {_camel(key): value for key, value in record.items()}
    if isinstance(trace := fields.get("trace"), Mapping):
        # The page of a trace downloads these as JSON texts.
        said = {name: _decoded(trace.get(name)) for name in ("input", "output")}
        observations = fields["observations"]
        fields = {**{_camel(key): value for key, value in {**trace, **said}.items()}, "observations": observations}
    if "traceId" in fields:
        yield _part(fields)
        if scores := _columns(record):
            yield str(fields["traceId"]), TracerSpan(kind="score", scores=scores).item()
        return
    if "observations" not in fields:
        unread["Langfuse traces without their observations: export observations"] += 1
        return
    listed = [part for part in fields["observations"] if isinstance(part, Mapping)]
    if len(listed) < len(fields["observations"]):
        unread["Langfuse observations that are only named: export traces with their observations"] += 1
    root: dict[str, Any] = {"kind": "agent", "agent": text_of(fields.get("name")), "source": name}
    root |= {"session": text_of(fields.get("sessionId")), "input": fields.get("input"), "output": fields.get("output")}
    started = min((seconds(first(part, "startTime", "start_time")) for part in listed), default=0.0)
    yield str(fields["id"]), TracerSpan(span_id=str(fields["id"]), started=started, **root).item()
    own = {"traceId": fields["id"]}
    parts = (
        {_camel(key): value for key, value in part.items()} | own for part in [*listed, *(fields.get("scores") or ())]
    )
    under = ({**part, "parentObservationId": part.get("parentObservationId") or fields["id"]} for part in parts)
    yield from each(_part, under, name, unread)


def _decoded(value: Any) -> Any:
    """The text in a JSON text."""
    with suppress(ValueError):
        return parse_json(value) if isinstance(value, str) and value[:1] == value[-1:] == '"' else value
    return value


def _columns(record: Mapping[str, Any]) -> dict[str, float | str]:
    """The scores of a row of a table's export, which has a column for each: the mean of its numbers, or its label."""
    listed = {name: value_of(value) for name, value in record.items() if name not in _LISTS}
    filled = {name: value for name, value in listed.items() if isinstance(value, list) and value}
    scores: dict[str, float | str] = {}
    for name, value in filled.items():
        if all(isinstance(item, int | float) for item in value):
            scores[name] = fmean(value)
        elif len(value) == 1 and isinstance(value[0], str):
            scores[name] = value[0]
    return scores


def _part(fields: Mapping[str, Any]) -> tuple[str, Item]:
    return str(fields["traceId"]), (_observation if fields.get("type") in _TYPES else _score)(fields)


def _observation(fields: Mapping[str, Any]) -> Item:
    """The span, whose attributes are in the metadata if it came by OpenTelemetry."""
    metadata = value_of(fields.get("metadata"))
    attributes = value_of(metadata.get("attributes")) if isinstance(metadata, Mapping) else None
    given = {
        "type": fields["type"],
        "input": fields.get("input"),
        "output": fields.get("output"),
        "model.name": first(fields, "model", "providedModelName"),
        "usage_details": {
            **(value_of(fields.get("usage")) or {}),
            **(value_of(fields.get("usageDetails")) or {}),
        },
    }
    _, item = read_span({
        "traceId": fields["traceId"],
        "spanId": fields["id"],
        "parentSpanId": fields.get("parentObservationId"),
        "name": fields.get("name"),
        "startTimeUnixNano": fields.get("startTime"),
        "endTimeUnixNano": fields.get("endTime"),
        "status": {"code": fields.get("level"), "message": fields.get("statusMessage")},
        "attributes": {
            "metadata": metadata,
            "session.id": fields.get("sessionId"),
            **{f"langfuse.observation.{key}": value for key, value in given.items()},
            **(attributes if isinstance(attributes, Mapping) else {}),
        },
    })  # fmt: skip
    return {**item, "source": name}


def _score(fields: Mapping[str, Any]) -> Item:
    value = fields.get("stringValue") if fields.get("dataType") == "CATEGORICAL" else fields.get("value")
    return TracerSpan(kind="score", scores={} if value is None else {text_of(fields.get("name")): value}).item()


def _camel(key: str) -> str:
    return re.sub(r"_([a-z])", lambda match: match[1].upper(), key)

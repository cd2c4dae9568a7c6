"""Langfuse: traces with their observations and scores, or each alone, as its API, exports and SDK write them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from groundwire.train.traces.messages import first, text_of
from groundwire.train.traces.record import seconds
from groundwire.train.traces.spans import Item, TracerSpan, llm_fields, rollout_of

name, build = "Langfuse", rollout_of
_KINDS = {"GENERATION": "llm", "TOOL": "tool", "AGENT": "agent", "EVALUATOR": "agent", "GUARDRAIL": "agent"}
_TYPES = {*_KINDS, "SPAN", "EVENT", "CHAIN", "RETRIEVER", "EMBEDDING"}
_ERROR = "ERROR"


def takes(record: Any) -> bool:
    """Whether ``record`` is a trace, an observation or a score."""
    if not isinstance(record, Mapping):
        return False
    keys = set(map(_camel, record))
    is_trace = "observations" in keys and ("id" in keys or isinstance(record.get("trace"), Mapping))
    is_part = "traceId" in keys and "id" in keys and (record.get("type") in _TYPES or {"name", "value"} <= keys)
    return is_trace or is_part


def split(record: Mapping[str, Any], _: str, unread: Counter[str]) -> Iterator[tuple[str, Item]]:
    """Each observation and score with its trace."""
    fields = {_camel(key): value for key, value in record.items()}
    if isinstance(trace := fields.get("trace"), Mapping):
        fields = {**{_camel(key): value for key, value in trace.items()}, "observations": fields["observations"]}
    if "traceId" in fields:
        yield str(fields["traceId"]), (_observation if fields.get("type") in _TYPES else _score)(fields)
        return
    root: dict[str, Any] = {
        "kind": "agent",
        "agent": text_of(fields.get("name")),
        "session": text_of(fields.get("sessionId")),
    }
    root |= {"input": fields.get("input"), "output": fields.get("output")}
    whole = [part for part in fields["observations"] if isinstance(part, Mapping)]
    if len(whole) < len(fields["observations"]):
        unread["Langfuse observations that are only named: export traces with their observations"] += 1
    started = min((seconds(first(part, "startTime", "start_time")) for part in whole), default=0.0)
    yield str(fields["id"]), TracerSpan(span_id=str(fields["id"]), started=started, **root).item()
    for part in [*whole, *(fields.get("scores") or ())]:
        if isinstance(part, Mapping):
            inner = {_camel(key): value for key, value in part.items()}
            inner["parentObservationId"] = inner.get("parentObservationId") or fields["id"]
            yield str(fields["id"]), (_observation if inner.get("type") in _TYPES else _score)(inner)


def _observation(fields: Mapping[str, Any]) -> Item:
    kind = _KINDS.get(str(fields["type"]), "")
    usage = {**(fields.get("usage") or {}), **(fields.get("usageDetails") or {})}
    unread = list[str]()
    known: dict[str, Any] = {"input": fields.get("input"), "output": fields.get("output")}
    if kind == "llm":
        known = llm_fields(fields.get("input"), fields.get("output"), unread)
        known |= {"model": text_of(first(fields, "model", "providedModelName")), "unread": unread}
        known |= {"prompt_tokens": int(usage.get("input") or 0), "response_tokens": int(usage.get("output") or 0)}
    elif kind:
        known["agent"] = text_of(fields.get("name"))
    return TracerSpan(
        span_id=str(fields["id"]),
        parent_id=text_of(fields.get("parentObservationId")),
        name=text_of(fields.get("name")),
        kind=kind,
        started=seconds(fields.get("startTime")),
        ended=seconds(fields.get("endTime")),
        error=(text_of(fields.get("statusMessage")) or "an error") if fields.get("level") == _ERROR else "",
        session=text_of(fields.get("sessionId")),
        source=name,
        **known,
    ).item()


def _score(fields: Mapping[str, Any]) -> Item:
    value = fields.get("stringValue") if fields.get("dataType") == "CATEGORICAL" else fields.get("value")
    return TracerSpan(kind="score", scores={} if value is None else {text_of(fields.get("name")): value}).item()


def _camel(key: str) -> str:
    return re.sub(r"_([a-z])", lambda match: match[1].upper(), key)

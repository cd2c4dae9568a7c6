"""Langfuse: traces with their observations and scores, or each alone, as its API, exports and SDK write them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from groundwire.train.traces.messages import count_of, first, text_of
from groundwire.train.traces.record import seconds
from groundwire.train.traces.spans import Item, TracerSpan, agent_in, each, llm_fields, rollout_of

name, build = "Langfuse", rollout_of
_KINDS = {"GENERATION": "llm", "TOOL": "tool", "AGENT": "agent", "EVALUATOR": "agent", "GUARDRAIL": "agent"}
_TYPES = {*_KINDS, "SPAN", "EVENT", "CHAIN", "RETRIEVER", "EMBEDDING"}
_ERROR = "ERROR"


def takes(record: Any) -> bool:
    """Whether ``record`` is a trace, an observation, a score, or what a client sends of them."""
    if not isinstance(record, Mapping):
        return False
    if isinstance(batch := record.get("batch"), list):
        return any(isinstance(event, Mapping) and takes(event.get("body")) for event in batch)
    keys = set(map(_camel, record))
    is_trace = "observations" in keys and ("id" in keys or isinstance(record.get("trace"), Mapping))
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
        fields = {**{_camel(key): value for key, value in trace.items()}, "observations": fields["observations"]}
    if "traceId" in fields:
        yield _part(fields)
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


def _part(fields: Mapping[str, Any]) -> tuple[str, Item]:
    return str(fields["traceId"]), (_observation if fields.get("type") in _TYPES else _score)(fields)


def _observation(fields: Mapping[str, Any]) -> Item:
    kind = _KINDS.get(str(fields["type"]), "")
    usage = {**(fields.get("usage") or {}), **(fields.get("usageDetails") or {})}
    unread = list[str]()
    known: dict[str, Any] = {"input": fields.get("input"), "output": fields.get("output")}
    if kind == "llm":
        known = llm_fields(fields.get("input"), fields.get("output"), unread)
        known |= {"model": text_of(first(fields, "model", "providedModelName")), "unread": unread}
        known["agent"] = agent_in(fields.get("metadata"))
        known |= {"prompt_tokens": count_of(usage.get("input")), "response_tokens": count_of(usage.get("output"))}
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

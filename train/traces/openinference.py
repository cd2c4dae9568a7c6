"""Phoenix: spans of its data frames and its API, whose attributes are OpenInference's, and annotations of spans.

OpenInference over OTLP is read with the other conventions (:mod:`.otlp`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from groundwire.train.traces import otlp
from groundwire.train.traces.messages import first
from groundwire.train.traces.spans import Item, TracerSpan, rollout_of

name, build = "Phoenix", rollout_of
_ATTRIBUTES, _CONTEXT = "attributes.", "context."


def takes(record: Any) -> bool:
    """Whether ``record`` is a row of a data frame, a span of the API, or an annotation."""
    if not isinstance(record, Mapping):
        return False
    is_annotation = {"span_id", "name", "result"} <= record.keys()
    return is_annotation or "context.span_id" in record or ("span_kind" in record and "context" in record)


def split(record: Mapping[str, Any], file: str, unread: Counter[str]) -> Iterator[tuple[str, Item]]:
    """The span, and its annotations."""
    if "result" in record:
        yield "", _score(record)  # an annotation names its span alone
        return
    known = {key: value for key, value in record.items() if not key.startswith((_ATTRIBUTES, _CONTEXT))}
    attributes, context = dict(record.get("attributes") or {}), dict(record.get("context") or {})
    for key, value in record.items():
        if value is not None and key.startswith((_ATTRIBUTES, _CONTEXT)):
            target = attributes if key.startswith(_ATTRIBUTES) else context
            target[key.partition(".")[2]] = value
    span = {**known, "attributes": attributes, "context": context}
    for trace_id, item in otlp.split(span, file, unread):
        yield trace_id, {**item, "source": name}
        for annotation in record.get("annotations") or ():
            yield trace_id, _score(annotation)


def _score(annotation: Mapping[str, Any]) -> Item:
    result = annotation.get("result") or {}
    value = first(result, "score", "label")
    scores = {} if value is None else {str(annotation.get("name")): value}
    return TracerSpan(kind="score", scores=scores, span_id=str(annotation.get("span_id") or "")).item()

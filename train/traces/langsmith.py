"""LangSmith: runs, one by one or with their child runs, and feedback, as its API and its SDK write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from groundwire.train.traces.messages import count_of, first, text_of, value_of
from groundwire.train.traces.record import seconds
from groundwire.train.traces.spans import Item, TracerSpan, agent_in, each, llm_fields, rollout_of

name, build = "LangSmith", rollout_of
_KINDS = {"llm": "llm", "chat_model": "llm", "tool": "tool"}


def takes(record: Any) -> bool:
    """Whether ``record`` is a run or feedback."""
    if isinstance(record, Mapping) and isinstance(posted := record.get("post"), list):
        return any(isinstance(run, Mapping) and "run_type" in run for run in posted)
    return isinstance(record, Mapping) and ("run_type" in record or {"run_id", "key", "score"} <= record.keys())


def split(record: Mapping[str, Any], _: str, unread: Counter[str]) -> Iterator[tuple[str, Item]]:
    """The run, its child runs and its feedback, with the trace; or the runs that the SDK sends, with their updates."""
    if "post" not in record:
        yield from each(_part, _with_children(record), name, unread)
        return
    runs: dict[str, dict[str, Any]] = {}
    for part in (*record["post"], *(record.get("patch") or ())):
        run = runs.setdefault(str(part.get("id") or text_of(part.get("dotted_order")).rpartition("Z")[2]), {})
        run |= {key: value for key, value in part.items() if value not in (None, {}, [])}
    yield from each(_part, runs.values(), name, unread)


def _with_children(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield record
    for child in record.get("child_runs") or ():
        yield from _with_children({**child, "trace_id": record.get("trace_id") or record["id"]})


def _part(record: Mapping[str, Any]) -> tuple[str, Item]:
    if "run_type" not in record:
        value = record["score"] if record["score"] is not None else record.get("value")
        scores = {} if value is None else {text_of(record["key"]): value}
        return str(record.get("trace_id") or record["run_id"]), TracerSpan(kind="score", scores=scores).item()
    # The first part of ``dotted_order`` is the root's: its time, Z, its id.
    root = text_of(record.get("dotted_order")).partition(".")[0].partition("Z")[2]
    return str(record.get("trace_id") or root or record["id"]), _span(record)


def _span(run: Mapping[str, Any]) -> Item:
    extra = value_of(run.get("extra")) or {}
    metadata, parameters = extra.get("metadata") or {}, extra.get("invocation_params") or {}
    asked, given = value_of(run.get("inputs")), value_of(run.get("outputs"))
    kind = _KINDS.get(run["run_type"], "" if run.get("parent_run_id") else "agent")
    unread = list[str]()
    known: dict[str, Any] = {"input": asked, "output": _only(given)}
    if kind == "llm":
        tools = parameters.get("tools") or (asked.get("tools") if isinstance(asked, Mapping) else None)
        known = llm_fields(asked, given, unread, tools=tools)
        request = asked if isinstance(asked, Mapping) else {}
        model = metadata.get("ls_model_name") or first(parameters, "model", "model_name") or request.get("model")
        known |= {"model": text_of(model), "agent": agent_in(metadata), "unread": unread}
        known["prompt_tokens"] = count_of(run.get("prompt_tokens"))
        known["response_tokens"] = count_of(run.get("completion_tokens"))
    elif kind == "tool":
        known |= {"input": _only(asked), "agent": text_of(run.get("name"))}
    feedback = value_of(run.get("feedback_stats")) or {}
    scores = {key: stats["avg"] for key, stats in feedback.items() if isinstance(stats, Mapping) and "avg" in stats}
    return TracerSpan(
        span_id=str(run["id"]),
        parent_id=text_of(run.get("parent_run_id")),
        name=text_of(run.get("name")),
        kind=kind,
        started=seconds(run.get("start_time")),
        ended=seconds(run.get("end_time")),
        error=text_of(run.get("error")).strip().partition("\n")[0],
        session=text_of(first(metadata, "thread_id", "session_id", "conversation_id")),
        scores={key: value for key, value in scores.items() if value is not None},
        source=name,
        **known,
    ).item()


def _only(value: Any) -> Any:
    """The value of the only field of an object; else the object."""
    return next(iter(value.values())) if isinstance(value, Mapping) and len(value) == 1 else value

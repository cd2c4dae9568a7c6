"""The spans of one trace, of any tracer, as a rollout.

Spans may come in any order, twice, and without their parents. Tracers of a framework and of a client may both record a
call: the inner span has the request as it was sent, so the outer one is no further call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.wire.exchange import UNREADABLE
from groundwire.tools.types import AgentStep
from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.messages import (
    Message,
    finish_of,
    read_messages,
    read_reply,
    read_tools,
    system_messages,
    text_of,
    value_of,
)
from groundwire.train.traces.record import TracedCall, make_rollout, plain, results_in, user_turn
from groundwire.train.traces.streams import whole_reply

Item = Mapping[str, Any]
"""The fields of a span that are set."""


@dataclass(slots=True, kw_only=True)
class TracerSpan:
    """What a tracer recorded of one operation."""

    span_id: str = ""
    parent_id: str = ""
    name: str = ""
    kind: str = ""
    """``llm``, ``tool``, ``agent``, or empty; ``score`` for one that is only what a trace or a span was judged."""
    started: float = 0.0
    ended: float = 0.0
    error: str = ""
    agent: str = ""
    model: str = ""
    messages: Sequence[Message] = ()
    reply: Message = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    input: Any = None
    output: Any = None
    call_id: str = ""
    """Of a tool's: that of the call in the reply that asked for it."""
    finish_reason: str = ""
    prompt_tokens: int = 0
    response_tokens: int = 0
    session: str = ""
    scores: Mapping[str, Any] = field(default_factory=dict)
    unread: Sequence[str] = ()
    source: str = ""
    is_log: bool = False
    """Whether it is an event of a span, which its tracer wrote as a log record."""

    def item(self) -> dict[str, Any]:
        """The fields that are set, as they are kept until the trace is whole."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name))}


def llm_fields(asked: Any, given: Any, unread: list[str], *, tools: Any = None, system: Any = None) -> dict[str, Any]:
    """The fields of a span for a request and a reply of any form; a request may have its tools."""
    request = value_of(asked)
    tools = tools or (request.get("tools") if isinstance(request, Mapping) else None)
    if isinstance(request, list) and (offered := [item for item in request if _is_offer(item)]):
        request, tools = [item for item in request if item not in offered], [item["content"] for item in offered]
    given = whole_reply(value_of(given), unread)
    return {
        "messages": [*system_messages(system, unread), *read_messages(request, unread)],
        "reply": read_reply(given, unread),
        "finish_reason": finish_of(given),
        "tools": read_tools(tools),
    }


def _is_offer(message: Any) -> bool:
    """Whether a message is the definition of a tool, as Langfuse's callback adds it to those of LangChain."""
    content = message.get("content") if isinstance(message, Mapping) and message.get("role") == "tool" else None
    return isinstance(content, Mapping) and content.get("type") == "function"


def agent_in(metadata: Any) -> str:
    """The agent, or the node of a graph, that LangChain names in the metadata of a call."""
    metadata = value_of(metadata)
    named = isinstance(metadata, Mapping) and (metadata.get("lc_agent_name") or metadata.get("langgraph_node"))
    return text_of(named or "")


def each(
    read: Callable[[Any], tuple[str, Item]], parts: Iterable[Any], name: str, unread: Counter[str]
) -> Iterator[tuple[str, Item]]:
    """What ``read`` makes of each part of a record; one of another form is counted, and loses no other."""
    for part in parts:
        try:
            yield read(part)
        except UNREADABLE as error:
            unread[f"{name}: spans of another form ({type(error).__name__})"] += 1


def rollout_of(trace_id: str, items: Sequence[Item], unread: Counter[str]) -> Iterator[Rollout]:
    """The rollout of a trace; none, which is counted, if it has no LLM call."""
    spans, places, logs = list[TracerSpan](), dict[str, int](), dict[str, list[TracerSpan]]()
    scores = dict[str, Any]()
    for item in items:
        span = TracerSpan(**item)
        scores |= span.scores
        if span.kind == "score":
            continue
        if span.is_log:
            logs.setdefault(span.span_id, []).append(span)
        elif span.span_id and (place := places.setdefault(span.span_id, len(spans))) < len(spans):
            spans[place] = TracerSpan(**{**spans[place].item(), **item})  # an update of one that is known
            unread["spans that came twice, joined"] += 1
        else:
            spans.append(span)
    _add_logs(spans, places, logs, unread)
    spans.sort(key=lambda span: span.started)
    by_id = {span.span_id: span for span in spans if span.span_id}
    if missing := sum(bool(span.parent_id) and span.parent_id not in by_id for span in spans):
        unread["spans whose parents are missing, read without them"] += missing
    repeated = _repeated(spans, by_id)
    calls = [span for span in spans if span.kind == "llm" and id(span) not in repeated]
    if repeated:
        unread["LLM spans around another one of the same call"] += len(repeated)
    for reason in {reason for span in calls for reason in span.unread}:
        unread[reason] += sum(reason in span.unread for span in calls)
    if not calls:
        return
    root = next((span for span in spans if span.parent_id not in by_id and span.kind != "tool"), spans[0])
    results, further = _tool_results(spans, calls)
    answer = value_of(root.output) if root.kind != "llm" else ""
    yield from [
        make_rollout(
            [_call(span, trace_id, place, by_id) for place, span in enumerate(calls)],
            rollout_id=trace_id,
            source=calls[0].source,
            question=user_turn(read_messages(root.input, [])) if root.kind != "llm" else "",
            inputs=value_of(root.input),
            answer=answer if isinstance(answer, str) else "",
            scores=scores,
            results=results,
            further_steps=further,
            error=root.error,
            session=next((span.session for span in spans if span.session), ""),
        )
    ]


def _add_logs(
    spans: list[TracerSpan], places: Mapping[str, int], logs: Mapping[str, Sequence[TracerSpan]], unread: Counter[str]
) -> None:
    """Give the spans what their log records have, of which each may have one message."""
    for span_id, events in logs.items():
        ordered = sorted(events, key=lambda event: event.started)  # equal times keep their order
        fields = {name: value for event in reversed(ordered) for name, value in event.item().items()}
        fields["messages"] = [message for event in ordered for message in event.messages]
        if span_id in places:
            spans[places[span_id]] = TracerSpan(**{**fields, **spans[places[span_id]].item()})
        else:
            spans.append(TracerSpan(**fields))
            unread["log records whose spans are missing, read without them"] += len(events)


def _ancestors(span: TracerSpan, by_id: Mapping[str, TracerSpan]) -> Iterator[TracerSpan]:
    seen = {span.span_id}
    while (parent := by_id.get(span.parent_id)) is not None and parent.span_id not in seen:
        seen.add(parent.span_id)
        yield parent
        span = parent


def _repeated(spans: Sequence[TracerSpan], by_id: Mapping[str, TracerSpan]) -> set[int]:
    """The spans of calls that others of the same call are about: the outer ones, or an inner one that has less."""
    repeated = set()
    for span in spans:
        outer = next((parent for parent in _ancestors(span, by_id) if parent.kind == "llm"), None)
        if span.kind == "llm" and outer is not None:
            has_less = not span.messages or (span.unread and not outer.unread)
            repeated.add(id(span if has_less and outer.messages else outer))
    return repeated


def _call(span: TracerSpan, trace_id: str, place: int, by_id: Mapping[str, TracerSpan]) -> TracedCall:
    agents = (parent.agent or parent.name for parent in _ancestors(span, by_id) if parent.kind == "agent")
    lost = "" if span.messages and (span.reply or span.error) else "its tracer recorded no messages"
    return TracedCall(
        history=(span.messages, len(span.messages)),
        unread="; ".join(span.unread) or lost,
        rollout_id=trace_id,
        attempt_id="",
        sequence=place,
        agent=span.agent or next(filter(None, agents), ""),
        model=span.model,
        finish_reason=span.finish_reason,
        started=span.started,
        ended=span.ended,
        error=span.error,
        call_id=span.span_id,
        prompt_tokens=span.prompt_tokens,
        response_tokens=span.response_tokens,
        tools_json=to_json(span.tools) if span.tools else "",
        reply_json=to_json(span.reply) if span.reply else "",
    )


def _tool_results(
    spans: Sequence[TracerSpan], calls: Sequence[TracerSpan]
) -> tuple[dict[Any, tuple[str, bool]], list[AgentStep]]:
    """The results of the calls in replies, by their ids; and steps for tools that no reply asked for."""
    results, further = dict[Any, tuple[str, bool]](), list[AgentStep]()
    asked: dict[tuple[str, str], list[Any]] = {}
    for span in calls:
        results |= results_in(span.messages)
        for call in span.reply.get("tool_calls") or ():
            function = call["function"]
            asked.setdefault((function.get("name"), _compact(function.get("arguments"))), []).append(call.get("id"))
            asked.setdefault((function.get("name"), ""), []).append(call.get("id"))
    ids = {call_id for called in asked.values() for call_id in called}
    for span in (span for span in spans if span.kind == "tool"):
        name = span.agent or span.name
        open_calls = asked.get((name, _compact(span.input))) or asked.get((name, "")) or ()
        is_asked = span.call_id in ids or bool(open_calls)
        call_id = span.call_id if span.call_id in ids else next(iter(open_calls), None)  # Google's calls have no ids
        for called in asked.values():
            if call_id in called:
                called.remove(call_id)
        output = _said(span.output) or span.error
        if is_asked:
            results[call_id] = results.get(call_id, (output, True))[0] or output, not span.error
        else:
            further.append(
                AgentStep(agent=name, kind="tool", input=text_of(span.input), output=output, ok=not span.error)
            )
    return results, further


def _said(output: Any) -> str:
    """What a tool returned as text, also where it is a message or in one field."""
    value = value_of(output)
    value = value["output"] if isinstance(value, Mapping) and value.keys() == {"output"} else value
    messages = read_messages(value, []) if isinstance(value, Mapping) else []
    return plain(messages[-1].get("content")) if messages else text_of(value)


def _compact(arguments: Any) -> str:
    return to_json(value_of(arguments)) if arguments else ""

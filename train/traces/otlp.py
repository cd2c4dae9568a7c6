"""OpenTelemetry: OTLP as JSON and protobuf, and what SDKs print, with the attributes of any convention.

GenAI semantic conventions in all their forms (attributes, events of spans and as log records, numbered attributes of
OpenLLMetry), OpenInference (Phoenix), Langfuse's and the AI SDK's own names.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groundwire.train.traces.messages import count_of, read_messages, text_of, value_of
from groundwire.train.traces.record import plain, seconds
from groundwire.train.traces.spans import Item, TracerSpan, agent_in, each, llm_fields, rollout_of

name, build = "OpenTelemetry", rollout_of

_KINDS = {
    **dict.fromkeys(
        ("chat", "text_completion", "generate_content", "llm", "generation", "completion", "chat_model"), "llm"
    ),
    **dict.fromkeys(("execute_tool", "tool", "ai.toolcall"), "tool"),
    **dict.fromkeys(("invoke_agent", "agent", "invoke_workflow", "workflow", "evaluator", "guardrail"), "agent"),
    **dict.fromkeys(("ai.generatetext.dogenerate", "ai.streamtext.dostream"), "llm"),
    **dict.fromkeys(("ai.generateobject.dogenerate", "ai.streamobject.dostream"), "llm"),
}
_KIND = (
    "gen_ai.operation.name", "openinference.span.kind", "langfuse.observation.type", "traceloop.span.kind",
    "llm.request.type", "ai.operationId", "langsmith.span.kind", "mlflow.spanType",
)  # fmt: skip
_INPUT = (
    "gen_ai.input.messages", "llm.input_messages", "gen_ai.prompt", "langfuse.observation.input", "ai.prompt.messages",
    "input.value", "langfuse.trace.input", "traceloop.entity.input", "mlflow.spanInputs", "ai.prompt",
)  # fmt: skip
_OUTPUT = (
    "gen_ai.output.messages", "llm.output_messages", "gen_ai.completion", "langfuse.observation.output", "output.value",
    "langfuse.trace.output", "traceloop.entity.output", "mlflow.spanOutputs", "ai.response.text",
)  # fmt: skip
_TOOLS = ("gen_ai.tool.definitions", "llm.tools", "llm.request.functions", "ai.prompt.tools")
_AGENT = ("gen_ai.agent.name", "agent.name", "agent_name", "graph.node.id", "traceloop.entity.name")
_MODEL = (
    "gen_ai.request.model", "llm.model_name", "langfuse.observation.model.name", "ai.model.id", "gen_ai.response.model",
)  # fmt: skip
_SESSION = ("gen_ai.conversation.id", "session.id", "langfuse.session.id", "langsmith.trace.session_id")
_PROMPT_TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
_RESPONSE_TOKENS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
_FINISH = ("gen_ai.response.finish_reasons", "llm.finish_reason", "ai.response.finishReason")
_LISTED = {"gen_ai.prompt", "gen_ai.completion", "llm.input_messages", "llm.output_messages", "llm.tools",
           "llm.request.functions"}  # fmt: skip
"""Lists whose elements are attributes of their own: ``gen_ai.prompt.0.role``."""
_NESTED = {"gen_ai", "llm", "input", "output", "openinference", "session", "agent", "tool"}
"""First words of attributes that some exports write as objects in objects."""
_RESOURCES, _SCOPES, _PARTS = (
    ("resourceSpans", "resource_spans", "resourceLogs", "resource_logs"),
    ("scopeSpans", "scope_spans", "instrumentationLibrarySpans", "scopeLogs", "scope_logs"),
    ("spans", "logRecords", "log_records"),
)
_OF_LOGS = {"timeUnixNano", "observedTimeUnixNano", "severityNumber", "severity_number", "eventName"}
"""Fields that spans do not have."""
_TOOL_SPAN = re.compile(r"^(execute_tool |running tool: )")
_DETAILS, _EVALUATION = "gen_ai.client.inference.operation.details", "gen_ai.evaluation.result"


def takes(record: Any) -> bool:
    """Whether ``record`` has spans or log records of OTLP, or is one as an SDK prints it."""
    if not isinstance(record, Mapping):
        return False
    context = record.get("context")
    printed = isinstance(context, Mapping) and "trace_id" in context and "span_id" in context
    known = {"traceId", "spanId"}, {"trace_id", "span_id", "severity_number"}
    return printed or not {*_RESOURCES, *_SCOPES}.isdisjoint(record) or any(keys <= record.keys() for keys in known)


def split(record: Any, _: str, unread: Counter[str]) -> Iterator[tuple[str, Item]]:
    """The trace and the item of each span of ``record``, and of each log record that is an event of GenAI."""
    parts = list(parts_in(record))
    kept = [part for part in parts if not _is_log(part) or _event_of(part).startswith("gen_ai.")]
    if others := len(parts) - len(kept):
        unread["log records that are no events of the GenAI conventions"] += others
    yield from each(read_span, kept, name, unread)


def parts_in(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The spans and log records of ``record``."""
    for resource in [part for name in _RESOURCES for part in _lists(record, name)] or [record]:
        scopes = [scope for name in _SCOPES for scope in _lists(resource, name)]
        for part in [part for scope in scopes for name in _PARTS for part in _lists(scope, name)] or [resource]:
            if "resource" not in part or "context" in part or _is_log(part):
                yield part


def _is_log(part: Mapping[str, Any]) -> bool:
    return not _OF_LOGS.isdisjoint(part)


def _event_of(log: Mapping[str, Any]) -> str:
    """The name of a log record that is an event; else empty."""
    return str(log.get("eventName") or log.get("event_name") or _attributes(log.get("attributes")).get("event.name"))


def _of_log(log: Mapping[str, Any]) -> dict[str, Any]:
    """An event that a log record has, as that of its span."""
    times = ("timeUnixNano", "timestamp", "observedTimeUnixNano", "observed_timestamp")
    event, body = _event_of(log), log.get("body")
    body = value_of(body if "severity_number" in log else _json_value(body))  # as an SDK prints it, or OTLP's
    said = {**_attributes(log.get("attributes")), **(body if isinstance(body, Mapping) else {})}
    return {
        **_of_json(log),
        "name": event,
        "started": next((time for name in times if (time := seconds(log.get(name)))), 0.0),
        "attributes": said if event == _EVALUATION else {_KIND[0]: "chat"},
        "events": [(event, said)],
    }


def _lists(holder: Mapping[str, Any], name: str) -> list[Any]:
    value = holder.get(name)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _of_json(span: Mapping[str, Any]) -> dict[str, Any]:
    context = span.get("context") or {}
    status = span.get("status") or {}
    attributes = _attributes(span.get("attributes"))
    events = [(str(event.get("name")), _attributes(event.get("attributes"))) for event in span.get("events") or ()]
    listed = value_of(attributes.get("events"))  # of Pydantic AI
    events += [(str(event.get("event.name")), event) for event in listed] if isinstance(listed, list) else []
    code = str(status.get("code") or status.get("status_code") or span.get("status_code") or "")
    return {
        "trace": _id(span.get("traceId") or span.get("trace_id") or context.get("trace_id")),
        "span": _id(span.get("spanId") or span.get("span_id") or context.get("span_id")),
        "parent": _id(span.get("parentSpanId") or span.get("parent_span_id") or span.get("parent_id")),
        "name": str(span.get("name") or ""),
        "started": seconds(span.get("startTimeUnixNano") or span.get("start_time_unix_nano") or span.get("start_time")),
        "ended": seconds(span.get("endTimeUnixNano") or span.get("end_time_unix_nano") or span.get("end_time")),
        "failed": code.upper().removeprefix("STATUS_CODE_") in ("2", "ERROR"),
        "message": str(status.get("message") or status.get("description") or span.get("status_message") or ""),
        "attributes": {"openinference.span.kind": span.get("span_kind"), **attributes},
        "events": events,
        "is_cut": bool(span.get("droppedAttributesCount") or span.get("dropped_attributes_count")),
    }


def _id(value: Any) -> str:
    """An id in hexadecimal, also of one in base64, as protobuf's JSON has bytes."""
    text = str(value or "")
    return base64.b64decode(text).hex() if text.endswith("=") else text.removeprefix("0x")


def _attributes(pairs: Any) -> dict[str, Any]:
    """Attributes by their names, from OTLP's pairs or from an object, whose nested ones get dotted names."""
    if isinstance(pairs, Mapping):
        flat: dict[str, Any] = {}
        for key, value in pairs.items():
            inner = isinstance(value, Mapping) and key.partition(".")[0] in _NESTED
            flat |= _attributes({f"{key}.{name}": item for name, item in value.items()}) if inner else {key: value}
        return flat
    return {str(pair.get("key")): _json_value(pair.get("value")) for pair in pairs or ()}


def _json_value(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    for kind, inner in value.items():
        if kind in ("arrayValue", "array_value"):
            return [_json_value(item) for item in (inner or {}).get("values") or ()]
        if kind in ("kvlistValue", "kvlist_value"):
            return _attributes((inner or {}).get("values"))
        return int(inner) if kind in ("intValue", "int_value") else inner
    return None


def read_span(span: Mapping[str, Any]) -> tuple[str, Item]:
    """The trace and the item of a span, or of a log record, as OTLP's JSON or an SDK writes them."""
    is_log = _is_log(span)
    raw = _of_log(span) if is_log else _of_json(span)
    if not raw["trace"].strip("0"):
        raise ValueError("a span without a trace")
    attributes, unread_parts = raw["attributes"], list[str]()
    messages, reply, scores, error = list[Any](), None, dict[str, Any](), raw["message"] or "an error without a message"
    for event, said in raw["events"]:
        if event in (_DETAILS, "gen_ai.content.prompt", "gen_ai.content.completion"):
            attributes = {**attributes, **said}
        elif event == "exception":
            error = f"{said.get('exception.type')}: {said.get('exception.message')}"
        elif event == _EVALUATION:
            scores |= _score(said)
        elif event == "gen_ai.choice":
            attributes = {_FINISH[1]: said.get("finish_reason"), **attributes}
            reply = {"role": "assistant", **said, **(value_of(said.get("message")) or {})}
        elif event.startswith("gen_ai.") and event.endswith(".message"):
            messages.append({"role": event.split(".")[1], **said})
    named = (str(attributes.get(name)).lower() for name in _KIND)
    kind = next((_KINDS[word] for word in named if word in _KINDS), "agent" if "agent_name" in attributes else "")
    if raw["name"] == _EVALUATION:
        kind, scores = "score", _score(attributes)
    fields: dict[str, Any] = {
        "span_id": raw["span"],
        "parent_id": raw["parent"],
        "name": raw["name"],
        "kind": kind,
        "started": raw["started"],
        "ended": raw["ended"],
        "error": error if raw["failed"] else "",
        "session": text_of(_value(attributes, _SESSION)),
        "scores": scores,
        "source": name,
        "is_log": is_log,
    }
    asked, given = messages or _value(attributes, _INPUT), reply or _value(attributes, _OUTPUT)
    if kind == "llm":
        unread_parts += ["attributes that are missing: their tracer's limit was reached"] if raw["is_cut"] else []
        unread_parts += [attributes["groundwire.unread"]] if "groundwire.unread" in attributes else []
        usage = value_of(attributes.get("langfuse.observation.usage_details")) or {}
        finish = value_of(_value(attributes, _FINISH))
        calls = value_of(attributes.get("ai.response.toolCalls"))
        content = given if not calls else {"content": [{"type": "text", "text": given or ""}, *calls]}
        tools, system = (
            _value(attributes, _TOOLS) or _requested(attributes),
            attributes.get("gen_ai.system_instructions"),
        )
        fields |= llm_fields(asked, content, unread_parts, tools=tools, system=system)
        fields |= {
            "model": text_of(_value(attributes, _MODEL)),
            "finish_reason": text_of(finish[0] if isinstance(finish, list) and finish else finish)
            or fields["finish_reason"],
            "prompt_tokens": count_of(_value(attributes, _PROMPT_TOKENS) or usage.get("input")),
            "response_tokens": count_of(_value(attributes, _RESPONSE_TOKENS) or usage.get("output")),
            "agent": text_of(attributes.get("gen_ai.agent.name")) or agent_in(_metadata(attributes)),
            "unread": unread_parts,
        }
    elif kind == "tool":
        fields |= {
            "agent": text_of(_value(attributes, ("gen_ai.tool.name", "tool.name", "ai.toolCall.name")))
            or _TOOL_SPAN.sub("", raw["name"]),
            "input": _value(attributes, ("gen_ai.tool.call.arguments", "ai.toolCall.args", *_INPUT)),
            "output": _value(attributes, ("gen_ai.tool.call.result", "ai.toolCall.result", *_OUTPUT)),
            "call_id": text_of(_value(attributes, ("gen_ai.tool.call.id", "ai.toolCall.id", "tool_call.id"))),
        }
    elif kind != "score":
        operation = text_of(attributes.get(_KIND[0]))
        if raw["name"].startswith(operation):  # such as "invoke_agent planner", or without a name
            fields["name"] = "" if "groundwire.mode" in attributes else raw["name"].removeprefix(operation).strip()
        fields |= {"agent": text_of(_value(attributes, _AGENT)), "input": _said(asked), "output": _said(given)}
    return raw["trace"], TracerSpan(**fields).item()


def _metadata(attributes: Mapping[str, Any]) -> Any:
    """The metadata of a call, as OpenInference or Langfuse writes them."""
    of_langfuse = "langfuse.observation.metadata."
    named = {key.removeprefix(of_langfuse): value for key, value in attributes.items() if key.startswith(of_langfuse)}
    return named or attributes.get("metadata")


def _value(attributes: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first attribute of ``names`` that is set, some of which have their elements one by one."""
    for name in names:
        if attributes.get(name) not in (None, "", [], "null"):
            return attributes[name]
        if name in _LISTED and any(key.startswith(f"{name}.0.") for key in attributes):
            return _nested(attributes, f"{name}.")
    return None


def _nested(attributes: Mapping[str, Any], prefix: str) -> Any:
    """The attributes that begin with ``prefix`` as objects in lists: ``0.role`` is the role of the first element."""
    tree: dict[str, Any] = {}
    for key, value in attributes.items():
        if key.startswith(prefix):
            *path, last = key.removeprefix(prefix).split(".")
            place = tree
            for step in path:
                inner = place.setdefault(step, {})
                place = inner if isinstance(inner, dict) else {}
            place[last] = value
    return _as_list(tree)


def _as_list(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    values = {key: _as_list(value) for key, value in tree.items()}
    if not values or not all(map(str.isdecimal, values)):
        return values
    elements, expected = list[Any](), 0
    for place in sorted(values, key=int):
        elements += [values[place]] if int(place) == expected else [None, values[place]]  # None: some are missing
        expected = int(place) + 1
    return elements


def _requested(attributes: Mapping[str, Any]) -> Any:
    """The tools of a request that is kept as a whole, or of Pydantic AI's parameters of one."""
    request, parameters = (value_of(attributes.get(name)) for name in ("input.value", "model_request_parameters"))
    if isinstance(parameters, Mapping):
        return [tool for name in ("function_tools", "output_tools") for tool in parameters.get(name) or ()]
    return request.get("tools") if isinstance(request, Mapping) else None


def _said(value: Any) -> Any:
    """What an agent got or gave: the last message's text, if it is a list of messages."""
    messages = read_messages(value, []) if isinstance(inner := value_of(value), list) else []
    return plain(messages[-1].get("content")) if messages else inner


def _score(attributes: Mapping[str, Any]) -> dict[str, Any]:
    names = ("gen_ai.evaluation.score.value", "gen_ai.evaluation.score.label")
    value = next((attributes[name] for name in names if attributes.get(name) is not None), None)
    return {} if value is None else {str(attributes.get("gen_ai.evaluation.name") or "score"): value}

"""The store's edge: our record in the words of Agent Lightning 0.3, in both directions, without its package.

A rollout is JSON with the fields of its ``AttemptedRollout``; calls, annotations and the outcome of an attempt are its
spans, as JSON or by OTLP. Server and client use the same functions, so each of the two also works with Agent
Lightning's own server, client, runner and exporter.

Agent Lightning traces LLM calls in the runner (AgentOps) or in its LLM proxy (LiteLLM). Where our own proxy traced no
call, these become calls as well.
"""

from __future__ import annotations

import ast
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model

from groundwire.adapters.tracing import LLMCall, from_span, reward_from_spans
from groundwire.adapters.tracing.calls import AGENT, PROMPT_IDS, order_calls, to_json
from groundwire.adapters.tracing.spans import REWARD_PREFIX, SpanRecord, TraceLimit
from groundwire.adapters.tracing.wire.exchange import UNREADABLE, read_reply
from groundwire.tools import clock
from groundwire.train.store.limits import AnyJson, Attributes, Count, Id, Items, Seconds, Table, Time
from groundwire.train.store.rollout import Attempt, AttemptStatus, Outcome, ProxyLLM, Rollout, RolloutStatus

_VLLM = "llm.hosted_vllm."
_AGENT_NAMES = (AGENT, "agent.name", "recipient_agent_type", "langchain.chain.type")
_METADATA: Mapping[str, Any] = {
    **{"group": "", "step": 0, "sampling": {}, "settings": {}, "prompts": None},
    "trace_limit": TraceLimit(),
}
"""Fields of a rollout that Agent Lightning has no name for, with their defaults."""
_CONFIG: Mapping[str, str] = {
    "timeout_s": "timeout_seconds",
    "unresponsive_s": "unresponsive_seconds",
    "max_attempts": "max_attempts",
    "retry_on": "retry_condition",
}
"""Agent Lightning's names of the fields that say how a rollout is tried."""
REQUESTED = ("task", "mode", "resources_id", "metadata", *_METADATA, *_CONFIG)
"""The fields of a rollout that a client sets."""
_OUTCOME = "groundwire.outcome"
"""The attribute with an attempt's outcome as JSON text, on the last span of our runners."""
_OUTCOMES = TypeAdapter(Outcome)
_LIMITS = TypeAdapter(dict[str, TraceLimit])
_SPAN = ("name", "rollout_id", "attempt_id", "sequence_id", "span_id", "parent_id", "attributes")
"""The fields that spans have here and there."""
ATTEMPT_FIELDS: Mapping[str, str] = {
    "attempt_id": "attempt_id",
    "number": "sequence_id",
    "started": "start_time",
    "ended": "end_time",
    "status": "status",
    "worker_id": "worker_id",
    "heartbeat": "last_heartbeat_time",
}
"""Agent Lightning's names of an attempt's fields."""


class Config(BaseModel):
    """How often a rollout is tried, and for how long."""

    timeout_seconds: Seconds | None = None
    unresponsive_seconds: Seconds | None = None
    max_attempts: Annotated[Count, Field(ge=1)] = 1
    retry_condition: Items[AttemptStatus] = []


class Request(BaseModel):
    """A rollout that a client enqueues."""

    input: AnyJson
    mode: Literal["train", "val", "test"] | None = None
    resources_id: Id | None = None
    config: Config | None = None
    metadata: Table | None = None


class RolloutFields(Request):
    """Agent Lightning's ``Rollout``, and its ``AttemptedRollout`` if it has an attempt, which is the last one."""

    rollout_id: str
    start_time: float
    end_time: float | None = None
    status: RolloutStatus = "queuing"
    attempt: dict[str, Any] | None = None


class Open(BaseModel):
    """Fields that we do not read are kept."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, AnyJson]


_model = cast(Any, create_model)
_Context = _model(
    "_Context", __base__=Open, trace_id=(Id, ...), span_id=(Id, ...), is_remote=(bool, ...), trace_state=(Table, ...)
)
_Status = _model(
    "_Status", __base__=Open, status_code=(Literal["UNSET", "OK", "ERROR"], ...), description=(str | None, None)
)
_Event = _model("_Event", __base__=Open, name=(str, ...), attributes=(Attributes, ...), timestamp=(Time | None, None))
_Link = _model("_Link", __base__=Open, context=(_Context, ...), attributes=(Attributes | None, None))
_OtelResource = _model("_OtelResource", attributes=(Attributes, ...), schema_url=(str, ...))
_ResourcesUpdate = _model("_ResourcesUpdate", resources=(dict[str, Any], ...))
SpanFields = _model(
    "SpanFields",
    __base__=Open,
    **dict.fromkeys(("rollout_id", "attempt_id", "trace_id", "span_id"), (Id, ...)),
    name=(str, ...),
    sequence_id=(Count, ...),
    parent_id=(Id | None, ...),
    status=(_Status, ...),
    attributes=(Attributes, ...),
    events=(Items[_Event], ...),  # type: ignore[valid-type]
    links=(Items[_Link], ...),  # type: ignore[valid-type]
    start_time=(Time | None, ...),
    end_time=(Time | None, ...),
    context=(_Context | None, ...),
    parent=(_Context | None, ...),
    resource=(_OtelResource, ...),
)
"""Agent Lightning's ``Span``."""


def request_json(rollout: Rollout) -> dict[str, Any]:
    """What a trainer says of a rollout that it enqueues."""
    own = {name: getattr(rollout, name) for name in _METADATA}
    return {
        "input": rollout.task,
        "mode": rollout.mode,
        "resources_id": rollout.resources_id,
        "config": {theirs: getattr(rollout, ours) for ours, theirs in _CONFIG.items()},
        "metadata": {**rollout.metadata, **{name: value for name, value in own.items() if value != _METADATA[name]}},
    }


def read_request(request: Request) -> Rollout:
    """The rollout that a client enqueues. Raises ``ValueError``."""
    config, metadata = request.config or Config(), dict(request.metadata or {})
    own = {name: metadata.pop(name) for name in _METADATA if name in metadata}
    own |= _LIMITS.validate_python({name: own[name] for name in own if name == "trace_limit"})
    return Rollout(
        task=request.input,
        mode=request.mode,
        resources_id=request.resources_id,
        metadata=metadata,
        **{ours: getattr(config, theirs) for ours, theirs in _CONFIG.items()},
        **own,
    )


def rollout_json(rollout: Rollout) -> dict[str, Any]:
    """A rollout with its last attempt, if it has one."""
    fields = {
        "rollout_id": rollout.rollout_id,
        "start_time": rollout.started,
        "end_time": rollout.ended,
        "status": rollout.status,
        **request_json(rollout),
    }
    return {**fields, "attempt": attempt_json(rollout, rollout.attempts[-1])} if rollout.attempts else fields


def attempt_json(rollout: Rollout, attempt: Attempt) -> dict[str, Any]:
    """An attempt of a rollout."""
    fields = {theirs: getattr(attempt, ours) for ours, theirs in ATTEMPT_FIELDS.items()}
    return {"rollout_id": rollout.rollout_id, **fields, "metadata": None}


def read_rollout(value: Any) -> Rollout:
    """A rollout from JSON; of its attempts only the last is known. Raises ``ValueError``."""
    fields = RolloutFields.model_validate(value)
    rollout = read_request(fields)
    rollout.rollout_id, rollout.status = fields.rollout_id, fields.status
    rollout.started, rollout.ended = fields.start_time, fields.end_time
    if (last := fields.attempt) is not None:
        known = {ours: last[theirs] for ours, theirs in ATTEMPT_FIELDS.items() if theirs in last}
        rollout.attempts = [TypeAdapter(Attempt).validate_python(known)]
    return rollout


def resources_json(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Named resources, each with its ``resource_type``."""
    return {
        name: {"resource_type": "proxy_llm", **asdict(value)} if isinstance(value, ProxyLLM) else value
        for name, value in resources.items()
    }


def read_resources(update: Any) -> dict[str, Any]:
    """The resources of a ``ResourcesUpdate``; a ``proxy_llm`` is a :class:`ProxyLLM`. Raises ``ValueError``."""
    resources = _ResourcesUpdate.model_validate(update).resources
    for name, value in resources.items():
        if isinstance(value, Mapping) and value.get("resource_type") == "proxy_llm":
            resources[name] = TypeAdapter(ProxyLLM).validate_python(
                {field: value[field] for field in ProxyLLM.__slots__ if field in value}
            )
    return resources


def span_json(span: SpanRecord) -> dict[str, Any]:
    """A span with the fields of Agent Lightning's ``Span``."""
    trace_id = secrets.token_hex(16)
    return {
        **{name: getattr(span, name) for name in _SPAN},
        "trace_id": trace_id,
        "start_time": span.start_time,
        "end_time": span.end_time,
        "status": {"status_code": "OK"} if span.error is None else {"status_code": "ERROR", "description": span.error},
        "context": {"trace_id": trace_id, "span_id": span.span_id, "is_remote": False, "trace_state": {}},
        "resource": {"attributes": {}, "schema_url": ""},
        "events": [],
        "links": [],
        "parent": None,
    }


def read_span(value: Mapping[str, Any]) -> SpanRecord:
    """A span from JSON. Raises ``KeyError`` and ``TypeError`` if it is none."""
    status = value["status"]
    return SpanRecord(
        **{name: value[name] for name in _SPAN},
        start_time=value["start_time"] or 0.0,
        end_time=value["end_time"] or 0.0,
        error=(status.get("description") or "") if status["status_code"] == "ERROR" else None,
    )


def outcome_span(outcome: Outcome, rollout_id: str, attempt_id: str, number: int) -> SpanRecord:
    """The span of how an attempt ended. Agent Lightning finds its reward, which is as ``emit_reward`` writes it: named
    values, the primary one first.
    """
    attributes: dict[str, Any] = {_OUTCOME: to_json(_OUTCOMES.dump_python(outcome))}
    if outcome.reward is not None:
        primary = "total" if outcome.reward_components else "primary"
        for index, (name, value) in enumerate({primary: outcome.reward, **outcome.reward_components}.items()):
            attributes[f"{REWARD_PREFIX}{index}.name"] = name
            attributes[f"{REWARD_PREFIX}{index}.value"] = float(value)
    now = clock.now()
    return SpanRecord(
        name="agentlightning.annotation",
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=number,
        attributes=attributes,
        start_time=now,
        end_time=now,
        span_id=outcome_span_id(rollout_id, attempt_id),
    )


def outcome_span_id(rollout_id: str, attempt_id: str) -> str:
    """The same for an attempt's outcome that is sent again: it is stored once."""
    return hashlib.blake2b(f"{rollout_id}/{attempt_id}".encode(), digest_size=8).hexdigest()


def read_record(spans: Sequence[SpanRecord]) -> tuple[list[LLMCall], list[SpanRecord], Outcome]:
    """The calls, the annotations and the outcome of an attempt, from its spans in the order in which they were stored.
    A foreign runner's outcome is the reward it stored.

    The calls of foreign tracers count if our proxy traced none, which would trace all.
    """
    try:
        spans = sorted(spans, key=attrgetter("sequence_id"))
        is_ours = any(PROMPT_IDS in span.attributes for span in spans)
        by_id = {span.span_id: span for span in spans}
        calls, others, names = [], [], dict[str, str]()
        for span in spans:
            if PROMPT_IDS in span.attributes:
                calls.append(from_span(span))
            elif span.name in _READERS and not is_ours:
                calls.append(_foreign_call(span, by_id, names))
            else:
                others.append(span)
        annotations = [span for span in others if _OUTCOME not in span.attributes]
        return order_calls(calls, others), annotations, _read_outcome(others)
    except UNREADABLE as error:
        message = f"its spans cannot be read: {type(error).__name__}: {error}"
        return [], [], Outcome(failure="not_stored", message=message)


def _read_outcome(spans: Sequence[SpanRecord]) -> Outcome:
    for span in spans:
        if _OUTCOME in span.attributes:
            return _OUTCOMES.validate_json(span.attributes[_OUTCOME])
    reward = reward_from_spans(spans)
    if isinstance(reward, dict):
        (_, primary), *others = reward.items()
        return Outcome(reward=primary, reward_components=dict(others))
    return Outcome(reward=reward)


def _foreign_call(span: SpanRecord, by_id: Mapping[str, SpanRecord], names: dict[str, str]) -> LLMCall:
    try:
        reply = _READERS[span.name](span.attributes)
        fields = {**read_reply(reply), "model": str(reply["model"])}
    except (*UNREADABLE, SyntaxError) as error:
        fields = {"error": f"the span cannot be read: {type(error).__name__}: {error}"}
    return LLMCall(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        sequence=span.sequence_id,
        agent=_agent_name(span, by_id, names),
        started=span.start_time,
        ended=span.end_time,
        **fields,
    )


def _tracer_reply(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion in a span of the runner-side tracer."""
    choice = {
        "message": {"role": "assistant", "content": attributes.get("gen_ai.completion.0.content")},
        "token_ids": attributes.get("response_token_ids"),
        "logprobs": {"content": json.loads(attributes.get("logprobs.content", "[]"))},
        "finish_reason": attributes.get("gen_ai.completion.0.finish_reason"),
    }
    model, prompt_ids = attributes.get("gen_ai.request.model", ""), attributes.get("prompt_token_ids")
    return {"model": model, "prompt_token_ids": prompt_ids, "choices": [choice]}


def _proxy_reply(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion in a span of the LLM proxy, which writes lists as Python literals."""
    lists = {name: ast.literal_eval(attributes[_VLLM + name]) for name in ("prompt_token_ids", "choices")}
    return {"model": attributes.get(f"{_VLLM}model", ""), **lists}


_READERS = {"openai.chat.completion": _tracer_reply, "raw_gen_ai_request": _proxy_reply}


def _agent_name(span: SpanRecord, by_id: Mapping[str, SpanRecord], known: dict[str, str]) -> str:
    """The name of the nearest agent among a span and its ancestors; ``known`` has those of spans seen before."""
    ancestor: SpanRecord | None = span
    name, passed = "", list[str]()
    while ancestor is not None and not name:
        if ancestor.span_id in known:  # or in a circle, which a store may hold
            name = known[ancestor.span_id]
            break
        known[ancestor.span_id] = ""
        passed.append(ancestor.span_id)
        name = str(next(filter(None, map(ancestor.attributes.get, _AGENT_NAMES)), ""))
        ancestor = by_id.get(ancestor.parent_id or "")
    known.update(dict.fromkeys(passed, name))
    return name

"""Sends rollouts to an OpenTelemetry collector or viewer, on request: ``--otlp http://HOST:PORT``.

A rollout is one trace, under OpenTelemetry's GenAI conventions: ``invoke_agent`` with one ``chat`` for each LLM call,
one ``execute_tool`` for each tool step and one ``gen_ai.evaluation.result`` for each reward. Viewers such as Phoenix,
Langfuse and Jaeger read OTLP over HTTP. It is sent after the rollout has ended and never delays one: what the viewer
does not accept is lost, and the run says so once.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

from groundwire.adapters.tracing import LLMCall, to_span
from groundwire.adapters.tracing.calls import to_json
from groundwire.tools.secrets import masked_values, register_secret
from groundwire.train.store.rollout import Rollout

_log = logging.getLogger(__name__)
_PATH = "/v1/traces"
_HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
_FLUSH_MS = 10_000
_NS = 1_000_000_000


class OtlpExport:
    """Sends each result that :meth:`export` gets, in the background; :meth:`close` waits for the last ones.

    ``target`` is the address of a viewer, or what takes the spans in its place.

    ``run`` is the name of the run, in each span as ``session.id``.
    """

    def __init__(self, target: str | SpanProcessor, *, run: str, domain: str) -> None:
        self._run, self._domain = run, domain
        resource = Resource.create({"service.name": "groundwire", "session.id": run})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        sender = BatchSpanProcessor(_Exporter(target)) if isinstance(target, str) else target
        self._provider.add_span_processor(sender)
        self._tracer = self._provider.get_tracer("groundwire")

    def export(self, result: Rollout) -> None:
        """Send a rollout as one trace."""
        calls = sorted(result.calls, key=lambda call: call.started)
        # A rollout without a call has no place in time.
        start = min((call.started for call in calls), default=0.0)
        end = max([start + result.seconds, *(call.ended for call in calls)])
        task = result.task
        of_trace = result.mode is None and not result.outcome.failure  # which may have no reward
        root = self._span(
            f"invoke_agent {self._domain}",
            start,
            end,
            Context(),
            {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.conversation.id": result.metadata.get("session") or result.rollout_id,
                **_asked(task),
                "gen_ai.output.messages": _messages([{"role": "assistant", "content": result.outcome.answer}]),
                "groundwire.task_id": str(task["id"]),
                "groundwire.mode": result.mode or "",
                "groundwire.group": result.group,
                "groundwire.status": result.outcome.status,
            },
            error=None if result.succeeded or of_trace else f"{result.outcome.status}: {result.outcome.message}",
        )
        for name, begins, ends, attributes, error in _children(result, calls, end):
            self._span(name, begins, ends, root, attributes, error=error)

    def close(self) -> None:
        """Send what is left, within some seconds."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()

    def _span(
        self, name: str, start: float, end: float, parent: Context, attributes: Mapping[str, Any], *, error: str | None
    ) -> Context:
        span = self._tracer.start_span(
            name,
            context=parent,
            kind=SpanKind.CLIENT if name.startswith("chat") else SpanKind.INTERNAL,
            attributes=masked_values({"session.id": self._run, **attributes}),
            start_time=int(start * _NS),
        )
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, masked_values(error)))
        span.end(int(max(start, end) * _NS))
        return set_span_in_context(span, Context())


def _asked(task: Mapping[str, Any]) -> dict[str, str]:
    """What an agent was asked: of a trace also its other inputs. A run's task has its gold, which is left out."""
    if inputs := task.get("inputs"):
        return {"input.value": to_json(inputs)}
    return {"gen_ai.input.messages": _messages([{"role": "user", "content": str(task["question"])}])}


def traces_url(url: str) -> str:
    """The address for traces: ``url`` with OTLP's path, unless it has one."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else _PATH))


def _children(result: Rollout, calls: Sequence[LLMCall], end: float) -> Iterator[tuple[Any, ...]]:
    """The name, start, end, attributes and error of each span below that of the rollout."""
    for call in calls:
        unread = getattr(call, "unread", None)  # of a trace: what its tracer lost, which is no error
        error = (call.untrainable_reason if unread is None else call.error) or None
        attributes = {**_call_attributes(call), **({"groundwire.unread": unread} if unread else {})}
        yield f"chat {call.model}", call.started, call.ended, attributes, error
    turn = 0
    for step in result.outcome.steps:
        if step["kind"] != "tool":
            turn += 1
            continue
        # A step has no times: a tool runs between the call before it and the next.
        begins = calls[min(turn, len(calls)) - 1].ended if calls and turn else end
        ends = calls[turn].started if turn < len(calls) else end
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": step["agent"],
            "gen_ai.tool.call.arguments": step["input"],
            "gen_ai.tool.call.result": step["output"],
        }
        yield f"execute_tool {step['agent']}", begins, max(begins, ends), attributes, None if step["ok"] else "error"
    for name, value in result.scores.items():
        kind, given = ("label", value) if isinstance(value, str) else ("value", float(value))
        score = {"gen_ai.evaluation.name": name, f"gen_ai.evaluation.score.{kind}": given}
        yield "gen_ai.evaluation.result", end, end, score, None


def _call_attributes(call: LLMCall) -> dict[str, Any]:
    """Those of the call's span in the store, with its messages in the form of the conventions, without token ids."""
    attributes = {
        **to_span(replace(call, prompt_ids=[], response_ids=[], logprobs=[])).attributes,
        "gen_ai.usage.input_tokens": len(call.prompt_ids) or call.prompt_tokens,
        "gen_ai.usage.output_tokens": len(call.response_ids) or call.response_tokens,
        "gen_ai.input.messages": _messages(call.messages),
        "gen_ai.output.messages": _messages([call.reply] if call.reply else [], finish_reason=call.finish_reason),
        "gen_ai.provider.name": "groundwire",
        "groundwire.reward": call.reward,
    }
    return {name: value for name, value in attributes.items() if value not in (None, "")}


def _messages(messages: Sequence[Mapping[str, Any]], *, finish_reason: str | None = None) -> str:
    """Chat messages in the form of the GenAI conventions, as JSON."""
    converted = []
    for message in messages:
        role, parts = str(message.get("role", "")), list[dict[str, Any]]()
        content = message.get("content")
        if thought := message.get("reasoning_content") or message.get("reasoning"):
            parts.append({"type": "reasoning", "content": thought})
        if role == "tool":
            parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content})
        elif content:
            parts += map(_part, content) if isinstance(content, list) else [{"type": "text", "content": str(content)}]
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            arguments = {"name": function.get("name"), "arguments": function.get("arguments")}
            parts.append({"type": "tool_call", "id": call.get("id"), **arguments})
        converted.append({"role": role, "parts": parts, **({"finish_reason": finish_reason} if finish_reason else {})})
    return json.dumps(converted, ensure_ascii=False)


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a chat message's content."""
    if part.get("type") == "image_url":
        return {"type": "uri", "modality": "image", "uri": part["image_url"]["url"]}
    return {"type": "text", "content": part["text"] if part.get("type") == "text" else json.dumps(part)}


class _Exporter(OTLPSpanExporter):
    """An exporter to ``url`` that logs its first failure, and no other."""

    def __init__(self, url: str) -> None:
        for name in _HEADERS:
            for header in os.environ.get(name, "").split(","):
                register_secret(header.partition("=")[2].strip())
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        super().__init__(endpoint=traces_url(url))
        self._url, self._warned = url, False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send ``spans``."""
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS and not self._warned:
            self._warned = True
            _log.warning("spans cannot be sent to %s and are lost there; the run goes on", self._url)
        return result

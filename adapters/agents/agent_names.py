"""The name of the agent or node that makes a call, as its framework tells it."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import context, trace
from opentelemetry.context import Context
from wrapt import register_post_import_hook

from groundwire.adapters.agents.changes import undo_later, wrap
from groundwire.adapters.tracing.calls import AGENT


def current_agent() -> str:
    """The agent or node that is calling; empty if no framework tells it.

    In this order: the agent of the OpenAI Agents SDK, the agent or the node of LangGraph, ``gen_ai.agent.name`` of the
    current OpenTelemetry span or of the nearest span around it, the agent of a framework without spans, the step of a
    workflow of LlamaIndex.
    """
    return (
        _sdk_agent()
        or _langgraph_node()
        or _otel_agent(trace.get_current_span())
        or str(context.get_value(_RUNNING) or "")
        or _workflow_step()
    )


@cache
def follow_agent_names() -> None:
    """From now on, until the run ends, spans know the name of the agent around them."""
    undo_later(follow_agent_names.cache_clear)
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # without one, spans have no attributes
        # Not by its function, which would refuse one that the agent sets later.
        trace._TRACER_PROVIDER = ours = _Provider()
        undo_later(lambda: setattr(trace, "_TRACER_PROVIDER", None) if trace._TRACER_PROVIDER is ours else None)
    provider: Any = trace.get_tracer_provider()
    if hasattr(provider, "add_span_processor"):  # of the SDK, which the application has
        names = _processor()
        provider.add_span_processor(names)
        # Logfire's provider has the SDK's in it.
        others = getattr(getattr(provider, "provider", provider), "_active_span_processor", None)
        if others is not None:
            undo_later(partial(_remove, names, others))
    register_post_import_hook(_instrument, "pydantic_ai")
    for module, function, name_of in _WITHOUT_SPANS:
        wrap(module, function, partial(_run_named, name_of))


def _remove(processor: Any, others: Any) -> None:
    with others._lock:
        others._span_processors = tuple(other for other in others._span_processors if other is not processor)


def _instrument(pydantic_ai: Any) -> None:
    agent = pydantic_ai.Agent
    if not (before := agent._instrument_default):  # else the author has done it
        agent.instrument_all()
        undo_later(lambda: agent.instrument_all(before))


def _sdk_agent() -> str:
    scope = sys.modules.get("agents.tracing.scope")
    span: Any = scope.Scope.get_current_span() if scope is not None else None
    while span is not None:
        if getattr(span.span_data, "type", "") == "agent":
            return str(span.span_data.name)
        # The span before this one, also where tracing is off and spans have no ids.
        previous = getattr(getattr(span, "_prev_span_token", None), "old_value", None)
        span = previous if hasattr(previous, "span_data") else None
    return ""


def _langgraph_node() -> str:
    module = sys.modules.get("langchain_core.runnables.config")
    config = module and module.var_child_runnable_config.get()
    metadata = (config or {}).get("metadata") or {}
    return str(metadata.get("lc_agent_name") or metadata.get("langgraph_node") or "")


def _workflow_step() -> str:
    module = sys.modules.get("workflows.runtime.types.step_function")
    if module is not None:
        step = module.StepWorkerStateContextVar.get(None)
        return str(step.state.step_name) if step else ""
    with suppress(RuntimeError):  # no loop
        task = asyncio.current_task() if "workflows" in sys.modules else None  # before version 2
        if getattr(task and task.get_coro(), "__qualname__", "") == "Context._step_worker":
            return str(task and task.get_name())
    return ""


def _agent_of_agno(model: Any, arguments: Mapping[str, Any]) -> str:
    """The agent or team for whose run a model is called; that of a memory is called for none."""
    run = arguments.get("run_response")
    return getattr(run, "agent_name", None) or getattr(run, "team_name", None) or current_agent()


_RUNNING = context.create_key("groundwire-agent")
_LLAMA_AGENTS = "llama_index.core.agent.workflow"
_AGNO_CALLS = tuple(("agno.models.base", f"Model.{name}", _agent_of_agno) for name in ("aresponse", "aresponse_stream"))
_WITHOUT_SPANS: tuple[tuple[str, str, str | Callable[[Any, Any], object]], ...] = (
    *_AGNO_CALLS,
    ("smolagents.agents", "MultiStepAgent.run", "name"),
    ("crewai.agent.core", "Agent.execute_task", "role"),
    ("camel.agents.chat_agent", "ChatAgent.step", "role_name"),
    ("camel.agents.chat_agent", "ChatAgent.astep", "role_name"),
    ("dspy.predict.predict", "Predict.__call__", lambda predictor, _: _predictor_name(predictor)),
    ("dspy.predict.predict", "Predict.acall", lambda predictor, _: _predictor_name(predictor)),
    ("haystack.components.agents.agent", "Agent.run", "__component_name__"),
    ("haystack.components.agents.agent", "Agent.run_async", "__component_name__"),
    ("haystack.core.pipeline.pipeline", "Pipeline._run_component", lambda _, kwargs: kwargs.get("component_name")),
    (f"{_LLAMA_AGENTS}.function_agent", "FunctionAgent.take_step", "name"),
    (f"{_LLAMA_AGENTS}.react_agent", "ReActAgent.take_step", "name"),
    (f"{_LLAMA_AGENTS}.codeact_agent", "CodeActAgent.take_step", "name"),
)
"""Frameworks that make no spans: module and method that runs an agent, and the attribute with the agent's name, or a
function of the object and of the keyword arguments that knows the name."""


def _run_named(name_of: str | Callable[[Any, Any], object], wrapped: Any, agent: Any, args: Any, kwargs: Any) -> Any:
    """Run an agent with its name in the context."""
    own_name = getattr(agent, name_of, None) if isinstance(name_of, str) else name_of(agent, kwargs)
    named = context.set_value(_RUNNING, own_name or type(agent).__name__)
    if inspect.isasyncgenfunction(wrapped):
        return _iterate_named(named, wrapped(*args, **kwargs))
    if inspect.iscoroutinefunction(wrapped):
        return _await_named(named, wrapped(*args, **kwargs))
    token = context.attach(named)
    try:
        return wrapped(*args, **kwargs)
    finally:
        context.detach(token)


async def _await_named(named: Context, work: Awaitable[Any]) -> Any:
    token = context.attach(named)
    try:
        return await work
    finally:
        context.detach(token)


async def _iterate_named(named: Context, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    with suppress(StopAsyncIteration):
        while True:
            yield await _await_named(named, anext(items))


def _predictor_name(predictor: Any) -> str:
    """The path of a predictor in the program that runs, such as ``extract.predict``."""
    callers = sys.modules["dspy"].settings.caller_modules or [predictor]
    return next((name for name, own in callers[0].named_predictors() if own is predictor and name != "self"), "")


_names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # the agent around each span


def _otel_agent(span: Any) -> str:
    attributes = getattr(span, "attributes", None) or {}
    return str(attributes.get(AGENT) or _names.get(span, ""))


def _name(span: Any, parent_context: Context | None) -> None:
    if name := _otel_agent(trace.get_current_span(parent_context)):
        _names[span] = name


_ids = count(1)


def _processor() -> Any:
    from opentelemetry.sdk.trace import SpanProcessor

    class AgentNames(SpanProcessor):
        def on_start(self, span: Any, parent_context: Context | None = None) -> None:
            _name(span, parent_context)

    return AgentNames()


class _Span(trace.NonRecordingSpan):
    """A span with attributes and nothing else: the SDK is no package of the base, as it moves the application's API."""

    def __init__(self, attributes: Any) -> None:
        super().__init__(trace.SpanContext(trace_id=1, span_id=next(_ids), is_remote=False))
        self.attributes = dict(attributes or {})

    def is_recording(self) -> bool:
        return True

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def set_attributes(self, attributes: Any) -> None:
        self.attributes.update(attributes)


class _Tracer(trace.Tracer):
    def start_span(self, name: str, context: Context | None = None, *args: Any, **kwargs: Any) -> trace.Span:
        span = _Span(kwargs.get("attributes") or (args[1] if len(args) > 1 else None))
        _name(span, context)
        return span

    @contextmanager
    def start_as_current_span(  # type: ignore[override]
        self, name: str, *args: Any, end_on_exit: bool = True, **kwargs: Any
    ) -> Iterator[trace.Span]:
        with trace.use_span(self.start_span(name, *args, **kwargs), end_on_exit) as span:
            yield span


class _Provider(trace.TracerProvider):
    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        return _Tracer()

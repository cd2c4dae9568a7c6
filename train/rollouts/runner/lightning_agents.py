"""Agents that are written for Agent Lightning: its emitters inside of an agent, and its ``LitAgent``.

Only processes in which Agent Lightning is installed import this module.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from agentlightning.tracer.base import Tracer, clear_active_tracer, get_active_tracer, set_active_tracer
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.types import LLM as LightningLLM
from agentlightning.types import AttemptedRollout as LightningRollout
from agentlightning.types import Attributes, ProxyLLM, Span, SpanCoreFields, TraceStatus
from pydantic_core import to_json

from groundwire.adapters import Endpoint, LitAgentBackend
from groundwire.adapters.tracing.emitted_spans import current_emissions
from groundwire.tools.text import valid_text, valid_texts
from groundwire.train.rollouts.runner.request_check import MAIN_LLM
from groundwire.train.store.client import StoreClient
from groundwire.train.store.limits import check_request
from groundwire.train.store.runner_client import RunnerClient
from groundwire.train.store.wire import AttemptedRollout

__all__ = ["EmissionTracer", "LitAgents"]

_RESERVED = "groundwire."
_lock = threading.Lock()


class EmissionTracer(Tracer):
    """Stores what agents emit (``agentlightning.emit_reward``) as spans of their attempts.

    Agent Lightning's own OpenTelemetry tracer holds one active trace per process and blocks while it exports. This one
    serves any number of rollouts: the attempt is known from the context of the calling task. The proxy traces calls.
    """

    _users = 0
    """The pools of this process that run rollouts. They share the first one's tracer."""

    def start(self) -> None:
        """Become the tracer of Agent Lightning's emitters, unless there is one."""
        with _lock:
            EmissionTracer._users += 1
            if get_active_tracer() is None:
                set_active_tracer(self)

    def stop(self) -> None:
        """With the last pool, leave the emitters without a tracer."""
        with _lock:
            EmissionTracer._users -= 1
            if not EmissionTracer._users and isinstance(get_active_tracer(), EmissionTracer):
                clear_active_tracer()

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Store a span that an agent emits, after the calls that its attempt has made so far.

        Raises ``ValueError``, in the agent, if the store would refuse it.
        """
        emissions = current_emissions()
        if emissions is None:
            raise RuntimeError(f"{name} was emitted outside of a rollout: emit it in the agent, or in what it calls")
        span = DummyTracer().create_span(valid_text(name), valid_texts(attributes), timestamp, status)
        _check(span)
        emissions.add(
            span.name,
            span.attributes,
            start_time=span.start_time or 0.0,
            end_time=span.end_time or 0.0,
            error=(span.status.description or "") if span.status.status_code == "ERROR" else None,
        )
        return span

    def get_last_trace(self) -> list[Span]:
        """Always empty: the spans are in the store."""
        return []


def _check(span: SpanCoreFields) -> None:
    for name in (span.name, *(span.attributes or {})):
        if name.startswith(_RESERVED):
            raise ValueError(f"{name!r:.60} cannot be emitted: names that begin with {_RESERVED!r} are reserved")
    try:
        check_request({}, span)
        to_json(span.attributes)
    except ValueError as error:
        raise ValueError(f"{span.name!r:.60} cannot be emitted: {error}") from error


class LitAgents:
    """Runs the ``LitAgent`` of ``backend`` for a runner of ``store``."""

    def __init__(self, backend: LitAgentBackend, store: Any) -> None:
        self._backend = backend
        if isinstance(store, RunnerClient):
            client = StoreClient(store.connection.address, token=store.connection.token)
            client.connection, store = store.connection, client
        from agentlightning.runner.agent import LitAgentRunner  # slow, and for such agents only

        # The agent has a weak reference to it.
        self._runner: LitAgentRunner[Any] = LitAgentRunner(tracer=EmissionTracer())
        self._runner.init(backend.agent)
        self._runner.init_worker(0, store)

    async def run(self, task: Mapping[str, Any], policy: Any, rollout: AttemptedRollout, endpoint: Endpoint) -> Any:
        """The value that the agent returns for an attempt; ``policy`` is the resource with the policy's address.

        Raises a :class:`groundwire.adapters.BackendError`.
        """
        if not isinstance(rollout, LightningRollout):
            rollout = LightningRollout.model_validate(rollout.model_dump())
        if not isinstance(policy, LightningLLM):
            policy = ProxyLLM.model_validate(policy.model_dump())
        # One resource: Agent Lightning warns if an agent of the first one finds two.
        given = {MAIN_LLM: policy.model_copy(update={"sampling_parameters": dict(endpoint.sampling)})}
        return await self._backend.rollout(task, given, rollout, endpoint)

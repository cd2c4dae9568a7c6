"""Agents that are written for Agent Lightning: its emitters inside of an agent, and its ``LitAgent``.

Only processes in which Agent Lightning is installed import this module.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import FunctionType
from typing import Any

from agentlightning.emitter.reward import emit_reward
from agentlightning.runner.agent import LitAgentRunner
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.base import Tracer, clear_active_tracer, get_active_tracer, set_active_tracer
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.types import AttemptedRollout as LightningRollout
from agentlightning.types import Attributes, ProxyLLM, Span, SpanCoreFields, TraceStatus
from pydantic_core import to_json

from groundwire.adapters import Endpoint, LitAgentBackend
from groundwire.adapters.tracing.emitted_spans import current_emissions
from groundwire.adapters.tracing.spans import REWARD_PREFIX
from groundwire.tools import clock
from groundwire.tools.files import shorten_repr
from groundwire.tools.numbers import MAX_METRIC
from groundwire.tools.text import valid_text, valid_texts
from groundwire.train.rollouts.runner.request_check import MAIN_LLM
from groundwire.train.store.agent_lightning import rollout_json
from groundwire.train.store.base import RolloutStore
from groundwire.train.store.limits import check_attributes
from groundwire.train.store.remote import RemoteStore
from groundwire.train.store.rollout import ProxyLLM as PolicyAddress
from groundwire.train.store.rollout import Rollout

_RESERVED = "groundwire."
_lock = threading.Lock()
_lightning_emit_reward = FunctionType(emit_reward.__code__, emit_reward.__globals__)
_lightning_emit_reward.__kwdefaults__ = emit_reward.__kwdefaults__


def _emit_reward(reward: Any, **options: Any) -> Any:
    """As Agent Lightning's function. What it refuses becomes a span that fails the attempt, though the agent may catch
    the error.
    """
    try:
        return _lightning_emit_reward(reward, **options)
    except Exception as error:
        if options.get("propagate", True) and (emissions := current_emissions()) is not None:
            numbers = reward.values() if isinstance(reward, dict) else [reward]
            too_large = any(isinstance(number, int) and abs(number) > MAX_METRIC for number in numbers)
            value = math.inf if too_large else f"{shorten_repr(reward)}: {error}"
            attributes = {f"{REWARD_PREFIX}0.name": "primary", f"{REWARD_PREFIX}0.value": value}
            now = clock.now()
            emissions.add("agentlightning.annotation", attributes, start_time=now, end_time=now)
        raise


# In place: agents may have imported it before.
emit_reward.__globals__["_emit_reward"] = _emit_reward
emit_reward.__code__ = (lambda *values, **options: _emit_reward(*values, **options)).__code__  # noqa: PLW0108
emit_reward.__kwdefaults__ = None


class EmissionTracer(Tracer):
    """Stores what agents emit (``agentlightning.emit_reward``) as spans of their attempts.

    Agent Lightning's own OpenTelemetry tracer holds one active trace per process and blocks while it exports. This one
    serves any number of rollouts: the attempt is known from the context of the calling task. The proxy traces calls.
    """

    @classmethod
    def serve(cls, *, running: bool) -> None:
        """While pools are running, be the tracer of Agent Lightning's emitters, unless they have another."""
        with _lock:
            tracer = get_active_tracer()
            if running and tracer is None:
                set_active_tracer(cls())
            elif not running and isinstance(tracer, EmissionTracer):
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
        check_attributes(span.attributes or {})
        to_json(span.attributes)
    except ValueError as error:
        raise ValueError(f"{span.name!r:.60} cannot be emitted: {error}") from error


class LitAgents:
    """Runs the ``LitAgent`` of ``backend`` for a runner of ``store``.

    The agent's runner has Agent Lightning's own client of a store behind HTTP; of one in this process it has none, and
    an empty store in its place.
    """

    def __init__(self, backend: LitAgentBackend, store: RolloutStore) -> None:
        self._backend = backend
        theirs: Any = InMemoryLightningStore()
        if isinstance(store, RemoteStore):
            address, token = store.address, store.token
            theirs = LightningStoreClient(address.replace("://", f"://x:{token}@", 1) if token else address)
        # The agent has a weak reference to it.
        self._runner: LitAgentRunner[Any] = LitAgentRunner(tracer=EmissionTracer())
        self._runner.init(backend.agent)
        self._runner.init_worker(0, theirs)

    async def run(self, task: Mapping[str, Any], policy: PolicyAddress, rollout: Rollout, endpoint: Endpoint) -> Any:
        """The value that the agent returns for an attempt. Raises a :class:`groundwire.adapters.BackendError`."""
        theirs = LightningRollout.model_validate(rollout_json(rollout))
        # One resource: Agent Lightning warns if an agent of the first one finds two.
        resource = ProxyLLM(**asdict(replace(policy, sampling_parameters=dict(endpoint.sampling))))
        return await self._backend.rollout(task, {MAIN_LLM: resource}, theirs, endpoint)

"""The part of Agent Lightning 0.3's data that a runner reads and writes, without a dependency on Agent Lightning.

The fields and their names are those of Agent Lightning's types, so the objects of its stores can be used in place of
these, and JSON of one is valid for the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from groundwire.adapters.tracing import semconv
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.tools.secrets import masked_values, secret_masker

__all__ = [
    "ENDED",
    "Attempt",
    "AttemptedRollout",
    "ProxyLLM",
    "ResourcesUpdate",
    "RolloutStatus",
    "RunnerStore",
    "span_fields",
]

ENDED = ("succeeded", "failed", "cancelled", "timeout")
"""The statuses of rollouts and attempts that no runner works on any more."""
_PACKED = (semconv.PROMPT_IDS, semconv.RESPONSE_IDS, semconv.LOGPROBS)


class _Fields(BaseModel):
    """Fields that a runner does not read are kept."""

    model_config = ConfigDict(extra="allow")


class Attempt(_Fields):
    """One execution of a rollout."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """1 for the first attempt."""
    start_time: float
    """Seconds since the epoch, by the store's clock."""
    status: str = "preparing"


class _Config(_Fields):
    unresponsive_seconds: float | None = None


class RolloutStatus(_Fields):
    """A rollout without its task: whether it still needs a runner, and which attempt is its last."""

    rollout_id: str
    status: str
    attempt: Attempt | None = None


class AttemptedRollout(_Fields):
    """A rollout that a runner has taken from the queue, with its new attempt."""

    rollout_id: str
    input: Any
    """The task."""
    mode: str | None = None
    resources_id: str | None = None
    status: str = "preparing"
    config: _Config = Field(default_factory=_Config)
    metadata: dict[str, Any] | None = None
    attempt: Attempt

    @model_validator(mode="after")
    def _one_rollout(self) -> AttemptedRollout:
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError("the attempt belongs to another rollout")
        return self


class ProxyLLM(_Fields):
    """The resource with the address of the proxy in front of the policy."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"
    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = Field(default_factory=dict)

    def get_base_url(self, rollout_id: str | None, attempt_id: str | None) -> str:
        """The base URL of an attempt's LLM calls; without ids the proxy's own."""
        if rollout_id is None or attempt_id is None:
            return self.endpoint
        base = self.endpoint.rstrip("/")
        version = "/v1" if base.endswith("/v1") else ""
        return f"{base.removesuffix('/v1')}/rollout/{rollout_id}/attempt/{attempt_id}{version}"


class ResourcesUpdate(_Fields):
    """Named resources; those of the type ``proxy_llm`` are :class:`ProxyLLM`."""

    resources_id: str
    resources: dict[str, Any]

    @model_validator(mode="after")
    def _proxies(self) -> ResourcesUpdate:
        for name, value in self.resources.items():
            if isinstance(value, Mapping) and value.get("resource_type") == "proxy_llm":
                self.resources[name] = ProxyLLM.model_validate(value)
        return self


class RunnerStore(Protocol):
    """The methods of a Lightning store that a runner calls."""

    async def dequeue_many_rollouts(self, *, limit: int, worker_id: str | None) -> Sequence[AttemptedRollout]:
        """Take up to ``limit`` rollouts from the queue."""
        ...

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """The resources of a run."""
        ...

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """The resources that were changed last."""
        ...

    async def get_rollout_by_id(self, rollout_id: str) -> Any:
        """A rollout with its last attempt: :class:`RolloutStatus` or Agent Lightning's object; None if unknown."""
        ...

    async def update_attempt(self, rollout_id: str, attempt_id: str, **changes: Any) -> Any:
        """Change an attempt's ``status`` or ``last_heartbeat_time``."""
        ...


def span_fields(span: SpanRecord, mask: Callable[[str], str] | None = None) -> dict[str, Any]:
    """``span`` with the fields of Agent Lightning's ``Span``, without secrets and in valid Unicode.

    ``mask`` is a :func:`secret_masker` for many spans.
    """
    mask = mask or secret_masker()
    trace_id = secrets.token_hex(16)
    return {
        "name": mask(span.name),
        "rollout_id": span.rollout_id,
        "attempt_id": span.attempt_id,
        "sequence_id": span.sequence_id,
        "trace_id": trace_id,
        "span_id": span.span_id,
        "parent_id": None,
        "attributes": masked_values({name: each for name, each in span.attributes.items() if name not in _PACKED}, mask)
        | {name: span.attributes[name] for name in _PACKED if name in span.attributes},
        "start_time": span.start_time,
        "end_time": span.end_time,
        "status": {"status_code": "OK"}
        if span.error is None
        else {"status_code": "ERROR", "description": mask(span.error)},
        "context": {"trace_id": trace_id, "span_id": span.span_id, "is_remote": False, "trace_state": {}},
        "resource": {"attributes": {}, "schema_url": ""},
        "events": [],
        "links": [],
        "parent": None,
    }

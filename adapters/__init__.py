"""Backends run agents: one module per framework, one contract, and a registry of names."""

from __future__ import annotations

from collections.abc import Callable

from groundwire.adapters._types import (
    AGENT_HEADER,
    AgentError,
    Answer,
    Backend,
    BackendError,
    Endpoint,
    EndpointError,
    PromptTooLongError,
    Question,
    Stoppable,
    ToolError,
)
from groundwire.adapters.unmodified.backend import FRAMEWORKS, agent_backend
from groundwire.tools.plugins import Registry

__all__ = [
    "AGENT_HEADER",
    "FRAMEWORKS",
    "AgentError",
    "Answer",
    "Backend",
    "BackendError",
    "Endpoint",
    "EndpointError",
    "PromptTooLongError",
    "Question",
    "Stoppable",
    "ToolError",
    "agent_backend",
    "check",
    "get",
    "names",
]

# The factories of backends, by name; their keyword arguments are the backend's options.
_registry: Registry[Callable[..., Backend]] = Registry(
    "backend", hook="register_backends", builtin="groundwire.adapters._builtin"
)
check, get, names = _registry.check, _registry.get, _registry.names

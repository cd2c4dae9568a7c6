"""Backends run agents: one contract, one way for the agents of any framework, and a registry of names."""

from __future__ import annotations

from collections.abc import Callable

from groundwire.adapters._types import (
    AGENT_HEADER,
    AgentError,
    AgentSetupError,
    Answer,
    Backend,
    BackendError,
    EmittedRewardError,
    Endpoint,
    EndpointError,
    MalformedOutputError,
    PromptTooLongError,
    Question,
    TimeLimitError,
    ToolError,
    TraceLimitError,
    TurnLimitError,
    as_backend,
)
from groundwire.adapters.agents.backend import FRAMEWORKS, LitAgentBackend, agent_backend
from groundwire.tools.plugins import Registry, hookimpl

__all__ = [
    "AGENT_HEADER",
    "FRAMEWORKS",
    "AgentError",
    "AgentSetupError",
    "Answer",
    "Backend",
    "BackendError",
    "EmittedRewardError",
    "Endpoint",
    "EndpointError",
    "LitAgentBackend",
    "MalformedOutputError",
    "PromptTooLongError",
    "Question",
    "TimeLimitError",
    "ToolError",
    "TraceLimitError",
    "TurnLimitError",
    "agent_backend",
    "as_backend",
    "check",
    "get",
    "names",
]

_registry: Registry[Callable[..., Backend]] = Registry("backend", hook="register_backends", builtin=__name__)
check = _registry.check
get = _registry.get
names = _registry.names


@hookimpl
def register_backends(register: Callable[[str, str], None]) -> None:
    """The project's SQL agents, ``custom`` for any agent object or function, and ``command`` for any program."""
    register("command", "groundwire.adapters.agents.command:CommandBackend")
    register("custom", "groundwire.adapters.agents.backend:agent_backend")
    register("langgraph", "groundwire.adapters.sql_agents.langgraph:backend")
    register("mcp", "groundwire.adapters.sql_agents.mcp:backend")
    register("openai-agents", "groundwire.adapters.sql_agents.openai_agents:backend")

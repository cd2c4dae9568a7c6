"""Backends run agents: one contract, one way for the agents of any framework, and a registry of names."""

from __future__ import annotations

from groundwire.adapters._registry import check, get, names
from groundwire.adapters._types import (
    AGENT_HEADER,
    AgentError,
    AgentSetupError,
    Answer,
    Backend,
    BackendError,
    Endpoint,
    EndpointError,
    MalformedOutputError,
    PromptTooLongError,
    Question,
    TimeLimitError,
    ToolError,
    TurnLimitError,
    as_backend,
)
from groundwire.adapters.agents.backend import FRAMEWORKS, agent_backend
from groundwire.adapters.agents.lit_agent import LitAgentBackend

__all__ = [
    "AGENT_HEADER",
    "FRAMEWORKS",
    "AgentError",
    "AgentSetupError",
    "Answer",
    "Backend",
    "BackendError",
    "Endpoint",
    "EndpointError",
    "LitAgentBackend",
    "MalformedOutputError",
    "PromptTooLongError",
    "Question",
    "TimeLimitError",
    "ToolError",
    "TurnLimitError",
    "agent_backend",
    "as_backend",
    "check",
    "get",
    "names",
]

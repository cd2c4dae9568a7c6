"""Backends run agents: one module per framework, one contract, and a registry of names."""

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
    Stoppable,
    TimeLimitError,
    ToolError,
    TurnLimitError,
)
from groundwire.adapters.unmodified.backend import FRAMEWORKS, agent_backend
from groundwire.adapters.unmodified.lit_agent import LitAgentBackend

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
    "Stoppable",
    "TimeLimitError",
    "ToolError",
    "TurnLimitError",
    "agent_backend",
    "check",
    "get",
    "names",
]

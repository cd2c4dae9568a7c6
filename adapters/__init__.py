"""Backends run agents: one module per framework, one contract, and a registry of names."""

from __future__ import annotations

from groundwire.adapters._registry import check, get, names
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

__all__ = [
    "AGENT_HEADER",
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
    "check",
    "get",
    "names",
]

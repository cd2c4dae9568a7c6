"""The environment variables of agents that run as they are."""

from __future__ import annotations

import os

__all__ = ["set_environment"]

_ENVIRONMENT = {
    # Clients refuse to be made without a key. The policy needs none.
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_API_KEY": "none",
    # LiteLLM would download its list of prices when it is imported, which blocks the event loop of all rollouts.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    # The OpenAI Agents SDK would send a trace of every rollout to OpenAI, and CrewAI statistics to its makers.
    "OPENAI_AGENTS_DISABLE_TRACING": "true",
    "CREWAI_DISABLE_TELEMETRY": "true",
}
"""Set before the agent is imported, and before an agent that is an object runs."""


def set_environment() -> None:
    """Set the variables that agents need, unless the user has set them."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)

"""From an agent's LLM calls to training data: proxy → spans → calls → triplets → trajectories.

The proxy is in :mod:`groundwire.adapters.tracing.proxy`: it needs aiohttp, which reading spans does not.
"""

from __future__ import annotations

import groundwire.adapters._lazy_agentlightning  # noqa: F401  (before anything of agentlightning)
from groundwire.adapters.tracing.calls import LLMCall, from_span, to_span
from groundwire.adapters.tracing.trajectories import (
    Trajectory,
    Triplet,
    all_calls_from_spans,
    calls_from_spans,
    calls_of_agents,
    reward_from_spans,
    trajectories,
    triplets,
)

__all__ = [
    "LLMCall",
    "Trajectory",
    "Triplet",
    "all_calls_from_spans",
    "calls_from_spans",
    "calls_of_agents",
    "from_span",
    "reward_from_spans",
    "to_span",
    "trajectories",
    "triplets",
]

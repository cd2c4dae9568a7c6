"""From an agent's LLM calls to training data: proxy → spans → calls → triplets → trajectories.

    calls = calls_from_spans(spans)
    trajectories(triplets(calls_of_agents(calls, agent_match), reward_from_spans(spans)))

The proxy (:mod:`groundwire.adapters.tracing.proxy`) is not imported here: it needs aiohttp, and reading spans does not.
"""

from __future__ import annotations

from groundwire.adapters.tracing.calls import (
    CallCredit,
    LLMCall,
    all_calls_from_spans,
    calls_from_spans,
    from_span,
    same_request,
    select_calls,
    to_span,
)
from groundwire.adapters.tracing.spans import reward_from_spans
from groundwire.adapters.tracing.trajectories import Trajectory, calls_of_agents, trajectories, triplets

__all__ = [
    "CallCredit",
    "LLMCall",
    "Trajectory",
    "all_calls_from_spans",
    "calls_from_spans",
    "calls_of_agents",
    "from_span",
    "reward_from_spans",
    "same_request",
    "select_calls",
    "to_span",
    "trajectories",
    "triplets",
]

"""From an agent's LLM calls to training data: proxy → spans → calls → triplets → trajectories.

The proxy is in :mod:`adapters.tracing.proxy`: it needs aiohttp, which reading spans does not.
"""

from __future__ import annotations

import os

from adapters.tracing.calls import Call, from_span, to_span
from adapters.tracing.triplets import (
    Trajectory,
    Triplet,
    all_calls_from_spans,
    calls_from_spans,
    reward_from_spans,
    select,
    trajectories,
    triplets,
)

# agentlightning is imported with the first span, and LiteLLM with it, which otherwise fetches a list of prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

__all__ = [
    "Call",
    "Trajectory",
    "Triplet",
    "all_calls_from_spans",
    "calls_from_spans",
    "from_span",
    "reward_from_spans",
    "select",
    "to_span",
    "trajectories",
    "triplets",
]

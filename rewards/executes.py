"""A reward for running a query without an error, as a first signal for a policy that is rarely right.

It judges the rollout, not the answer, which may be prose. Any query counts, so give it a small weight in a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.tools.types import AgentStep

__all__ = ["executed", "executes"]


def executed(steps: Sequence[AgentStep]) -> bool:
    """Whether at least one tool call succeeded."""
    return any(step["kind"] == "tool" and step["ok"] for step in steps)


async def executes(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float:
    """1.0 if :func:`executed`, else 0.0."""
    return float(executed(steps))

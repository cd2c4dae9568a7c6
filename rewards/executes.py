"""Whether the agent ran a query that worked: a small reward to begin with, for a policy that rarely answers right.

It is about the rollout and not about the answer, which may be prose. A query that reads nothing executes, too: give it
a small weight beside a reward for the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.tools.types import AgentStep

__all__ = ["executed", "executes"]


def executed(steps: Sequence[AgentStep]) -> bool:
    """Whether some tool run of the trace reported no error."""
    return any(step["kind"] == "tool" and step["ok"] for step in steps)


async def executes(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float:
    """1 where :func:`executed`, else 0."""
    return float(executed(steps))

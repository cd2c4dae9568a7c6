"""The credit with which the calls of recorded rollouts were trained: as the trainer stored it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from groundwire.adapters.tracing import CallCredit

__all__ = ["credit_lines", "group_key", "row_credits", "trained_calls"]

Row = Mapping[str, Any]


def group_key(row: Row) -> tuple[Any, ...]:
    """The key of the rollout's group."""
    return row["step"], row["mode"], row["temperature"], row["group"]


def trained_calls(row: Row, agent_match: str | None) -> list[Mapping[str, Any]]:
    """The calls of a rollout that were trained, or that can be: of the agents that ``agent_match`` selects."""
    if any(credits := row_credits(row)):
        return [call for call, credit in zip(row["calls"], credits, strict=False) if credit]
    return [call for call in row["calls"] or () if re.search(agent_match or "", call["agent"] or "")]


def row_credits(row: Row) -> list[CallCredit | None]:
    """The credit of each of the row's calls, None for one that was not trained.

    Empty for validation, without a reward, and if another estimator of verl's computed the advantages.
    """
    return [each and CallCredit(**each) for each in json.loads(row.get("credits") or "[]")]


def credit_lines(row: Row) -> Iterator[str]:
    """A line for each trained call of a row."""
    trained = ((call, credit) for call, credit in zip(row["calls"] or (), row_credits(row), strict=False) if credit)
    for number, (call, credit) in enumerate(trained, 1):
        name = f" ({call['agent']})" if call["agent"] else ""
        yield (
            f"call {number}{name}: return {credit.returns:.4g}, advantage {credit.advantage:.3g}, "
            f"weight {credit.weight:.3g}"
        )

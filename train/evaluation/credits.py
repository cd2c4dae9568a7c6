"""The credit of the calls of recorded rollouts, computed as the trainer did."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groundwire.adapters.tracing import Triplet
from groundwire.train.algorithms.credit import CallCredit, assign_credit

__all__ = ["credit_lines", "group_key", "row_credits", "trained_calls"]

Row = Mapping[str, Any]


def group_key(row: Row) -> tuple[Any, ...]:
    """The key of the rollout's group."""
    return row["step"], row["mode"], row["temperature"], row["group"]


def trained_calls(row: Row, agent_match: str | None) -> list[Mapping[str, Any]]:
    """The calls of a rollout that can be trained on, of the agents that ``agent_match`` selects."""
    return [call for call in row["calls"] or () if re.search(agent_match or "", call["agent"] or "")]


def row_credits(rows: Sequence[Row], settings: Mapping[str, Any]) -> list[list[CallCredit]]:
    """The credits of each row's :func:`trained_calls`; none for validation and without a reward.

    ``rows`` are whole steps of a run with ``settings``. The choices of one request count as calls one after another,
    and constrained calls count with verl, too: the rows do not tell them apart.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, row in enumerate(rows):
        if row["mode"] == "train" and row["reward"] is not None:
            groups.setdefault(group_key(row), []).append(index)
    credits: list[list[CallCredit]] = [[] for _ in rows]
    for indices in groups.values():
        assigned = assign_credit(
            [(rows[index]["reward"], _triplets(rows[index], settings.get("agent_match"))) for index in indices],
            credit="broadcast" if _verl_estimator(settings) else settings.get("credit") or "broadcast",
            discount=settings.get("credit_discount", 1.0),
            scale=settings.get("scale_rewards", True),
            truncated=settings.get("truncated") or "train",
            call_cost=settings.get("call_cost", 0.0),
        )
        for index, each in zip(indices, assigned, strict=True):
            credits[index] = each
    return credits


def credit_lines(row: Row, credits: Sequence[CallCredit], settings: Mapping[str, Any]) -> Iterator[str]:
    """A line for each trained call of a row; none if another estimator of verl computed the advantages."""
    if _verl_estimator(settings):
        return
    calls = trained_calls(row, settings.get("agent_match"))
    for number, (call, credit) in enumerate(zip(calls, credits, strict=False), 1):
        name = f" ({call['agent']})" if call["agent"] else ""
        yield (
            f"call {number}{name}: return {credit.returns:.4g}, advantage {credit.advantage:.3g}, "
            f"weight {credit.weight:.3g}"
        )


def _verl_estimator(settings: Mapping[str, Any]) -> bool:
    """Whether verl computed the advantages with another estimator."""
    given = {key.lstrip("+"): value for key, value in (settings.get("verl") or {}).items()}
    return given.get("algorithm.adv_estimator", "grpo") not in ("grpo", "groundwire")


def _triplets(row: Row, agent_match: str | None) -> list[Triplet]:
    calls = list(row["calls"] or ())
    rewards = json.loads(row.get("call_rewards") or "[]") or [None] * len(calls)
    emitted = {id(call): reward for call, reward in zip(calls, rewards, strict=False)}
    return [
        Triplet(
            prompt_ids=list(call["prompt_ids"]),
            response_ids=list(call["response_ids"]),
            logprobs=[],
            reward=row["reward"],
            call_reward=emitted.get(id(call)),
            agent=call["agent"] or "",
            sequence=number,
            choice=None,
            weights_version=None,
            first_weights_version=None,
            truncated=call["finish_reason"] == "length",
        )
        for number, call in enumerate(trained_calls(row, agent_match))
    ]

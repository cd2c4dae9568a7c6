"""Calls → triplets: the calls that are trained on, each with its reward."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from groundwire.adapters.tracing.calls import LLMCall

__all__ = ["Triplet", "calls_of_agents", "triplets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Triplet:
    """Prompt, response and reward of one call."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    """One for each of ``response_ids``."""
    reward: float | None
    """The rollout's reward, the same for each of its triplets; None if it has none."""
    call_reward: float | None
    """The reward that the agent emitted between this call and the next; None if there is none."""
    agent: str
    sequence: int
    weights_version: int | None
    first_weights_version: int | None


def calls_of_agents(calls: Iterable[LLMCall], agent_match: str | None) -> list[LLMCall]:
    """The calls of the agents in whose name ``re.search`` finds ``agent_match``; all calls if it is None.

    ``"write"`` selects write_query and rewrite_query. Raises ``ValueError`` if it is not a regular expression.
    """
    if agent_match is None:
        return list(calls)
    try:
        pattern = re.compile(agent_match)
    except re.error as error:
        raise ValueError(f"agent_match {agent_match!r} is not a regular expression: {error}") from error
    return [call for call in calls if pattern.search(call.agent)]


def triplets(calls: Iterable[LLMCall], reward: float | None) -> list[Triplet]:
    """One triplet for each call; ``reward`` is the rollout's.

    Raises ``ValueError`` for a call with an :attr:`LLMCall.untrainable_reason`.
    """
    return [_triplet(call, reward) for call in calls]


def _triplet(call: LLMCall, reward: float | None) -> Triplet:
    if reason := call.untrainable_reason:
        raise ValueError(f"call {call.sequence} of rollout {call.rollout_id} cannot be trained on: {reason}")
    return Triplet(
        prompt_ids=call.prompt_ids,
        response_ids=call.response_ids,
        logprobs=call.logprobs,
        reward=reward,
        call_reward=call.reward,
        agent=call.agent,
        sequence=call.sequence,
        weights_version=call.weights_version,
        first_weights_version=call.first_weights_version,
    )

"""Calls → triplets → trajectories: the calls that are trained on, and the conversations as the policy saw them.

Triplets are merged while the next prompt begins with the whole conversation so far; only sampled tokens carry a loss.
Nothing is cut or tokenized again: each sampled token is trained on exactly once, after exactly the tokens it was
sampled after. So merging saves work and does not change what is learned. A trajectory is as long as its last triplet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from groundwire.adapters.tracing.calls import LLMCall, select_calls

__all__ = ["Trajectory", "Triplet", "calls_of_agents", "trajectories", "triplets"]


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
    """The reward that the agent emitted for this call, with those of :func:`select_calls`; None if there is none."""
    agent: str
    sequence: int
    choice: int | None
    """:attr:`LLMCall.choice`: one of several choices is a trajectory of its own."""
    weights_version: int | None
    first_weights_version: int | None
    grammar: str = ""
    """What the response had to be (:attr:`LLMCall.grammar`): ``logprobs`` are those of its allowed tokens."""
    truncated: bool = False
    """Whether the limit of tokens ended the response (``finish_reason: length``)."""


def calls_of_agents(calls: Iterable[LLMCall], agent_match: str | None) -> list[LLMCall]:
    """The calls of the agents in whose name ``re.search`` finds ``agent_match``, as :func:`select_calls`; all calls if
    it is None.

    ``"write"`` selects write_query and rewrite_query. Raises ``ValueError`` if it is not a regular expression.
    """
    if agent_match is None:
        return list(calls)
    try:
        pattern = re.compile(agent_match)
    except re.error as error:
        raise ValueError(f"agent_match {agent_match!r} is not a regular expression: {error}") from error
    return select_calls(calls, lambda call: pattern.search(call.agent))


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
        choice=call.choice,
        weights_version=call.weights_version,
        first_weights_version=call.first_weights_version,
        grammar=call.grammar,
        truncated=call.finish_reason == "length",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Merged triplets. ``response_ids``, ``loss_mask`` and ``logprobs`` have the same length.

    ``response_ids`` is everything after the first prompt: sampled tokens (mask 1), and the tokens that the agent put
    between them, such as tool results and the next question (mask 0, logprob 0.0).
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    triplets: tuple[Triplet, ...]
    """In order."""

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


def trajectories(triplets: Iterable[Triplet]) -> list[Trajectory]:
    """Merge the triplets of a rollout, in their order, into as few trajectories as possible.

    A triplet extends the trajectory with the longest context that its prompt begins with, of any agent. If there
    is none (the prompt was rendered differently, or sampled again) it starts a new trajectory.
    """
    open_: list[_OpenTrajectory] = []
    for triplet in triplets:
        fitting = [each for each in open_ if triplet.choice is None and each.precedes(triplet)]
        if fitting:
            max(fitting, key=lambda each: len(each.context)).add(triplet)
        else:
            open_.append(_OpenTrajectory(triplet))
    return [each.close() for each in open_]


class _OpenTrajectory:
    """A trajectory that may still grow. ``context`` is every token so far."""

    def __init__(self, triplet: Triplet) -> None:
        self.context = list(triplet.prompt_ids)
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.triplets: list[Triplet] = []
        self.add(triplet)

    def precedes(self, triplet: Triplet) -> bool:
        if self.triplets[-1].choice is not None:
            return False
        end, prompt = len(self.context), triplet.prompt_ids
        # Most triplets do not extend a trajectory; the length or this one token usually shows it.
        return end <= len(prompt) and prompt[end - 1] == self.context[-1] and prompt[:end] == self.context

    def add(self, triplet: Triplet) -> None:
        inserted = len(triplet.prompt_ids) - len(self.context)
        self.context = triplet.prompt_ids + triplet.response_ids
        self.mask += [0] * inserted + [1] * len(triplet.response_ids)
        self.logprobs += [0.0] * inserted + triplet.logprobs
        self.triplets.append(triplet)

    def close(self) -> Trajectory:
        start = len(self.triplets[0].prompt_ids)
        return Trajectory(
            prompt_ids=self.context[:start],
            response_ids=self.context[start:],
            loss_mask=self.mask,
            logprobs=self.logprobs,
            triplets=tuple(self.triplets),
        )

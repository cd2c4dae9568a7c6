"""Calls → triplets → trajectories: the calls that are trained on, and the conversations as the policy saw them.

A triplet is a call's prompt ids, response ids and reward. Calls are merged while the next prompt begins with the whole
conversation so far; only sampled tokens carry a loss. Nothing is cut or tokenized again: each sampled token is trained
on exactly once, after exactly the tokens it was sampled after. So merging saves work and does not change what is
learned. A trajectory is as long as its last call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from groundwire.adapters.tracing.calls import LLMCall, select_calls


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


def triplets(calls: Iterable[LLMCall], reward: float | None) -> list[LLMCall]:
    """The calls of a rollout with this ``reward``, of which :func:`trajectories` are made; none without a reward."""
    return [] if reward is None else list(calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Merged calls. ``response_ids``, ``loss_mask`` and ``logprobs`` have the same length.

    ``response_ids`` is everything after the first prompt: sampled tokens (mask 1), and the tokens that the agent put
    between them, such as tool results and the next question (mask 0, logprob 0.0).
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    calls: tuple[LLMCall, ...]
    """In order."""

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


def trajectories(calls: Iterable[LLMCall]) -> list[Trajectory]:
    """Merge the calls of a rollout, in their order, into as few trajectories as possible.

    A call extends the trajectory with the longest context that its prompt begins with, of any agent. If there
    is none (the prompt was rendered differently, or sampled again) it starts a new trajectory. So does each of several
    choices (``n``) of one request.

    Raises ``ValueError`` for a call with an :attr:`LLMCall.untrainable_reason`.
    """
    open_: list[_OpenTrajectory] = []
    for call in calls:
        if reason := call.untrainable_reason:
            raise ValueError(f"call {call.sequence} of rollout {call.rollout_id} cannot be trained on: {reason}")
        fitting = [trajectory for trajectory in open_ if call.choice is None and trajectory.precedes(call)]
        if fitting:
            max(fitting, key=lambda trajectory: len(trajectory.context)).add(call)
        else:
            open_.append(_OpenTrajectory(call))
    return [trajectory.close() for trajectory in open_]


class _OpenTrajectory:
    """A trajectory that may still grow. ``context`` is every token so far."""

    def __init__(self, call: LLMCall) -> None:
        self.context = list(call.prompt_ids)
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.calls: list[LLMCall] = []
        self.add(call)

    def precedes(self, call: LLMCall) -> bool:
        if self.calls[-1].choice is not None:
            return False
        end, prompt = len(self.context), call.prompt_ids
        # Most calls do not extend a trajectory; the length or this one token usually shows it.
        return end <= len(prompt) and prompt[end - 1] == self.context[-1] and prompt[:end] == self.context

    def add(self, call: LLMCall) -> None:
        inserted = len(call.prompt_ids) - len(self.context)
        self.context = call.prompt_ids + call.response_ids
        self.mask += [0] * inserted + [1] * len(call.response_ids)
        self.logprobs += [0.0] * inserted + call.logprobs
        self.calls.append(call)

    def close(self) -> Trajectory:
        start = len(self.calls[0].prompt_ids)
        return Trajectory(
            prompt_ids=self.context[:start],
            response_ids=self.context[start:],
            loss_mask=self.mask,
            logprobs=self.logprobs,
            calls=tuple(self.calls),
        )

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
    merged: list[list[LLMCall]] = []
    for call in calls:
        if reason := call.untrainable_reason:
            raise ValueError(f"call {call.sequence} of rollout {call.rollout_id} cannot be trained on: {reason}")
        fitting = [before for before in merged if _continues(call, before[-1])]
        if fitting:
            max(fitting, key=lambda before: len(before[-1].prompt_ids) + len(before[-1].response_ids)).append(call)
        else:
            merged.append([call])
    return [_trajectory(calls) for calls in merged]


def _continues(call: LLMCall, last: LLMCall) -> bool:
    """Whether the prompt begins with the whole conversation up to ``last``."""
    if call.choice is not None or last.choice is not None:
        return False
    prompt, start = call.prompt_ids, len(last.prompt_ids)
    end = start + len(last.response_ids)
    # Most calls do not extend a trajectory; the length or this one token usually shows it.
    if end > len(prompt) or prompt[end - 1] != last.response_ids[-1]:
        return False
    return prompt[:start] == last.prompt_ids and prompt[start:end] == last.response_ids


def _trajectory(calls: list[LLMCall]) -> Trajectory:
    mask, logprobs, end = list[int](), list[float](), len(calls[0].prompt_ids)
    for call in calls:
        inserted = len(call.prompt_ids) - end
        mask += [0] * inserted + [1] * len(call.response_ids)
        logprobs += [0.0] * inserted + call.logprobs
        end = len(call.prompt_ids) + len(call.response_ids)
    return Trajectory(
        prompt_ids=calls[0].prompt_ids,
        response_ids=calls[-1].prompt_ids[len(calls[0].prompt_ids) :] + calls[-1].response_ids,
        loss_mask=mask,
        logprobs=logprobs,
        calls=tuple(calls),
    )

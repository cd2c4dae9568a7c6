"""Calls → triplets → trajectories: what a rollout's calls mean to a trainer.

A trajectory is a conversation as the policy saw it: calls are merged while the next prompt begins with all that came
before, and only sampled tokens carry a loss. Nothing is ever cut or tokenized again, so merging can only save work,
never change what is learned: each sampled token is trained on exactly once, after exactly the context it was sampled
from. A trajectory is as long as its last call, so it always fits where that call did.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groundwire.adapters.tracing.calls import LLMCall, from_span, is_call_span
from groundwire.adapters.tracing.semconv import AFTER_CALLS, EMITTED, REWARD_PREFIX

__all__ = [
    "Trajectory",
    "Triplet",
    "all_calls_from_spans",
    "calls_from_spans",
    "calls_of_agents",
    "reward_from_spans",
    "trajectories",
    "triplets",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Triplet:
    """One call with its reward."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    """One for each response id."""
    reward: float | None
    """The rollout's reward, the same on each of its triplets; None where it has none."""
    call_reward: float | None
    """What the agent emitted after this call, before the next; None where nothing was."""
    agent: str
    sequence: int
    weights_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Merged calls. ``response_ids``, ``loss_mask`` and ``logprobs`` have one length.

    ``response_ids`` is all that follows the first prompt: sampled tokens (mask 1) and what the agent put between them
    (mask 0: tool results, the next question; logprob 0.0).
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    calls: tuple[LLMCall, ...]
    """The calls it was merged from, in order."""

    def __len__(self) -> int:
        """Tokens in all."""
        return len(self.prompt_ids) + len(self.response_ids)


def all_calls_from_spans(spans: Iterable[Any]) -> list[LLMCall]:
    """Every call among ``spans``, in order, with the reward that the agent emitted for it.

    :attr:`LLMCall.untrainable_reason` says which cannot be trained on, and why.
    """
    spans = list(spans)
    calls = [from_span(span) for span in spans if is_call_span(span)]
    calls.sort(key=lambda call: (call.sequence, call.started))
    rewards = _emitted(calls, _rewards(spans))
    return [replace(call, reward=rewards[place]) if place in rewards else call for place, call in enumerate(calls)]


def calls_from_spans(spans: Iterable[Any]) -> list[LLMCall]:
    """The calls that can be trained on, in order: those without a :attr:`LLMCall.untrainable_reason`."""
    return [call for call in all_calls_from_spans(spans) if not call.untrainable_reason]


def calls_of_agents(calls: Iterable[LLMCall], agent_match: str | None) -> list[LLMCall]:
    """The calls of the agents whose name ``agent_match`` is found in (``re.search``); all where it is None.

    ``"write"`` selects write_query and rewrite_query. Raises ``ValueError`` where it is no regular expression.
    """
    if agent_match is None:
        return list(calls)
    try:
        pattern = re.compile(agent_match)
    except re.error as error:
        raise ValueError(f"agent_match {agent_match!r} is not a regular expression: {error}") from error
    return [call for call in calls if pattern.search(call.agent)]


def triplets(calls: Iterable[LLMCall], reward: float | None) -> list[Triplet]:
    """One triplet a call; ``reward`` is the rollout's."""
    return [
        Triplet(
            prompt_ids=call.prompt_ids,
            response_ids=call.response_ids,
            logprobs=call.logprobs,
            reward=reward,
            call_reward=call.reward,
            agent=call.agent,
            sequence=call.sequence,
            weights_version=call.weights_version,
        )
        for call in calls
    ]


def trajectories(calls: Iterable[LLMCall]) -> list[Trajectory]:
    """Merge calls, in their order, into as few trajectories as they allow.

    A call goes on the open trajectory with the longest context that its prompt begins with, whichever agent's it is;
    where there is none (the prompt was rendered differently, or sampled again) it opens one. Raises ``ValueError`` for
    a call with a :attr:`LLMCall.untrainable_reason`.
    """
    open_: list[_Open] = []
    for call in calls:
        if call.untrainable_reason:
            raise ValueError(
                f"call {call.sequence} of rollout {call.rollout_id} cannot be trained on: {call.untrainable_reason}"
            )
        fitting = [each for each in open_ if each.precedes(call)]
        if fitting:
            max(fitting, key=lambda each: len(each.context)).add(call)
        else:
            open_.append(_Open(call))
    return [each.close() for each in open_]


class _Open:
    """A trajectory that may still grow. ``context`` is every token so far."""

    def __init__(self, call: LLMCall) -> None:
        self.context = list(call.prompt_ids)
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.calls: list[LLMCall] = []
        self.add(call)

    def precedes(self, call: LLMCall) -> bool:
        end, prompt = len(self.context), call.prompt_ids
        # Most do not, and most of those show it by their length or in this one token.
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


def reward_from_spans(spans: Iterable[Any]) -> float | dict[str, float] | None:
    """The rollout's reward: the last that was returned; a dict (primary first) where it has parts.

    A reward with parts that is then returned as its primary value is one reward, and keeps its parts. What the agent
    emitted while it worked is its calls', and never the rollout's.
    """
    rewards = [reward.values for reward in _rewards(spans) if not reward.emitted]
    if not rewards:
        return None
    last = rewards[-1]
    if len(rewards) > 1 and len(last) == 1 and _primary(rewards[-2]) == _primary(last):
        last = rewards[-2]
    return last if len(last) > 1 else _primary(last)


@dataclass(frozen=True, slots=True)
class _Reward:
    sequence: int
    values: dict[str, float]
    emitted: bool
    after_calls: int
    """0 where nobody counted."""


def _rewards(spans: Iterable[Any]) -> list[_Reward]:
    found = []
    for span in spans:
        values: dict[str, float] = {}
        attributes, index = span.attributes or {}, 0
        while (value := attributes.get(f"{REWARD_PREFIX}{index}.value")) is not None:
            values[str(attributes.get(f"{REWARD_PREFIX}{index}.name", index))] = float(value)
            index += 1
        if values and all(map(math.isfinite, values.values())):
            reward = _Reward(
                span.sequence_id, values, bool(attributes.get(EMITTED)), int(attributes.get(AFTER_CALLS, 0))
            )
            found.append((span.sequence_id, span.start_time or 0.0, reward))
    return [reward for *_, reward in sorted(found, key=lambda each: each[:2])]


def _primary(values: dict[str, float]) -> float:
    return next(iter(values.values()))


def _emitted(calls: Sequence[LLMCall], rewards: Sequence[_Reward]) -> dict[int, float]:
    """The reward of each call (by its place) that has one: it goes to the newest call before it, and the last counts.

    The rollout's own reward is no call's. Emitting it after the last call and returning it, too, is saying it twice.
    """
    returned = next((reward for reward in reversed(rewards) if not reward.emitted), None)
    found: dict[int, float] = {}
    for reward in rewards:
        place = bisect_left(calls, reward.sequence, key=lambda call: call.sequence) - 1
        if reward.after_calls:
            place = min(reward.after_calls, len(calls)) - 1
        value = _primary(reward.values)
        twice = returned is not None and place == len(calls) - 1 and value == _primary(returned.values)
        if place >= 0 and reward is not returned and not twice:
            found[place] = value
    return found

"""Rewards among a rollout's spans: the rollout's own, and those that the agent emitted for its calls."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.adapters.tracing.semconv import CALL_ID, EMITTED, RESPONSE_ID, REWARD_PREFIX

__all__ = ["call_rewards", "reward_from_spans"]


def reward_from_spans(spans: Iterable[Any]) -> float | dict[str, float] | None:
    """The rollout's reward: the last that was not emitted by the agent. A dict (primary first) if it has components.

    A reward with components that is then returned as its primary value is one reward, and keeps its components.
    """
    rewards = [reward.values for reward in _rewards(spans) if not reward.emitted]
    if not rewards:
        return None
    last = rewards[-1]
    if len(rewards) > 1 and len(last) == 1 and _primary(rewards[-2]) == _primary(last):
        last = rewards[-2]
    return last if len(last) > 1 else _primary(last)


def call_rewards(
    sequences: Sequence[int], spans: Iterable[Any], *, ids: Mapping[str, int] | None = None
) -> dict[int, float]:
    """The emitted reward of each call that has one, by the call's index in ``sequences``, the sorted calls' numbers.

    An emitted reward belongs to the reply that it names, else to the call in whose context it was emitted, else to the
    newest call before it; of several the last counts. ``ids`` are the indices of calls by the ids of calls and replies.
    Without marks of emitted spans the last reward is the rollout's, and so is an equal one after the last call.
    """
    ids = ids or {}
    rewards = _rewards(spans)
    returned = next((reward for reward in reversed(rewards) if not reward.emitted), None)
    by_call: dict[int, float] = {}
    for reward in rewards:
        index = ids.get(reward.call_id, bisect_left(sequences, reward.sequence) - 1)
        if reward.reply_id:
            index = ids.get(reward.reply_id, -1)  # a reply of another model is no call
        value = _primary(reward.values)
        repeated = returned is not None and index == len(sequences) - 1 and value == _primary(returned.values)
        if index >= 0 and (reward.emitted or not (reward is returned or repeated)):
            by_call[index] = value
    return by_call


@dataclass(frozen=True, slots=True)
class _Reward:
    sequence: int
    values: dict[str, float]
    emitted: bool
    call_id: str
    reply_id: str


def _rewards(spans: Iterable[Any]) -> list[_Reward]:
    """The finite rewards, in order."""
    rewards = []
    for span in spans:
        values: dict[str, float] = {}
        attributes: Mapping[str, Any] = span.attributes or {}
        index = 0
        while (value := attributes.get(f"{REWARD_PREFIX}{index}.value")) is not None:
            values[str(attributes.get(f"{REWARD_PREFIX}{index}.name", index))] = float(value)
            index += 1
        if values and all(map(math.isfinite, values.values())):
            call_id, reply_id = str(attributes.get(CALL_ID, "")), str(attributes.get(RESPONSE_ID, ""))
            reward = _Reward(span.sequence_id, values, bool(attributes.get(EMITTED)), call_id, reply_id)
            rewards.append((span.sequence_id, span.start_time or 0.0, reward))
    return [reward for *_, reward in sorted(rewards, key=lambda entry: entry[:2])]


def _primary(values: dict[str, float]) -> float:
    return next(iter(values.values()))

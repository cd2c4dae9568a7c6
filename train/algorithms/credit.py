"""The return, the advantage and the weight of each LLM call of a group's rollouts, the same for both trainers.

The return of call k of a rollout is ``G_k = r_k + discount * G_(k+1)``. ``r_k`` is the reward that the agent emitted
for the call; to that of the last call the rollout's reward is added. The advantage of a call is
``(G - mean) / (std + 1e-6)`` over comparable returns of the group, and its tokens are trained with
``weight * advantage``. The modes are cases of it:

=========== ======================== ===================================== ==========================
mode        return of a call         compared with                         weight of a call
=========== ======================== ===================================== ==========================
broadcast   the rollout's reward     the rollouts of the group             1
last        the rollout's reward     the rollouts of the group             1 for the last, else 0
discount    the rollout's reward     the rollouts of the group             discount ** (calls after it)
turns       ``G_k``                  comparable calls of the group         1
=========== ======================== ===================================== ==========================

Comparing rollouts is GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1): a rollout of five calls weighs no more in
its group's mean than a rollout of one. Comparable calls read the same prompt ids (anchor states: Feng et al. 2025,
"GiGPO", arXiv:2505.10978). A call that no other rollout of the group has made is compared with the calls of the same
agent and ordinal, and if no other rollout has made such a call either, with all calls of the group.

Calls whose reply was cut off at the limit of tokens are trained like others (``train``); or they have weight 0
(``mask``, the overlong filtering of Yu et al. 2025, "DAPO", arXiv:2503.14476, section 3.4), and their rollout is
compared all the same; or their rollout's reward is 0 (``zero``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from groundwire.adapters.tracing import Trajectory, Triplet

__all__ = ["CallCredit", "Credit", "Truncated", "assign_credit", "normalize", "token_credit", "trained_reward"]

Credit = Literal["broadcast", "last", "discount", "turns"]
Truncated = Literal["train", "mask", "zero"]


@dataclass(frozen=True, slots=True)
class CallCredit:
    """What one call is trained with."""

    returns: float
    advantage: float
    weight: float
    """Factor of the advantage. Tokens of weight 0 are not trained: they do not count in a mean over tokens either."""


def assign_credit(
    rollouts: Sequence[tuple[float, Sequence[Triplet]]],
    *,
    credit: Credit = "broadcast",
    discount: float = 1.0,
    scale: bool = True,
    truncated: Truncated = "train",
) -> list[list[CallCredit]]:
    """The credits of a group's rollouts, each given as its reward and its trained calls in order.

    A rollout without trained calls has no part in the comparison. If fewer than two are left, nothing can be compared,
    and every advantage is 0. Without ``scale`` they are not divided by the standard deviation.
    """
    rollouts = [(trained_reward(reward, calls, truncated), calls) for reward, calls in rollouts]
    returns = [_returns(reward, calls, credit, discount) for reward, calls in rollouts]
    if credit == "turns":
        advantages = _call_advantages([calls for _, calls in rollouts], returns, scale)
    else:
        present = [index for index, (_, calls) in enumerate(rollouts) if calls]
        compared = normalize([rollouts[index][0] for index in present], scale=scale)
        of_rollout = dict(zip(present, compared, strict=True))
        advantages = [[of_rollout[index]] * len(calls) if calls else [] for index, (_, calls) in enumerate(rollouts)]
    return [
        [CallCredit(*each) for each in zip(*of_calls, _weights(calls, credit, discount, truncated), strict=True)]
        for (_, calls), *of_calls in zip(rollouts, returns, advantages, strict=True)
    ]


def trained_reward(reward: float, calls: Sequence[Triplet], truncated: Truncated) -> float:
    """The reward that a rollout with these trained calls is compared with."""
    return 0.0 if truncated == "zero" and any(call.truncated for call in calls) else reward


def normalize(returns: Sequence[float], *, scale: bool = True) -> list[float]:
    """``(return - mean) / (std + 1e-6)`` in float32, with the unbiased standard deviation; without ``scale`` the
    numerator (Liu et al. 2025, "Dr. GRPO", arXiv:2503.20783).

    Equal returns, or a single one, give 0: the mean's rounding error over 1e-6 would be up to 0.06.
    """
    values = np.array(returns, np.float32)
    if len(returns) < 2 or np.ptp(values) <= 1e-6 * np.abs(values).max():
        return [0.0] * len(returns)
    deviation = np.float32(np.std(values, ddof=1, dtype=np.float64)) if scale else np.float32(1)
    scaled: list[float] = ((values - values.mean()) / (deviation + np.float32(1e-6 * scale))).tolist()
    return scaled


def token_credit(trajectory: Trajectory, credits: Mapping[int, CallCredit]) -> tuple[list[int], list[float]]:
    """The loss mask and the weighted advantages of a trajectory, one for each of its ``response_ids``.

    ``credits`` are by the ``id()`` of the trajectory's triplets. Tokens of weight 0 have mask 0.
    """
    mask, advantages = [0] * len(trajectory.response_ids), [0.0] * len(trajectory.response_ids)
    for triplet in trajectory.triplets:
        credit, length = credits[id(triplet)], len(triplet.response_ids)
        if credit.weight:
            start = len(triplet.prompt_ids) - len(trajectory.prompt_ids)
            mask[start : start + length] = [1] * length
            advantages[start : start + length] = [credit.weight * credit.advantage] * length
    return mask, advantages


def _steps(calls: Sequence[Triplet]) -> list[int]:
    """The ordinal of the request of each call: the choices of one request are one step."""
    steps: list[int] = []
    for call in calls:
        steps.append((steps[-1] if steps else -1) + (0 if call.choice and steps else 1))
    return steps


def _returns(reward: float, calls: Sequence[Triplet], credit: Credit, discount: float) -> list[float]:
    if credit != "turns" or not calls:
        return [reward] * len(calls)
    steps = _steps(calls)
    rewards = [0.0] * (steps[-1] + 1)
    for step, call in zip(steps, calls, strict=True):
        rewards[step] = call.call_reward or 0.0
    rewards[-1] += reward
    for step in range(len(rewards) - 2, -1, -1):
        rewards[step] += discount * rewards[step + 1]
    return [rewards[step] for step in steps]


def _weights(calls: Sequence[Triplet], credit: Credit, discount: float, truncated: Truncated) -> list[float]:
    after = [len(calls) - 1 - place for place in range(len(calls))]
    if credit == "last":
        weights = [float(count == 0) for count in after]
    else:
        weights = [discount**count if credit == "discount" else 1.0 for count in after]
    masked = truncated == "mask"
    return [0.0 if masked and call.truncated else weight for call, weight in zip(calls, weights, strict=True)]


def _call_advantages(
    rollouts: Sequence[Sequence[Triplet]], returns: Sequence[Sequence[float]], scale: bool
) -> list[list[float]]:
    """The advantage of each call among the comparable calls of its group."""
    sets: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    keys: dict[tuple[int, int], tuple[Hashable, ...]] = {}
    for index, calls in enumerate(rollouts):
        ordinals = Counter[str]()
        for place, call in enumerate(calls):
            if not call.choice:
                ordinals[call.agent] += 1
            keys[index, place] = (tuple(call.prompt_ids), (call.agent, ordinals[call.agent]), "all")
            for key in keys[index, place]:
                sets[key].append((index, place))
    advantages = [[0.0] * len(calls) for calls in rollouts]
    normalized: dict[Hashable, dict[tuple[int, int], float]] = {}
    for (index, place), candidates in keys.items():
        for key in candidates:
            if len({member for member, _ in sets[key]}) > 1:
                if key not in normalized:
                    values = [returns[member][at] for member, at in sets[key]]
                    normalized[key] = dict(zip(sets[key], normalize(values, scale=scale), strict=True))
                advantages[index][place] = normalized[key][index, place]
                break
    return advantages

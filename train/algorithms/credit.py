"""The return, the advantage and the weight of each LLM call of a group's rollouts, the same for both trainers.

The return of call k of a rollout is ``G_k = r_k - call_cost + discount * G_(k+1)``. ``r_k`` is the reward that the
agent emitted for the call; to that of the last call the rollout's reward is added. The advantage of a call is
``(G - mean) / (std + 1e-6)``: the mean is over comparable returns of the group, and the standard deviation is that of
its rollouts' rewards. Tokens are trained with ``weight * advantage``. The modes are cases of it:

=========== ========================================= ========================== ==============================
mode        return of a call                          compared with              weight of a call
=========== ========================================= ========================== ==============================
broadcast   the rollout's reward - call_cost * calls  the rollouts of the group  1
last        the same                                  the rollouts of the group  1 for the last, else 0
discount    the same                                  the rollouts of the group  discount ** (calls after it)
turns       ``G_k``                                   comparable calls           1
=========== ========================================= ========================== ==============================

The choices (``n``) of one request are one call here. A rollout's reward in the deviation has the emitted ones for
``turns``, and neither costs nor discount: divided by a deviation of returns, the smallest cost would weigh as much as
right against wrong where all rollouts are right. Equal rewards give 0, but for costs, which are compared undivided.

Comparing rollouts is GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1): a rollout of five calls weighs no more in
its group's mean than a rollout of one. Comparable calls read the same prompt ids (anchor states: Feng et al. 2025,
"GiGPO", arXiv:2505.10978). A call that no other rollout of the group has made is compared with the calls of the same
agent and ordinal, and if no other rollout has made such a call either, with all calls of the group.

Calls whose reply was cut off at the limit of tokens are trained like others (``train``); or they have weight 0
(``mask``, the overlong filtering of Yu et al. 2025, "DAPO", arXiv:2503.14476, section 3.4), and their rollout is
compared all the same; or their rollout has the least reward (``zero``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from groundwire.adapters.tracing import CallCredit, LLMCall, Trajectory, same_request, trajectories
from groundwire.train.algorithms.distillation import add_teacher
from groundwire.train.config.run_config import RunConfig
from groundwire.train.store.rollout import Rollout

Credits = Mapping[tuple[int, int | None], CallCredit]
"""The credit of a rollout's calls by their sequence and choice."""
Scored = tuple[float, Sequence[LLMCall]]
"""A rollout's reward and its trained calls."""


@dataclass(frozen=True)
class TrainingItem:
    """A trajectory with a trained token. ``mask`` and ``advantages`` have the length of its ``response_ids``."""

    trajectory: Trajectory
    mask: list[int]
    """1 for a token that is trained."""
    advantages: list[float]
    """Times the weight of the token's call; 0 where the mask is."""

    @property
    def constrained(self) -> list[tuple[int, int, str]]:
        """The trained replies to a grammar: where each starts and ends in the ``response_ids``, and its grammar."""
        before = len(self.trajectory.prompt_ids)
        starts = ((len(call.prompt_ids) - before, call) for call in self.trajectory.calls if call.grammar)
        return [(start, start + len(call.response_ids), call.grammar) for start, call in starts if self.mask[start]]


@dataclass(frozen=True, kw_only=True)
class TrainedRollout:
    """A rollout, and what the update trains of it."""

    rollout: Rollout
    reward: float
    """That its group compared: its own, or the least of the run if a reply was cut off and ``truncated`` is zero."""
    credits: Credits
    items: list[TrainingItem]
    """Empty if none of its calls is trained."""


@dataclass(frozen=True, kw_only=True)
class TrainingGroup:
    """The rollouts of a task that are compared with each other."""

    rollouts: list[TrainedRollout]
    differs: bool
    """Whether the rewards differ of its rollouts with trained calls."""
    distilled: bool = False
    """Whether a teacher judges its tokens: then equal rewards teach, too."""

    @property
    def teaches(self) -> bool:
        """Whether the rewards differ, and a trained token has an advantage. Costs alone teach nothing."""
        return self.distilled or (self.differs and self.has_gradient)

    @property
    def items(self) -> list[TrainingItem]:
        """Those of all its rollouts."""
        return [item for rollout in self.rollouts for item in rollout.items]

    @property
    def has_gradient(self) -> bool:
        """Whether an advantage is not 0. With ``call_cost`` a group of equal rewards may have one and not teach."""
        return any(any(item.advantages) for item in self.items)

    def record(self) -> None:
        """Write into the rollouts what their calls are trained with."""
        for trained in self.rollouts:
            for call in trained.rollout.calls:
                call.credit = trained.credits.get((call.sequence, call.choice))


def training_items(rollouts: Sequence[Rollout], config: RunConfig, *, least: float) -> list[TrainingGroup]:
    """What a step trains: the groups of its rollouts, with the mask and the advantage of each token.

    Rollouts without a reward are left out. ``least`` is the least reward of the run.
    """
    groups: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.outcome.reward is not None:
            groups[rollout.group].append(rollout)
    return [_training_group(group, config, least) for group in groups.values()]


def _training_group(group: Sequence[Rollout], config: RunConfig, least: float) -> TrainingGroup:
    trained = [rollout.trained_calls(config.agent_match) for rollout in group]
    cut_off = [config.truncated == "zero" and any(call.truncated for call in calls) for calls in trained]
    rewards = [least if cut else rollout.outcome.reward or 0.0 for rollout, cut in zip(group, cut_off, strict=True)]
    scored = list(zip(rewards, trained, strict=True))
    assigned = assign_credit(scored, config)
    members = []
    for rollout, (reward, calls), call_credits in zip(group, scored, assigned, strict=True):
        places = ((call.sequence, call.choice) for call in calls)
        credits = dict(zip(places, call_credits, strict=True))
        items = [TrainingItem(path, *token_credit(path, credits)) for path in trajectories(calls)]
        items = [item for item in items if any(item.mask)]
        members.append(TrainedRollout(rollout=rollout, reward=reward, credits=credits, items=items))
    if config.teacher:
        add_teacher([item for member in members for item in member.items], config)
    differs = bool(_deviation(_sums(_rewards(scored, config.credit))))
    return TrainingGroup(rollouts=members, differs=differs, distilled=bool(config.teacher))


def assign_credit(rollouts: Sequence[Scored], config: RunConfig) -> list[list[CallCredit]]:
    """The credits of a group's rollouts, each given as its reward and its trained calls in order.

    A rollout without trained calls has no part in the comparison. If fewer than two are left, nothing can be compared,
    and every advantage is 0. Without ``scale_rewards`` they are not divided by the standard deviation (Liu et al. 2025,
    "Dr. GRPO", arXiv:2503.20783).
    """
    calls = [trained for _, trained in rollouts]
    rewards = _rewards(rollouts, config.credit)
    returns = [_returns(of_requests, config) for of_requests in rewards]
    # Of the rewards of whole rollouts: that of returns would shrink to the costs where all rewards are equal.
    deviation = _deviation(_sums(rewards))
    compared = returns
    if not deviation:  # only costs differ, and the discount of equal rewards is no merit of the shorter rollout
        compared = [_returns([0.0] * len(of_requests), config) for of_requests in rewards]
    divisor = deviation + np.float32(1e-6) if config.scale_rewards and deviation else np.float32(1)
    steps = list(map(_steps, calls))
    if config.credit == "turns":
        advantages = _call_advantages(calls, steps, compared, divisor)
    else:
        # One return for each rollout: with one for each call, a rollout of many calls would pull the mean to itself.
        of_rollouts = iter(_advantages([of_requests[0] for of_requests in compared if of_requests], divisor))
        advantages = [[next(of_rollouts)] * len(trained) if trained else [] for trained in calls]
    return [
        [
            CallCredit(of_requests[step], advantage, _weight(call, places[-1] - step, config))
            for call, step, advantage in zip(of_rollout, places, of_calls, strict=True)
        ]
        for of_rollout, places, of_requests, of_calls in zip(calls, steps, returns, advantages, strict=True)
    ]


def token_credit(trajectory: Trajectory, credits: Credits) -> tuple[list[int], list[float]]:
    """The loss mask and the weighted advantages of a trajectory, one for each of its ``response_ids``.

    Tokens without credit, or with weight 0, have mask 0.
    """
    mask, advantages = [0] * len(trajectory.response_ids), [0.0] * len(trajectory.response_ids)
    for call in trajectory.calls:
        credit, length = credits.get((call.sequence, call.choice)), len(call.response_ids)
        if credit and credit.weight:
            start = len(call.prompt_ids) - len(trajectory.prompt_ids)
            mask[start : start + length] = [1] * length
            advantages[start : start + length] = [credit.weight * credit.advantage] * length
    return mask, advantages


def _steps(calls: Sequence[LLMCall]) -> list[int]:
    """The ordinal of the request of each call: the choices of one request are one step."""
    choices = [call.choice for call in calls]
    begins = [not same_request(before, choice) for before, choice in zip([None, *choices], choices, strict=False)]
    return [begun - 1 for begun in accumulate(begins)]


def _rewards(rollouts: Sequence[Scored], credit: str) -> list[list[float]]:
    """The reward of each request of each rollout; empty without calls."""
    of_rollouts = []
    for reward, calls in rollouts:
        # The reward of a request is that of its last choice.
        emitted = {step: (call.reward or 0.0) for step, call in zip(_steps(calls), calls, strict=True)}
        rewards = list(emitted.values()) if credit == "turns" else [0.0] * len(emitted)
        of_rollouts.append([*rewards[:-1], rewards[-1] + reward] if rewards else [])
    return of_rollouts


def _sums(rewards: Sequence[Sequence[float]]) -> list[float]:
    """Of each rollout with calls."""
    return [sum(of_requests) for of_requests in rewards if of_requests]


def _returns(rewards: Sequence[float], config: RunConfig) -> list[float]:
    if config.credit != "turns":
        return [sum(rewards) - config.call_cost * len(rewards)] * len(rewards)
    returns = [reward - config.call_cost for reward in rewards]
    for step in range(len(returns) - 2, -1, -1):
        returns[step] += config.credit_discount * returns[step + 1]
    return returns


def _weight(call: LLMCall, requests_after: int, config: RunConfig) -> float:
    if config.truncated == "mask" and call.truncated:
        return 0.0
    if config.credit == "last":
        return float(requests_after == 0)
    return config.credit_discount**requests_after if config.credit == "discount" else 1.0


def _deviation(values: Sequence[float]) -> np.float32:
    """The unbiased standard deviation; 0 if the values are equal but for rounding, or fewer than two."""
    numbers = np.array(values, np.float32)
    # The mean's rounding error over 1e-6 would be an advantage of up to 0.06.
    if len(values) < 2 or np.ptp(numbers) <= 1e-6 * np.abs(numbers).max():
        return np.float32(0)
    return np.float32(np.std(numbers, ddof=1, dtype=np.float64))


def _advantages(returns: Sequence[float], divisor: np.float32) -> list[float]:
    """``(return - mean) / divisor``; equal returns, or a single one, give 0."""
    values = np.array(returns, np.float32)
    advantages = (values - values.mean()) / divisor if _deviation(returns) else np.zeros_like(values)
    return [float(advantage) for advantage in advantages]


def _call_advantages(
    rollouts: Sequence[Sequence[LLMCall]],
    steps: Sequence[Sequence[int]],
    returns: Sequence[Sequence[float]],
    divisor: np.float32,
) -> list[list[float]]:
    """The advantage of each call among the comparable calls of its group. ``returns`` are those of requests."""
    keys: dict[tuple[int, int], tuple[Hashable, ...]] = {}
    for index, calls in enumerate(rollouts):
        requests: defaultdict[str, dict[int, int]] = defaultdict(dict)  # of each agent: their ordinals by step
        for at, (call, step) in enumerate(zip(calls, steps[index], strict=True)):
            ordinal = requests[call.agent].setdefault(step, len(requests[call.agent]))
            keys[index, at] = (tuple(call.prompt_ids), (call.agent, ordinal), "all")
    advantages: dict[tuple[int, int], float] = {}
    for rank in range(3):  # the closest comparison that another rollout takes part in
        sets: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        for place, candidates in keys.items():
            sets[candidates[rank]].append(place)
        for places in sets.values():
            if len({index for index, _ in places}) > 1:
                values = [returns[index][steps[index][at]] for index, at in places]
                for place, advantage in zip(places, _advantages(values, divisor), strict=True):
                    advantages.setdefault(place, advantage)
    return [[advantages.get((index, at), 0.0) for at in range(len(calls))] for index, calls in enumerate(rollouts)]

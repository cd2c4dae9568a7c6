"""The rollouts of a step, how each has ended, and what a failed one scores.

The score depends on the rewards of the run: no failure may be better than a wrong answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from groundwire.adapters.tracing.sampling import derive_seed
from groundwire.adapters.tracing.spans import read_rewards
from groundwire.domains import Task
from groundwire.rewards import RewardError, total
from groundwire.rewards.attack.watch import ATTACK, KnownAttacks, is_attack
from groundwire.tools.files import shorten_repr
from groundwire.tools.numbers import MAX_METRIC, MAX_REWARD, reward_number
from groundwire.tools.secrets import mask_secrets
from groundwire.train.config.failures import failure_scores
from groundwire.train.rollouts.errors import UnreadableAnswerError
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Outcome, Rollout

if TYPE_CHECKING:
    from groundwire.train.artifacts.run_dir import RunDir
    from groundwire.train.config.run_config import RunConfig


def requests_of_step(
    tasks: Iterable[Task], config: RunConfig, step: int, *, drawn: Counter[str] | None = None
) -> Iterator[list[Rollout]]:
    """The group of each task: ``group_size`` rollouts, whose seeds follow from the run's, the step and the task.

    ``drawn`` counts the groups that the tasks had in this step before: one that is drawn again has other seeds.
    """
    drawn = Counter() if drawn is None else drawn
    common = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    for task in tasks:
        name = str(task["id"])
        first = drawn[name] * config.group_size
        drawn[name] += 1
        seeds = [derive_seed(config.seed, step, name, first + sample) for sample in range(config.group_size)]
        yield [Rollout(task=task, group=name, step=step, sampling={**common, "seed": seed}) for seed in seeds]


def final_outcome(rollout: Rollout, *, not_stored: str = "") -> Outcome:
    """The outcome of a rollout that has ended, with the failures that no runner reports. A failure has no score yet.

    ``not_stored`` says why some of its calls are not in the store.
    """
    reported = rollout.outcome
    failed = replace(reported, reward=None, reward_components={})
    problem, kind = not_stored, "not_stored"  # it would be trained without some of its calls
    if not problem and (problem := _reward_problem(rollout)):  # or without some of its rewards
        failed, kind = replace(failed, least_reward=0.0, query_scores=()), RewardError.kind
    if problem:
        also = reported.failure and reported.failure != kind
        reason = f"; it failed of {reported.failure}: {reported.message}" if also else ""
        return replace(failed, failure=kind, message=f"{problem}{reason}")
    if reported.failure:
        return failed
    if rollout.status == "cancelled":
        return replace(failed, failure="timeout", message="not finished by the step's deadline")
    if rollout.status != "succeeded" or reported.reward is None:
        message = "the runner reported neither a reward nor a failure"
        if rollout.attempt is not None and rollout.attempt.status == "unresponsive":
            message = f"its runner was lost, at attempt {rollout.attempt.number}"
        return replace(failed, failure="no_result", message=message)
    return reported


def _reward_problem(rollout: Rollout) -> str:
    """Why a reward that the rollout emitted, or that another program reported for it, is none; else empty."""
    outcome = rollout.outcome
    numbers = [("reward", outcome.reward or 0.0, MAX_REWARD), ("least reward", outcome.least_reward, MAX_REWARD)]
    numbers += [("reward of a query", score, MAX_REWARD) for score in outcome.query_scores]
    numbers += [(f"component {name!r:.60}", value, MAX_METRIC) for name, value in outcome.reward_components.items()]
    for name, value, most in numbers:
        try:
            reward_number(value, most)
        except (TypeError, ValueError) as error:
            return f"the {name} is {shorten_repr(value)}; {error}"
    try:
        for span in rollout.annotations:
            read_rewards(span.attributes)
    except ValueError as error:
        return str(error)
    return ""


def groups_of(rollouts: Iterable[Rollout]) -> list[list[int]]:
    """The places of the rollouts that a reward compares with each other."""
    groups = defaultdict[Any, list[int]](list)
    for place, rollout in enumerate(rollouts):
        groups[rollout.mode, rollout.step, rollout.group, rollout.sampling.get("temperature")].append(place)
    return list(groups.values())


class GroupComparison:
    """Adds what ``compare`` gives the answers of a group to their rewards, when all have ended.

    A failure of the types ``scored`` is worse than any answer. The one answer to a question of a validation is compared
    with that of the same validation before training, which ``recorded`` has: 0.5 is as good, the mean the rate of wins.
    """

    COLUMNS = ("step", "mode", "temperature", "task_id", "status", "reward", "answer")

    def __init__(self, compare: Any, scored: Collection[str], recorded: Iterable[Rollout], timer: StepTimer) -> None:
        self._compare, self._scored, self._recorded, self._timer = compare, scored, recorded, timer
        self._start = dict[Any, Rollout]()

    async def __call__(self, group: Sequence[Rollout]) -> None:
        """Complete the rewards of rollouts of one task; without a verdict those with answers fail."""
        answered, compared = [rollout.outcome for rollout in group if rollout.succeeded], [*group]
        if group[0].mode == "val" and len(group) == 1:
            if group[0].step and not self._start:
                self._start = {_key(one): one for one in self._recorded if (one.mode, one.step) == ("val", 0)}
            start = self._start.get(_key(group[0])) if group[0].step else group[0]
            compared += [start] if start is not None else []
        answers = [rollout.outcome.answer for rollout in compared if rollout.succeeded]
        failed = sum(rollout.outcome.failure in self._scored for rollout in compared)
        try:
            with self._timer.busy("reward"):
                values = await self._compare(group[0].task, answers, failed=failed) if answered else []
            for outcome, value in zip(answered, values, strict=False):
                outcome.reward = (outcome.reward or 0.0) + total(value)
                outcome.reward_components = {**outcome.reward_components, **value}
        except Exception as error:  # it asks another program
            for outcome in answered:
                outcome.reward, outcome.reward_components = None, {}
                outcome.failure, outcome.message = getattr(error, "kind", RewardError.kind), mask_secrets(str(error))


def _key(rollout: Rollout) -> tuple[str, Any]:
    return str(rollout.task["id"]), rollout.sampling.get("temperature")


class FailureScores:
    """``failures`` is the setting of that name. What ``run`` has sampled so far counts, also in validations."""

    def __init__(self, failures: str = "", run: RunDir | None = None) -> None:
        self._scores = failure_scores(failures)
        self.least = 0.0
        """The least value that the reward declares or has given in this run; 0 if none is lower."""
        self._has_scored = False
        self._attacks = KnownAttacks.read(run.path) if run is not None else None
        self._unproven: list[Rollout] = []
        """Those whose reward raised about the answer when it had scored no other answer yet."""
        for rollouts in run.rollout_batches(["status", "reward"], []) if run is not None else ():
            self._add([rollout.outcome.reward for rollout in rollouts if rollout.succeeded])

    def settle(self, rollouts: Sequence[Rollout]) -> None:
        """Give a score to those that failed. Rollouts that are compared are settled together.

        What a reward raises about an answer counts once it has scored another; until then the reward may be broken.
        """
        self._add([rollout.outcome.reward for rollout in rollouts if rollout.succeeded])
        self.least = min([self.least, *(rollout.outcome.least_reward for rollout in rollouts)])
        for rollout in rollouts:
            outcome = rollout.outcome
            if outcome.failure == UnreadableAnswerError.kind and not self._has_scored:
                outcome.failure = RewardError.kind
                self._unproven.append(rollout)
            if outcome.failure:
                outcome.reward = self._score(outcome.failure)
            elif (known := self._attacks) is not None and rollout.mode == "train":
                won = (outcome.reward or 0) >= known.wins_from and not is_attack(outcome.reward_components)
                if won and (name := known.match(rollout.task, outcome.answer)):
                    outcome.reward_components = {**outcome.reward_components, f"{ATTACK}{name}": 1.0}
                    outcome.reward = self.least if known.zero else outcome.reward

    def _add(self, rewards: Sequence[float | None]) -> None:
        self.least = min([self.least, *filter(None, rewards)])
        self._has_scored = self._has_scored or bool(rewards)
        if self._has_scored:
            for rollout in self._unproven:
                rollout.outcome.failure = UnreadableAnswerError.kind
                rollout.outcome.reward = self._score(UnreadableAnswerError.kind)
            self._unproven.clear()

    def _score(self, failure: str) -> float | None:
        score = self._scores.get(failure)
        return self.least if score is None and failure in self._scores else score

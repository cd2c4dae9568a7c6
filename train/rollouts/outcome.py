"""The rollouts of a step, and how each has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from groundwire.adapters.tracing.sampling import derive_seed
from groundwire.domains import Task
from groundwire.train.store.rollout import Outcome, Rollout

if TYPE_CHECKING:
    from groundwire.train.config.run_config import RunConfig

__all__ = ["final_outcome", "requests_of_step"]


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
    if not_stored:  # it would be trained without some of its calls
        reason = f"; it failed of {reported.failure}: {reported.message}" if reported.failure else ""
        return replace(failed, failure="not_stored", message=f"{not_stored}{reason}")
    if reported.failure:
        return failed
    if rollout.status == "cancelled":
        return replace(failed, failure="timeout", message="not finished by the step's deadline")
    if rollout.status != "succeeded" or reported.reward is None:
        message = "the runner reported neither a reward nor a failure"
        return replace(failed, failure="no_result", message=message)
    return reported

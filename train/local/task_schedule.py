"""The tasks of each training step. They depend on the seed, the step and the rewards of earlier steps only, so a
resumed run repeats them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from groundwire.domains import Task
from groundwire.train.algorithms.curriculum import PassRates
from groundwire.train.config.run_config import RunConfig
from groundwire.train.rollouts.outcome import requests_of_step
from groundwire.train.store.rollout import Rollout

__all__ = ["max_groups", "training_groups"]


def max_groups(tasks: Sequence[Task], config: RunConfig) -> int:
    """The most groups of a step: ``sampling_budget`` times ``tasks_per_step``, each with another task."""
    return min(len(tasks), int(config.tasks_per_step * config.sampling_budget))


def training_groups(
    tasks: Sequence[Task], config: RunConfig, step: int, rates: PassRates | None = None
) -> Iterator[list[Rollout]]:
    """The groups of a step in the order in which they are sampled, :func:`max_groups` of them.

    With ``rates`` tasks are drawn by them. Groups after the first ``tasks_per_step`` are for dynamic sampling.
    """
    return requests_of_step(_ordered(tasks, config, step, rates)[: max_groups(tasks, config)], config, step)


def _ordered(tasks: Sequence[Task], config: RunConfig, step: int, rates: PassRates | None) -> list[Task]:
    """All tasks: those of the step, then the others in random order."""
    if rates is not None:
        by_id = {str(task["id"]): task for task in tasks}
        return [by_id[task] for task in rates.order(by_id, f"{config.seed}/{step}")]
    first = _tasks_of_step(tasks, config, step)
    others = [index for index in range(len(tasks)) if index not in first]
    random.Random(f"{config.seed}/{step}/others").shuffle(others)
    return [tasks[index] for index in (*first, *others)]


def _tasks_of_step(tasks: Sequence[Task], config: RunConfig, step: int) -> list[int]:
    """The indices of the next ``tasks_per_step`` tasks of an endless sequence of shuffled epochs."""
    size = min(config.tasks_per_step, len(tasks))
    epoch, position = divmod(step - 1, len(tasks) // size)
    order = list(range(len(tasks)))
    random.Random(f"{config.seed}/{epoch}").shuffle(order)
    return order[position * size : (position + 1) * size]

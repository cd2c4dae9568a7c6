"""The rollout requests of a training step, the same for both trainers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from groundwire.adapters.tracing.sampling import derive_seed
from groundwire.domains import Task
from groundwire.train.config.run_config import RunConfig
from groundwire.train.rollouts.outcome import RolloutRequest

__all__ = ["requests_of_step"]


def requests_of_step(
    tasks: Iterable[Task], config: RunConfig, step: int, *, drawn: Counter[str] | None = None
) -> Iterator[list[RolloutRequest]]:
    """The group of each task: ``group_size`` rollouts, whose seeds follow from the run's, the step and the task.

    ``drawn`` counts the groups that the tasks had in this step before: one that is drawn again has other seeds.
    """
    drawn = Counter() if drawn is None else drawn
    for task in tasks:
        name = str(task["id"])
        first = drawn[name] * config.group_size
        drawn[name] += 1
        seeds = [derive_seed(config.seed, step, name, first + sample) for sample in range(config.group_size)]
        common = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        yield [RolloutRequest(task=task, group=name, mode="train", sampling={**common, "seed": seed}) for seed in seeds]

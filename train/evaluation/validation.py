"""When a run validates, on which tasks, and with which rollout requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from groundwire.adapters.tracing.sampling import derive_seed
from groundwire.domains import Task

if TYPE_CHECKING:
    from groundwire.train.config.run_config import RunConfig
    from groundwire.train.store.rollout import Rollout

T = TypeVar("T")
_GOLDEN = 2654435769  # 2**32 over the golden ratio
VALIDATIONS = {"validation": "greedy", "validation_sampled": "sampled"}
"""The validations in a line of ``metrics.jsonl`` and in summaries, with the way of sampling."""


def validation_name(temperature: float) -> str:
    """The name of a validation in metrics and summaries: ``validation`` if greedy, else ``validation_sampled``."""
    return "validation" if temperature == 0 else "validation_sampled"


def validation_temperatures(config: RunConfig, step: int) -> list[float]:
    """Temperatures of the local trainer's validations at a step; before and after training one is sampled."""
    if step in (0, config.steps):
        return [0.0, config.temperature] if config.val_temperature == 0 else [config.val_temperature]
    return [config.val_temperature] if config.val_every and step % config.val_every == 0 else []


def validation_missing(config: RunConfig, line: Mapping[str, Any]) -> bool:
    """Whether a line of ``metrics.jsonl`` lacks a validation, because the local trainer was stopped before it."""
    return any(
        validation_name(temperature) not in line for temperature in validation_temperatures(config, line["step"])
    )


def validation_deadline_s(config: RunConfig, rollouts: int) -> float:
    """The time that a validation has: a step's, for each time that all runners are busy."""
    return config.step_deadline_s * max(1.0, rollouts / max(1, config.n_runners))


def choose_tasks(tasks: Sequence[T], count: int) -> list[T]:
    """``count`` tasks (0 is all), evenly spaced in ``tasks``: the same for every run and seed, from all databases.

    A smaller number of them is a part of a larger one: multiples of the golden ratio are spread evenly, however many.
    """
    if count <= 0 or count >= len(tasks):
        return list(tasks)
    order = sorted(range(len(tasks)), key=lambda index: index * _GOLDEN % 2**32)
    return [tasks[index] for index in sorted(order[:count])]


def validation_requests(
    tasks: Sequence[Task], config: RunConfig, temperature: float, *, step: int = 0, samples: Iterable[int] = (0,)
) -> list[Rollout]:
    """A rollout of each task for each number in ``samples``; a ``temperature`` of 0 is greedy.

    A task's seed is independent of those of other runs' seeds, of other samples and of training.
    """
    from groundwire.train.store.rollout import Rollout  # slow: imports the store

    return [
        Rollout(
            task=task,
            group=str(task["id"]),
            mode="val",
            step=step,
            sampling={
                "temperature": temperature,
                "max_tokens": config.max_tokens,
                "seed": derive_seed(config.seed, "validation", task["id"], sample),
            },
        )
        for sample in samples
        for task in tasks
    ]

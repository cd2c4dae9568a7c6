"""The tasks of each training step. They depend on the seed and the step only, so a resumed run repeats them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from groundwire.domains import Task
from groundwire.train.config.run_config import RunConfig
from groundwire.train.rollouts.outcome import RolloutRequest

__all__ = ["training_requests"]


def training_requests(tasks: Sequence[Task], config: RunConfig, step: int) -> list[RolloutRequest]:
    """``group_size`` rollouts, each with its own seed, of each of the step's tasks."""
    requests = []
    for task in _tasks_of_step(tasks, config, step):
        for sample in range(config.group_size):
            key = f"{config.seed}/{step}/{task['id']}/{sample}".encode()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big")
            sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens, "seed": seed}
            requests.append(RolloutRequest(task=task, group=str(task["id"]), mode="train", sampling=sampling))
    return requests


def _tasks_of_step(tasks: Sequence[Task], config: RunConfig, step: int) -> list[Task]:
    """The next ``tasks_per_step`` tasks of an endless sequence of shuffled epochs."""
    size = min(config.tasks_per_step, len(tasks))
    epoch, position = divmod(step - 1, len(tasks) // size)
    order = list(range(len(tasks)))
    random.Random(f"{config.seed}/{epoch}").shuffle(order)
    return [tasks[i] for i in order[position * size : (position + 1) * size]]

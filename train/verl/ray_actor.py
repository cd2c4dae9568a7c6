"""Starts actors of Ray beside the trainer's process, for work that would take that process's time."""

from __future__ import annotations

from typing import Any

__all__ = ["start_actor"]


def start_actor(kind: type, *arguments: Any, restarts: bool = False) -> Any:
    """An actor of the class ``kind`` on this host.

    With ``restarts`` Ray starts it again when its process ends, and repeats its open calls.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    forever = -1 if restarts else 0
    actor = ray.remote(kind).options(
        num_cpus=0, max_restarts=forever, max_task_retries=forever, scheduling_strategy=here
    )
    return actor.remote(*arguments)

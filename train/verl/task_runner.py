"""The actor of verl's trainer. Before Ray kills the processes of the job, it ends what the rollout processes run."""

from __future__ import annotations

from typing import Any

from verl.trainer.main_ppo import TaskRunnerV1

__all__ = ["TaskRunner"]


class TaskRunner(TaskRunnerV1.__ray_actor_class__):
    """verl's actor, for ``run_ppo``."""

    def run(self, config: Any) -> None:
        """Train until verl ends; the last rollouts are then written, and the copies of databases removed."""
        try:
            super().run(config)
        finally:
            if self.agent_loop_manager is not None:
                self.agent_loop_manager.stop()

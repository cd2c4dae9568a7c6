"""verl's process with its trainer, which at the end also ends the processes with the rollouts."""

from __future__ import annotations

from typing import Any

from verl.trainer.main_ppo import TaskRunnerV1

from groundwire.train.verl.agent_loop_manager import RolloutManager

__all__ = ["TaskRunner"]


class TaskRunner(TaskRunnerV1.__ray_actor_class__):
    """An actor of Ray's, for verl's ``run_ppo``."""

    def run(self, config: Any) -> None:
        """Train until verl ends. Ray kills the processes of its job, which then leave the copies of databases."""
        try:
            super().run(config)
        finally:
            if self.agent_loop_manager is not None:
                RolloutManager.current.workers.stop()

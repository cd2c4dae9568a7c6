"""Rollouts with a reward and calls, and what an update trains of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.adapters.tracing import LLMCall, Trajectory, trajectories
from groundwire.train.algorithms.credit import TrainingGroup, training_items
from groundwire.train.config.run_config import RunConfig
from groundwire.train.store.rollout import Outcome, Rollout

__all__ = ["Sampled", "llm_call", "training_groups"]


def llm_call(sequence: int, prompt_ids: list[int], response_ids: list[int], **fields: Any) -> LLMCall:
    """A call that can be trained on."""
    fields = {"logprobs": [-1.0] * len(response_ids), **fields}
    return LLMCall(
        rollout_id="r", attempt_id="a", sequence=sequence, prompt_ids=prompt_ids, response_ids=response_ids, **fields
    )


@dataclass(frozen=True)
class Sampled:
    """A rollout of a group."""

    group: str
    reward: float
    calls: list[LLMCall]

    @property
    def trajectories(self) -> list[Trajectory]:
        return trajectories(self.calls)


def training_groups(rollouts: Sequence[Sampled], *, least: float = 0.0, **settings: Any) -> list[TrainingGroup]:
    """What an update trains with these settings of a run; ``least`` is the least reward of the run."""
    results = [
        Rollout(
            task={"id": rollout.group},
            group=rollout.group,
            outcome=Outcome(reward=rollout.reward),
            calls=rollout.calls,
        )
        for rollout in rollouts
    ]
    return training_items(results, RunConfig(**settings), least=least)

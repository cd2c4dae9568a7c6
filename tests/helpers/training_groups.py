"""Rollouts with a reward and calls, and what an update trains of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.adapters.tracing import LLMCall, Trajectory, trajectories, triplets
from groundwire.train.algorithms.credit import TrainingGroup, training_items
from groundwire.train.config.run_config import RunConfig
from groundwire.train.rollouts.outcome import RolloutRequest, RolloutResult

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
        return trajectories(triplets(self.calls, self.reward))


def training_groups(rollouts: Sequence[Sampled], *, least: float = 0.0, **settings: Any) -> list[TrainingGroup]:
    """What an update trains with these settings of a run; ``least`` is the least reward of the run."""
    results = [
        RolloutResult(
            request=RolloutRequest(task={"id": rollout.group}, group=rollout.group, mode="train"),
            rollout_id=str(number), status="succeeded", reward=rollout.reward, reward_components={}, message="",
            answer="", steps=[], calls=rollout.calls, attempts=1, seconds=1.0,
        )
        for number, rollout in enumerate(rollouts)
    ]  # fmt: skip
    return training_items(results, RunConfig(**settings), least=least)

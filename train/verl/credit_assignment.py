"""The rows that a group of rollouts becomes in verl, with the advantage of each of their calls.

verl 0.9.1 stores a row under ``{uid}_{session}_{index}``: prompt, rollout, trajectory. Its estimators know no calls, so
the advantages are computed here, as for the local trainer, when the group is complete
(:mod:`groundwire.train.algorithms.credit`). verl's trainer takes them from the rows (:mod:`.stored_columns`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from groundwire.adapters.tracing import Trajectory, Triplet, select_calls, trajectories, triplets
from groundwire.train.algorithms.credit import (
    Credit,
    Credits,
    Truncated,
    assign_credit,
    rewards_differ,
    token_credit,
    trained_reward,
)

if TYPE_CHECKING:
    from groundwire.train.rollouts.outcome import RolloutResult

__all__ = ["TrainingRow", "training_rows"]


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One trajectory as verl stores it. All lists but ``prompt_ids`` have the length of ``response_ids``."""

    key: str
    uid: str
    session: int
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    advantages: list[float] | None
    """Those that the tokens are trained with; None if verl computes them."""
    logprobs: list[float]
    reward: float
    turns: int
    """LLM calls of the whole rollout."""
    first_version: int
    last_version: int
    """Versions of the weights at the first and at the last sampled token."""
    step: int
    teaches: bool = False
    """Whether it has a gradient because the rewards of its group differ, not only the costs of its calls."""
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_gradient(self) -> bool:
        """Whether an advantage is not 0. Rows whose advantages verl computes are taken to have one."""
        return self.advantages is None or any(self.advantages)


def training_rows(
    rollouts: Sequence[tuple[int, RolloutResult, float]],
    *,
    uid: str,
    step: int,
    credit: Credit | None = "broadcast",
    discount: float = 1.0,
    scale: bool = True,
    truncated: Truncated = "train",
    call_cost: float = 0.0,
    agent_match: str | None = None,
    least: float = 0.0,
) -> list[TrainingRow]:
    """The rows of the rollouts of a prompt, each given as its session, its result and its reward.

    A rollout without a call that is trained has none. Trained are the free calls of the agents that ``agent_match``
    selects: verl's workers compute log-probabilities over the whole vocabulary, and those of a constrained call are
    over the tokens that its grammar allows. ``least`` is the least reward of the run. Without ``credit`` the rows carry
    no advantages and train all these calls.
    """
    calls = [result.trained_calls(agent_match) for _, result, _ in rollouts]
    free = [triplets(select_calls(each, lambda call: not call.grammar), None) for each in calls]
    scored = [
        (trained_reward(reward, each, truncated, least), each)
        for (*_, reward), each in zip(rollouts, free, strict=True)
    ]
    mode = credit or "broadcast"
    assigned = assign_credit(
        scored, credit=mode, discount=discount, scale=scale, truncated=truncated, call_cost=call_cost
    )
    differ = rewards_differ(scored, credit=mode, truncated=truncated)
    rows: list[TrainingRow] = []
    for (session, result, _), of_agents, (reward, trained), credits in zip(
        rollouts, calls, scored, assigned, strict=True
    ):
        turns = triplets(of_agents, reward)
        by_call = {(call.sequence, call.choice): each for call, each in zip(trained, credits, strict=True)}
        if credit:
            result.credits.update(by_call)
        for index, (trajectory, mask, advantages) in enumerate(_trained_parts(turns, by_call)):
            versions = [_weights_versions(turn, step) for turn in trajectory.triplets]
            rows.append(
                TrainingRow(
                    key=f"{uid}_{session}_{index}",
                    uid=uid,
                    session=session,
                    prompt_ids=trajectory.prompt_ids,
                    response_ids=trajectory.response_ids,
                    mask=mask,
                    advantages=advantages if credit else None,
                    logprobs=trajectory.logprobs,
                    reward=reward,
                    turns=len(turns),
                    first_version=min(first for first, _ in versions),
                    last_version=max(last for _, last in versions),
                    step=step,
                    teaches=differ and (credit is None or any(advantages)),
                    info={name: float(value) for name, value in result.reward_components.items()},
                )
            )
    return rows


def _trained_parts(turns: Sequence[Triplet], credits: Credits) -> Iterator[tuple[Trajectory, list[int], list[float]]]:
    """The trajectories with a trained token, each with its mask and advantages.

    The one with the last call comes last: verl takes a session's reward from its row with the highest index.
    """
    for trajectory in sorted(trajectories(turns), key=lambda trajectory: trajectory.triplets[-1].sequence):
        mask, advantages = token_credit(trajectory, credits)
        if any(mask):
            yield trajectory, mask, advantages


def _weights_versions(turn: Triplet, step: int) -> tuple[int, int]:
    """Versions of the weights at a call's first and last token; a missing one counts as this step's."""
    last = turn.weights_version if turn.weights_version is not None else max(0, step - 1)
    first = turn.first_weights_version if turn.first_weights_version is not None else last
    return first, last

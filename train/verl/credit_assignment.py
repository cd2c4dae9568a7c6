"""From a rollout's outcome to verl's rows, and which of its tokens the reward is for.

verl 0.9.1 stores a row under ``{uid}_{session}_{index}``: prompt, rollout, trajectory. For GRPO it takes the last row
of each ``{uid}_{session}``, compares those with each other within a ``uid``, and gives each result to all rows of its
session (``verl/trainer/ppo/v1/utils.py``, ``compute_advantage_for_multi_trajectories``). So a rollout counts once in
its group however many rows it has, and ``broadcast`` needs nothing more. ``last`` masks all sampled tokens but those of
the last call. ``discount`` counts a call ``credit_discount`` times as much as the one after it, for which verl has no
place: there the weights travel in the row's ``uid``, and :func:`discounted_advantage` reads them (verl calls estimators
other than GRPO with the ``uid`` of each row and nothing else that could carry them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from groundwire.adapters.tracing import LLMCall, Trajectory, calls_of_agents, trajectories

if TYPE_CHECKING:
    import torch

    from groundwire.train.rollouts.collector import RolloutResult

__all__ = ["DISCOUNT", "TrainingRow", "discounted_advantage", "rows"]

DISCOUNT = "groundwire_discount"
"""The name that :func:`discounted_advantage` is registered by."""


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One trajectory as verl stores it. All lists but ``prompt_ids`` have the length of ``response_ids``."""

    key: str
    uid: str
    """What verl groups rows by; with ``discount`` it carries the weights, too."""
    session: int
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float
    turns: int
    """Calls of the whole rollout."""
    first_version: int
    last_version: int
    """Weights at the first and at the last sampled token."""
    step: int
    info: Mapping[str, float] = field(default_factory=dict)


def rows(
    outcome: RolloutResult,
    *,
    uid: str,
    session: int,
    step: int,
    reward: float,
    credit: str = "broadcast",
    discount: float = 0.9,
    agent_match: str | None = None,
) -> list[TrainingRow]:
    """The rows of one rollout; none where it sampled nothing that is trained."""
    calls = calls_of_agents(outcome.calls, agent_match)
    if not calls:
        return []
    made = trajectories(calls)
    if credit == "last":
        made = [trajectory for trajectory in made if calls[-1] in trajectory.calls]
    # verl's own estimator takes a session's reward from its highest index, its dumps and validation too: the last call.
    made.sort(key=lambda trajectory: trajectory.calls[-1].sequence)
    after = {id(call): len(calls) - 1 - place for place, call in enumerate(calls)}
    result = []
    for index, trajectory in enumerate(made):
        mask, group = trajectory.loss_mask, uid
        if credit == "last":
            kept = len(calls[-1].response_ids)
            mask = [0] * (len(mask) - kept) + mask[-kept:]
        elif credit == "discount":
            group = f"{uid}|{session}|{_spans(trajectory, after, discount)}"
        versions = [_versions(call, step) for call in trajectory.calls]
        result.append(
            TrainingRow(
                key=f"{uid}_{session}_{index}",
                uid=group,
                session=session,
                prompt_ids=trajectory.prompt_ids,
                response_ids=trajectory.response_ids,
                mask=mask,
                logprobs=trajectory.logprobs,
                reward=reward,
                turns=len(calls),
                first_version=min(first for first, _ in versions),
                last_version=max(last for _, last in versions),
                step=step,
                info={name: float(value) for name, value in outcome.reward_components.items()},
            )
        )
    return result


def _versions(call: LLMCall, step: int) -> tuple[int, int]:
    """The weights at a call's first and last token. What a server does not say is taken for this step's."""
    last = call.weights_version if call.weights_version is not None else max(0, step - 1)
    first = call.first_weights_version if call.first_weights_version is not None else last
    return first, last


def _spans(trajectory: Trajectory, after: Mapping[int, int], discount: float) -> str:
    """``weight:end`` of each call in a trajectory: up to which response token its weight reaches."""
    start = len(trajectory.prompt_ids)
    parts = []
    for call in trajectory.calls:
        end = len(call.prompt_ids) + len(call.response_ids) - start
        parts.append(f"{discount ** after[id(call)]!r}:{end}")
    return ",".join(parts)


def discounted_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str],
    config: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO over the rollouts of a group, each token weighted as its row's ``uid`` says.

    ``token_level_rewards`` and ``response_mask``: [rows, tokens]; every row of a rollout has the rollout's reward.
    Returns advantages and returns, both [rows, tokens]. The formula within a group is verl's
    ``compute_grpo_outcome_advantage``: (reward - mean) / (std + 1e-6), the mean over rollouts. Rows without weights
    (verl's own padding) get 0.
    """
    import torch

    scores = token_level_rewards.sum(dim=-1)
    sessions: dict[str, dict[str, torch.Tensor]] = {}
    for row, name in enumerate(index):
        uid, session, _weights = _parse(name)
        sessions.setdefault(uid, {})[session] = scores[row]
    by_std = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    advantages = torch.zeros_like(token_level_rewards)
    for row, name in enumerate(index):
        uid, session, weights = _parse(name)
        group = torch.stack(list(sessions[uid].values()))
        if len(group) > 1:
            # Of equal rewards, a mean that is rounded would make an advantage of a tenth.
            advantage = sessions[uid][session] - group.mean() if group.max() > group.min() else torch.zeros(())
            if by_std:
                advantage = advantage / (group.std() + 1e-6)
        else:
            advantage = scores[row] / (1 + 1e-6) if by_std else scores[row]
        start = 0
        for weight, end in weights:
            advantages[row, start:end] = advantage * weight
            start = end
    advantages = advantages * response_mask
    return advantages, advantages


def _parse(name: str) -> tuple[str, str, list[tuple[float, int]]]:
    uid, _, rest = str(name).partition("|")
    session, _, spans = rest.partition("|")
    pairs = (span.split(":") for span in spans.split(",") if span)
    return uid, session, [(float(weight), int(end)) for weight, end in pairs]

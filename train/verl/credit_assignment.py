"""The rows that a rollout becomes in verl, and the weight of the reward in each of its calls.

verl 0.9.1 stores a row under ``{uid}_{session}_{index}``: prompt, rollout, trajectory. For GRPO it takes the last row
of each ``{uid}_{session}``, compares these within a ``uid``, and gives each advantage to all rows of its session
(``verl/trainer/ppo/v1/utils.py``, ``compute_advantage_for_multi_trajectories``). So a rollout counts once in its group,
however many rows it has, and ``broadcast`` needs nothing else. ``last`` masks all sampled tokens but those of the last
call. ``discount`` weights a call ``credit_discount`` times as much as the next one. verl has no field for such weights
and gives estimators other than GRPO only the ``uid`` of each row, so the row's ``uid`` carries the weights and
:func:`discounted_advantage` reads them from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from groundwire.adapters.tracing import Trajectory, Triplet, calls_of_agents, trajectories, triplets

if TYPE_CHECKING:
    import torch

    from groundwire.train.rollouts.outcome import RolloutResult

__all__ = ["DISCOUNT", "TrainingRow", "discounted_advantage", "training_rows"]

DISCOUNT = "groundwire_discount"
"""The name under which :func:`discounted_advantage` is registered in verl."""


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One trajectory as verl stores it. All lists but ``prompt_ids`` have the length of ``response_ids``."""

    key: str
    uid: str
    """verl groups rows by it; with ``discount`` it also carries the weights."""
    session: int
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float
    turns: int
    """LLM calls of the whole rollout."""
    first_version: int
    last_version: int
    """Versions of the weights at the first and at the last sampled token."""
    step: int
    info: Mapping[str, float] = field(default_factory=dict)


def training_rows(
    result: RolloutResult,
    *,
    uid: str,
    session: int,
    step: int,
    reward: float,
    credit: str = "broadcast",
    discount: float = 0.9,
    agent_match: str | None = None,
) -> list[TrainingRow]:
    """The rows of one rollout; none without a free call of a trained agent (``agent_match``)."""
    turns = triplets(calls_of_agents(result.calls, agent_match), reward)
    if not turns:
        return []
    merged = trajectories(turns)
    if credit == "last":
        merged = [trajectory for trajectory in merged if turns[-1] in trajectory.triplets]
    # verl takes a session's reward from its row with the highest index: the row with the last call.
    merged.sort(key=lambda trajectory: trajectory.triplets[-1].sequence)
    weights = {id(turn): discount ** (len(turns) - 1 - place) for place, turn in enumerate(turns)}
    rows: list[TrainingRow] = []
    for trajectory in merged:
        mask, group = _free_mask(trajectory), uid
        if credit == "last":
            kept = len(turns[-1].response_ids)
            mask = [0] * (len(mask) - kept) + mask[-kept:]
        elif credit == "discount":
            group = f"{uid}|{session}|{_encode_weights(trajectory, weights)}"
        if not any(mask):
            continue
        versions = [_weights_versions(turn, step) for turn in trajectory.triplets]
        rows.append(
            TrainingRow(
                key=f"{uid}_{session}_{len(rows)}",
                uid=group,
                session=session,
                prompt_ids=trajectory.prompt_ids,
                response_ids=trajectory.response_ids,
                mask=mask,
                logprobs=trajectory.logprobs,
                reward=reward,
                turns=len(turns),
                first_version=min(first for first, _ in versions),
                last_version=max(last for _, last in versions),
                step=step,
                info={name: float(value) for name, value in result.reward_components.items()},
            )
        )
    return rows


def _free_mask(trajectory: Trajectory) -> list[int]:
    """The loss mask without constrained calls.

    verl's workers compute log-probabilities over the whole vocabulary. Those of a constrained call are over the tokens
    that its grammar allows, so its gradient would be of another distribution than the one that sampled.
    """
    mask, start = list(trajectory.loss_mask), len(trajectory.prompt_ids)
    for turn in trajectory.triplets:
        if turn.grammar:
            begin = len(turn.prompt_ids) - start
            mask[begin : begin + len(turn.response_ids)] = [0] * len(turn.response_ids)
    return mask


def _weights_versions(turn: Triplet, step: int) -> tuple[int, int]:
    """Versions of the weights at a call's first and last token; a missing one counts as this step's."""
    last = turn.weights_version if turn.weights_version is not None else max(0, step - 1)
    first = turn.first_weights_version if turn.first_weights_version is not None else last
    return first, last


def _encode_weights(trajectory: Trajectory, weights: Mapping[int, float]) -> str:
    """``weight:end`` of each call, comma-separated; ``end`` is a position in the response tokens."""
    start = len(trajectory.prompt_ids)
    return ",".join(
        f"{weights[id(turn)]!r}:{len(turn.prompt_ids) + len(turn.response_ids) - start}" for turn in trajectory.triplets
    )


def _decode_weights(name: str) -> tuple[str, str, list[tuple[float, int]]]:
    """The uid of the prompt, the session, and (weight, end) of each call."""
    uid, _, rest = str(name).partition("|")
    session, _, spans = rest.partition("|")
    pairs = (span.split(":") for span in spans.split(",") if span)
    return uid, session, [(float(weight), int(end)) for weight, end in pairs]


def discounted_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str],
    config: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO over the rollouts of a group, with the token weights that each row's ``uid`` carries.

    ``token_level_rewards`` and ``response_mask``: [rows, tokens]; every row of a rollout has the rollout's reward.
    Returns advantages and returns, both [rows, tokens]. The formula within a group is that of verl's
    ``compute_grpo_outcome_advantage``: (reward - mean) / (std + 1e-6), the mean over rollouts. Rows without weights
    (verl's padding) get 0.
    """
    import torch

    scores = token_level_rewards.sum(dim=-1)
    sessions: dict[str, dict[str, torch.Tensor]] = {}
    for row, name in enumerate(index):
        uid, session, _weights = _decode_weights(name)
        sessions.setdefault(uid, {})[session] = scores[row]
    by_std = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    advantages = torch.zeros_like(token_level_rewards)
    for row, name in enumerate(index):
        uid, session, weights = _decode_weights(name)
        group = torch.stack(list(sessions[uid].values()))
        if len(group) > 1:
            # The rounded mean of equal rewards may differ from them, and 1e-6 below would make that a tenth.
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

"""The rows that a group of rollouts becomes in verl, with the advantage of each of their calls.

verl 0.9.1 stores a row under ``{uid}_{session}_{index}``: prompt, rollout, trajectory. Its estimators know no calls, so
the advantages are computed here, as for the local trainer, when the group is complete
(:mod:`groundwire.train.algorithms.credit`). verl's trainer takes them from the rows (:mod:`.stored_columns`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from groundwire.adapters.tracing import LLMCall
from groundwire.train.algorithms.credit import Credit, Truncated, training_items
from groundwire.train.config.run_config import RunConfig
from groundwire.train.store.rollout import Rollout

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
    rollouts: Sequence[tuple[int, Rollout, float]],
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
    mode = credit or "broadcast"
    config = RunConfig(
        credit=mode,
        scale_rewards=scale,
        truncated=truncated,
        call_cost=call_cost,
        agent_match=agent_match,
        credit_discount=0.9 if mode == "discount" and discount == 1 else discount,
    )
    scored = [replace(result, outcome=replace(result.outcome, reward=reward)) for _, result, reward in rollouts]
    rows: list[TrainingRow] = []
    for group in training_items(scored, config, least=least, constrained=False):
        if credit:
            group.record()
        for (session, result, _), trained in zip(rollouts, group.rollouts, strict=True):
            # The trajectory with the last call comes last: verl takes a session's reward from its row with the highest
            # index.
            items = sorted(trained.items, key=lambda item: item.trajectory.calls[-1].sequence)
            for index, item in enumerate(items):
                versions = [_weights_versions(call, step) for call in item.trajectory.calls]
                rows.append(
                    TrainingRow(
                        key=f"{uid}_{session}_{index}",
                        uid=uid,
                        session=session,
                        prompt_ids=item.trajectory.prompt_ids,
                        response_ids=item.trajectory.response_ids,
                        mask=item.mask,
                        advantages=item.advantages if credit else None,
                        logprobs=item.trajectory.logprobs,
                        reward=trained.reward,
                        turns=len(result.trained_calls(agent_match)),
                        first_version=min(first for first, _ in versions),
                        last_version=max(last for _, last in versions),
                        step=step,
                        teaches=group.teaches and (credit is None or any(item.advantages)),
                        info={name: float(value) for name, value in result.outcome.reward_components.items()},
                    )
                )
    return rows


def _weights_versions(call: LLMCall, step: int) -> tuple[int, int]:
    """Versions of the weights at a call's first and last token; a missing one counts as this step's."""
    last = call.weights_version if call.weights_version is not None else max(0, step - 1)
    first = call.first_weights_version if call.first_weights_version is not None else last
    return first, last

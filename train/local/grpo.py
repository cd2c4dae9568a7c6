"""GRPO: the advantages of the calls of each group, one clipped token loss, Adam.

The advantages are those of :mod:`groundwire.train.algorithms.credit`. The loss is PPO's clipped objective with a higher
upper bound (Yu et al. 2025, "DAPO", "clip-higher") and the dual clip of Ye et al. 2020 (arXiv:1912.09729) for negative
advantages, averaged over tokens. There is no KL term. On the same tensors :func:`clipped_policy_loss` equals verl 0.9's
``compute_policy_loss_vanilla`` (``verl/trainer/ppo/core_algos.py``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from groundwire.adapters.tracing import Trajectory, Triplet
from groundwire.tools.files import shorten_repr
from groundwire.train.algorithms.credit import Credit, assign_credit, token_credit
from groundwire.train.local.packing import Branch, pack, packed_logits, to_device
from groundwire.train.policy.attention import TREE
from groundwire.train.policy.constraint import Constraints

__all__ = ["GRPO", "GRPOConfig", "ScoredRollout", "check_state", "clipped_policy_loss"]


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """The hyperparameters."""

    learning_rate: float = 2e-4
    """Adam's step size. A policy of 1 M parameters needs a hundred times that of a 1 B one."""
    warmup_steps: int = 5
    """Steps of linear warmup, because Adam's second moments are noisy at first."""
    clip_low: float = 0.2
    """Below a ratio of ``1 - clip_low`` a token with a negative advantage has no gradient."""
    clip_high: float = 0.3
    """Above ``1 + clip_high`` one with a positive advantage has none. Larger than ``clip_low``, for rare tokens."""
    clip_dual: float = 3.0
    """A token's loss is at most this many times its negative advantage."""
    minibatches: int = 2
    """Optimizer steps per batch of rollouts; clipping has an effect from the second on."""
    credit: Credit = "broadcast"
    """How a rollout's reward and its calls' rewards become the advantages of its calls."""
    credit_discount: float = 0.9
    """With ``discount`` the factor of a call's weight, with ``turns`` of its return, to the call before."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm."""
    temperature: float = 1.0
    """The rollouts' sampling temperature, at which new log-probabilities are computed, too."""
    branches_per_row: int = 8
    """Most trajectories packed after one shared prefix: attention is quadratic in the row's length."""
    tokens_per_forward: int = 2048
    """Tokens of one forward and backward pass. It bounds the memory; on a CPU, small passes are faster."""


@dataclass(frozen=True, kw_only=True)
class ScoredRollout:
    """A rollout's trajectories, its reward, and the group that it is compared with."""

    group: str
    reward: float
    trajectories: Sequence[Trajectory]

    @property
    def calls(self) -> list[Triplet]:
        """Its trained calls, in order."""
        calls = (triplet for trajectory in self.trajectories for triplet in trajectory.triplets)
        return sorted(calls, key=lambda triplet: (triplet.sequence, triplet.choice or 0))


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.3,
    clip_dual: float = 3.0,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The clipped policy loss, averaged over the tokens selected by ``mask``.

    All four tensors have the same shape (any); ``mask`` is bool or 0/1. Returns the scalar loss and the metrics
    ``clip_fraction``, ``kl`` (the estimate ``mean(old - new)``), ``ratio_max`` and ``ratio_min``.
    """
    mask = mask.to(logprobs.dtype)
    count = mask.sum().clamp(min=1)
    log_ratio = (logprobs - old_logprobs).clamp(-20, 20)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * clip_dual), losses)
    loss = (losses * mask).sum() / count
    with torch.no_grad():
        picked = mask.bool()
        metrics = {
            "clip_fraction": float(((clipped > unclipped).to(mask.dtype) * mask).sum() / count),
            "kl": float((-log_ratio * mask).sum() / count),
            "ratio_max": float(ratio[picked].max()) if picked.any() else 1.0,
            "ratio_min": float(ratio[picked].min()) if picked.any() else 1.0,
        }
    return loss, metrics


class GRPO:
    """Updates a model with Adam; :meth:`update` is one training step.

    ``constraints`` compute which tokens a constrained reply could have. Only such replies need them.
    """

    def __init__(
        self, model: torch.nn.Module, config: GRPOConfig, *, seed: int = 0, constraints: Constraints | None = None
    ) -> None:
        self.model, self.config, self._constraints = model, config, constraints
        if next(model.parameters()).is_cuda:
            model.set_attn_implementation(TREE)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.999))
        self.updates = 0
        self._random = random.Random(seed)

    def update(self, rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
        """Train the model in place on one batch of scored rollouts; returns the step's metrics.

        Groups whose advantages are all 0 are left out: those with equal rewards, and those of a single rollout. Without
        any other group the model does not change (``groups_used`` is 0).
        """
        config = self.config
        batch: dict[str, list[ScoredRollout]] = {}
        for rollout in rollouts:
            batch.setdefault(rollout.group, []).append(rollout)
        scored = [(group, self._items(group)) for group in batch.values()]
        used = [(group, items) for group, items in scored if any(any(item.advantages) for item in items)]
        groups = [items for _, items in used]
        metrics: dict[str, float] = {
            "groups": len(batch),
            "groups_used": len(groups),
            "rollouts_trained": sum(bool(rollout.calls) for group, _ in used for rollout in group),
        }
        if not groups:
            return metrics
        rate = config.learning_rate * min(1.0, (self.updates + 1) / max(1, config.warmup_steps))
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        self._random.shuffle(groups)
        self.model.train()
        for start in range(min(config.minibatches, len(groups))):
            # A minibatch has complete groups, because the advantages of a group sum to zero.
            self._minibatch([item for group in groups[start :: config.minibatches] for item in group], metrics, start)
        self.model.eval()
        self.updates += 1
        metrics["learning_rate"] = rate
        return metrics

    def state(self) -> dict[str, Any]:
        """The state that :meth:`load_state` continues from exactly."""
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates, "random": self._random.getstate()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state`, which :func:`check_state` has checked."""
        groups = self.optimizer.state_dict()["param_groups"]  # their values come from the settings
        self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        self.updates = state["updates"]
        self._random.setstate(_random_state(state))

    def _items(self, group: Sequence[ScoredRollout]) -> list[_Item]:
        """The trajectories of a group's rollouts with their tokens' advantages."""
        config = self.config
        calls = [rollout.calls for rollout in group]
        credits = assign_credit(
            [(rollout.reward, each) for rollout, each in zip(group, calls, strict=True)],
            credit=config.credit,
            discount=config.credit_discount,
        )
        by_call = {
            id(call): credit
            for rollout in zip(calls, credits, strict=True)
            for call, credit in zip(*rollout, strict=True)
        }
        made = [
            _Item(trajectory, *token_credit(trajectory, by_call))
            for rollout in group
            for trajectory in rollout.trajectories
        ]
        return [item for item in made if any(item.mask)]

    def _minibatch(self, items: list[_Item], metrics: dict[str, float], index: int) -> None:
        """One optimizer step on the trajectories of some groups."""
        config, measured = self.config, dict.fromkeys(("loss", "kl", "clip_fraction"), 0.0)
        total = sum(sum(item.mask) for item in items)
        ratios: list[float] = []
        self.optimizer.zero_grad(set_to_none=False)
        for rows in _forwards(_rows(items, config.branches_per_row), config.tokens_per_forward):
            logprobs, old, advantages = self._evaluate(rows)
            loss, part = clipped_policy_loss(
                logprobs,
                old,
                advantages,
                torch.ones_like(old),
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                clip_dual=config.clip_dual,
            )
            share = len(old) / total
            (loss * share).backward()
            for name, value in {**part, "loss": float(loss.detach())}.items():
                if name in measured:
                    measured[name] += share * value
            ratios += [part["ratio_min"], part["ratio_max"]]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        self.optimizer.step()
        if index == 0:
            # Before the first optimizer step the policy is the one that sampled, so a ratio other than 1 is a mismatch
            # between the server and the trainer.
            metrics["initial_ratio_error"] = max(abs(ratio - 1) for ratio in ratios)
        metrics |= {**measured, "ratio_min": min(ratios), "ratio_max": max(ratios), "grad_norm": float(norm)}
        metrics["tokens_trained"] = metrics.get("tokens_trained", 0) + total

    def _evaluate(self, rows: list[_Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sampled tokens' new log-probabilities, those at sampling time, and their advantages, each [M]."""
        device = next(self.model.parameters()).device
        one_row = self.model.config._attn_implementation == TREE
        packed = to_device(pack([(row.prefix, row.branches) for row in rows], one_row=one_row), device)
        items = [item for row in rows for item in row.items]
        logits = packed_logits(self.model, packed) / self.config.temperature
        if any(triplet.grammar for item in items for triplet in item.trajectory.triplets):
            # The sampler's distribution: only tokens that the grammar allowed had a probability.
            logits = logits.masked_fill(self._forbidden(items, logits.shape).to(device), -torch.inf)
        logprobs = torch.log_softmax(logits, -1).gather(1, packed.targets[:, None])[:, 0]
        sampled = [
            (old, advantage)
            for item in items
            for old, advantage, is_trained in zip(item.trajectory.logprobs, item.advantages, item.mask, strict=True)
            if is_trained
        ]
        old, advantages = torch.tensor(sampled, device=device).unbind(1)
        return logprobs, old, advantages

    def _forbidden(self, items: Sequence[_Item], shape: torch.Size) -> torch.Tensor:
        """bool [M, vocabulary]: tokens that could not be sampled. An item's targets are the replies that it trains."""
        if self._constraints is None:
            raise ValueError("a call was sampled with a grammar: give GRPO the constraints of the model and tokenizer")
        forbidden = torch.zeros(shape, dtype=torch.bool)
        start = 0
        for item in items:
            for triplet in item.trajectory.triplets:
                if not item.mask[len(triplet.prompt_ids) - len(item.trajectory.prompt_ids)]:
                    continue
                end = start + len(triplet.response_ids)
                if triplet.grammar:
                    forbidden[start:end] = ~self._constraints.replay(triplet.grammar, triplet.response_ids)
                start = end
        return forbidden


def check_state(model: torch.nn.Module, state: Any) -> None:
    """Raise ``ValueError`` if ``state`` is not the :meth:`GRPO.state` of a trainer of ``model``."""
    try:
        moments, updates = state["optimizer"]["state"], state["updates"]
        random.Random().setstate(_random_state(state))
        if not isinstance(updates, int) or updates < 0:
            raise ValueError(f"updates is {shorten_repr(updates)}, no count")
        parameters = dict(enumerate(model.parameters()))
        if not moments.keys() <= parameters.keys():
            raise ValueError(f"it has the moments of {len(moments)} parameters, and the model has {len(parameters)}")
        for index, moment in moments.items():
            shapes = {"step": (), "exp_avg": parameters[index].shape, "exp_avg_sq": parameters[index].shape}
            for name, shape in shapes.items():
                if moment[name].shape != shape or not moment[name].is_floating_point():
                    raise ValueError(f"{name} of parameter {index} is not of the model's shape {[*shape]}")
    except (TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ValueError(f"it is no trainer's state ({type(error).__name__}: {error})") from error


def _random_state(state: Any) -> tuple[Any, ...]:
    version, internal, gauss = state["random"]
    if not isinstance(gauss, float | None):
        raise ValueError(f"random is {shorten_repr(state['random'])}, no state of a generator")
    return version, tuple(internal), gauss


@dataclass(frozen=True)
class _Item:
    """A trajectory with the mask of its trained tokens and their advantages, both of the length of its response."""

    trajectory: Trajectory
    mask: list[int]
    advantages: list[float]


@dataclass(frozen=True)
class _Row:
    """Trajectories that are packed after a shared prefix."""

    prefix: list[int]
    items: list[_Item]

    @property
    def branches(self) -> list[Branch]:
        start = len(self.prefix)
        return [
            (
                item.trajectory.prompt_ids[start:] + item.trajectory.response_ids,
                [0] * (len(item.trajectory.prompt_ids) - start) + item.mask,
            )
            for item in self.items
        ]

    @property
    def length(self) -> int:
        return len(self.prefix) + sum(len(item.trajectory) - len(self.prefix) for item in self.items)


def _rows(items: Sequence[_Item], branches_per_row: int) -> list[_Row]:
    """Rows of trajectories with long common prefixes; sorting puts such trajectories next to each other."""
    rows: list[_Row] = []
    for item in sorted(items, key=lambda item: item.trajectory.prompt_ids):
        prompt = item.trajectory.prompt_ids
        if rows and len(rows[-1].items) < branches_per_row:
            shared = _common_prefix(rows[-1].prefix, prompt)
            # With a prefix of less than half the prompt, which is another schema, packing saves nothing.
            if 2 * shared >= len(prompt):
                rows[-1] = _Row(rows[-1].prefix[:shared], [*rows[-1].items, item])
                continue
        rows.append(_Row(prompt, [item]))
    return rows


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of ``a`` and ``b``."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


def _forwards(rows: Sequence[_Row], tokens: int) -> Iterator[list[_Row]]:
    """Batches of rows of similar length, of at most ``tokens`` ids with padding; a longer row is a batch by itself."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: row.length):
        if batch and row.length * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch

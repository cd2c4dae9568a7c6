"""GRPO: one loss over the trained tokens of each group, AdamW.

The tokens and their advantages are those of :mod:`groundwire.train.algorithms.credit`, the terms of the loss those of
:mod:`groundwire.train.algorithms.losses`.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from groundwire.tools.files import shorten_repr
from groundwire.train.algorithms.credit import TrainingGroup, TrainingItem
from groundwire.train.algorithms.losses import (
    Loss,
    Schedule,
    clipped_policy_loss,
    kl_to_reference,
    learning_rate,
    token_weights,
)
from groundwire.train.algorithms.speed import ModelCost
from groundwire.train.algorithms.token_logprobs import Head, token_logprobs
from groundwire.train.config.run_config import RunConfig
from groundwire.train.local.lora import adapters, without_adapters
from groundwire.train.local.packing import Packed, Row, WeightedItem, forward_batches, make_rows, pack, packed_hidden
from groundwire.train.policy.attention import set_attention
from groundwire.train.policy.constraint import Constraints

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """The settings of the update, most under the names of the run's settings, which describe them."""

    learning_rate: float = 2e-4
    lr_schedule: Schedule = "constant"
    warmup_steps: int = 5
    total_steps: int = 0
    """The length of a falling schedule."""
    max_grad_norm: float = 1.0
    loss: Loss = "token-mean"
    clip_high: float = 0.3
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    max_tokens: int = 64
    minibatches: int = 2
    temperature: float = 1.0
    """The rollouts' sampling temperature, at which new log-probabilities are computed, too."""
    branches_per_row: int = 8
    """Most trajectories packed after one shared prefix: attention is quadratic in the row's length."""
    tokens_per_forward: int = 2048
    """Most tokens of a forward and backward pass, but at least one trajectory's. On a CPU, small passes are faster."""
    logits_per_chunk: int = 1 << 26
    """Most logits that exist at once; if there are more, they are computed in chunks, twice."""
    bf16: bool = False
    """Matrix products in bfloat16; weights, optimizer and log-probabilities stay in float32."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass: a third more time for a fraction of the memory."""

    @classmethod
    def from_settings(cls, config: RunConfig) -> GRPOConfig:
        """The values of a run's settings."""
        cuda = config.device.startswith("cuda")
        values = {field.name: getattr(config, field.name) for field in fields(cls) if hasattr(config, field.name)}
        values = {name: value for name, value in values.items() if value is not None}
        if cuda:
            values["branches_per_row"] = sys.maxsize  # blocks of other branches are skipped there
        values["bf16"] = cuda if config.bf16 is None else config.bf16
        values["gradient_checkpointing"] = cuda
        return cls(**{**values, "total_steps": config.steps})


class _Tokens(NamedTuple):
    """The trained tokens of a forward pass; all tensors are [M]."""

    logprobs: Tensor
    old: Tensor  # log-probabilities at sampling time
    advantages: Tensor
    weights: Tensor
    penalties: Tensor  # weights in the KL and entropy terms
    sequences: Tensor  # the number of each token's trajectory
    entropy: Tensor
    reference: Tensor | None  # log-probabilities of the reference policy


class GRPO:
    """Updates a model with AdamW; :meth:`update` is one training step.

    ``reference`` is the frozen policy of the KL term: another model, or ``model`` itself if it has adapters.
    ``constraints`` compute which tokens a constrained reply could have. Only such replies need them.
    """

    def __init__(
        self,
        model: Any,
        config: GRPOConfig,
        *,
        seed: int = 0,
        reference: Any = None,
        constraints: Constraints | None = None,
    ) -> None:
        if config.kl_coef and reference is None:
            raise ValueError(f"kl_coef is {config.kl_coef:g}: give GRPO the reference policy")
        self.model, self.config, self._reference, self._constraints = model, config, reference, constraints
        self._shares = set_attention(model) and (reference is None or set_attention(reference))
        self._heads = {policy: Head(policy) for policy in (model, reference) if policy is not None}
        self.cost = ModelCost.of(model, frozen=bool(adapters(model)))
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.learning_rate, weight_decay=0.0)
        self.on_pass: Callable[[int], None] = lambda trajectories: None
        """Is told how many trajectories each pass of an update had."""
        self.steps, self.updates = 0, 0
        """Training steps, and those that changed the model."""
        self._rate_scale = 1.0  # of a schedule that goes on where another one was
        self.skipped_in_a_row = 0
        """The last optimizer steps that were skipped because their gradient was not finite."""
        self._random = random.Random(seed)
        if config.gradient_checkpointing:
            older = model.gradient_checkpointing_enable  # its name before it was deprecated within transformers 5
            getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})

    def update(self, groups: Sequence[TrainingGroup]) -> dict[str, float]:
        """Train the model in place on the groups of a step; returns the step's metrics.

        Groups whose advantages are all 0 are left out: those with equal rewards, and those of a single rollout. With a
        KL or entropy term they have a part in this term. Without any other group the model does not change
        (``groups_used`` is 0). A minibatch whose loss or gradient is not finite is skipped (``updates_skipped``).
        """
        config = self.config
        used = [group for group in groups if group.teaches]
        with_gradient = [group.items for group in groups if group.has_gradient]
        penalized = groups if config.kl_coef or config.entropy_coef else []
        others = [group.items for group in penalized if group.items and not group.has_gradient]
        rate = self._learning_rate(self.steps)
        self.steps += 1
        metrics: dict[str, float] = {
            "groups": len(groups),
            "groups_used": len(used),
            "rollouts_trained": sum(bool(rollout.items) for group in used for rollout in group.rollouts),
        }
        if not with_gradient and not others:
            return metrics
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        self._random.shuffle(with_gradient)
        self._random.shuffle(others)
        for module in self.model.modules():
            # Replies are sampled without dropout and noise. Only where layers are recomputed does this flag say so.
            module.training = config.gradient_checkpointing and isinstance(module, GradientCheckpointingLayer)
        count = min(config.minibatches, len(with_gradient) or len(others))
        for start in range(count):
            # A minibatch has complete groups, because the advantages of a group sum to zero.
            trained = [item for items in with_gradient[start::count] for item in items]
            rest = [item for items in others[start::count] for item in items]
            self._minibatch(trained, rest, metrics, start)
        self.model.eval()
        self.updates += 1
        metrics["learning_rate"] = rate
        return metrics

    def state(self) -> dict[str, Any]:
        """The state that :meth:`load_state` continues from exactly."""
        trained = adapters(self.model)
        return {
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "random": self._random.getstate(),
            "steps": self.steps,
            "rates": (self.config.learning_rate, self._learning_rate(max(0, self.steps - 1))),
            **({"adapters": trained} if trained else {}),
        }

    def load_state(self, state: dict[str, Any]) -> str:
        """Continue from a :meth:`state` that :func:`check_state` has checked. Says if its schedule was another one."""
        own = adapters(self.model)
        for name, value in state.get("adapters", {}).items():
            own[name].copy_(value)
        groups = self.optimizer.state_dict()["param_groups"]  # their values come from the settings
        self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        self.updates, self.steps = state["updates"], state.get("steps", state["updates"])
        base, last = state.get("rates", (None, 0.0))
        now = self._learning_rate(max(0, self.steps - 1))
        self._random.setstate(_random_state(state))
        if base != self.config.learning_rate or not self.steps or not now or math.isclose(last, now):
            return ""
        self._rate_scale = last / now
        other = f"another learning_rate than {base:g} would begin the new schedule"
        return f"the learning rate goes on from {last:.2g}, where the schedule of before has left it; {other}"

    def _learning_rate(self, step: int) -> float:
        config = self.config
        shape = {"warmup_steps": config.warmup_steps, "total_steps": config.total_steps}
        rate = learning_rate(step, base=config.learning_rate * self._rate_scale, schedule=config.lr_schedule, **shape)
        return min(config.learning_rate, rate)

    def _minibatch(
        self, trained: list[TrainingItem], others: list[TrainingItem], metrics: dict[str, float], index: int
    ) -> None:
        """One optimizer step on the trajectories of some groups. ``others`` are those of groups without a gradient:
        they have a part in the KL and entropy terms, and none in the mean of the policy loss.
        """
        items = trained + others
        lengths = [sum(item.mask) for item in items]
        total = sum(lengths)
        # Weights are those of the whole minibatch, so the gradients of its passes add up to the gradient of its loss.
        weigh = partial(token_weights, loss=self.config.loss, max_tokens=self.config.max_tokens)
        weights = weigh(lengths[: len(trained)]) + [0.0] * len(others)
        weighted = [
            WeightedItem(**vars(item), weight=weight, penalty=penalty)
            for item, weight, penalty in zip(items, weights, weigh(lengths), strict=True)
        ]
        measured, ratios = self._accumulate_within_memory(weighted, total)
        for name in ("tokens_computed", "update_flops"):
            metrics[name] = metrics.get(name, 0) + measured.pop(name)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        if not math.isfinite(norm) or not math.isfinite(measured["loss"]):
            self.optimizer.zero_grad(set_to_none=False)
            self.skipped_in_a_row += 1
            metrics["updates_skipped"] = metrics.get("updates_skipped", 0) + 1
            return
        self.optimizer.step()
        self.skipped_in_a_row = 0
        if index == 0:
            # Before the first optimizer step the policy is the one that sampled, so a ratio other than 1 is a mismatch
            # between the server and the trainer.
            metrics["initial_ratio_error"] = max(abs(ratio - 1) for ratio in ratios)
            metrics["sampler_kl"], metrics["probability_difference"] = measured["kl"], measured["difference"]
        del measured["difference"]
        metrics |= {**measured, "ratio_min": min(ratios), "ratio_max": max(ratios), "grad_norm": norm}
        metrics["tokens_trained"] = metrics.get("tokens_trained", 0) + total

    def _accumulate_within_memory(
        self, items: Sequence[WeightedItem], total: int
    ) -> tuple[dict[str, float], list[float]]:
        """:meth:`_accumulate`, again with half of the tokens in a pass while the GPU's memory is too small."""
        longest = max(len(item.trajectory) for item in items)
        while True:
            tokens = self.config.tokens_per_forward
            try:
                return self._accumulate(items, total)
            except torch.OutOfMemoryError:
                if tokens <= longest:
                    raise
            # Here and not in the handler, because the error's traceback keeps the tensors.
            torch.cuda.empty_cache()
            self.config = replace(self.config, tokens_per_forward=tokens // 2)
            text = "an update of %d tokens a pass ran out of memory: going on with tokens_per_forward=%d"
            _log.warning(text, tokens, tokens // 2)

    def _accumulate(self, items: Sequence[WeightedItem], total: int) -> tuple[dict[str, float], list[float]]:
        """Add up the gradient of a minibatch of ``total`` tokens; returns its metrics and the extreme ratios."""
        config = self.config
        branches = config.branches_per_row if self._shares else 1
        rows = make_rows(items, branches=branches, tokens=config.tokens_per_forward)
        measured, ratios = defaultdict[str, float](int), list[float]()
        self.optimizer.zero_grad(set_to_none=False)
        for batch in forward_batches(rows, config.tokens_per_forward):
            tokens = self._evaluate(batch)
            loss, figures = self._loss(tokens)
            loss.backward()
            self.on_pass(sum(len(row.items) for row in batch))
            measured["tokens_computed"] += sum(row.length for row in batch)
            measured["update_flops"] += self.cost.update([span for row in batch for span in row.spans], len(tokens.old))
            ratios += [figures.pop("ratio_min"), figures.pop("ratio_max")]
            measured["loss"] += float(loss.detach())
            # A mean over the minibatch's tokens, as if one pass had computed all of them.
            for name, value in figures.items():
                measured[name] += value * len(tokens.old) / total
        return measured, ratios

    def _loss(self, tokens: _Tokens) -> tuple[Tensor, dict[str, float]]:
        """The part of the minibatch's loss that these tokens have, and metrics averaged over them."""
        config = self.config
        loss, metrics = clipped_policy_loss(
            tokens.logprobs,
            tokens.old,
            tokens.advantages,
            tokens.weights,
            sequences=tokens.sequences if config.loss == "gspo" else None,
            clip_high=config.clip_high,
        )
        if tokens.reference is not None:
            divergence = kl_to_reference(tokens.logprobs, tokens.reference)
            loss = loss + config.kl_coef * (tokens.penalties * divergence).sum()
            metrics["kl_reference"] = float(divergence.detach().mean())
        if config.entropy_coef:
            loss = loss - config.entropy_coef * (tokens.penalties * tokens.entropy).sum()
        with torch.no_grad():
            metrics["entropy"] = float(tokens.entropy.mean())
            metrics["difference"] = float((tokens.logprobs.exp() - tokens.old.exp()).abs().mean())
        return loss, metrics

    def _evaluate(self, rows: list[Row]) -> _Tokens:
        device = self.parameters[0].device
        one_row = self._shares and device.type == "cuda"
        packed = pack(rows, one_row=one_row, device=device)
        items = [item for row in rows for item in row.items]
        masks = self._masks(items, len(packed.targets)) if any(item.constrained for item in items) else None
        logprobs, entropy = self._logprobs(self.model, packed, masks)
        reference = None
        if self.config.kl_coef:
            with torch.no_grad(), without_adapters(self._reference):
                reference, _ = self._logprobs(self._reference, packed, masks)
        sampled = [
            (old, advantage, item.weight, item.penalty)
            for item in items
            for old, advantage, is_trained in zip(item.trajectory.logprobs, item.advantages, item.mask, strict=True)
            if is_trained
        ]
        old, advantages, weights, penalties = torch.tensor(sampled, device=device).unbind(1)
        lengths = torch.tensor([sum(item.mask) for item in items], device=device)
        sequences = torch.arange(len(items), device=device).repeat_interleave(lengths)
        return _Tokens(logprobs, old, advantages, weights, penalties, sequences, entropy, reference)

    def _logprobs(self, model: Any, packed: Packed, masks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The log-probabilities of the targets and the entropies, both [M]."""
        config = self.config
        with torch.autocast(packed.ids.device.type, torch.bfloat16, enabled=config.bf16):
            return token_logprobs(
                self._heads[model],
                packed_hidden(model, packed),
                packed.targets,
                temperature=config.temperature,
                masks=masks,
                logits_per_chunk=config.logits_per_chunk,
                entropy_gradient=config.entropy_coef > 0,
            )

    def _masks(self, items: Sequence[WeightedItem], targets: int) -> Tensor:
        """uint8 [M, bytes]: the tokens that the sampler gave a probability, for :func:`.unpack_masks`."""
        if self._constraints is None:
            raise ValueError("a call was sampled with a grammar: give GRPO the constraints of the model and tokenizer")
        masks = torch.full((targets, (self._heads[self.model].out_features + 7) // 8), 255, dtype=torch.uint8)
        before = 0  # an item's targets are the tokens that it trains
        for item in items:
            for start, end, grammar in item.constrained:
                place, reply = before + sum(item.mask[:start]), item.trajectory.response_ids[start:end]
                masks[place : place + len(reply)] = self._constraints.replay(grammar, reply)
            before += sum(item.mask)
        return masks


def check_state(model: torch.nn.Module, state: Any) -> None:
    """Raise ``ValueError`` if ``state`` is not the :meth:`GRPO.state` of a trainer of ``model``."""
    try:
        moments = state["optimizer"]["state"]
        random.Random().setstate(_random_state(state))
        for name, count in {"updates": state["updates"], "steps": state.get("steps", 0)}.items():
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"{name} is {shorten_repr(count)}, no count")
        math.isclose(*state.get("rates", (1.0, 1.0)))  # two numbers
        parameters = dict(enumerate(state["adapters"].values() if "adapters" in state else model.parameters()))
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

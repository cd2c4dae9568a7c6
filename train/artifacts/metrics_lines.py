"""The keys of the lines of metrics that a run writes, declared once.

The local trainer, verl's rollout service, GEPA's trainer and the evaluator write them; :class:`.run_dir.RunDir` refuses
a key that is not declared here, and checks the values of what it reads, since disks and people err.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from groundwire.tools.files import first_error
from groundwire.train.store.rows import Count, Number

Counts = dict[str, Count]


class _Part(BaseModel):
    """A part of a validation: of all its questions, or of those of one difficulty."""

    accuracy: Number | None
    ci95: Annotated[list[Number], Field(min_length=2, max_length=2)] = [0.0, 0.0]
    n: Count = 0


class _Validation(_Part):
    """What :func:`groundwire.train.evaluation.metrics.compute_accuracy` computes."""

    model_config = ConfigDict(extra="allow")
    ci95: Annotated[list[Number], Field(min_length=2, max_length=2)]
    n: Count
    total: Count
    metric_name: str = "accuracy"

    @model_validator(mode="after")
    def _check_breakdowns(self) -> _Validation:
        for name, value in (self.model_extra or {}).items():
            if name.startswith("by_"):
                _BREAKDOWN.validate_python(value, strict=True)
        return self


_BREAKDOWN = TypeAdapter(dict[str, _Part])


def add_lost_runners(lines: list[dict[str, Any]], lost: int) -> list[dict[str, Any]]:
    """``lines`` with more lost runners in the last one: those of a step that has no line, or is done again."""
    if lines and lost:
        lines[-1]["runners_lost"] = lines[-1].get("runners_lost", 0) + lost
    return lines


def _key(meaning: str, default: Any = None) -> Any:
    return Field(default=default, description=meaning)


class MetricsLine(BaseModel):
    """A line of ``metrics.jsonl``: a training step, or at step 0 the validation before it. Only ``step`` must be there.

    docs/why.md has these keys, in groups.
    """

    step: Count = Field(description="the training step; 0 is before training")
    reward_components: dict[str, Number] = _key("the mean of each component of the reward", {})
    rollouts_trained: Count = _key("rollouts of groups with a gradient", 0)
    without_calls: Count = _key("rollouts without an LLM call: they are judged and train nothing", 0)
    retried: Count = _key("rollouts that took more than one attempt", 0)
    runners_lost: Count = _key("runners in other processes that ended or fell silent", 0)
    calls: Count = _key("LLM calls that can be trained on", 0)
    groups: Count = _key("groups that were sampled", 0)
    groups_used: Count = _key("groups that have a gradient", 0)
    groups_skipped: Count = _key("groups without two rewards to compare (verl)", 0)
    groups_replaced: Count = _key("groups without a gradient that another prompt replaced (verl)", 0)
    tokens_trained: Count = _key("tokens that were trained", 0)
    entropy: Number | None = _key("mean entropy of the policy at the trained tokens, in nats")
    validation: _Validation = _key("the greedy validation at this step")
    validation_sampled: _Validation = _key("the sampled validation at this step")
    reward: Number | None = _key("mean reward of the step's rollouts that have one")
    rollouts: Count = _key("rollouts that were sampled", 0)
    failures: Counts = _key("failed rollouts by type, whether they score or are left out", {})
    dropped: Count = _key("rollouts that are left out: without a reward, and with verl also those without a row", 0)
    gradient_share: Number | None = _key("share of the groups that have a gradient because their rewards differ")
    truncated_share: Number | None = _key("share of the trained agents' replies that ended at `max_tokens`")
    unchecked_share: Number | None = _key("share of the right answers that no variant of their database could check")
    known_attacks: Count = _key("rollouts that won with a known attack on the reward (`groundwire audit --attack`)", 0)
    same_prompt: dict[str, Number] = _key(
        "pairs of replies of one group to the same prompt: how many, how many are equal, and how many would be if "
        "each were sampled",
        {},
    )
    initial_ratio_error: Number | None = _key("largest distance of a token's ratio from 1 before the first update")
    sampler_kl: Number | None = _key("KL divergence from the sampler to the trainer before the first update, per token")
    probability_difference: Number | None = _key("mean absolute difference of their token probabilities")
    kl: Number | None = _key("mean of old minus new log-probabilities at the last update")
    kl_reference: Number | None = _key("KL divergence to the model at the start of the run, with `kl_coef`")
    teacher_kl: Number | None = _key("reverse KL divergence to the `teacher`, per token")
    teacher_share: Number | None = _key("part of the trained calls that the teacher has judged")
    clip_fraction: Number | None = _key("share of tokens whose ratio was clipped at the last update")
    ratio_min: Number | None = _key("smallest probability ratio of a token at the last update")
    ratio_max: Number | None = _key("largest probability ratio of a token at the last update")
    loss: Number | None = _key("the loss of the last update")
    grad_norm: Number | None = _key("norm of the last gradient before clipping")
    learning_rate: Number | None = _key("the step's learning rate; absent without an update")
    updates_skipped: Count = _key("updates whose loss or gradient was not finite: they are not applied", 0)
    tokens_computed: Count = _key("tokens in the passes of the updates: a shared prompt counts once", 0)
    flops: dict[str, Number] = _key("the model's operations for `sampling` and `update`", {})
    speed: dict[str, Number] = _key("the step in the units of other trainers", {})
    machine: dict[str, Any] = _key("`device`, `gpus`, `training_gpus` and `cores` of the step", {})
    tokens_generated: Count = _key("tokens that were sampled", 0)
    tokens_per_s: Number = _key("sampled tokens per second of the whole step", 0.0)
    candidates: Count = _key("prompts that GEPA has tried", 0)
    seconds: dict[str, Annotated[Number, Field(ge=0)]] = _key("the step's time by phase", {})
    wall_time_s: Annotated[Number, Field(ge=0)] = _key("seconds since the start of the run", 0.0)
    verl: dict[str, Any] = _key("everything that verl logged for the step", {})


_METRICS_LINE = TypeAdapter(MetricsLine)


def check_names(line: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a line has a key that is not declared."""
    if unknown := line.keys() - MetricsLine.model_fields:
        raise ValueError(f"{', '.join(sorted(unknown))}: no key of a MetricsLine; declare it in {__name__}")


def line_error(line: Any) -> str:
    """What is wrong with a line of ``metrics.jsonl``; empty if nothing is. Keys of another version are no error."""
    return first_error(_METRICS_LINE, line)

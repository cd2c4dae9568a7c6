"""What the files of a run directory hold. Each line and row is checked when it is read, since disks and people err."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, SkipValidation, TypeAdapter, model_validator

from groundwire.tools.files import first_error

__all__ = ["ROLLOUT_COLUMNS", "metrics_line_error", "rollout_error"]

Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def _numbers(code: str, description: str) -> BeforeValidator:
    """A list of numbers that fit into an ``array`` of this type; pydantic's own check takes longer than reading."""

    def check(values: Any) -> Any:
        try:
            array(code, values)
        except (TypeError, OverflowError):
            raise ValueError(f"must be a list of {description}") from None
        return values

    return BeforeValidator(check)


TokenIds = Annotated[list[int], SkipValidation, _numbers("I", "token ids")]
LogProbs = Annotated[list[float], SkipValidation, _numbers("d", "numbers")]


class _Part(BaseModel):
    """A part of a validation: of all its questions, or of those of one difficulty."""

    accuracy: Number | None
    ci95: Annotated[list[Number], Field(min_length=2, max_length=2)] = [0.0, 0.0]
    n: Count = 0


class _Validation(_Part):
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


class _NoValidation(BaseModel):
    model_config = ConfigDict(extra="forbid")


_BREAKDOWN = TypeAdapter(dict[str, _Part])


class _MetricsLine(BaseModel):
    """A line of ``metrics.jsonl``; a line of another trainer or version may lack all but the step."""

    step: Count
    reward: Number | None = None
    reward_components: dict[str, Number] = {}
    rollouts: Count = 0
    failures: dict[str, Count] = {}
    without_calls: Count = 0
    groups: Count = 0
    groups_used: Count = 0
    gradient_share: Number | None = None
    truncated_share: Number | None = None
    same_prompt: dict[str, Number] = {}
    unchecked_share: Number | None = None
    entropy: Number | None = None
    sampler_kl: Number | None = None
    probability_difference: Number | None = None
    kl: Number | None = None
    clip_fraction: Number | None = None
    grad_norm: Number | None = None
    tokens_generated: Count = 0
    tokens_trained: Count = 0
    seconds: dict[str, Annotated[Number, Field(ge=0)]] = {}
    wall_time_s: Annotated[Number, Field(ge=0)] = 0.0
    validation: _Validation | _NoValidation = _NoValidation()
    validation_sampled: _Validation | _NoValidation = _NoValidation()


class _AgentStep(BaseModel):
    agent: str
    kind: str
    input: str
    output: str
    ok: bool


class _Call(BaseModel):
    agent: str | None
    prompt_ids: TokenIds
    response_ids: TokenIds
    logprobs: LogProbs

    @model_validator(mode="after")
    def _check_lengths(self) -> _Call:
        if len(self.logprobs) != len(self.response_ids):
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.response_ids)} response_ids")
        return self


class _CallCredit(BaseModel):
    returns: Number
    advantage: Number
    weight: Number


class _UntrainableCall(BaseModel):
    untrainable_reason: str
    prompt_tokens: Count
    response_tokens: Count


class _Rollout(BaseModel):
    """A row of ``rollouts.parquet``. All fields may be left out, since a reader may need a few columns."""

    step: Count = 0
    mode: Literal["train", "val"] = "train"
    temperature: Annotated[Number, Field(ge=0)] = 0.0
    rollout_id: str = ""
    task_id: str = ""
    group: str = ""
    status: str = ""
    message: str | None = ""
    reward: Number | None = None
    reward_components: Json[dict[str, Number]] = {}
    attempts: Count = 0
    seconds: Number = 0.0
    task: Json[dict[str, Any]] = {}
    answer: str | None = ""
    judged_field: str | None = ""
    input: str | None = ""
    agent_steps: Json[list[_AgentStep]] = []
    calls: list[_Call] | None = []
    call_rewards: Json[list[Number | None]] | None = []
    credits: Json[list[_CallCredit | None]] | None = []
    untrainable: Json[list[_UntrainableCall]] | None = []
    turn_scores: Json[list[Number]] | None = []


ROLLOUT_COLUMNS = tuple(_Rollout.model_fields)
_OPTIONAL = ("call_rewards", "credits", "untrainable", "turn_scores", "judged_field", "input")
"""Columns that a file may lack."""

_METRICS_LINE, _ROLLOUTS = TypeAdapter(_MetricsLine), TypeAdapter(list[_Rollout])


def metrics_line_error(line: Any) -> str:
    """What is wrong with a line of ``metrics.jsonl``, or an empty text."""
    return first_error(_METRICS_LINE, line)


def rollout_error(rows: Iterable[Mapping[str, Any]]) -> str:
    """What is wrong with rows of rollouts, or an empty text."""
    return first_error(_ROLLOUTS, list(rows))


def missing_column(present: Collection[str], wanted: Collection[str]) -> str:
    """The message about a wanted column that a file lacks, or an empty text."""
    missing = [name for name in wanted if name not in present and name not in _OPTIONAL]
    return f"it has no column {missing[0]!r}" if missing else ""

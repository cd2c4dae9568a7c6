"""The columns of a run's files of rollouts. Each row is checked when it is read, since disks and people err."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, Json, SkipValidation, TypeAdapter, model_validator

from groundwire.tools.files import first_error
from groundwire.train.artifacts.metrics_lines import Count, Number

__all__ = ["ROLLOUT_COLUMNS", "missing_column", "rollout_error"]


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

_ROLLOUTS = TypeAdapter(list[_Rollout])


def rollout_error(rows: Iterable[Mapping[str, Any]]) -> str:
    """What is wrong with rows of rollouts, or an empty text."""
    return first_error(_ROLLOUTS, list(rows))


def missing_column(present: Collection[str], wanted: Collection[str]) -> str:
    """The message about a wanted column that a file lacks, or an empty text."""
    missing = [name for name in wanted if name not in present and name not in _OPTIONAL]
    return f"it has no column {missing[0]!r}" if missing else ""

"""Rollouts as rows of ``rollouts.parquet``, and back. Each row is checked when it is read, since disks and people err.

A row has the fields that are read after a run, under names that notebooks can use, and JSON text where the values
differ from task to task. Messages and tools of calls are not kept: with the token ids they would make a run's directory
several times as large. A call has what is needed to answer it again (:mod:`groundwire.adapters.tracing.replay`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Json, SkipValidation, TypeAdapter
from typing_extensions import Required, TypedDict

from groundwire.adapters.tracing import CallCredit, LLMCall
from groundwire.adapters.tracing.calls import to_json
from groundwire.tools.files import first_error
from groundwire.tools.numbers import MAX_METRIC, MAX_REWARD
from groundwire.tools.types import AgentStep
from groundwire.train.store.rollout import Attempt, Outcome, Rollout

Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
Metric = Annotated[float, Field(ge=-MAX_METRIC, le=MAX_METRIC)]


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


class _Call(TypedDict, total=False):
    """An LLM call: fields of :class:`LLMCall`, those of its credit, and why it cannot be trained on, if so."""

    agent: Required[str | None]
    prompt_ids: Required[TokenIds]
    response_ids: Required[TokenIds]
    logprobs: Required[LogProbs]
    sequence: Count | None
    choice: Count | None
    finish_reason: str | None
    grammar: str | None
    weights_version: int | None
    first_weights_version: int | None
    status: int | None
    error: str | None
    prompt_tokens: Count | None
    response_tokens: Count | None
    reward: Number | None
    returns: Number | None
    advantage: Number | None
    weight: Number | None
    reply_key: str | None
    prompt_key: str | None
    call_id: str | None
    started: Number | None
    ended: Number | None
    cached_tokens: Count | None
    reply_body: str | None
    untrainable_reason: str | None


def _check_lengths(call: Any) -> Any:
    if len(call["logprobs"]) != len(call["response_ids"]) and not call.get("untrainable_reason"):
        raise ValueError(f"{len(call['logprobs'])} logprobs for {len(call['response_ids'])} response_ids")
    return call


class _Row(TypedDict, total=False):
    """A row of ``rollouts.parquet``. All fields may be left out, since a reader may need a few columns."""

    step: Count
    mode: Literal["train", "val"]
    temperature: Annotated[Number, Field(ge=0)]
    rollout_id: str
    task_id: str
    group: str
    status: str
    message: str | None
    reward: Reward | None
    reward_components: Json[dict[str, Metric]]
    attempts: Count
    seconds: Number
    task: Json[dict[str, Any]]
    answer: str | None
    judged_field: str | None
    input: str | None
    agent_steps: Json[list[AgentStep]]
    turn_scores: Json[list[Reward]] | None
    calls: list[Annotated[_Call, AfterValidator(_check_lengths)]] | None


COLUMNS = tuple(_Row.__annotations__)
_OPTIONAL = ("turn_scores", "judged_field", "input")
"""Columns that a file may lack."""
_CREDIT = tuple(CallCredit.__dataclass_fields__)
_OF_CALL = tuple(name for name in _Call.__annotations__ if name not in (*_CREDIT, "untrainable_reason"))
_ROWS = TypeAdapter(list[_Row])


def row_error(rows: Iterable[Mapping[str, Any]]) -> str:
    """What is wrong with rows of rollouts, or an empty text."""
    return first_error(_ROWS, list(rows))


def missing_column(present: Collection[str], wanted: Collection[str]) -> str:
    """The message about a wanted column that a file lacks, or an empty text."""
    missing = [name for name in wanted if name not in present and name not in _OPTIONAL]
    return f"it has no column {missing[0]!r}" if missing else ""


def to_row(rollout: Rollout) -> dict[str, Any]:
    """The row of a rollout that has ended."""
    outcome = rollout.outcome
    return {
        "step": rollout.step,
        "mode": rollout.mode,
        "temperature": float(rollout.sampling.get("temperature", 1.0)),
        "rollout_id": rollout.rollout_id,
        "task_id": str(rollout.task["id"]),
        "group": rollout.group,
        "status": outcome.status,
        "message": outcome.message,
        "reward": outcome.reward,
        "reward_components": to_json(dict(outcome.reward_components)),
        "attempts": rollout.attempt.number if rollout.attempt else 0,
        "seconds": round(rollout.seconds, 4),
        "task": json.dumps(dict(rollout.task), ensure_ascii=False, default=str),
        "answer": outcome.answer,
        "judged_field": outcome.judged_field,
        "input": outcome.input,
        "agent_steps": json.dumps(list(outcome.steps), ensure_ascii=False),
        "turn_scores": json.dumps(rollout.turn_scores()),
        "calls": [
            {name: getattr(call, name) for name in (*_OF_CALL, "untrainable_reason")}
            | {name: getattr(call.credit, name, None) for name in _CREDIT}
            for call in rollout.calls
        ],
    }


def from_row(row: Mapping[str, Any]) -> Rollout:
    """The rollout of a row, which may lack columns."""
    status, rollout_id = row.get("status", "succeeded"), row.get("rollout_id", "")
    attempts = row.get("attempts", 0)
    return Rollout(
        rollout_id=rollout_id,
        task={"id": row.get("task_id", ""), **json.loads(row.get("task") or "{}")},
        group=row.get("group", ""),
        mode=row.get("mode", "train"),
        step=row.get("step", 0),
        sampling={"temperature": row.get("temperature", 1.0)},
        status="succeeded" if status == "succeeded" else "failed",
        ended=row.get("seconds", 0.0),
        attempts=[Attempt(number=attempts, started=0.0)] if attempts else [],
        outcome=Outcome(
            answer=row.get("answer") or "",
            steps=json.loads(row.get("agent_steps") or "[]"),
            input=row.get("input") or "",
            judged_field=row.get("judged_field") or "",
            reward=row.get("reward"),
            reward_components=json.loads(row.get("reward_components") or "{}"),
            query_scores=json.loads(row.get("turn_scores") or "[]")[:-1],
            failure="" if status == "succeeded" else status,
            message=row.get("message") or "",
        ),
        calls=[_call(entry, place, rollout_id) for place, entry in enumerate(row.get("calls") or ())],
    )


def _call(entry: Mapping[str, Any], place: int, rollout_id: str) -> LLMCall:
    fields = {name: entry[name] for name in _OF_CALL if entry.get(name) is not None}
    trained: dict[str, Any] = {name: entry.get(name) for name in _CREDIT}
    credit = None if None in trained.values() else CallCredit(**trained)
    return LLMCall(rollout_id=rollout_id, attempt_id="", credit=credit, **{"sequence": place, **fields})

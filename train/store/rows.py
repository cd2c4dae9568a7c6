"""Rollouts as rows of ``rollouts.parquet``, and back.

A row has the fields that are read after a run, under names that notebooks can use, and JSON text where the values
differ from task to task. Messages and tools of calls are not kept: with the token ids they would make a run's directory
several times as large.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from groundwire.adapters.tracing import CallCredit, LLMCall
from groundwire.train.store.rollout import Attempt, Outcome, Rollout

__all__ = ["from_row", "to_row"]

_CALL_FIELDS = ("agent", "prompt_ids", "response_ids", "logprobs", "finish_reason", "weights_version")
_FAILED = re.compile(r"failed with status (\d+): (.*)", re.DOTALL)


def to_row(rollout: Rollout) -> dict[str, Any]:
    """The row of a rollout that has ended."""
    outcome, calls = rollout.outcome, rollout.trainable_calls
    credits = [asdict(call.credit) if call.credit else None for call in calls]
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
        "reward_components": json.dumps(dict(outcome.reward_components)),
        "attempts": rollout.attempt.number if rollout.attempt else 0,
        "seconds": round(rollout.seconds, 4),
        "task": json.dumps(dict(rollout.task), ensure_ascii=False, default=str),
        "answer": outcome.answer,
        "judged_field": outcome.judged_field,
        "input": outcome.input,
        "agent_steps": json.dumps(list(outcome.steps), ensure_ascii=False),
        "turn_scores": json.dumps(rollout.turn_scores()),
        "calls": [{name: getattr(call, name) for name in _CALL_FIELDS} for call in calls],
        "call_rewards": json.dumps([call.reward for call in calls]),
        "credits": json.dumps(credits if any(credits) else []),
        "untrainable": json.dumps(
            [
                {
                    "agent": call.agent,
                    "untrainable_reason": call.untrainable_reason,
                    "prompt_tokens": len(call.prompt_ids) or call.prompt_tokens,
                    "response_tokens": len(call.response_ids) or call.response_tokens,
                }
                for call in rollout.untrainable_calls
            ],
            ensure_ascii=False,
        ),
    }


def from_row(row: Mapping[str, Any]) -> Rollout:
    """The rollout of a row, which may lack columns."""
    status = row.get("status", "succeeded")
    outcome = Outcome(
        answer=row.get("answer") or "",
        steps=json.loads(row.get("agent_steps") or "[]"),
        input=row.get("input") or "",
        judged_field=row.get("judged_field") or "",
        reward=row.get("reward"),
        reward_components=json.loads(row.get("reward_components") or "{}"),
        query_scores=json.loads(row.get("turn_scores") or "[]")[:-1],
        failure="" if status == "succeeded" else status,
        message=row.get("message") or "",
    )
    attempts = row.get("attempts", 0)
    return Rollout(
        rollout_id=row.get("rollout_id", ""),
        task=json.loads(row["task"]) if "task" in row else {"id": row.get("task_id", "")},
        group=row.get("group", ""),
        mode=row.get("mode", "train"),
        step=row.get("step", 0),
        sampling={"temperature": row.get("temperature", 1.0)},
        status="succeeded" if status == "succeeded" else "failed",
        ended=row.get("seconds", 0.0),
        attempts=[Attempt(number=attempts, started=0.0)] if attempts else [],
        outcome=outcome,
        calls=[*_trainable(row), *_untrainable(row)],
    )


def _trainable(row: Mapping[str, Any]) -> Iterator[LLMCall]:
    rewards = json.loads(row.get("call_rewards") or "[]")
    credits = json.loads(row.get("credits") or "[]")
    for number, (entry, reward, credit) in enumerate(zip_longest(row.get("calls") or (), rewards, credits)):
        fields = {name: value for name, value in entry.items() if value is not None}
        given = CallCredit(**credit) if credit else None
        yield LLMCall(rollout_id="", attempt_id="", sequence=number, reward=reward, credit=given, **fields)


def _untrainable(row: Mapping[str, Any]) -> Iterator[LLMCall]:
    for entry in json.loads(row.get("untrainable") or "[]"):
        failed = _FAILED.fullmatch(entry["untrainable_reason"])
        status, error = (int(failed[1]), failed[2]) if failed else (200, entry["untrainable_reason"])
        yield LLMCall(
            rollout_id="",
            attempt_id="",
            sequence=-1,
            agent=entry.get("agent") or "",
            status=status,
            error=error,
            prompt_tokens=entry.get("prompt_tokens") or 0,
            response_tokens=entry.get("response_tokens") or 0,
        )

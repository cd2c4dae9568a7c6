"""A rollout as it is kept in a run's folder."""

from __future__ import annotations

import json
from typing import Any

from groundwire.train.rollouts.collector import RolloutResult

__all__ = ["row"]


def row(step: int, outcome: RolloutResult) -> dict[str, Any]:
    """A rollout as a row of ``rollouts.parquet``."""
    task = outcome.job.task
    return {
        "step": step,
        "mode": outcome.job.mode,
        "temperature": float(outcome.job.sampling.get("temperature", 1.0)),
        "rollout_id": outcome.rollout_id,
        "task_id": str(task["id"]),
        "group": outcome.job.group,
        "status": outcome.status,
        "message": outcome.message,
        "reward": outcome.reward,
        "reward_components": json.dumps(outcome.reward_components),
        "attempts": outcome.attempts,
        "seconds": round(outcome.seconds, 4),
        "task": json.dumps(dict(task), ensure_ascii=False, default=str),
        "answer": outcome.answer,
        "agent_steps": json.dumps(list(outcome.steps), ensure_ascii=False),
        "calls": [
            {
                "agent": call.agent,
                "prompt_ids": call.prompt_ids,
                "response_ids": call.response_ids,
                "logprobs": call.logprobs,
                "finish_reason": call.finish_reason,
                "weights_version": call.weights_version,
            }
            for call in outcome.calls
        ],
        "call_rewards": json.dumps([call.reward for call in outcome.calls]),
        "untrainable": json.dumps(
            [
                {
                    "agent": call.agent,
                    "problem": call.untrainable_reason,
                    "prompt_tokens": len(call.prompt_ids) or call.prompt_tokens,
                    "response_tokens": len(call.response_ids) or call.response_tokens,
                }
                for call in outcome.untrainable
            ],
            ensure_ascii=False,
        ),
    }

"""Explains why a rollout taught the policy nothing, from its row in ``rollouts.parquet``.

A rollout is trained on if it has a reward, if at least one call of a trained agent has token ids, and if its reward
differs from its group's mean. Each rule below tests one condition, in this order; the first that fails is the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from groundwire.train.evaluation.credits import group_key, row_credits, trained_calls

__all__ = ["KINDS", "NO_CALL", "Reason", "diagnose", "no_triplets", "scored"]

Row = Mapping[str, Any]

KINDS = {
    "trained": "trained",
    "validation": "validation: never trained on",
    "no_calls": "judged without an LLM call, which trains nothing",
    "no_token_ids": "no token ids from the endpoint",
    "calls_failed": "every LLM call failed",
    "bad_calls": "calls that cannot be trained on",
    "agent_match": "agent_match matched none of its agents",
    "prompt_too_long": "prompt over the limit",
    "no_result": "no result from the runner",
    "not_stored": "its LLM calls are not in the store",
    "timeout": "not finished in time",
    "reward": "the reward could not be computed",
    "unreadable_answer": "the reward cannot read the answer",
    "judge_abstained": "the judge gave no verdict",
    "refused": "its runner does not allow the request",
    "endpoint": "the endpoint failed",
    "agent": "the agent's own code failed",
    "malformed_output": "the agent cannot use a reply",
    "turn_limit": "the agent reached its limit of turns",
    "setup": "the agent failed before its first LLM call, or as the run is set up",
    "tool": "a tool failed, or what it runs on",
    "failed": "another failure",
    "equal_rewards": "every reward of its group was equal",
    "only_reward": "no other rollout of its group has a reward",
    "mean_reward": "its reward is its group's mean",
}
"""The kinds of :class:`Reason` with their descriptions."""

_ROUNDING = 1e-6  # of advantages
NO_CALL = (
    "no LLM call reached the proxy: the agent answered without one, or called another address than the base URL of its "
    "endpoint"
)
_NO_IDS = "the server sent no token ids"
# The messages of groundwire's server, of vLLM (two), and of OpenAI.
_TOO_LONG = (
    re.compile(r"prompt has (?P<prompt>\d+) tokens, and the model's context of (?P<limit>\d+)"),
    re.compile(r"maximum context length is (?P<limit>\d+) tokens.*?(?P<prompt>\d+) (?:input )?tokens", re.DOTALL),
    re.compile(r"prompt \(length (?P<prompt>\d+)\).*?maximum model length of (?P<limit>\d+)", re.DOTALL),
)


@dataclass(frozen=True)
class Reason:
    """Why a rollout taught nothing, or that it was trained on: a key of :data:`KINDS`, and an explanation."""

    kind: str
    text: str


def diagnose(rows: Sequence[Row], settings: Mapping[str, Any] = MappingProxyType({})) -> list[Reason]:
    """The reason of each row. ``rows`` are whole steps, since each rollout is compared with its group; ``settings`` are
    the run's.
    """
    match = settings.get("agent_match")
    groups: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row["reward"] is not None:
            groups[group_key(row)].append(row)
    return [_reason(row, groups[group_key(row)], match) for row in rows]


def _reason(row: Row, group: Sequence[Row], agent_match: str | None) -> Reason:
    """``group`` are the rows of its group with a reward."""
    failure = _failure(row)
    if row["mode"] == "val":
        validated = Reason("validation", "a validation rollout: it is judged, and never trained on")
        return failure or no_triplets(row, None) or validated
    if failure is not None and row["reward"] is not None:
        reason = _reason({**row, "status": "succeeded"}, group, agent_match)
        return Reason(reason.kind, f"{failure.text}; {reason.text}")
    return (
        failure
        or no_triplets(row, agent_match)
        or _no_gradient(row, group, agent_match)
        or Reason("trained", _trained_text(row, [each["reward"] for each in group], agent_match))
    )


def _failure(row: Row) -> Reason | None:
    """The failure of a rollout, and what it scores; None if it succeeded."""
    if row["status"] == "succeeded":
        return None
    reason = _failure_reason(row)
    return Reason(reason.kind, f"{reason.text} ({scored(row)})")


def _failure_reason(row: Row) -> Reason:
    status, message = row["status"], row["message"] or "no message"
    if status == "prompt_too_long":
        return Reason("prompt_too_long", _too_long_text(message))
    if status == "no_result":
        return Reason("no_result", f"the store has neither its reward nor its failure: {message}")
    if status == "endpoint" and (problems := _untrainable_reasons(row)):
        return Reason("endpoint", f"{KINDS['endpoint']}: {message}; its last call {problems[-1]}")
    kind = status if status in KINDS else "failed"
    return Reason(kind, f"{KINDS[kind]} after {row['attempts']} attempt(s): {message}")


def scored(row: Row) -> str:
    """What a failed rollout counts as."""
    return "left out" if row["reward"] is None else f"scored {row['reward']:g}"


def _too_long_text(message: str) -> str:
    for pattern in _TOO_LONG:
        if match := pattern.search(message):
            over = int(match["prompt"]) - int(match["limit"])
            by = f"over the limit by {over} tokens" if over > 0 else "as long as the limit, without space for a reply"
            return f"prompt {by} ({match['prompt']} of {match['limit']}): shorten the schema, or serve a longer context"
    return f"prompt over the limit: {message}"


def no_triplets(row: Row, agent_match: str | None) -> Reason | None:
    """Why a rollout gives no triplet; None if it gives one."""
    if trained_calls(row, agent_match):
        return None
    if row["calls"]:
        names = ", ".join(sorted({call["agent"] or "(no name)" for call in row["calls"]}))
        return Reason("agent_match", f"agent_match {agent_match!r} matched none of its agents; names seen: {names}")
    return _failure(row) or _no_trainable_call(_untrainable_reasons(row), row["message"])


def _no_trainable_call(problems: Sequence[str], message: str | None) -> Reason:
    """The reason if no call can be trained on; ``problems`` has one entry for each call."""
    if not problems:
        return Reason("no_calls", message or NO_CALL)
    if all(problem == _NO_IDS for problem in problems):
        return Reason(
            "no_token_ids",
            f"the endpoint sent no token ids in any of {len(problems)} call(s): training needs a server with "
            "return_token_ids, which vLLM has since 0.10.2",
        )
    if all(problem.startswith("failed") for problem in problems):
        return Reason("calls_failed", f"each of its {len(problems)} call(s) failed; the last {problems[-1]}")
    return Reason("bad_calls", f"none of its {len(problems)} call(s) can be trained on; the last: {problems[-1]}")


def _no_gradient(row: Row, group: Sequence[Row], agent_match: str | None) -> Reason | None:
    if (recorded := row_credits(row)) and not any(recorded):
        return Reason("bad_calls", f"none of its {len(recorded)} call(s) was trained: verl trains no constrained reply")
    compared = [each for each in group if trained_calls(each, agent_match)]
    if len(compared) < 2:
        return Reason("only_reward", "no other rollout of its group has a reward to compare it with")
    rewards = [each["reward"] for each in compared]
    mean = sum(rewards) / len(rewards)
    if not any(_has_gradient(each, mean) for each in compared):
        equal = min(rewards) == max(rewards)
        text = f"all {len(rewards)} rewards of its group were {row['reward']:g}"
        return Reason("equal_rewards", text if equal else "the returns of comparable calls of its group were equal")
    if not _has_gradient(row, mean):
        at_mean = math.isclose(row["reward"], mean, abs_tol=1e-9)
        text = f"its reward {row['reward']:g} is its group's mean"
        return Reason("mean_reward", text if at_mean else "the return of each call is the mean of comparable calls")
    return None


def _has_gradient(row: Row, mean: float) -> bool:
    """Whether a rollout was trained; by its reward if verl computed the advantages, whose estimator compares them."""
    if credits := row_credits(row):
        return any(abs(credit.weight * credit.advantage) > _ROUNDING for credit in credits if credit)
    return not math.isclose(row["reward"], mean, abs_tol=1e-9)


def _trained_text(row: Row, group: Sequence[float], agent_match: str | None) -> str:
    calls = trained_calls(row, agent_match)
    tokens = sum(len(call["response_ids"]) for call in calls)
    other_calls = len(row["calls"]) - len(calls)
    others = f", {other_calls} {'of other agents' if agent_match else 'constrained'} left out" if other_calls else ""
    mean = sum(group) / max(1, len(group))
    return (
        f"trained on {tokens} tokens of {len(calls)} call(s){others}: reward {row['reward']:g}, mean of its group "
        f"{mean:.3g}"
    )


def _untrainable_reasons(row: Row) -> list[str]:
    """Why each call without token ids cannot be trained on."""
    return [call["untrainable_reason"] for call in json.loads(row.get("untrainable") or "[]")]

"""Why a rollout taught the policy nothing, as rules over what a run keeps of it.

A rollout teaches where it has a reward, where at least one call of a trained agent came with its token ids, and where
its reward differs from its group's mean. Each rule below is one way to miss that; the first that applies is the reason,
in the order in which things happen to a rollout.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.train.evaluation.metrics import is_judged

__all__ = [
    "GAVE_NOTHING",
    "KINDS",
    "Reason",
    "diagnose",
    "group_key",
    "is_transient",
    "nothing_judged",
    "nothing_to_train",
]

KINDS = {
    "trained": "trained",
    "validation": "validation: never trained on",
    "no_calls": "no LLM call reached the proxy",
    "no_token_ids": "no token ids from the endpoint",
    "calls_failed": "every LLM call failed",
    "bad_calls": "calls that cannot be trained on",
    "agent_match": "agent_match matched none of its agents",
    "prompt_too_long": "prompt over the limit",
    "no_result": "no result from the runner",
    "timeout": "not finished in time",
    "reward": "the reward could not be computed",
    "judge_abstained": "the judge gave no verdict",
    "endpoint": "the endpoint failed",
    "agent": "the agent's own code failed",
    "tool": "a tool broke",
    "failed": "failed otherwise",
    "equal_rewards": "every reward of its group was equal",
    "alone": "no other rollout of its group has a reward",
    "average": "its reward is its group's mean",
}
"""Every kind of :class:`Reason`, as a table names it."""

GAVE_NOTHING = ("no_calls", "no_token_ids", "calls_failed", "bad_calls", "agent_match")
"""Kinds of rollouts with a reward and without a triplet."""

_PASSING = ("timeout", "no_result", "endpoint")
_MEND = {
    "reward": "mend the reward (python -m train.audit tries it without a model)",
    "judge_abstained": "see to the judge's endpoint, key and caps (docs/rewards.md)",
}

_SAID = 300  # characters of a failure's message

_NO_IDS = "the server sent no token ids"
# groundwire's server; vLLM's two wordings; OpenAI's.
_TOO_LONG = (
    re.compile(r"prompt has (?P<prompt>\d+) tokens, and the model's context of (?P<limit>\d+)"),
    re.compile(r"maximum context length is (?P<limit>\d+) tokens.*?(?P<prompt>\d+) (?:input )?tokens", re.DOTALL),
    re.compile(r"prompt \(length (?P<prompt>\d+)\).*?maximum model length of (?P<limit>\d+)", re.DOTALL),
)


@dataclass(frozen=True)
class Reason:
    """Why a rollout taught nothing, or that it did: ``kind`` is one of :data:`KINDS`, ``text`` one sentence."""

    kind: str
    text: str


def diagnose(
    rows: Sequence[Mapping[str, Any]], *, agent_match: str | None = None, trainer: str = "local"
) -> list[Reason]:
    """The reason of each row of a run's rollouts, in order.

    A rollout's group is looked for among ``rows``, so they are whole steps. ``trainer`` matters where a group has one
    reward: verl replaces the group, the local trainer compares it with 0.
    """
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["reward"] is not None:
            groups.setdefault(group_key(row), []).append(row["reward"])
    return [_reason(row, groups.get(group_key(row), []), agent_match, trainer) for row in rows]


def group_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The rollouts with one key are compared with each other."""
    return row["step"], row["mode"], row["temperature"], row["group"]


def nothing_to_train(rows: Sequence[Mapping[str, Any]], *, agent_match: str | None = None) -> str:
    """Why none of ``rows`` (of whole steps, or a validation) gives a triplet; empty where at least one does."""
    if any(_trained_calls(row, agent_match) for row in rows):
        return ""
    reasons = [_without_triplets(row, agent_match) for row in rows]
    counted = Counter(reason.kind for reason in reasons if reason)
    if not counted:
        return ""
    said = {reason.kind: reason.text for reason in reversed(reasons) if reason}
    parts = [f"{count} of {len(rows)}: {said[kind]}" for kind, count in counted.most_common()]
    return f"no rollout gave anything to train on. {'; '.join(parts)}"


def nothing_judged(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why none of ``rows`` (of a step, or a validation) could be judged, and what to do; empty where one could."""
    if not rows or any(map(is_judged, rows)):
        return ""
    first, kinds = rows[0], {row["status"] for row in rows}
    what = "validation rollouts" if first["mode"] == "val" else "rollouts"
    said = " ".join((first["message"] or "no more is known").split())[:_SAID]
    mend = [text for kind, text in _MEND.items() if kind in kinds]
    return "; ".join(
        [f"none of {len(rows)} {what} could be judged", f"the first failed of {first['status']}: {said}", *mend]
    )


def is_transient(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a failure is among ``rows`` that may be gone in the next step, such as a machine that was asleep."""
    return any(row["status"] in _PASSING for row in rows)


def _reason(row: Mapping[str, Any], group: Sequence[float], agent_match: str | None, trainer: str) -> Reason:
    if row["mode"] == "val":
        validated = Reason("validation", "a validation rollout: it is judged, and never trained on")
        return _failure(row) or _without_triplets(row, None) or validated
    return (
        _failure(row)
        or _without_triplets(row, agent_match)
        or _without_gradient(row["reward"], group, trainer)
        or Reason("trained", _trained(row, group, agent_match))
    )


def _failure(row: Mapping[str, Any]) -> Reason | None:
    """A rollout without a reward, by the type of its failure."""
    if row["reward"] is not None:
        return None
    status, message = row["status"], row["message"] or "no more is known"
    if status == "prompt_too_long":
        return Reason("prompt_too_long", _prompt_too_long(message))
    if status == "no_result":
        return Reason("no_result", f"the store has neither a reward nor a failure of it: {message}")
    if status == "endpoint" and (failed := [call["problem"] for call in _untrainable(row)]):
        return Reason("endpoint", f"{KINDS['endpoint']}: {message}; its last call {failed[-1]}")
    kind = status if status in KINDS else "failed"
    return Reason(kind, f"{KINDS[kind]} after {row['attempts']} attempt(s): {message}")


def _prompt_too_long(message: str) -> str:
    for pattern in _TOO_LONG:
        if match := pattern.search(message):
            over = int(match["prompt"]) - int(match["limit"])
            by = f"over the limit by {over} tokens" if over > 0 else "as long as the limit, with no room for a reply"
            return f"prompt {by} ({match['prompt']} of {match['limit']}): shorten the schema, or serve a longer context"
    return f"prompt over the limit: {message}"


def _without_triplets(row: Mapping[str, Any], agent_match: str | None) -> Reason | None:
    if _trained_calls(row, agent_match):
        return None
    if row["calls"]:
        seen = ", ".join(sorted({call["agent"] or "(no name)" for call in row["calls"]}))
        return Reason("agent_match", f"agent_match {agent_match!r} matched none of its agents; names seen: {seen}")
    return _failure(row) or _without_ids([call["problem"] for call in _untrainable(row)])


def _without_ids(problems: Sequence[str]) -> Reason:
    """A rollout none of whose calls can be trained on; ``problems`` has one for each call."""
    if not problems:
        return Reason(
            "no_calls",
            "no LLM call reached the proxy: the agent answered without one, or called another address than the base "
            "URL of its endpoint",
        )
    last = problems[-1]
    if all(problem == _NO_IDS for problem in problems):
        return Reason(
            "no_token_ids",
            f"the endpoint sent no token ids in any of {len(problems)} call(s): training needs a server with "
            "return_token_ids, which vLLM has from 0.10.2 on",
        )
    if all(problem.startswith("failed") for problem in problems):
        return Reason("calls_failed", f"each of its {len(problems)} call(s) failed; the last {last}")
    return Reason("bad_calls", f"none of its {len(problems)} call(s) can be trained on; the last: {last}")


def _without_gradient(reward: float, group: Sequence[float], trainer: str) -> Reason | None:
    if len(group) == 1 and (trainer == "verl" or reward == 0.0):
        return Reason("alone", "no other rollout of its group has a reward: there is nothing to compare it with")
    if len(group) > 1 and min(group) == max(group):
        return Reason("equal_rewards", f"all {len(group)} rewards of its group were {reward:g}: no one did better")
    if len(group) > 1 and math.isclose(reward, sum(group) / len(group), abs_tol=1e-9):
        return Reason("average", f"its reward {reward:g} is its group's mean: it did neither better nor worse")
    return None


def _trained(row: Mapping[str, Any], group: Sequence[float], agent_match: str | None) -> str:
    calls = list(_trained_calls(row, agent_match))
    left_out = len(row["calls"]) - len(calls)
    tokens = sum(len(call["response_ids"]) for call in calls)
    apart = f", {left_out} of other agents left out" if left_out else ""
    mean = sum(group) / max(1, len(group))
    return (
        f"trained on {tokens} tokens of {len(calls)} call(s){apart}: reward {row['reward']:g} where its group's "
        f"mean is {mean:.3g}"
    )


def _trained_calls(row: Mapping[str, Any], agent_match: str | None) -> list[Mapping[str, Any]]:
    return [call for call in row["calls"] or () if re.search(agent_match or "", call["agent"] or "")]


def _untrainable(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is kept of calls without ids; runs from before this was kept have none."""
    yield from json.loads(row.get("untrainable") or "[]")

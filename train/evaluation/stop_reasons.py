"""Why a run ends: its rollouts failed, or gave nothing to train on, in a way that will last; and what to do then."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.train.evaluation.diagnosis import NO_CALL, no_triplets
from groundwire.train.evaluation.metrics import is_judged, made_no_call

__all__ = [
    "CACHES",
    "MAX_MESSAGE",
    "FailedSteps",
    "all_failed",
    "failed_by_policy",
    "first_failure",
    "is_transient",
    "lasting_failure",
    "mostly_unscored",
    "never_called",
    "nothing_judged",
    "nothing_to_train",
    "rollouts_text",
]

Row = Mapping[str, Any]

MAX_MESSAGE = 300
"""Characters of a failure's message in an error."""
_TRANSIENT = ("tool", "timeout", "no_result", "not_stored", "endpoint")
_ADVICE = {
    "agent": "repair the agent (groundwire run --dev shows its calls)",
    "setup": "repair the agent (groundwire run --dev shows its calls)",
    "reward": "fix the reward (groundwire audit tries it without a model)",
    "unreadable_answer": "return a reward for such answers, or raise RewardError where none can be computed",
    "judge_abstained": "check the judge's endpoint, key and caps (docs/rewards.md)",
}
_GIVEN_TO_REWARD = ("succeeded", "reward", "unreadable_answer", "judge_abstained")
"""The statuses of rollouts whose answer the reward got."""
_MAX_FAILED_STEPS = 3
CACHES = (
    "a cache of the agent may answer in place of the model: turn it off (DSPy: dspy.configure_cache(), LangChain: "
    "set_llm_cache(None), LiteLLM: litellm.cache = None, or one of your own); or a worker thread or task that serves "
    "several rollouts makes their calls, and all count for the rollout that started it: start one in each rollout"
)


def nothing_judged(rows: Sequence[Row]) -> str:
    """Why no row (of a step, or a validation) could be judged, and what to do; empty if one could."""
    if not rows or any(map(is_judged, rows)):
        return ""
    return f"none of {len(rows)} {rollouts_text(rows)} could be judged; {first_failure(rows)}"


def all_failed(rows: Sequence[Row]) -> str:
    """Why every row (of a step, or a validation) failed, and what to do; empty if one succeeded."""
    if not rows or any(row["status"] == "succeeded" for row in rows):
        return ""
    return f"all {len(rows)} {rollouts_text(rows)} failed; {first_failure(rows)}"


def mostly_unscored(rows: Sequence[Row]) -> str:
    """Why the reward failed for more than half of the answers (of a step, or a validation), and what to do; empty if it
    did not.

    A reward that raises for certain answers, such as wrong ones, leaves a sample that says nothing of the policy.
    """
    given = [row for row in rows if row["status"] in _GIVEN_TO_REWARD]
    failed = [row for row in given if row["status"] in ("reward", "unreadable_answer") and not is_judged(row)]
    transient = sum(row["status"] in _TRANSIENT for row in rows)
    if 2 * len(failed) <= len(given) or transient > len(failed):  # a step that mostly timed out gave it few answers
        return ""
    rest = len(given) - len(failed)
    biased = f"; the other {rest} would be a biased sample" if rest else ""
    return f"{len(failed)} of {len(given)} {rollouts_text(rows)} have no reward; {first_failure(failed)}{biased}"


def lasting_failure(rows: Sequence[Row]) -> str:
    """Why a run ends at these rows (of a step, or a validation), and what to do; empty if it goes on.

    All failed for a reason that will persist, or the reward failed for most.
    """
    reason = nothing_judged(rows) or all_failed(rows)
    return reason if reason and not is_transient(rows) else mostly_unscored(rows)


def failed_by_policy(rows: Sequence[Row]) -> bool:
    """Whether every row failed, and the policy caused one or more of them: what training may repair."""
    return bool(all_failed(rows)) and any(map(is_judged, rows))


class FailedSteps:
    """Counts the training steps in a row that :func:`failed_by_policy`."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, rows: Sequence[Row]) -> str:
        """Why training ends at these rows of a step, and what to do; empty if it goes on."""
        self._count = self._count + 1 if failed_by_policy(rows) else 0
        return f"in {self._count} steps in a row {all_failed(rows)}" if self._count >= _MAX_FAILED_STEPS else ""


def nothing_to_train(rows: Sequence[Row], *, agent_match: str | None = None) -> str:
    """Why no row (of whole steps, or a validation) gives a triplet; empty if one does."""
    if silent := never_called(rows):
        return f"no rollout gave anything to train on: {silent}"
    reasons = [no_triplets(row, agent_match) for row in rows]
    found = [reason for reason in reasons if reason]
    if not found or len(found) < len(rows):
        return ""
    texts = {reason.kind: reason.text for reason in reversed(found)}
    counts = Counter(reason.kind for reason in found).most_common()
    parts = [f"{count} of {len(rows)}: {texts[kind]}" for kind, count in counts]
    return f"no rollout gave anything to train on. {'; '.join(parts)}"


def never_called(rows: Sequence[Row]) -> str:
    """What is known if no row (of a validation) had an LLM call; empty if one had."""
    if not rows or not all(map(made_no_call, rows)):
        return ""
    return f"none of {len(rows)} {rollouts_text(rows)} made an LLM call: {rows[0]['message'] or NO_CALL}; {CACHES}"


def is_transient(rows: Sequence[Row]) -> bool:
    """Whether failures may be gone in the next step: one is of a type for which that is so, or the policy caused them
    and their messages differ by more than numbers.
    """
    if any(row["status"] in _TRANSIENT for row in rows):
        return True
    ways = {(row["status"], re.sub(r"\d+", "0", row["message"] or "")) for row in rows}
    return any(map(is_judged, rows)) and len(ways) > 1


def rollouts_text(rows: Sequence[Row]) -> str:
    """What to call ``rows``."""
    return "validation rollouts" if rows[0]["mode"] == "val" else "rollouts"


def first_failure(failed: Sequence[Row]) -> str:
    """The type and the message of the first of ``failed``, and what to do."""
    statuses = {row["status"] for row in failed}
    message = " ".join((failed[0]["message"] or "no message").split())[:MAX_MESSAGE]
    advice = (text for status, text in _ADVICE.items() if status in statuses)
    return "; ".join([f"the first failed of {failed[0]['status']}: {message}", *advice])

"""Why a run ends: its rollouts failed, or gave nothing to train on, in a way that will last; and what to do then."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from groundwire.train.evaluation.diagnosis import NO_CALL, no_triplets
from groundwire.train.evaluation.metrics import is_judged
from groundwire.train.store.rollout import Rollout

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
_REWARD_FAILED = ("reward", "unreadable_answer")
_GIVEN_TO_REWARD = ("succeeded", *_REWARD_FAILED, "judge_abstained")
"""The statuses of rollouts whose answer the reward got."""
_MAX_FAILED_STEPS = 3
CACHES = (
    "a cache of the agent may answer in place of the model: turn it off (DSPy: dspy.configure_cache(), LangChain: "
    "set_llm_cache(None), LiteLLM: litellm.cache = None, or one of your own); or a worker thread or task that serves "
    "several rollouts makes their calls, and all count for the rollout that started it: start one in each rollout"
)


def nothing_judged(rollouts: Sequence[Rollout]) -> str:
    """Why no rollout (of a step, or a validation) could be judged, and what to do; empty if one could."""
    if not rollouts or any(map(is_judged, rollouts)):
        return ""
    return f"none of {len(rollouts)} {rollouts_text(rollouts)} could be judged; {first_failure(rollouts)}"


def all_failed(rollouts: Sequence[Rollout]) -> str:
    """Why every rollout (of a step, or a validation) failed, and what to do; empty if one succeeded."""
    if not rollouts or not all(rollout.outcome.failure for rollout in rollouts):
        return ""
    return f"all {len(rollouts)} {rollouts_text(rollouts)} failed; {first_failure(rollouts)}"


def mostly_unscored(rollouts: Sequence[Rollout]) -> str:
    """Why the reward failed for more than half of the answers (of a step, or a validation), and what to do; empty if it
    did not.

    A reward that raises for certain answers, such as wrong ones, leaves a sample that says nothing of the policy.
    """
    answered = [rollout for rollout in rollouts if rollout.outcome.status in _GIVEN_TO_REWARD]
    failed = [rollout for rollout in answered if rollout.outcome.failure in _REWARD_FAILED and not is_judged(rollout)]
    transient = sum(rollout.outcome.failure in _TRANSIENT for rollout in rollouts)
    if 2 * len(failed) <= len(answered) or transient > len(failed):  # a step that mostly timed out gave it few answers
        return ""
    rest = len(answered) - len(failed)
    biased = f"; the other {rest} would be a biased sample" if rest else ""
    return f"{len(failed)} of {len(answered)} {rollouts_text(rollouts)} have no reward; {first_failure(failed)}{biased}"


def lasting_failure(rollouts: Sequence[Rollout]) -> str:
    """Why a run ends at these rollouts (of a step, or a validation), and what to do; empty if it goes on.

    All failed for a reason that will persist, or the reward failed for most.
    """
    reason = nothing_judged(rollouts) or all_failed(rollouts)
    return reason if reason and not is_transient(rollouts) else mostly_unscored(rollouts)


def failed_by_policy(rollouts: Sequence[Rollout]) -> bool:
    """Whether every rollout failed, and the policy caused one or more of them: what training may repair."""
    return bool(all_failed(rollouts)) and any(map(is_judged, rollouts))


class FailedSteps:
    """Counts the training steps in a row that :func:`failed_by_policy`."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, rollouts: Sequence[Rollout]) -> str:
        """Why training ends at these rollouts of a step, and what to do; empty if it goes on."""
        self._count = self._count + 1 if failed_by_policy(rollouts) else 0
        return f"in {self._count} steps in a row {all_failed(rollouts)}" if self._count >= _MAX_FAILED_STEPS else ""


def nothing_to_train(rollouts: Sequence[Rollout], *, agent_match: str | None = None) -> str:
    """Why no rollout (of whole steps, or a validation) gives a triplet; empty if one does."""
    if silent := never_called(rollouts):
        return f"no rollout gave anything to train on: {silent}"
    reasons = [reason for rollout in rollouts if (reason := no_triplets(rollout, agent_match))]
    if not reasons or len(reasons) < len(rollouts):
        return ""
    texts = {reason.kind: reason.text for reason in reversed(reasons)}  # the first of each kind
    counts = Counter(reason.kind for reason in reasons).most_common()
    listed = "; ".join(f"{count} of {len(rollouts)}: {texts[kind]}" for kind, count in counts)
    return f"no rollout gave anything to train on. {listed}"


def never_called(rollouts: Sequence[Rollout]) -> str:
    """What is known if no rollout (of a validation) had an LLM call; empty if one had."""
    if not rollouts or not all(rollout.made_no_call for rollout in rollouts):
        return ""
    known = rollouts[0].outcome.message or NO_CALL
    return f"none of {len(rollouts)} {rollouts_text(rollouts)} made an LLM call: {known}; {CACHES}"


def is_transient(rollouts: Sequence[Rollout]) -> bool:
    """Whether failures may be gone in the next step: one is of a type for which that is so, or the policy caused them
    and their messages differ by more than numbers.
    """
    outcomes = [rollout.outcome for rollout in rollouts]
    if any(outcome.failure in _TRANSIENT for outcome in outcomes):
        return True
    ways = {(outcome.failure, re.sub(r"\d+", "0", outcome.message)) for outcome in outcomes}
    return any(map(is_judged, rollouts)) and len(ways) > 1


def rollouts_text(rollouts: Sequence[Rollout]) -> str:
    """What to call ``rollouts``."""
    return "validation rollouts" if rollouts[0].mode == "val" else "rollouts"


def first_failure(failed: Sequence[Rollout]) -> str:
    """The type and the message of the first of ``failed``, and what to do."""
    failures = {rollout.outcome.failure for rollout in failed}
    first = failed[0].outcome
    message = " ".join((first.message or "no message").split())[:MAX_MESSAGE]
    advice = (text for failure, text in _ADVICE.items() if failure in failures)
    return "; ".join([f"the first failed of {first.failure}: {message}", *advice])

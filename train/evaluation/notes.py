"""What a user should know of rollouts: notes on an agent's first ones and on each step, and why a run ends.

A run ends if its rollouts failed, or gave nothing to train on, in a way that will last.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from groundwire.adapters.agents.failures import CACHES
from groundwire.adapters.tracing import LLMCall
from groundwire.tools.text import texts_in
from groundwire.train.evaluation.diagnosis import NO_CALL, no_triplets, scored
from groundwire.train.evaluation.metrics import is_judged
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.store.rollout import Rollout

_log = logging.getLogger(__name__)

_MAX_MESSAGE = 300
"""Characters of a failure's message in an error."""
_TRANSIENT = ("tool", "timeout", "no_result", "not_stored", "endpoint")
_ADVICE = {
    "agent": "repair the agent (groundwire run --dev shows its calls)",
    "setup": "repair the agent, or how the run calls it",
    "reward": "fix the reward (groundwire audit tries it without a model)",
    "unreadable_answer": "return a reward for such answers, or raise RewardError where none can be computed",
    "judge_abstained": "check the judge's endpoint, key and caps (docs/rewards.md)",
}
_REWARD_FAILED = ("reward", "unreadable_answer")
_GIVEN_TO_REWARD = ("succeeded", *_REWARD_FAILED, "judge_abstained")
"""The statuses of rollouts whose answer the reward got."""
_MAX_FAILED_STEPS = 3
_CACHES = (
    f"{CACHES}; or a worker thread or task that serves several rollouts makes their calls, and all count for the "
    "rollout that started it: start one in each rollout"
)

_EVIDENCE = 8
"""Characters of the different golds that were found. So few, such as "yes" and "no", are in many prompts."""
_ABOVE_CHANCE = 3
"""How many times as often as the gold of another task a task's own is found, where that is no chance."""
_PROMPT_TOKENS = 2000
"""Tokens of the longest prompts that the starter was made for."""
_TOOLS = 10
"""Tools of one request that the starter was made for."""


class RolloutNotes:
    """Shows, once each: that rollouts made no LLM call, that a cache of the agent answers, what ``credit=last`` leaves
    out, and with ``failures`` the first ones of each type: an evaluation shows them with its results. ``run`` is the
    folder of the run, if it has one.
    """

    def __init__(
        self, show_note: Callable[[str], None], *, run: Path | None = None, failures: bool = True, credit: str = ""
    ) -> None:
        self._show_note, self._failures, self._credit = show_note, failures, credit
        self._more = f". More: groundwire why {run}" if run else ""
        self._shown, self._called = set[str](), set[str]()

    def show(self, rollouts: Sequence[Rollout]) -> None:
        """``rollouts`` are those of a step or validation."""
        self._show_silent(rollouts)
        if self._credit == "last":
            self._show_left_out(rollouts)
        failures = dict.fromkeys(rollout.outcome.failure for rollout in rollouts if rollout.outcome.failure)
        for failure in failures if self._failures else ():
            failed = [rollout for rollout in rollouts if rollout.outcome.failure == failure]
            text = f"{share(failed, rollouts)} failed ({scored(failed[0])}); {first_failure(failed)}"
            self._once(failure, f"{text}{self._more}")

    def _show_silent(self, rollouts: Sequence[Rollout]) -> None:
        silent = [rollout for rollout in rollouts if rollout.made_no_call]
        self._called |= {str(rollout.task["id"]) for rollout in rollouts if rollout.succeeded and rollout.calls}
        if silent:
            self._once("silent", without_call(silent, rollouts))
        if cached := [rollout for rollout in silent if str(rollout.task["id"]) in self._called]:
            text = f"{share(cached, rollouts)} made no LLM call, though others of their questions did: {_CACHES}"
            self._once("cached", text, partial(_log.warning, "%s"))

    def _show_left_out(self, rollouts: Sequence[Rollout]) -> None:
        calls = [(call, call.credit) for rollout in rollouts for call in rollout.calls if call.credit is not None]
        if left := sum(credit.weight == 0 and not call.truncated for call, credit in calls):
            share = f"{left} of {len(calls)} calls of this step ({left / len(calls):.0%}) teach nothing"
            only = "credit=last trains only the last request of a rollout"
            self._once("last", f"{only}: {share}; credit=broadcast and credit=turns train all calls")

    def _once(self, kind: str, note: str, show: Callable[[str], None] | None = None) -> None:
        if kind not in self._shown:
            self._shown.add(kind)
            (show or self._show_note)(note)


def without_call(silent: Sequence[Rollout], rollouts: Sequence[Rollout]) -> str:
    """What is to be said of ``silent``, those of the rollouts that made no LLM call."""
    # The longest: one that names hosts, if there is.
    reason = max((rollout.outcome.message or NO_CALL for rollout in silent), key=len)
    return f"{share(silent, rollouts)} made no LLM call: they are judged, and train nothing. {reason}"


def share(some: Sequence[Rollout], rollouts: Sequence[Rollout]) -> str:
    """How many of the rollouts are ``some`` of them."""
    return f"{len(some)} of {_counted(rollouts)}"


def _counted(rollouts: Sequence[Rollout]) -> str:
    return f"{len(rollouts)} {'validation ' if rollouts[0].mode == 'val' else ''}rollouts"


def agent_notes(rollouts: Sequence[Rollout], *, served: str, view: AgentView, model: str = "") -> list[str]:
    """What a user should know of the first rollouts of an agent: the models that it asked for, golds in its prompts,
    and what it asks of the starter beyond its limits.

    ``served`` is the policy's own name. ``model`` is the run's, if it is served here.
    """
    calls = [call for rollout in rollouts for call in rollout.calls]
    asked_for = Counter(call.model for call in calls if call.model not in ("", served) and not call.untrainable_reason)
    names = ", ".join(f"{name} ({count} calls)" for name, count in asked_for.most_common())
    models = f"the policy answered the calls to {names}; --train-model selects models" if names else ""
    notes = [models, gold_in_prompts(rollouts, view)]
    return [note for note in (*notes, starter_limits(calls) if model == "starter" else "") if note]


def gold_in_prompts(rollouts: Sequence[Rollout], view: AgentView) -> str:
    """A warning if the first prompts of rollouts have the gold answers of their tasks; else "".

    A gold that is in its question does not count, nor one that is no more often found than that of another task.
    """
    pairs, columns = list[tuple[str, str]](), dict[str, None]()
    for rollout in rollouts:
        gold = words(view.gold(rollout.task))
        gold = gold if gold.isascii() else gold.strip()  # many scripts do not divide words
        if rollout.calls and gold.strip() and gold not in words(rollout.task["question"]):
            first = min(rollout.calls, key=lambda call: call.sequence)
            prompt = words(" ".join(texts_in(first.messages)))
            pairs.append((gold, prompt))
            if gold in prompt:
                visible = view.columns(rollout.task).items()
                columns |= {name: None for name, value in visible if gold in words(str(value))}
    # How often would a gold be found by chance? As often as that of another task is: short golds are in many prompts.
    golds = list(dict.fromkeys(gold for gold, _ in pairs))
    another = dict(zip(golds, [*golds[1:], *golds[:1]], strict=True))
    copied = [gold for gold, prompt in pairs if gold in prompt]
    chance = sum(another[gold] in prompt for gold, prompt in pairs if another[gold] != gold)
    if sum(len(gold.replace(" ", "")) for gold in set(copied)) < _EVIDENCE or len(copied) <= _ABOVE_CHANCE * chance:
        return ""
    where = f" It is in {', '.join(columns)}, which the agent is given." if columns else ""
    return (
        f"the gold answer is in the first prompt of {len(copied)} of {len(pairs)} rollouts "
        f"({len(copied) / len(pairs):.0%}; that of another task in {chance}), so the agent can copy it.{where} That is "
        "right only where the agent is to find it in a document of its prompt"
    )


def words(text: str) -> str:
    """``text`` in lower case without punctuation, so that only whole words are found in it."""
    return " ".join(["", *re.findall(r"\w+", text.casefold()), ""])


def starter_limits(calls: Sequence[LLMCall]) -> str:
    """A sentence that names the limits of the starter that ``calls`` exceed; empty if they exceed none."""
    tools = {call.tools_json: [tool.get("function", tool) for tool in call.tools] for call in calls}
    longest = max((len(call.prompt_ids) or call.prompt_tokens for call in calls), default=0)
    most = max(map(len, tools.values()), default=0)
    failed = sum("<tool_call>" in str(call.reply.get("content")) for call in calls if call.tools_json)
    without_text = most and not any(_takes_text(tool) for offered in tools.values() for tool in offered)
    limits = {
        f"prompts of up to {longest:,} tokens (at most {_PROMPT_TOKENS:,})": longest > _PROMPT_TOKENS,
        f"{most} tools in one request (at most {_TOOLS})": most > _TOOLS,
        "tools of which none has a text argument, for a query": without_text,
        # A toy makes such mistakes now and then.
        f"calls of tools that the agent does not have, in {failed} of {len(calls)} replies": failed > len(calls) / 10,
    }
    beyond = "; ".join(text for text, is_beyond in limits.items() if is_beyond)
    return beyond and f"beyond what the starter, a toy, was made for: {beyond}. --model takes a larger model"


def _takes_text(tool: dict[str, Any]) -> bool:
    properties = (tool.get("parameters") or {}).get("properties") or {}
    return any(isinstance(kind, dict) and kind.get("type", "string") == "string" for kind in properties.values())


def nothing_judged(rollouts: Sequence[Rollout]) -> str:
    """Why no rollout of a step or a validation could be judged, and what to do; empty if one could."""
    if not rollouts or any(map(is_judged, rollouts)):
        return ""
    return f"none of {_counted(rollouts)} could be judged; {first_failure(rollouts)}"


def all_failed(rollouts: Sequence[Rollout]) -> str:
    """Why every rollout failed, and what to do; empty if one succeeded."""
    if not rollouts or not all(rollout.outcome.failure for rollout in rollouts):
        return ""
    return f"all {_counted(rollouts)} failed; {first_failure(rollouts)}"


def mostly_unscored(rollouts: Sequence[Rollout]) -> str:
    """Why the reward failed for more than half of the answers; else empty.

    A reward that raises for certain answers, such as wrong ones, leaves a sample that says nothing of the policy.
    """
    answered = [rollout for rollout in rollouts if rollout.outcome.status in _GIVEN_TO_REWARD]
    failed = [rollout for rollout in answered if rollout.outcome.failure in _REWARD_FAILED and not is_judged(rollout)]
    transient = sum(rollout.outcome.failure in _TRANSIENT for rollout in rollouts)
    if 2 * len(failed) <= len(answered) or transient > len(failed):  # a step that mostly timed out gave it few answers
        return ""
    rest = len(answered) - len(failed)
    biased = f"; the other {rest} would be a biased sample" if rest else ""
    return f"{share(failed, answered)} have no reward; {first_failure(failed)}{biased}"


def lasting_failure(rollouts: Sequence[Rollout]) -> str:
    """Why a run ends at these rollouts: all failed for a reason that will persist, or the reward failed for most."""
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
    if all(rollout.made_no_call for rollout in rollouts) and (silent := never_called(rollouts)):
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
    silent = [rollout for rollout in rollouts if rollout.made_no_call]
    if not silent or any(rollout.calls for rollout in rollouts):
        return ""
    reason = silent[0].outcome.message or NO_CALL
    return f"none of {_counted(rollouts)} made an LLM call: {reason}{'' if CACHES in reason else f'; {_CACHES}'}"


def is_transient(rollouts: Sequence[Rollout]) -> bool:
    """Whether failures may be gone in the next step: one is of a type for which that is so, or the policy caused them
    and their messages differ by more than numbers.
    """
    ways = {(rollout.outcome.failure, re.sub(r"\d+", "0", rollout.outcome.message)) for rollout in rollouts}
    return any(failure in _TRANSIENT for failure, _ in ways) or (any(map(is_judged, rollouts)) and len(ways) > 1)


def first_failure(failed: Sequence[Rollout]) -> str:
    """The type and the message of the first of ``failed``, and what to do."""
    failures = {rollout.outcome.failure for rollout in failed}
    first = failed[0].outcome
    message = " ".join((first.message or "no message").split())[:_MAX_MESSAGE]
    advice = (text for failure, text in _ADVICE.items() if failure in failures)
    return "; ".join([f"the first failed of {first.failure}: {message}", *advice])

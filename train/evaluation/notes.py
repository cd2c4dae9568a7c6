"""Notes for the terminal: what a user should know of an agent's first rollouts, and of those of each step."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from groundwire.adapters.tracing import LLMCall
from groundwire.tools.text import texts_in
from groundwire.train.evaluation.diagnosis import NO_CALL, scored
from groundwire.train.evaluation.stop_reasons import CACHES, MAX_MESSAGE, first_failure, rollouts_text
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.store.rollout import Rollout

_log = logging.getLogger(__name__)

_MIN_ANSWERS = 5
"""Fewer equal answers may be right."""
_EVIDENCE = 8
"""Characters of the different golds that were found. So few, such as "yes" and "no", are in many prompts."""
_ABOVE_CHANCE = 3
"""How many times as often as the gold of another task a task's own is found, where that is no chance."""
PROMPT_TOKENS = 2000
"""Tokens of the longest prompts that the starter was made for."""
TOOLS = 10
"""Tools of one request that the starter was made for."""


class RolloutNotes:
    """Shows, once each: that rollouts made no LLM call, that a cache of the agent answers, what ``credit=last`` leaves
    out, and the first failures of each type. The last is for trainers, which give the folder of the ``run``: an
    evaluation shows them with its results.
    """

    def __init__(self, show_note: Callable[[str], None], *, run: Path | None = None, credit: str = "") -> None:
        self._show_note, self._run, self._credit = show_note, run, credit
        self._shown, self._called = set[str](), set[str]()

    def show(self, rollouts: Sequence[Rollout]) -> None:
        """``rollouts`` are those of a step or validation."""
        self._show_silent(rollouts)
        if self._credit == "last":
            self._show_left_out(rollouts)
        failures = dict.fromkeys(rollout.outcome.failure for rollout in rollouts if rollout.outcome.failure)
        for failure in failures if self._run else ():
            failed = [rollout for rollout in rollouts if rollout.outcome.failure == failure]
            text = f"{_share(failed, rollouts)} failed ({scored(failed[0])}); {first_failure(failed)}"
            self._once(failure, f"{text}. More: groundwire why {self._run}")

    def _show_silent(self, rollouts: Sequence[Rollout]) -> None:
        silent = [rollout for rollout in rollouts if rollout.made_no_call]
        self._called |= {str(rollout.task["id"]) for rollout in rollouts if rollout.succeeded and rollout.calls}
        if silent:
            # The longest: one that names hosts, if there is.
            reason = max((rollout.outcome.message or NO_CALL for rollout in silent), key=len)
            text = f"{_share(silent, rollouts)} made no LLM call: they are judged, and train nothing. {reason}"
            self._once("silent", text)
        if cached := [rollout for rollout in silent if str(rollout.task["id"]) in self._called]:
            text = f"{_share(cached, rollouts)} made no LLM call, though others of their questions did: {CACHES}"
            self._once("cached", text, partial(_log.warning, "%s"))

    def _show_left_out(self, rollouts: Sequence[Rollout]) -> None:
        trained = [call for rollout in rollouts for call in rollout.calls if call.credit is not None]
        if left := sum(call.credit.weight == 0 and not call.truncated for call in trained if call.credit is not None):
            share = f"{left} of {len(trained)} calls of this step ({left / len(trained):.0%}) teach nothing"
            only = "credit=last trains only the last request of a rollout"
            self._once("last", f"{only}: {share}; credit=broadcast and credit=turns train all calls")

    def _once(self, kind: str, note: str, show: Callable[[str], None] | None = None) -> None:
        if kind not in self._shown:
            self._shown.add(kind)
            (show or self._show_note)(note)


def _share(some: Sequence[Rollout], rollouts: Sequence[Rollout]) -> str:
    return f"{len(some)} of {len(rollouts)} {rollouts_text(rollouts)}"


def agent_notes(rollouts: Sequence[Rollout], *, served: str, view: AgentView, model: str = "") -> list[str]:
    """What a user should know of the first rollouts of an agent: the models that it asked for, odd answers, golds in
    its prompts, and what it asks of the starter beyond its limits.

    ``served`` is the policy's own name. ``model`` is the run's, if it is served here.
    """
    calls = [call for rollout in rollouts for call in rollout.calls]
    notes = [_models_note(calls, served), _answers_note(rollouts), gold_in_prompts(rollouts, view)]
    return [note for note in (*notes, starter_limits(calls) if model == "starter" else "") if note]


def _answers_note(rollouts: Sequence[Rollout]) -> str:
    """A warning if all answers to different tasks are empty or equal; empty if not."""
    ended = [rollout for rollout in rollouts if not rollout.outcome.failure]
    answers = {rollout.task["id"]: rollout.outcome.answer.strip() for rollout in ended}
    if len(answers) < _MIN_ANSWERS or len(set(answers.values())) > 1:
        return ""
    [answer] = set(answers.values())
    same = f"the same: {answer[:MAX_MESSAGE]!r}" if answer else "empty"
    return (
        f"the answers to all {len(answers)} tasks are {same}. If the agent answers in another form, name a function "
        "that reads the answer from its result: --agent-output module:name"
    )


def _models_note(calls: Iterable[LLMCall], served: str) -> str:
    """A note on the model names that the agents asked for, if the policy answered under other names than its own."""
    counts = Counter(call.model for call in calls if call.model not in ("", served) and not call.untrainable_reason)
    names = ", ".join(f"{name} ({count} calls)" for name, count in counts.most_common())
    return f"the policy answered the calls to {names}; --train-model selects models" if names else ""


def gold_in_prompts(rollouts: Sequence[Rollout], view: AgentView) -> str:
    """A warning if the first prompts of rollouts have the gold answers of their tasks; else "".

    A gold that is in its question does not count, nor one that is no more often found than that of another task.
    """
    pairs, columns = list[tuple[str, str]](), dict[str, None]()
    for rollout in rollouts:
        gold = _words(view.gold(rollout.task))
        gold = gold if gold.isascii() else gold.strip()  # many scripts do not divide words
        if rollout.calls and gold.strip() and gold not in _words(rollout.task["question"]):
            first = min(rollout.calls, key=lambda call: call.sequence)
            prompt = _words(" ".join(texts_in(first.messages)))
            pairs.append((gold, prompt))
            if gold in prompt:
                given = view.columns(rollout.task)
                columns |= {name: None for name, value in given.items() if gold in _words(str(value))}
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


def _words(text: str) -> str:
    """``text`` in lower case without punctuation, so that only whole words are found in it."""
    return " ".join(["", *re.findall(r"\w+", text.casefold()), ""])


def starter_limits(calls: Iterable[LLMCall]) -> str:
    """A sentence that names the limits of the starter that ``calls`` exceed; empty if they exceed none."""
    calls = list(calls)
    tools = {call.tools_json: [tool.get("function", tool) for tool in call.tools] for call in calls}
    longest = max((len(call.prompt_ids) or call.prompt_tokens for call in calls), default=0)
    most = max(map(len, tools.values()), default=0)
    failed = sum("<tool_call>" in str(call.reply.get("content")) for call in calls if call.tools_json)
    beyond = []
    if longest > PROMPT_TOKENS:
        beyond.append(f"prompts of up to {longest:,} tokens (at most {PROMPT_TOKENS:,})")
    if most > TOOLS:
        beyond.append(f"{most} tools in one request (at most {TOOLS})")
    if most and not any(_takes_text(tool) for offered in tools.values() for tool in offered):
        beyond.append("tools of which none has a text argument, for a query")
    if failed > len(calls) / 10:  # a toy makes such mistakes now and then
        beyond.append(f"calls of tools that the agent does not have, in {failed} of {len(calls)} replies")
    if not beyond:
        return ""
    return f"beyond what the starter, a toy, was made for: {'; '.join(beyond)}. --model takes a larger model"


def _takes_text(tool: dict[str, Any]) -> bool:
    properties = (tool.get("parameters") or {}).get("properties") or {}
    return any(isinstance(kind, dict) and kind.get("type", "string") == "string" for kind in properties.values())

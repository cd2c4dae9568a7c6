"""Are gold answers in the prompts of an agent?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from groundwire.tools.text import texts_in
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.rollouts.outcome import RolloutResult

__all__ = ["gold_in_prompts"]

_EVIDENCE = 8
"""Characters of the different golds that were found. So few, such as "yes" and "no", are in many prompts."""
_ABOVE_CHANCE = 3
"""How many times as often as the gold of another task a task's own is found, where that is no chance."""


def gold_in_prompts(results: Sequence[RolloutResult], view: AgentView) -> str:
    """A warning if the first prompts of rollouts have the gold answers of their tasks; else "".

    A gold that is in its question does not count, nor one that is no more often found than that of another task.
    """
    pairs, columns = list[tuple[str, str]](), dict[str, None]()
    for result in results:
        calls, task = [*result.calls, *result.untrainable], result.request.task
        gold = _words(view.gold(task))
        gold = gold if gold.isascii() else gold.strip()  # many scripts do not divide words
        if calls and gold.strip() and gold not in _words(task["question"]):
            prompt = _words(" ".join(texts_in(min(calls, key=lambda call: call.sequence).messages)))
            pairs.append((gold, prompt))
            if gold in prompt:
                columns |= {name: None for name, value in view.columns(task).items() if gold in _words(str(value))}
    golds = list(dict.fromkeys(gold for gold, _ in pairs))
    another = dict(zip(golds, [*golds[1:], *golds[:1]], strict=True))
    found = [gold for gold, prompt in pairs if gold in prompt]
    chance = sum(another[gold] in prompt for gold, prompt in pairs if another[gold] != gold)
    if sum(len(gold.replace(" ", "")) for gold in set(found)) < _EVIDENCE or len(found) <= _ABOVE_CHANCE * chance:
        return ""
    where = f" It is in {', '.join(columns)}, which the agent is given." if columns else ""
    return (
        f"the gold answer is in the first prompt of {len(found)} of {len(pairs)} rollouts "
        f"({len(found) / len(pairs):.0%}; that of another task in {chance}), so the agent can copy it.{where} That is "
        "right only where the agent is to find it in a document of its prompt"
    )


def _words(text: str) -> str:
    """``text`` in lower case without punctuation, so that only whole words are found in it."""
    return " ".join(["", *re.findall(r"\w+", text.casefold()), ""])

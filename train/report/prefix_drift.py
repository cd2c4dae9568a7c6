"""Why an agent's next prompt does not begin with what the policy sampled.

Where it does, calls merge into one trajectory, and a rollout is trained in one piece
(:func:`groundwire.adapters.tracing.trajectories`). Where it does not nothing is lost and nothing is wrong with the
training, but each call is computed by itself, and what the policy reads back is not what it wrote. The rules here look
at ids first and at text only to name a cause, so they need no chat template.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.train.report.token_text import TokenDecoder

__all__ = ["CAUSES", "Drift", "drifts"]

CAUSES = {
    "new": "the agent begins a conversation of its own: what was sampled is not among its messages",
    "thinking": "the chat template strips thinking from earlier turns",
    "tool_call": "the tool call was read and written again by the framework or the chat template",
    "end": "the sampled end token is not the one that the chat template ends a turn with",
    "blanks": "blanks around the reply were stripped",
    "tokens": "the same text was tokenized again, into other tokens",
    "truncated": "earlier messages were left out or cut",
    "edited": "the history was edited by the framework before it was sent again",
}
"""What may lie behind a drift, likeliest cause by cause."""

_SAME = 8
"""Tokens that must agree for a later part of the conversation to be recognised."""
_THINKING = re.compile(r"<(think|thinking|reasoning)>|</(think|thinking|reasoning)>")
_CALL = re.compile(r"<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|\"arguments\"\s*:|\"parameters\"\s*:")


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A call whose prompt begins with no earlier call's prompt and reply.

    ``call`` and ``earlier`` are places in the rollout's calls: ``earlier`` is the one it agrees with longest, up to
    token ``position``. There ``expected`` was read or sampled, and ``found`` is in the next prompt; None where the
    prompt ends.
    """

    call: int
    earlier: int
    agent: str
    position: int
    expected: int
    found: int | None
    cause: str
    """One of :data:`CAUSES`."""
    sampled: bool
    """Whether the expected token was sampled (else it stood in the earlier prompt)."""

    def sentence(self, framework: str, vocabulary: TokenDecoder) -> str:
        """The drift, what is likely behind it, and in which framework."""
        return f"{self.difference(vocabulary)}; likely {CAUSES[self.cause]} ({framework})"

    def difference(self, vocabulary: TokenDecoder) -> str:
        """The first token that differs."""
        expected = vocabulary.token(self.expected)
        found = "the prompt's end" if self.found is None else repr(vocabulary.token(self.found))
        where = "sampled" if self.sampled else "in the earlier prompt"
        return (
            f"call {self.call + 1} ({self.agent or 'no name'}) does not begin with call {self.earlier + 1}: token "
            f"{self.position} is {found}, and {expected!r} was {where}"
        )


def drifts(calls: Sequence[Mapping[str, Any]], vocabulary: TokenDecoder) -> list[Drift]:
    """The drifts of one rollout. ``calls`` are as in ``rollouts.parquet``, with ids.

    Each call's prompt is compared with every earlier call's prompt and reply, as merging does.
    """
    found = []
    contexts: list[list[int]] = []
    for place, call in enumerate(calls):
        prompt = list(call["prompt_ids"])
        agreed = [_agreement(context, prompt) for context in contexts]
        if agreed and not any(n == len(context) for n, context in zip(agreed, contexts, strict=True)):
            earlier = max(range(place), key=lambda each: (agreed[each], each))
            found.append(_drift(calls, place, earlier, agreed[earlier], vocabulary))
        contexts.append(prompt + list(call["response_ids"]))
    return found


def _drift(
    calls: Sequence[Mapping[str, Any]], place: int, earlier: int, position: int, vocabulary: TokenDecoder
) -> Drift:
    before, prompt = calls[earlier], list(calls[place]["prompt_ids"])
    context = list(before["prompt_ids"]) + list(before["response_ids"])
    sampled = position >= len(before["prompt_ids"])
    judge = _in_reply if sampled else _in_prompt
    return Drift(
        call=place,
        earlier=earlier,
        agent=str(calls[place]["agent"] or ""),
        position=position,
        expected=context[position],
        found=prompt[position] if position < len(prompt) else None,
        cause=judge(before, prompt, position, vocabulary),
        sampled=sampled,
    )


def _in_reply(before: Mapping[str, Any], prompt: list[int], position: int, vocabulary: TokenDecoder) -> str:
    """The prompt agrees up to some token of the reply."""
    start, reply = len(before["prompt_ids"]), list(before["response_ids"])
    if position == start + len(reply) - 1 and reply[-1] in vocabulary.special:
        return "end"
    said = vocabulary.text(_turn(reply, vocabulary))
    kept = vocabulary.text(_turn(prompt[start:], vocabulary))
    if said == kept:
        return "tokens" if said else "edited"
    if said.strip() == kept.strip():
        return "blanks"
    if len(_THINKING.findall(said)) > len(_THINKING.findall(kept)):
        return "thinking"
    if _CALL.search(said) and _CALL.search(kept):
        return "tool_call"
    return "truncated" if kept.strip() and said.startswith(kept.strip()) else "edited"


def _in_prompt(before: Mapping[str, Any], prompt: list[int], position: int, vocabulary: TokenDecoder) -> str:
    """The prompt agrees only with the beginning of the earlier prompt."""
    earlier, reply = list(before["prompt_ids"]), list(before["response_ids"])
    header = _header(earlier, vocabulary)
    if position >= len(earlier) - len(header):  # some templates open the thinking for the model
        return "thinking" if _THINKING.search(vocabulary.text(header)) else "edited"
    if _comes_back(earlier + reply, prompt, position):
        return "truncated"
    if not vocabulary:
        return "edited" if _count(prompt, reply[:_SAME]) else "new"
    if _count(prompt, header) <= _count(earlier, header):
        return "new"
    thoughts = [len(_THINKING.findall(vocabulary.text(ids))) for ids in (earlier, prompt)]
    return "thinking" if thoughts[0] > thoughts[1] else "edited"


def _comes_back(context: list[int], prompt: list[int], position: int) -> bool:
    """Whether the prompt goes on with a later part of the conversation, which it then leaves a part of out."""
    following = prompt[position : position + _SAME]
    return len(following) == _SAME and _count(context[position + 1 :], following) > 0


def _turn(ids: Sequence[int], vocabulary: TokenDecoder) -> list[int]:
    """The tokens up to the end of the turn."""
    end = next((place for place, token in enumerate(ids) if token in vocabulary.special), len(ids))
    return list(ids[:end])


def _header(prompt: Sequence[int], vocabulary: TokenDecoder) -> list[int]:
    """What a prompt ends with so that the assistant speaks: its last marker and what follows."""
    marked = [place for place, token in enumerate(prompt) if token in vocabulary.special]
    return list(prompt[marked[-1] :]) if marked else list(prompt[-1:])


def _count(ids: Sequence[int], part: Sequence[int]) -> int:
    """How often ``part`` is in ``ids``; searched for as bytes, since prompts are long."""
    if not part:
        return 0
    text, wanted = array("Q", ids), array("Q", part)
    size, found, place = text.itemsize, 0, -1
    data, sought = text.tobytes(), wanted.tobytes()
    while (place := data.find(sought, place + 1)) >= 0:
        found += place % size == 0
    return found


def _agreement(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with: found by halves, since prompts of thousands of tokens agree for most of them."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""Finds prompts that do not begin with an earlier prompt and its sampled reply, and names the likely cause.

Calls whose prompts do are merged into one trajectory (:func:`groundwire.adapters.tracing.trajectories`). After a
mismatch the call begins a new trajectory: training stays correct but computes more, and the policy reads a text
that it did not write. Token ids show a mismatch; text only tells the causes apart, so no chat template is needed.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from groundwire.adapters.tracing import LLMCall
from groundwire.train.report.token_text import TokenDecoder

CAUSES = {
    "new_conversation": "the agent begins a new conversation: the sampled reply is not among its messages",
    "thinking": "the chat template strips thinking from earlier turns",
    "tool_call": "the tool call was read and written again by the framework or the chat template",
    "end_token": "the sampled end token is not the one that the chat template ends a turn with",
    "whitespace": "whitespace around the reply was stripped",
    "retokenized": "the same text was tokenized again, into other tokens",
    "truncated": "earlier messages were left out or cut",
    "edited": "the history was edited by the framework before it was sent again",
}
"""The likely causes of a mismatch."""

_SAME = 8  # tokens that must be equal to recognise a later part of the conversation
_THINKING = re.compile(r"<(think|thinking|reasoning)>|</(think|thinking|reasoning)>")
_TOOL_CALL = re.compile(r"<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|\"arguments\"\s*:|\"parameters\"\s*:")


@dataclass(frozen=True, kw_only=True)
class PrefixMismatch:
    """A call whose prompt begins with no earlier call's prompt and reply.

    ``call`` and ``earlier`` are indices of the rollout's calls; ``earlier`` is the one with the longest common prefix.
    At token ``position`` it has ``expected``, and the prompt has ``found``, or None if it ends there.
    """

    call: int
    earlier: int
    agent: str
    position: int
    expected: int
    found: int | None
    cause: str
    """A key of :data:`CAUSES`."""
    sampled: bool
    """Whether the expected token was sampled; else it was in the earlier prompt."""

    def explanation(self, framework: str, decoder: TokenDecoder) -> str:
        """The difference, its likely cause and the framework."""
        return f"{self.difference(decoder)}; likely {CAUSES[self.cause]} ({framework})"

    def difference(self, decoder: TokenDecoder) -> str:
        """The first token that differs."""
        found = "the prompt's end" if self.found is None else repr(decoder.token(self.found))
        origin = "sampled" if self.sampled else "in the earlier prompt"
        return (
            f"call {self.call + 1} ({self.agent or 'no name'}) does not begin with call {self.earlier + 1}: token "
            f"{self.position} is {found}, and {decoder.token(self.expected)!r} was {origin}"
        )


def find_mismatches(calls: Sequence[LLMCall], decoder: TokenDecoder) -> list[PrefixMismatch]:
    """The mismatches of one rollout, of its ``calls`` with token ids.

    Each call's prompt is compared with every earlier call's prompt and reply, like merging into trajectories does.
    """
    mismatches = []
    contexts: list[list[int]] = []
    for index, call in enumerate(calls):
        prompt = call.prompt_ids
        common = [_common_prefix(context, prompt) for context in contexts]
        if common and not any(length == len(context) for length, context in zip(common, contexts, strict=True)):
            earlier = max(range(index), key=lambda place: (common[place], place))
            mismatches.append(_mismatch(calls, index, earlier, common[earlier], decoder))
        contexts.append(prompt + call.response_ids)
    return mismatches


def _mismatch(
    calls: Sequence[LLMCall], index: int, earlier: int, position: int, decoder: TokenDecoder
) -> PrefixMismatch:
    before, prompt = calls[earlier], calls[index].prompt_ids
    context = before.prompt_ids + before.response_ids
    sampled = position >= len(before.prompt_ids)
    cause_of = _cause_in_reply if sampled else _cause_in_prompt
    return PrefixMismatch(
        call=index,
        earlier=earlier,
        agent=calls[index].agent,
        position=position,
        expected=context[position],
        found=prompt[position] if position < len(prompt) else None,
        cause=cause_of(before, prompt, position, decoder),
        sampled=sampled,
    )


def _cause_in_reply(before: LLMCall, prompt: list[int], position: int, decoder: TokenDecoder) -> str:
    """The cause if the prompt agrees up to some token of the reply."""
    start, reply = len(before.prompt_ids), before.response_ids
    if position == start + len(reply) - 1 and reply[-1] in decoder.special:
        return "end_token"
    sampled = decoder.text(_first_turn(reply, decoder))
    resent = decoder.text(_first_turn(prompt[start:], decoder))
    if sampled == resent:
        return "retokenized" if sampled else "edited"
    if sampled.strip() == resent.strip():
        return "whitespace"
    if len(_THINKING.findall(sampled)) > len(_THINKING.findall(resent)):
        return "thinking"
    if _TOOL_CALL.search(sampled) and _TOOL_CALL.search(resent):
        return "tool_call"
    return "truncated" if resent.strip() and sampled.startswith(resent.strip()) else "edited"


def _cause_in_prompt(before: LLMCall, prompt: list[int], position: int, decoder: TokenDecoder) -> str:
    """The cause if the prompt agrees only with the beginning of the earlier prompt."""
    earlier, reply = before.prompt_ids, before.response_ids
    header = _assistant_header(earlier, decoder)
    if position >= len(earlier) - len(header):  # some templates open the thinking for the model
        return "thinking" if _THINKING.search(decoder.text(header)) else "edited"
    if _resumes_later(earlier + reply, prompt, position):
        return "truncated"
    if not decoder:
        return "edited" if _count(prompt, reply[:_SAME]) else "new_conversation"
    if _count(prompt, header) <= _count(earlier, header):
        return "new_conversation"
    thoughts = [len(_THINKING.findall(decoder.text(ids))) for ids in (earlier, prompt)]
    return "thinking" if thoughts[0] > thoughts[1] else "edited"


def _resumes_later(context: list[int], prompt: list[int], position: int) -> bool:
    """Whether the prompt skips a part of the conversation and goes on with a later one."""
    following = prompt[position : position + _SAME]
    return len(following) == _SAME and _count(context[position + 1 :], following) > 0


def _first_turn(ids: Sequence[int], decoder: TokenDecoder) -> list[int]:
    """The tokens before the first special one."""
    end = next((index for index, token in enumerate(ids) if token in decoder.special), len(ids))
    return list(ids[:end])


def _assistant_header(prompt: Sequence[int], decoder: TokenDecoder) -> list[int]:
    """The tokens that open the assistant's turn: the last special token of the prompt, and all after it."""
    special = [index for index, token in enumerate(prompt) if token in decoder.special]
    return list(prompt[special[-1] :]) if special else list(prompt[-1:])


def _count(ids: Sequence[int], part: Sequence[int]) -> int:
    """The number of occurrences of ``part`` in ``ids``, found as bytes because prompts are long."""
    if not part:
        return 0
    values = array("Q", ids)
    data, wanted = values.tobytes(), array("Q", part).tobytes()
    count, start = 0, -1
    while (start := data.find(wanted, start + 1)) >= 0:
        count += start % values.itemsize == 0
    return count


def _common_prefix(one: list[int], other: list[int]) -> int:
    """The length of the common prefix, by bisection: prompts of thousands of tokens are mostly equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

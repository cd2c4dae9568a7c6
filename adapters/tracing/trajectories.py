"""Calls → triplets → trajectories: the calls that are trained on, and the conversations as the policy saw them.

A triplet is a call's prompt ids, response ids and reward. Calls are merged while the next prompt begins with the whole
conversation so far; only sampled tokens carry a loss. Nothing is cut or tokenized again: each sampled token is trained
on exactly once, after exactly the tokens it was sampled after. So merging saves work and does not change what is
learned. A trajectory is as long as its last call.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from groundwire.adapters.tracing.calls import LLMCall, select_calls


def calls_of_agents(calls: Iterable[LLMCall], agent_match: str | None) -> list[LLMCall]:
    """The calls of the agents in whose name ``re.search`` finds ``agent_match``, as :func:`select_calls`; all calls if
    it is None.

    ``"write"`` selects write_query and rewrite_query. Raises ``ValueError`` if it is not a regular expression.
    """
    if agent_match is None:
        return list(calls)
    try:
        pattern = re.compile(agent_match)
    except re.error as error:
        raise ValueError(f"agent_match {agent_match!r} is not a regular expression: {error}") from error
    return select_calls(calls, lambda call: pattern.search(call.agent))


def triplets(calls: Iterable[LLMCall], reward: float | None) -> list[LLMCall]:
    """The calls of a rollout with this ``reward``, of which :func:`trajectories` are made; none without a reward."""
    return [] if reward is None else list(calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Merged calls. ``response_ids``, ``loss_mask`` and ``logprobs`` have the same length.

    ``response_ids`` is everything after the first prompt: sampled tokens (mask 1), and the tokens that the agent put
    between them, such as tool results and the next question (mask 0, logprob 0.0).
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    calls: tuple[LLMCall, ...]
    """In order."""

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


def trajectories(calls: Iterable[LLMCall]) -> list[Trajectory]:
    """Merge the calls of a rollout, in their order, into as few trajectories as possible.

    A call extends the trajectory with the longest context that its prompt begins with, of any agent. If there
    is none (the prompt was rendered differently, or sampled again) it starts a new trajectory. So does each of several
    choices (``n``) of one request.

    Raises ``ValueError`` for a call with an :attr:`LLMCall.untrainable_reason`.
    """
    merged, calls = list[list[LLMCall]](), list(calls)
    contexts, ends = Contexts(), dict[bytes, list[int]]()
    """What a call may continue, and the trajectories that end so, as a heap: the first one is continued first."""
    for call in calls:
        if reason := call.untrainable_reason:
            raise ValueError(f"call {call.sequence} of rollout {call.rollout_id} cannot be trained on: {reason}")
        if len(calls) == 1:
            return [_trajectory(calls)]
        prompt, place = token_bytes(call.prompt_ids), len(merged)
        before = contexts.longest_prefix(prompt) if call.choice is None else None
        if before is None:
            merged.append([])
        else:
            place = heappop(ends[before])
            if not ends[before]:
                del ends[before]
                contexts.remove(before)
        merged[place].append(call)
        if call.choice is None:
            after = prompt + token_bytes(call.response_ids)
            contexts.add(after)
            heappush(ends.setdefault(after, []), place)
    return [_trajectory(calls) for calls in merged]


def token_bytes(ids: Iterable[int]) -> bytes:
    """Token ids as four bytes each: what they begin with and have in common is found without a loop in Python."""
    return array("I", ids).tobytes()


class Contexts:
    """Conversations as :func:`token_bytes`, sorted: the longest common prefix of one with any is with a neighbour.

    So the time to find a conversation's beginning does not grow with the number of conversations.
    """

    def __init__(self) -> None:
        self._sorted: list[bytes] = []

    def add(self, context: bytes) -> None:
        """Add a conversation, once."""
        place = bisect_left(self._sorted, context)
        if self._sorted[place : place + 1] != [context]:
            self._sorted.insert(place, context)

    def remove(self, context: bytes) -> None:
        """Remove a conversation that was added."""
        del self._sorted[bisect_left(self._sorted, context)]

    def longest_prefix(self, prompt: bytes) -> bytes | None:
        """The longest conversation that ``prompt`` begins with; None if there is none."""
        end, beginning = len(self._sorted), prompt
        while end := bisect_right(self._sorted, beginning, 0, end):
            context = self._sorted[end - 1]
            if prompt.startswith(context):
                return context
            beginning = prompt[: 4 * common_tokens(context, beginning)]
        return None

    def neighbours(self, prompt: bytes) -> list[bytes]:
        """The conversation before ``prompt`` and the one after it: one of them has most first tokens in common."""
        place = bisect_left(self._sorted, prompt)
        return self._sorted[max(0, place - 1) : place + 1]


def common_tokens(first: bytes, second: bytes) -> int:
    """How many first tokens of two :func:`token_bytes` are equal."""
    low, high = 0, min(len(first), len(second)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if first[4 * low : 4 * middle] == second[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _trajectory(calls: list[LLMCall]) -> Trajectory:
    mask, logprobs, end = list[int](), list[float](), len(calls[0].prompt_ids)
    for call in calls:
        inserted = len(call.prompt_ids) - end
        mask += [0] * inserted + [1] * len(call.response_ids)
        logprobs += [0.0] * inserted + call.logprobs
        end = len(call.prompt_ids) + len(call.response_ids)
    return Trajectory(
        prompt_ids=calls[0].prompt_ids,
        response_ids=calls[-1].prompt_ids[len(calls[0].prompt_ids) :] + calls[-1].response_ids,
        loss_mask=mask,
        logprobs=logprobs,
        calls=tuple(calls),
    )

"""Merging calls loses nothing and invents nothing, whatever the conversation."""

from __future__ import annotations

from itertools import count, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groundwire.adapters.tracing import LLMCall, Trajectory, trajectories
from groundwire.adapters.tracing.trajectories import Contexts, common_tokens, token_bytes


def call(
    prompt: list[int], response: list[int], *, sequence: int = 1, agent: str = "", first_logprob: int = 1
) -> LLMCall:
    """Every sampled token gets a logprob of its own, so that it can be told from every other."""
    logprobs = [-float(first_logprob + index) for index in range(len(response))]
    return LLMCall(
        rollout_id="r",
        attempt_id="a",
        sequence=sequence,
        agent=agent,
        prompt_ids=prompt,
        response_ids=response,
        logprobs=logprobs,
    )


TOKENS = st.lists(st.integers(0, 2), max_size=4)  # few tokens: prefixes then agree by chance, which is the hard part
SAMPLED = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@st.composite
def conversations(draw: st.DrawFn) -> list[LLMCall]:
    """Calls that go on from any earlier one, sample it again, change its history, or start afresh."""
    calls: list[LLMCall] = []
    logprobs = count(1)
    for sequence in range(draw(st.integers(1, 10))):
        earlier = draw(st.sampled_from(calls)) if calls else None
        kind = draw(st.sampled_from(["goes on", "goes on", "samples again", "changes history", "starts afresh"]))
        if earlier is None or kind == "starts afresh":
            prompt = [*draw(TOKENS), 0]
        elif kind == "goes on":
            prompt = earlier.prompt_ids + earlier.response_ids + draw(TOKENS)
        elif kind == "samples again":
            prompt = earlier.prompt_ids
        else:
            prompt = [*(earlier.prompt_ids + earlier.response_ids)[:-1], *draw(SAMPLED)]
        response = draw(SAMPLED)
        first = next(logprobs)
        for _ in response[1:]:
            next(logprobs)
        calls.append(call(prompt, response, sequence=sequence, agent=draw(st.sampled_from("ab")), first_logprob=first))
    return calls


def sampled_in_calls(calls: list[LLMCall]) -> list[tuple[float, int, list[int]]]:
    """(logprob, token, all that stood before it) of every sampled token."""
    return sorted(
        (logprob, token, c.prompt_ids + c.response_ids[:index])
        for c in calls
        for index, (token, logprob) in enumerate(zip(c.response_ids, c.logprobs, strict=True))
    )


def trained_in_trajectories(merged: list[Trajectory]) -> list[tuple[float, int, list[int]]]:
    """The same, as a trainer would see it."""
    return sorted(
        (t.logprobs[index], token, t.prompt_ids + t.response_ids[:index])
        for t in merged
        for index, token in enumerate(t.response_ids)
        if t.loss_mask[index]
    )


@given(conversations())
def test_every_sampled_token_is_trained_on_once_after_the_context_it_was_sampled_from(calls: list[LLMCall]) -> None:
    assert trained_in_trajectories(trajectories(calls)) == sampled_in_calls(calls)


@given(conversations())
def test_ids_masks_and_logprobs_have_the_same_length(calls: list[LLMCall]) -> None:
    for merged in trajectories(calls):
        assert len(merged.response_ids) == len(merged.loss_mask) == len(merged.logprobs)
        assert len(merged) == len(merged.prompt_ids) + len(merged.response_ids)
        assert set(merged.loss_mask) <= {0, 1}
        assert all(logprob == 0.0 for logprob, mask in zip(merged.logprobs, merged.loss_mask, strict=True) if not mask)


@given(conversations())
def test_a_trajectory_is_exactly_its_first_prompt_and_its_last_call(calls: list[LLMCall]) -> None:
    merged = trajectories(calls)
    assert sorted(c.sequence for t in merged for c in t.calls) == [c.sequence for c in calls]
    for t in merged:
        assert t.prompt_ids == t.calls[0].prompt_ids
        assert t.prompt_ids + t.response_ids == t.calls[-1].prompt_ids + t.calls[-1].response_ids


@given(st.lists(st.tuples(TOKENS, SAMPLED), min_size=1, max_size=8))
def test_a_conversation_that_only_grows_is_one_trajectory(turns: list[tuple[list[int], list[int]]]) -> None:
    context, calls = [9], []
    for sequence, (inserted, response) in enumerate(turns):
        calls.append(call(context + inserted, response, sequence=sequence))
        context = context + inserted + response
    (merged,) = trajectories(calls)
    assert sum(merged.loss_mask) == sum(len(response) for _, response in turns)


@given(st.permutations([("a", 10), ("a", 10), ("a", 10), ("b", 20), ("b", 20), ("b", 20)]))
def test_agents_that_take_turns_have_a_trajectory_each(order: list[tuple[str, int]]) -> None:
    contexts: dict[str, list[int]] = {}
    calls = []
    for sequence, (agent, token) in enumerate(order):
        prompt = [*contexts.get(agent, [token]), token + 1]
        calls.append(call(prompt, [token + 2], sequence=sequence, agent=agent))
        contexts[agent] = [*prompt, token + 2]
    assert sorted({c.agent for t in trajectories(calls) for c in t.calls}) == ["a", "b"]
    assert [len(t.calls) for t in trajectories(calls)] == [3, 3]
    assert all(len({c.agent for c in t.calls}) == 1 for t in trajectories(calls))


def test_the_longest_matching_context_is_extended() -> None:
    calls = [call([1], [2]), call([1, 2, 3], [4]), call([1], [2]), call([1, 2, 3, 4, 5], [6]), call([1, 2, 7], [8])]
    assert [t.prompt_ids + t.response_ids for t in trajectories(calls)] == [[1, 2, 3, 4, 5, 6], [1, 2, 7, 8]]


def test_a_next_prompt_without_new_tokens_keeps_the_mask_on_sampled_tokens() -> None:
    (merged,) = trajectories([call([1, 2], [41, 42]), call([1, 2, 41, 42], [43])])
    assert (merged.response_ids, merged.loss_mask) == ([41, 42, 43], [1, 1, 1])


def test_a_prompt_that_is_sampled_again_starts_another_trajectory() -> None:
    merged = trajectories([call([1, 2], [3, 4]), call([1, 2], [3, 5])])
    assert [(t.prompt_ids, t.response_ids, t.loss_mask) for t in merged] == [
        ([1, 2], [3, 4], [1, 1]),
        ([1, 2], [3, 5], [1, 1]),
    ]


def test_a_later_prompt_longer_than_the_first_stays_a_prompt() -> None:
    merged = trajectories([call([1], [2]), call([9, 1, 2, 3, 4, 5], [6])])
    assert [(t.prompt_ids, t.loss_mask) for t in merged] == [([1], [1]), ([9, 1, 2, 3, 4, 5], [1])]


def test_a_call_that_cannot_be_trained_on_is_an_error_with_its_number() -> None:
    broken = LLMCall(rollout_id="r", attempt_id="a", sequence=3, prompt_ids=[1], response_ids=[2])
    with pytest.raises(ValueError, match="call 3 of rollout r cannot be trained on: 1 sampled tokens but 0 logprobs"):
        trajectories([broken])


def test_merging_does_not_change_the_calls() -> None:
    calls = [call([1], [2]), call([1, 2, 3], [4])]
    trajectories(calls)
    assert [(c.prompt_ids, c.response_ids) for c in calls] == [([1], [2]), ([1, 2, 3], [4])]


@given(st.lists(st.lists(st.integers(0, 300), max_size=5), max_size=12), st.lists(st.integers(0, 300), max_size=7))
def test_the_longest_beginning_and_the_most_common_tokens_are_found_without_comparing_all(
    added: list[list[int]], prompt: list[int]
) -> None:
    def common(ids: list[int]) -> int:
        return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, prompt, strict=False))))

    contexts, asked = Contexts(), token_bytes(prompt)
    for ids in [*added, *added]:
        contexts.add(token_bytes(ids))
    beginnings = [ids for ids in added if prompt[: len(ids)] == ids]
    longest = token_bytes(max(beginnings, key=len)) if beginnings else None
    assert contexts.longest_prefix(asked) == longest
    near = [common_tokens(context, asked) for context in contexts.neighbours(asked)]
    assert max(near, default=0) == max(map(common, added), default=0)
    if longest is not None:
        contexts.remove(longest)
        shorter = [ids for ids in beginnings if token_bytes(ids) != longest]
        assert contexts.longest_prefix(asked) == (token_bytes(max(shorter, key=len)) if shorter else None)


def test_a_rollout_may_have_very_many_calls() -> None:
    """With each compared with all before, this would take minutes."""
    start, count_ = list(range(40)), 20_000
    calls = [call([*start, 50 + number], [7, 8], sequence=number) for number in range(count_)]
    calls += [call([*start, 50 + number, 7, 8, 9], [1], sequence=count_ + number) for number in range(count_)]
    merged = trajectories(calls)
    assert [len(path.calls) for path in merged] == [2] * count_
    assert [path.prompt_ids[-1] for path in merged] == list(range(50, 50 + count_))

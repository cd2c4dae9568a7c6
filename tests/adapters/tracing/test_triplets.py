"""Spans become calls, and calls become triplets with rewards."""

from __future__ import annotations

from typing import Any

import pytest
from agentlightning.emitter import emit_reward
from agentlightning.types import Span

from groundwire.adapters.tracing import (
    LLMCall,
    all_calls_from_spans,
    calls_from_spans,
    calls_of_agents,
    reward_from_spans,
    to_span,
    triplets,
)
from groundwire.adapters.tracing.spans import EMITTED


def call(sequence: int, *, agent: str = "write_query", **fields: Any) -> LLMCall:
    given = {"prompt_ids": [1, 2], "response_ids": [3], "logprobs": [-0.5], "weights_version": 4, **fields}
    return LLMCall(rollout_id="r", attempt_id="a", sequence=sequence, agent=agent, **given)


def reward(sequence: int, value: Any, primary: str | None = None) -> Span:
    """A reward's span as Agent Lightning's own emitter makes it."""
    core = emit_reward(value, primary_key=primary, propagate=False)
    return Span.from_core_fields(core, rollout_id="r", attempt_id="a", sequence_id=sequence)


def test_calls_are_ordered_by_sequence_number() -> None:
    spans = [to_span(call(3)), to_span(call(1)), reward(4, 1.0), to_span(call(2))]
    assert [c.sequence for c in calls_from_spans(spans)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"status": 502, "error": "refused"}, "failed with status 502: refused"),
        ({"error": "broke off"}, "broke off"),
        ({"response_ids": [], "logprobs": []}, "no token ids"),
        ({"prompt_ids": []}, "no token ids"),
        ({"logprobs": [-0.5, -0.5]}, "1 sampled tokens but 2 logprobs"),
        ({"logprobs": [float("nan")]}, "not a finite number"),
    ],
)
def test_a_call_that_cannot_be_trained_on_is_left_out_with_a_reason(fields: dict[str, Any], why: str) -> None:
    spans = [to_span(call(1)), to_span(call(2, **fields))]
    assert [c.sequence for c in calls_from_spans(spans)] == [1]
    assert why in all_calls_from_spans(spans)[1].untrainable_reason


def test_other_spans_are_not_calls() -> None:
    stranger = Span.from_attributes(attributes={"gen_ai.operation.name": "chat"}, rollout_id="r", name="chat")
    assert all_calls_from_spans([stranger]) == []


def test_agent_match_is_a_regex_over_agent_names() -> None:
    calls = [call(1, agent="write_query"), call(2, agent="check_query"), call(3, agent="rewrite_query")]
    assert [c.sequence for c in calls_of_agents(calls, "write")] == [1, 3]
    assert [c.sequence for c in calls_of_agents(calls, "^write")] == [1]
    assert calls_of_agents(calls, None) == calls
    with pytest.raises(ValueError, match=r"agent_match '\(' is not a regular expression"):
        calls_of_agents(calls, "(")


def test_the_reward_of_a_call_that_is_not_trained_counts_for_the_trained_one_before_it() -> None:
    calls = [
        *(call(1, agent="tool", reward=9.0), call(2, agent="plan", choice=0), call(3, agent="plan", choice=1)),
        *(call(4, agent="tool", reward=0.5, choice=0), call(5, agent="tool", reward=0.5, choice=1)),
        *(call(6, agent="tool", reward=0.25), call(7, agent="plan", reward=1.0)),
    ]
    assert [(c.sequence, c.reward) for c in calls_of_agents(calls, "plan")] == [(2, 0.75), (3, 0.75), (7, 1.0)]


def emitted(sequence: int, value: Any, primary: str | None = None) -> Span:
    """A reward that an agent emitted while it worked."""
    span = reward(sequence, value, primary)
    return span.model_copy(update={"attributes": {**span.attributes, EMITTED: True}})


def test_each_triplet_has_the_rollouts_reward_and_its_emitted_reward() -> None:
    spans = [
        *(to_span(call(1)), emitted(2, 0.25), to_span(call(3)), to_span(call(4))),
        *(emitted(5, 0.1), emitted(6, 0.2), reward(7, 1.0)),
    ]
    made = triplets(calls_from_spans(spans), reward_from_spans(spans))
    assert reward_from_spans(spans) == 1.0
    assert [(call.sequence, call.reward) for call in made] == [(1, 0.25), (3, None), (4, 0.2)]
    assert (made[0].prompt_ids, made[0].response_ids, made[0].logprobs) == ([1, 2], [3], [-0.5])
    assert (made[0].agent, made[0].weights_version) == ("write_query", 4)


def test_without_marks_all_rewards_but_the_last_belong_to_calls() -> None:
    spans = [to_span(call(1)), reward(2, 0.25), to_span(call(3)), reward(4, 0.1), reward(5, 1.0)]
    assert [c.reward for c in calls_from_spans(spans)] == [0.25, 0.1]
    assert reward_from_spans(spans) == 1.0


def test_a_reward_before_the_first_call_belongs_to_no_call() -> None:
    spans = [emitted(1, 0.5), to_span(call(2))]
    assert [c.reward for c in calls_from_spans(spans)] == [None]


def test_the_reward_of_a_failed_call_belongs_to_no_other_call() -> None:
    spans = [to_span(call(1)), to_span(call(2, status=502, error="refused")), emitted(3, 0.5)]
    assert [(c.sequence, c.reward) for c in calls_from_spans(spans)] == [(1, None)]


def test_an_emitted_reward_is_never_the_rollouts() -> None:
    assert reward_from_spans([to_span(call(1)), emitted(2, 0.5)]) is None
    components = emitted(2, {"a": 1.0, "b": 2.0}, primary="a")
    assert reward_from_spans([to_span(call(1)), components, reward(3, 1.0)]) == 1.0


def test_an_emitted_reward_is_a_calls_whatever_the_rollouts_reward_is() -> None:
    spans = [to_span(call(1)), emitted(2, 0.75), to_span(call(3)), emitted(4, 0.75), reward(5, 0.75)]
    assert reward_from_spans(spans) == 0.75
    assert [c.reward for c in calls_from_spans(spans)] == [0.75, 0.75]


def test_without_marks_a_reward_that_is_emitted_and_returned_counts_once() -> None:
    spans = [to_span(call(1)), reward(2, 0.75), to_span(call(3)), reward(4, 0.75), reward(5, 0.75)]
    assert [c.reward for c in calls_from_spans(spans)] == [0.75, None]


def test_the_last_reward_is_the_rollouts() -> None:
    assert reward_from_spans([]) is None
    assert reward_from_spans([reward(5, 0.9), to_span(call(1)), reward(2, 0.2)]) == 0.9


def test_a_reward_emitted_and_then_returned_counts_once() -> None:
    assert reward_from_spans([reward(2, 0.75), reward(3, 0.75)]) == 0.75


def test_a_reward_keeps_its_components_with_the_primary_first() -> None:
    components = {"executes": 0.1, "judge": 0.7, "total": 0.8}
    emitted = reward(2, components, primary="total")
    assert reward_from_spans([emitted]) == components
    assert next(iter(reward_from_spans([emitted]))) == "total"
    assert reward_from_spans([emitted, reward(3, 0.8)]) == components
    assert reward_from_spans([emitted, reward(3, 0.5)]) == 0.5

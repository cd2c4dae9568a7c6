"""Calls that Agent Lightning traced itself become the calls that our proxy traces of the same conversation."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest
from open_rollouts import OpenRollouts
from programs import ROOT

from groundwire.adapters.tracing import LLMCall, to_span, trajectories
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.train.rollouts.outcome import final_outcome
from groundwire.train.store.agent_lightning import read_record, read_span, span_json
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.store.sqlite import MEMORY

# Written by tests/data/make_lightning_spans.py.
RECORDED = json.loads((ROOT / "tests" / "data" / "lightning_spans.json").read_text())


def _recorded(by: str) -> list[SpanRecord]:
    return [read_span(span) for span in RECORDED[by]]


def _calls(spans: list[SpanRecord]) -> list[LLMCall]:
    return read_record(spans)[0]


@pytest.mark.parametrize("value", [1e308, -1e16, "0.5", "Infinity", "NaN", 10**400, [0.5], True])
async def test_a_reward_that_another_program_stored_is_one_or_its_rollout_failed(value: Any) -> None:
    store = LightningStore(MEMORY)
    attempted = await store.start_rollout(input={"id": "t", "question": "?"})
    ids = {"rollout_id": attempted["rollout_id"], "attempt_id": attempted["attempt"]["attempt_id"]}
    attributes = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}
    record = SpanRecord(name="a", sequence_id=1, attributes=attributes, start_time=1.0, end_time=1.0, **ids)
    await store.add_many_spans([span_json(record)])
    await store.update_attempt(**ids, status="succeeded")
    rollout = await store.get(ids["rollout_id"])
    assert rollout is not None
    outcome = final_outcome(rollout)
    if value is True:
        assert (outcome.status, outcome.reward) == ("succeeded", 1.0)
    else:
        assert (outcome.status, outcome.reward) == ("reward", None)
        assert "a span has the reward 'primary' of " in outcome.message


@pytest.mark.parametrize(
    "changed",
    [{"reward": 1e308}, {"reward": -math.inf}, {"reward": math.nan}, {"reward_components": {"a": 1e308}},
     {"least_reward": -1e308}, {"query_scores": [1e308]}],
)  # fmt: skip
async def test_an_outcome_that_another_runner_reported_is_checked(changed: dict[str, Any]) -> None:
    store = LightningStore(MEMORY)
    await store.enqueue([Rollout(task={"id": "t", "question": "?"})])
    [rollout] = await store.dequeue(1)
    outcome = Outcome(**{"answer": "4", "reward": 1.0, **changed})
    await store.end_attempt(rollout.rollout_id, rollout.attempts[-1].attempt_id, outcome, failed=False)
    read = await store.get(rollout.rollout_id)
    assert read is not None
    final = final_outcome(read)
    assert (final.status, final.reward, final.least_reward, final.answer) == ("reward", None, 0.0, "4")


async def test_the_first_of_several_rewards_that_another_program_stored_is_the_one() -> None:
    named = {"0.name": "right", "0.value": 0.5, "1.name": "short", "1.value": 1.0}
    attributes = {f"agentlightning.reward.{name}": value for name, value in named.items()}
    ids = {"rollout_id": "r", "attempt_id": "a"}
    record = SpanRecord(name="a", sequence_id=1, attributes=attributes, start_time=1.0, end_time=1.0, **ids)
    outcome = read_record([record])[2]
    assert (outcome.reward, outcome.reward_components) == (0.5, {"short": 1.0})


def test_the_agent_of_a_call_is_the_nearest_of_its_ancestors_however_deep_they_are() -> None:
    """With each ancestor asked again for each call, this would take minutes."""

    def traced(number: int, parent: int | None, **attributes: Any) -> SpanRecord:
        ids = {"rollout_id": "r", "attempt_id": "a", "span_id": str(number), "parent_id": str(parent)}
        name = "openai.chat.completion"
        return SpanRecord(name=name, sequence_id=number, attributes=attributes, start_time=1.0, end_time=1.0, **ids)

    first = [traced(0, None, **{"agent.name": "first"}), *(traced(number, number - 1) for number in range(1, 20_000))]
    second = [traced(number, number - 1) for number in range(20_001, 20_010)]
    circle = [traced(30_000, 30_001), traced(30_001, 30_000)]
    calls = _calls([*first, traced(20_000, 500, **{"agent.name": "second"}), *second, *circle])
    assert [call.agent for call in calls] == ["first"] * 20_000 + ["second"] * 10 + ["", ""]


async def _proxied() -> list[SpanRecord]:
    """The spans of the recorded conversation, traced by our proxy."""
    store = OpenRollouts()
    rollout = await store.start()
    async with (
        ScriptedPolicyServer(replies=["hello", "world"]) as server,
        LLMProxy(upstreams=[server.base_url], sink=store) as proxy,
    ):
        url = proxy.base_url(rollout.rollout_id, rollout.attempts[-1].attempt_id)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            for _ in range(2):
                reply = await client.chat.completions.create(model="m", messages=messages)
                messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
                messages += [{"role": "user", "content": "Go on."}]
        await proxy.flush()
    return list(map(to_span, await store.calls(rollout.rollout_id)))


def _tokens(calls: list[LLMCall]) -> list[Any]:
    return [(call.prompt_ids, call.response_ids, call.logprobs) for call in calls]


@pytest.mark.parametrize("by", ["runner", "proxy"])
async def test_its_own_spans_become_the_same_calls(by: str) -> None:
    ours, theirs = _calls(await _proxied()), _calls(_recorded(by))
    assert _tokens(theirs) == _tokens(ours)
    assert len(theirs) == 2
    assert [len(trajectory.calls) for trajectory in trajectories(theirs)] == [2]


def test_rewards_that_its_runner_stored_belong_to_the_same_calls() -> None:
    calls, _, outcome = read_record(_recorded("runner"))
    assert outcome.reward == 0.5
    assert [call.reward for call in calls] == [0.25, None]


async def test_calls_that_our_proxy_traced_are_not_counted_twice() -> None:
    ours = await _proxied()
    assert _tokens(_calls([*ours, *_recorded("runner")])) == _tokens(_calls(ours))


def test_the_agents_name_is_that_of_the_nearest_agent() -> None:
    spans = _recorded("runner")
    [session] = [span for span in spans if span.name.endswith(".session")]
    session.attributes["agent.name"] = "write_query"  # type: ignore[index]
    assert [call.agent for call in _calls(spans)] == ["write_query"] * 2


def test_a_span_that_cannot_be_read_is_a_failed_call() -> None:
    spans = [span for span in _recorded("proxy") if span.name == "raw_gen_ai_request"]
    spans[0].attributes["llm.hosted_vllm.choices"] = "[{'token_ids': <cut>"
    first, second = _calls(spans)
    assert "the span cannot be read: SyntaxError" in first.untrainable_reason
    assert second.untrainable_reason == ""

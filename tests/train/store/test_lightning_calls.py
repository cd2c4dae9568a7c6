"""Calls that Agent Lightning traced itself become the triplets that our proxy makes of the same conversation."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import OtelResource, Span
from programs import ROOT

from groundwire.adapters.tracing import (
    LLMCall,
    all_calls_from_spans,
    calls_from_spans,
    reward_from_spans,
    trajectories,
)
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.train.store.spans import LightningSpanSink, with_call_spans

# Written by tests/data/make_lightning_spans.py.
RECORDED = json.loads((ROOT / "tests" / "data" / "lightning_spans.json").read_text())


def _recorded(by: str) -> list[Span]:
    return [Span(**span, resource=OtelResource(attributes={}, schema_url="")) for span in RECORDED[by]]


async def _proxied() -> list[Any]:
    """The spans of the recorded conversation, traced by our proxy."""
    store = InMemoryLightningStore()
    rollout = await store.start_rollout(input={})
    async with (
        ScriptedPolicyServer(replies=["hello", "world"]) as server,
        LLMProxy(upstreams=[server.base_url], sink=LightningSpanSink(store)) as proxy,
    ):
        url = proxy.base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            for _ in range(2):
                reply = await client.chat.completions.create(model="m", messages=messages)
                messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
                messages += [{"role": "user", "content": "Go on."}]
        await proxy.flush()
        return list(await store.query_spans(rollout.rollout_id))


def _tokens(calls: list[LLMCall]) -> list[Any]:
    return [(call.prompt_ids, call.response_ids, call.logprobs) for call in calls]


@pytest.mark.parametrize("by", ["runner", "proxy"])
async def test_its_own_spans_become_the_samecalls_from_spans(by: str) -> None:
    ours, theirs = calls_from_spans(await _proxied()), calls_from_spans(with_call_spans(_recorded(by)))
    assert _tokens(theirs) == _tokens(ours)
    assert len(theirs) == 2
    assert [len(trajectory.calls) for trajectory in trajectories(theirs)] == [2]


def test_rewards_that_its_runner_stored_belong_to_the_same_calls() -> None:
    spans = with_call_spans(_recorded("runner"))
    assert reward_from_spans(spans) == 0.5
    assert [call.reward for call in calls_from_spans(spans)] == [0.25, None]


async def test_calls_that_our_proxy_traced_are_not_counted_twice() -> None:
    ours = await _proxied()
    assert _tokens(calls_from_spans(with_call_spans([*ours, *_recorded("runner")]))) == _tokens(calls_from_spans(ours))


def test_the_agents_name_is_that_of_the_nearest_agent() -> None:
    spans = _recorded("runner")
    [session] = [span for span in spans if span.name.endswith(".session")]
    session.attributes["agent.name"] = "write_query"
    assert [call.agent for call in calls_from_spans(with_call_spans(spans))] == ["write_query"] * 2


def test_a_span_that_cannot_be_read_is_a_failed_call() -> None:
    spans = [span for span in _recorded("proxy") if span.name == "raw_gen_ai_request"]
    spans[0].attributes["llm.hosted_vllm.choices"] = "[{'token_ids': <cut>"
    first, second = all_calls_from_spans(with_call_spans(spans))
    assert "the span cannot be read: SyntaxError" in first.untrainable_reason
    assert second.untrainable_reason == ""

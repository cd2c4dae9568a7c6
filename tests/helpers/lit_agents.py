"""Agents for Agent Lightning, as their authors write them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, TypedDict

import agentlightning as agl
import openai


class Blocking(agl.LitAgent[dict[str, Any]]):
    """A plain method, with its own validation."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        llm = resources["main_llm"]
        assert llm.sampling_parameters["temperature"] == 0.0
        assert self.tracer is not None
        base_url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": task["question"]}]
            reply = client.chat.completions.create(model=llm.model, messages=messages)
        return float(reply.choices[0].message.content == task["answer"])

    def validation_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return 0.5 + 0.5 * self.rollout(task, resources, rollout)


class Async(agl.LitAgent[dict[str, Any]]):
    """An async method that emits a reward for its first call."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        reward = await asyncio.to_thread(decorated.rollout, task, resources, rollout)
        agl.emit_reward(0.25)
        return float(reward)


@agl.rollout
def decorated(task: dict[str, Any], llm: agl.LLM) -> float:
    """A function with Agent Lightning's decorator."""
    with openai.OpenAI(base_url=llm.endpoint, api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": task["question"]}]
        reply = client.chat.completions.create(model=llm.model, messages=messages)
    return float(reply.choices[0].message.content == task["answer"])


def emits(question: str) -> str:
    """A function of the task that rewards its call."""
    with openai.OpenAI(max_retries=0) as client:
        reply = client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": question}])
    agl.emit_reward(0.25)
    return str(reply.choices[0].message.content)


def emits_too_much(question: str) -> str:
    """A function of the task that does not see why its reward was refused."""
    with suppress(OverflowError):
        agl.emit_reward(10**400)
    return question


class _State(TypedDict, total=False):
    question: str
    answer: str


class Graph(agl.LitAgent[dict[str, Any]]):
    """A graph of LangGraph whose nodes make their calls with a client of their own."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        from langgraph.graph import START, StateGraph

        llm = resources["main_llm"]
        client = openai.OpenAI(
            base_url=llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id), api_key="none", max_retries=0
        )

        def ask(state: dict[str, Any]) -> dict[str, Any]:
            messages: Any = [{"role": "user", "content": state["question"]}]
            reply = client.chat.completions.create(model=llm.model, messages=messages)
            return {"answer": reply.choices[0].message.content}

        graph: Any = StateGraph(_State)
        graph.add_node("write_query", ask)
        graph.add_node("check_query", ask)
        graph.add_edge(START, "write_query")
        graph.add_edge("write_query", "check_query")
        result = graph.compile().invoke({"question": task["question"]})
        return float(result["answer"] == task["answer"])


class WithoutReward(agl.LitAgent[dict[str, Any]]):
    """Returns nothing."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> None:
        return None


class NeedsArguments(WithoutReward):
    """Cannot be made from its name."""

    def __init__(self, model: str) -> None:
        super().__init__()

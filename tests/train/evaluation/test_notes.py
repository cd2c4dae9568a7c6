"""Notes on an agent's first rollouts: odd answers, models, and what it asks of the starter beyond its limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from groundwire.adapters.tracing import LLMCall
from groundwire.train.evaluation.notes import agent_notes, starter_limits
from groundwire.train.store.rollout import Outcome, Rollout


def call(*, prompt=10, tools=(), reply="SELECT 1"):
    return LLMCall(
        rollout_id="ro",
        attempt_id="at",
        sequence=0,
        prompt_ids=[1] * prompt,
        tools_json=json.dumps(tools) if tools else "",
        reply_json=json.dumps({"role": "assistant", "content": reply}),
    )


def tool(name="run", **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def test_nothing_is_said_about_what_the_starter_was_made_for():
    assert starter_limits([]) == ""
    handoff, query = tool("transfer_to_sql"), tool(sql={"type": "string"})
    assert starter_limits([call(prompt=2000), call(tools=[handoff]), call(tools=[query, handoff])]) == ""


def test_every_limit_that_is_exceeded_is_named():
    assert "prompts of up to 2,001 tokens" in starter_limits([call(), call(prompt=2001)])
    assert "none has a text argument" in starter_limits([call(tools=[tool(number={"type": "integer"})])])
    assert "12 tools in one request" in starter_limits([call(tools=[tool(sql={})] * 12)])
    wrong = call(
        tools=[tool(sql={"type": "string"})], reply='<tool_call>\n{"name": "ran", "arguments": {}}\n</tool_call>'
    )
    assert "calls of tools that the agent does not have, in 1 of 2 replies" in starter_limits([wrong, call()])
    assert starter_limits([wrong, *[call()] * 9]) == ""


def _notes(*ended: Outcome, calls: Sequence[LLMCall] = ()) -> str:
    rollouts = [Rollout(task={"id": str(number)}, outcome=outcome) for number, outcome in enumerate(ended)]
    if calls:
        rollouts = [Rollout(task={"id": "a"}, outcome=Outcome(reward=1.0), calls=list(calls))]
    view: Any = SimpleNamespace(gold=lambda task: "")
    return "\n".join(agent_notes(rollouts, served="policy", view=view))


def test_the_models_of_the_agents_are_named():
    def named(*models):
        given = {"prompt_ids": [1], "response_ids": [2], "logprobs": [0.0]}
        return _notes(calls=[replace(call(), model=model, **given) for model in models])

    assert named("policy", "", "policy") == ""
    assert "gpt-5 (2 calls), o4 (1 calls); --train-model" in named("gpt-5", "o4", "gpt-5")

"""The starter is a toy: a note names what an agent asks of it beyond its limits."""

from __future__ import annotations

import json

from groundwire.adapters.tracing import LLMCall
from groundwire.train.evaluation.notes import starter_limits


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

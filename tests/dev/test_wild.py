"""The scripted model of ``make wild``, its lists of agents and environments, and its page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dev.wild.__main__ import table
from dev.wild.model import reply

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEV = Path(__file__).parents[2] / "dev"
USER = {"role": "user", "content": "What is 6 times 7?"}


def tool(name: str, **properties: object) -> dict[str, object]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def test_each_tool_is_called_once_with_arguments_that_fit_then_a_text_follows() -> None:
    tools = [tool("multiply", a={"type": "integer"}, b={"type": "integer"}), tool("look", color={"enum": ["red"]})]
    messages, called = [USER], []
    while (answer := reply({"messages": messages, "tools": tools})).tool_calls:
        [call] = answer.tool_calls
        called.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
        messages = [*messages, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "42"}]
    assert called == [("multiply", {"a": 6, "b": 7}), ("look", {"color": "red"})]
    assert "42" in answer.text


def test_a_tool_that_ends_the_conversation_comes_last() -> None:
    tools = [tool("final_answer", answer={"type": "string"}), tool("look")]
    assert reply({"messages": [USER], "tools": tools}).tool_calls[0]["function"]["name"] == "look"
    looked = {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}
    answer = reply({"messages": [USER, looked], "tools": tools})
    assert answer.tool_calls[0]["function"]["name"] == "final_answer"


def test_a_json_schema_is_filled_with_its_references() -> None:
    schema = {
        "properties": {"day": {"$ref": "#/$defs/Day"}, "note": {"anyOf": [{"type": "null"}, {"type": "string"}]}},
        "$defs": {"Day": {"type": "object", "properties": {"date": {"type": "string", "format": "date"}}}},
    }
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    filled = json.loads(reply({"messages": [USER], "response_format": form}).text)
    assert filled == {"day": {"date": "2025-01-10"}, "note": "a note What is 6 times 7?"}


def test_an_agent_names_an_environment_and_tasks_that_exist() -> None:
    environments = tomllib.loads((DEV / "environments.toml").read_text())
    agents = tomllib.loads((DEV / "wild" / "agents.toml").read_text())["agent"]
    for agent in agents:
        assert agent.get("environment", "langchain") in environments
        assert (DEV / "wild" / "tasks" / f"{agent['tasks']}.jsonl").is_file()
    assert len({agent["name"] for agent in agents}) == len(agents)


def test_the_page_has_the_results() -> None:
    """After a change: ``make wild``."""
    agents = {agent["name"]: agent for agent in tomllib.loads((DEV / "wild" / "agents.toml").read_text())["agent"]}
    results = json.loads((DEV.parent / "docs" / "wild.json").read_text())
    page = (DEV.parent / "docs" / "wild.md").read_text(encoding="utf-8")
    assert f"\n{table(agents, results)}\n" in page
    assert "\n0 of 1 work" in f"\n{table(agents, {'routing': {**results['routing'], 'outcome': 'no call'}})}"

"""A script that runs its agent when it is imported, and a function that runs its agent, serve as agents."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from groundwire.adapters import Endpoint, Question, agent_backend
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer

CLIENT = """
import openai

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)

def ask(question: str) -> str:
    messages = [{"role": "user", "content": question}]
    try:
        return client.chat.completions.create(model="m", messages=messages).choices[0].message.content
    except Exception:
        return "no answer"
"""
MAIN = """
import asyncio
from agents import Agent, OpenAIChatCompletionsModel, Runner
from openai import AsyncOpenAI

async def main():
    client = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
    model = OpenAIChatCompletionsModel("m", client)
    Agent(name="another", model=model)
    agent = Agent(name="writer", instructions="Write.", model=model)
    print(await Runner.run(agent, "The author's question"))

def plain_main():
    asyncio.run(main())
"""


async def _answer(agent: str) -> tuple[str, list[str]]:
    """The answer to a question, and the last message of each call."""
    async with ScriptedPolicyServer(["one", "two"]) as server:
        backend = agent_backend(agent)
        question = Question(id="1", text="Which singers?", database="")
        answer = await backend.run(question, Endpoint(base_url=server.base_url, model="m"))
        await backend.stop()
        return answer.text, [request["messages"][-1]["content"] for request in server.requests]


async def test_a_script_is_imported_up_to_the_line_that_runs_its_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "runs_at_import.py"
    script.write_text(f"{CLIENT}\nreply = ask('The author asks')\nraise RuntimeError(reply)\n")
    with caplog.at_level(logging.WARNING):
        assert await _answer(f"{script}:ask") == ("one", ["Which singers?"])
    assert (
        "runs_at_import.py, line 13: the agent calls 127.0.0.1 when it is made, in no rollout: move a call"
        in caplog.text
    )
    assert "the rest of the file is left out" in caplog.text


async def test_what_such_a_script_defines_later_does_not_exist(tmp_path: Path) -> None:
    script = tmp_path / "defines_late.py"
    script.write_text(f"{CLIENT}\nask('The author asks')\ndef agent(question: str): ...\n")
    with pytest.raises(ValueError, match="has no 'agent'; it has ask"):
        agent_backend(f"{script}:agent")


@pytest.mark.parametrize("name", ["main", "plain_main"])
async def test_a_function_that_runs_its_agent_makes_it(tmp_path: Path, name: str) -> None:
    script = tmp_path / f"with_{name}.py"
    script.write_text(MAIN)
    if name == "plain_main":  # it starts an event loop of its own, as in a process without one
        import asyncio

        backend = await asyncio.to_thread(agent_backend, f"{script}:{name}")
        assert "Runner.run" in backend.describe_call(Question(id="1", text="", database=""))
    else:
        assert await _answer(f"{script}:{name}") == ("one", ["Which singers?"])


async def test_a_function_that_calls_a_model_without_an_agent_is_none(tmp_path: Path) -> None:
    script = tmp_path / "asks_itself.py"
    script.write_text(f"{CLIENT}\ndef main():\n    ask('The author asks')\n")
    with pytest.raises(ValueError, match="calls a model before it returns an agent, in no rollout: move a call"):
        agent_backend(f"{script}:main")


async def test_a_client_with_the_tools_of_an_agent_stays_open_where_its_run_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = "class MCPClient:\n    open = False\n"
    client += "    def __enter__(self):\n        self.open = True\n        return self\n"
    client += "    def __exit__(self, *error):\n        self.open = False\n"
    (tmp_path / "smolagents").mkdir()
    (tmp_path / "smolagents" / "__init__.py").write_text("")
    (tmp_path / "smolagents" / "mcp_client.py").write_text(client)
    monkeypatch.syspath_prepend(tmp_path)
    run = "from smolagents.mcp_client import MCPClient\nother = MCPClient()\nwith other: ...\n"
    run += "with MCPClient() as tools:\n    ask('The author asks')\n"
    (tmp_path / "with_tools.py").write_text(
        f"{CLIENT}\n{run}".replace("def ask", "def answer(question): return f'{tools.open} {other.open}'\n\ndef ask")
    )
    assert (await _answer(f"{tmp_path}/with_tools.py:answer"))[0] == "True False"
    for name in ("smolagents", "smolagents.mcp_client"):
        monkeypatch.delitem(sys.modules, name)

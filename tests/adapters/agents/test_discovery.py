"""The agents that are found in the text of a folder's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from groundwire.adapters.agents.discovery import agents_of

EXAMPLES = Path(__file__).parents[3] / "examples" / "frameworks"
TRIAGE = """
from agents import Agent, function_tool
@function_tool
def look_up(question: str) -> str: ...
faq = Agent(name="FAQ", tools=[look_up])
triage = Agent(name="Triage", handoffs=[faq])
"""
FLOWS = """
import langgraph.graph as lg
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="gpt-5")
helper = create_agent(model)
builder = lg.StateGraph(dict).add_node("ask", helper)
flow = builder.compile()
"""
MADE = """
from smolagents import CodeAgent, InferenceClientModel
def make(steps: int = 3): return CodeAgent([], InferenceClientModel(), max_steps=steps)
def needs(model): return CodeAgent([], model)
def unrelated(): return 1
"""
BUILT = """
from langgraph.graph import StateGraph
def reward(task, answer): return 1.0
def build():
    builder = StateGraph(dict)
    builder.add_node("ask", print)
    return builder.compile()
"""
ASKS = """
from openai import OpenAI
client = OpenAI()
def answer(question: str) -> str: return client.responses.create(model="gpt-5", input=question).output_text
def helper(text_value): ...
"""
CREW = """
from crewai import Agent, Crew
from crewai.project import CrewBase
@CrewBase
class Research:
    def crew(self): return Crew(agents=[])
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(TRIAGE, [("agent.py:triage", "agent of the OpenAI Agents SDK")], id="the whole, not its parts"),
        pytest.param(FLOWS, [("agent.py:flow", "agent of LangGraph")], id="a graph that is built in steps"),
        pytest.param(MADE, [("agent.py:make", "function that makes an agent of smolagents")], id="a maker"),
        pytest.param(
            BUILT, [("agent.py:build", "function that makes an agent of LangGraph")], id="a maker in steps, no reward"
        ),
        pytest.param(f"{BUILT}graph = build()", [("agent.py:graph", "agent of LangGraph")], id="what a maker made"),
        pytest.param(ASKS, [("agent.py:answer", "function of the question")], id="a function of the question"),
        pytest.param(CREW, [("agent.py:Research", "class of CrewAI")], id="a decorated class"),
        pytest.param(TRIAGE + "def f(:", [], id="a file that is no Python"),
        pytest.param("from mine import Agent\na = Agent()", [], id="a class of another package"),
    ],
)
def test_the_likeliest_agents_of_a_folder(
    tmp_path: Path, text: str, found: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "agent.py").write_text(text)
    (tmp_path / "test_agent.py").write_text(ASKS)
    for name in (".venv", "node_modules", "tests", "installed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "other.py").write_text(TRIAGE)
    (tmp_path / "installed" / "pyvenv.cfg").touch()
    assert [(agent.name, agent.what) for agent in agents_of(tmp_path)] == found
    assert ("agent.py cannot be read" in caplog.text) == text.endswith("(:")


def test_each_example_of_a_framework_has_one() -> None:
    folders = [folder for folder in EXAMPLES.iterdir() if (folder / "agent.py").is_file()]
    assert len(folders) > 10
    for folder in folders:
        assert len(agents_of(folder)) == 1, folder.name

"""An object is run by the driver of its framework, which is found by the names of its classes."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from groundwire.adapters import Endpoint, Question, agent_backend
from groundwire.adapters.agents.backend import AgentBackend
from groundwire.adapters.agents.drivers import _CLASSES, Driver, driver_of, framework_of, is_agent
from groundwire.tools.types import TEXT

OWN = [name for name in _CLASSES if not name.startswith(("langgraph.", "langchain_core.", "agents."))]


def stand_in(name: str, **attributes: Any) -> Any:
    """An object of a class of the full name ``name``."""
    module, _, kind = name.rpartition(".")
    return type(kind, (), {"__module__": module, **attributes})()


@pytest.mark.parametrize("name", OWN)
def test_a_class_and_those_that_derive_from_it_have_the_driver_of_their_framework(name: str) -> None:
    agent = stand_in(name)
    derived = type("Own", (type(agent),), {})()
    framework = ".".join(name.split(".")[:2])  # a namespace such as google is others' as well
    for value in (agent, derived):
        assert is_agent(value)
        assert isinstance(driver_of(value, "a"), Driver)
        assert framework_of(value) == _CLASSES[name].replace("_", "-")
    assert framework not in sys.modules, "a driver is found without its framework"


@pytest.mark.parametrize("module", sorted(set(_CLASSES.values())))
def test_each_driver_runs_its_agent(module: str) -> None:
    driver = import_module(f"groundwire.adapters.agents.drivers.{module}").FrameworkDriver
    assert driver.run is not Driver.run


@pytest.mark.parametrize(
    ("name", "method", "argument", "result"),
    [
        ("agno.agent.agent.Agent", "arun", "dependencies", {"status": "COMPLETED", "content": "x"}),
        ("strands.agent.agent.Agent", "invoke_async", "invocation_state", {"text": "x"}),
    ],
)
async def test_what_the_tools_of_an_agent_can_read_are_the_columns_of_the_task(
    name: str, method: str, argument: str, result: dict[str, str]
) -> None:
    given: dict[str, Any] = {}

    async def run(self: Any, question: str, **more: Any) -> Any:
        given.update(more)
        return SimpleNamespace(**result)

    question = Question(id="1", text="Why?", database="a.sqlite", answers=TEXT, columns={"db_path": "a.sqlite"})
    await agent_backend(stand_in(name, **{method: run})).run(question, Endpoint(base_url="http://localhost", model="m"))
    assert given[argument]["db_path"] == "a.sqlite"


def test_an_agent_with_agents_and_run_is_no_backend() -> None:
    workflow = stand_in("workflows.workflow.Workflow", agents={}, run=lambda self: None)
    assert isinstance(agent_backend(workflow), AgentBackend)


def test_a_class_that_needs_no_arguments_makes_the_agent() -> None:
    kind = type(stand_in("workflows.workflow.Workflow", __init__=lambda self, timeout=1, **more: None))
    backend = agent_backend(kind)
    assert isinstance(backend, AgentBackend)


class Meta(type):
    def __call__(cls, *args: Any, **more: Any) -> Any:
        return super().__call__(*args, **more)


def test_a_class_whose_metaclass_takes_any_arguments_makes_the_agent() -> None:
    kind = Meta("Module", (), {"__module__": "dspy.primitives.module"})
    assert isinstance(agent_backend(kind), AgentBackend)

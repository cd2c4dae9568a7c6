"""Agents of other frameworks are found by the names of their classes. ``make wild`` runs them."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from typing import Any

import pytest

from groundwire.adapters import Question, agent_backend
from groundwire.adapters.agents import drivers
from groundwire.adapters.agents.drivers import driver_of, framework_of, own_copy

CLASSES = [name for name in drivers._CLASSES if "agents.agent.AgentBase" not in name and "lang" not in name]


def stand_in(full_name: str, base: type = object) -> type:
    module, _, name = full_name.rpartition(".")
    return type(name, (base,), {"__module__": module, "__qualname__": name})


@pytest.mark.parametrize("full_name", CLASSES)
def test_an_agent_is_known_by_its_class_without_its_framework(full_name: str) -> None:
    before = {*sys.modules}
    if full_name.endswith("Meta"):  # the class of an agent's class
        agent: Any = stand_in(full_name, type)("Crew", (), {})
    else:
        agent = type("OfTheUser", (stand_in(full_name),), {})()
    framework = framework_of(agent)
    assert framework == drivers._CLASSES[full_name].replace("_", "-")
    assert (
        type(driver_of(agent, "agent"))
        is import_module(f"{drivers.__name__}.{drivers._CLASSES[full_name]}").FrameworkDriver
    )
    assert not {name for name in {*sys.modules} - before if not name.startswith("groundwire")}


def test_a_class_and_its_objects_may_both_be_an_agent() -> None:
    kind = stand_in("crewai.project.crew_base.CrewBaseMeta", type)("Crew", (), {})
    assert framework_of(kind) == framework_of(kind()) == "crewai"


class Remembers:
    def __init__(self) -> None:
        self.model, self.messages, self.lock = object(), ["of the author"], threading.Lock()
        self.hooks = [self.lock, self.messages]
        self.handler = self.remember

    def remember(self) -> None:
        self.messages.append("of this attempt")


def test_the_copy_of_an_agent_has_a_state_of_its_own() -> None:
    agent = Remembers()
    copy = own_copy(agent, {}, shared=("model",))
    copy.handler()
    assert (agent.messages, copy.messages) == (["of the author"], ["of the author", "of this attempt"])
    assert copy.model is agent.model


def test_the_copy_of_an_agent_shares_what_cannot_be_copied_as_a_whole() -> None:
    agent = Remembers()
    copy = own_copy(agent, {})
    assert copy.lock is agent.lock
    assert copy.hooks is agent.hooks


class Component:
    """As a class of AutoGen that is made from a file."""

    def __init__(self, provider: str) -> None:
        self.provider = provider

    @classmethod
    def load_component(cls, settings: dict[str, str]) -> Component:
        return cls(settings["provider"])


class Team(stand_in("autogen_agentchat.base._task.TaskRunner")):  # type: ignore[misc]
    def __init__(self, client: Component) -> None:
        self.name = client.provider


def make_team(model_client: Component) -> Team:
    return Team(model_client)


def test_an_option_may_be_a_parameter_that_has_no_default() -> None:
    backend = agent_backend(make_team, options={"model_client": {"provider": "openai"}})
    question = Question(id="1", text="Which?", database="")
    assert backend.describe_call(question) == "make_team().run(the question)"
    with pytest.raises(ValueError, match="has no option 'other'; it has model_client"):
        agent_backend(make_team, options={"model_client": {"provider": "openai"}, "other": 1})

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
from groundwire.adapters.agents.early_runs import EarlyCallError

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


@pytest.mark.parametrize("full_name", ["crewai.crew.Crew", "autogen_agentchat.base._task.TaskRunner"])
def test_a_framework_without_a_context_refuses_the_option(full_name: str) -> None:
    agent = stand_in(full_name)()
    with pytest.raises(ValueError, match=r"agent 'agent' is of (crewai|autogen), whose runs take no context"):
        driver_of(agent, "agent", {"agent_context": dict})
    driver_of(agent, "agent", {"agent_config": dict})


def test_an_unknown_object_is_named_by_its_class() -> None:
    with pytest.raises(ValueError, match="agent 'agent' is a Component of test_drivers: give an agent of a framework"):
        driver_of(Component("x"), "agent")


class Sessions:
    """As a session manager of Strands."""

    def __init__(self) -> None:
        self.stored: list[str] = []

    def register(self, callbacks: list[Any]) -> None:
        callbacks.append(lambda message: self.stored.append(message))  # noqa: PLW0108 - as Strands does


class Conversation(stand_in("strands.agent.agent.Agent")):  # type: ignore[misc]
    def __init__(self, seen: list[str]) -> None:
        self.messages = [{"role": "user", "content": "The author asks"}]
        self.session_manager, self.hooks = Sessions(), type("Hooks", (), {})()
        self.hooks._registered_callbacks = {str: [seen.append]}
        self.session_manager.register(self.hooks._registered_callbacks[str])

    def add(self, message: str) -> None:
        for callback in self.hooks._registered_callbacks[str]:
            callback(message)


def test_a_rollout_of_strands_stores_nothing_in_the_session_of_the_agent() -> None:
    seen: list[str] = []
    agent = Conversation(seen)
    rollout = driver_of(agent, "agent").fresh()
    rollout.add("of the rollout")
    assert (seen, agent.session_manager.stored, rollout.session_manager) == (["of the rollout"], [], None)
    agent.add("of the author")
    assert agent.session_manager.stored == ["of the author"]

    assert rollout.messages == agent.messages


def test_a_rollout_does_not_remember_the_question_of_a_run_that_was_ended() -> None:
    agent = Conversation([])

    def run(agent: Any) -> None:
        raise EarlyCallError("the agent calls a model when it is made")

    with pytest.raises(EarlyCallError):
        run(agent)
    assert driver_of(agent, "agent").fresh().messages == []
    assert len(agent.messages) == 1


class Runtime:
    """As AutoGen's, whose agents know the team that has registered them."""

    def __init__(self, ignore_unhandled_exceptions: bool = True) -> None:
        self.asked = ["The author asks"] if ignore_unhandled_exceptions else []


def test_a_team_that_has_begun_a_run_begins_anew_in_a_rollout() -> None:
    team = make_team(Component("openai"))
    team._initialized = team._embedded_runtime = True
    team._runtime, team._output_message_queue = Runtime(), ["of the author's run"]
    rollout = driver_of(team, "team").fresh()
    assert (rollout._initialized, rollout._runtime.asked, rollout._output_message_queue.qsize()) == (False, [], 0)
    assert (team._initialized, team._runtime.asked) == (True, ["The author asks"])

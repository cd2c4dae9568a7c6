"""How the agents of each framework get a task and are run: a module for each, which is imported at its first agent.

Another framework is one more module, with a class ``FrameworkDriver``, and the names of its classes in ``_CLASSES``.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

from groundwire.adapters._types import AgentSetupError, Endpoint, Question
from groundwire.adapters.agents.drivers.contexts import Columns, call_for, made_of
from groundwire.tools.daemon_threads import in_thread

T = TypeVar("T")
Hooks = Mapping[str, Callable[..., Any]]
"""The functions of the user's, ``agent_context`` and ``agent_config``, those that are given."""
NO_HOOKS: Hooks = MappingProxyType({})
TEXT_NAMES = (
    *("prompt", "query", "text", "input", "message", "user_message", "user_input", "user_query", "user_prompt"),
    *("problem", "instruction", "user_question", "question_text", "nl_question"),
)
"""Names of fields and parameters that get the question."""
SHOWN = 1000  # characters of an input
_NAMED = 10  # fields of an input
_RUNNABLES = ("langchain_core.runnables.base.Runnable", "langgraph.graph.state.StateGraph")
"""What can be run, but need not be an agent: a model, a prompt or a tool, or what a graph is compiled from."""
_CREWAI_AGENT = "crewai.agents.agent_builder.base_agent.BaseAgent"
_CLASSES = {
    "langgraph.pregel.main.Pregel": "langgraph",
    **dict.fromkeys(_RUNNABLES, "langgraph"),
    "agents.agent.AgentBase": "openai_agents",
    **dict.fromkeys(("agno.agent.agent.Agent", "agno.team.team.Team", "agno.workflow.workflow.Workflow"), "agno"),
    "autogen_agentchat.base._task.TaskRunner": "autogen",
    **dict.fromkeys(("crewai.crew.Crew", "crewai.flow.flow.Flow", _CREWAI_AGENT), "crewai"),
    "crewai.project.crew_base.CrewBaseMeta": "crewai",  # the class of the classes of a project's template
    "google.adk.agents.base_agent.BaseAgent": "google_adk",
    **dict.fromkeys(("google.adk.apps.app.App", "google.adk.runners.Runner"), "google_adk"),
    "pydantic_ai.agent.abstract.AbstractAgent": "pydantic_ai",
    **dict.fromkeys(("strands.agent.agent.Agent", "strands.multiagent.base.MultiAgentBase"), "strands"),
    "agent_framework._agents.BaseAgent": "agent_framework",
    "agent_framework._workflows._workflow.Workflow": "agent_framework",
    "agent_framework._workflows._functional.FunctionalWorkflow": "agent_framework",
    "agent_framework._workflows._functional.FunctionalWorkflowDefinition": "agent_framework",
    "camel.agents.chat_agent.ChatAgent": "camel",
    "dspy.primitives.module.Module": "dspy",
    "haystack.components.agents.agent.Agent": "haystack",
    "haystack.core.pipeline.base.PipelineBase": "haystack",
    "smolagents.agents.MultiStepAgent": "smolagents",
    "workflows.workflow.Workflow": "llama_index",
}
"""The module of this package that runs the objects of a class, by the full name of the class."""


class AgentTask(Columns):
    """The part of a task that an agent may see: ``id``, ``question``, ``database`` and the task's other columns."""

    def _lacks(self, name: str) -> str:
        return f"the agent sees no {name!r} but {', '.join(self)}; agent_columns names what it needs of the others"


def agent_task(question: Question) -> AgentTask:
    """What an agent gets of its task."""
    own = {"id": question.id, "question": question.text, "database": question.database}
    return AgentTask({**question.columns, **own})


class Driver:
    """Runs ``agent``, an object of its framework.

    :meth:`run` is the least. It returns the framework's result; :mod:`groundwire.adapters.agents.answers` finds the
    answer in it.
    """

    method = "run"
    """The method that runs the agent, as it is shown to the user; "" if the agent itself is called."""
    threaded = False
    """Whether each run has a thread."""
    own_calls = False
    """Whether the agent sends its calls to the endpoint that it gets."""
    takes_context = True
    """Whether its runs get a :meth:`context`."""
    tool_fields: tuple[str, ...] = ("tools",)
    """The agent's attributes that hold its tools, if it is surely asked with tools where it has some."""
    result_field = ""
    """The agent's attribute that holds the declared class of its results."""

    def __init__(self, agent: Any, name: str, hooks: Hooks = NO_HOOKS) -> None:
        """Raises ``ValueError`` for a hook that the framework has no use for."""
        if "agent_context" in hooks and not self.takes_context:
            framework = str(framework_of(agent)).replace("-", " ")
            raise ValueError(
                f"agent {name!r} is of {framework}, whose runs take no context: leave out agent_context; agent_input "
                "makes the input, and agent_config further arguments of the run"
            )
        self.agent, self.name, self.hooks = agent, name, hooks
        self.called = f"{name}.{self.method}" if self.method else name

    @property
    def calls_tools(self) -> bool:
        """Whether a model is surely asked with tools."""
        return any(getattr(self.agent, name, None) for name in self.tool_fields)

    def inputs(self, task: AgentTask) -> Any:
        """The input of a run for a task: the question, or fields that the task has. Raises ``ValueError``."""
        return task["question"]

    def describe(self, task: AgentTask) -> str:
        """How the agent is called for a task. Raises ``ValueError`` if it cannot be."""
        inputs = self.inputs(task)
        names = [*inputs] if isinstance(inputs, Mapping) else ["the question"]
        return f"{self.called}({', '.join([*names[:_NAMED], *['…'] * (len(names) > _NAMED)])})"

    def arguments(self, source: Any, question: Question, endpoint: Endpoint) -> Any:
        """The input of a run, from the task or from what ``agent_input`` made of it. Raises ``ValueError``."""
        return self.inputs(source) if isinstance(source, AgentTask) else source

    def show(self, arguments: Any) -> str:
        """A run in one line."""
        return f"{self.called}({arguments!r:.{SHOWN}})"

    def fresh(self) -> Any:
        """The agent of one attempt: a copy of an object that keeps what happened in a run, here the object itself."""
        return self.agent

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        """Run ``agent``, which :meth:`fresh` has returned, in the redirection of its attempt. Returns its result."""
        raise NotImplementedError

    @property
    def context_class(self) -> Any:
        """The class of the contexts that the agent is written for; None if it has none, or does not say it."""
        return None

    def check_context(self, task: AgentTask) -> None:
        """Raise ``ValueError`` if no context can be made for a task."""
        if "agent_context" not in self.hooks and self.context_class is not None:
            try:
                made_of(self.context_class, task)
            except AgentSetupError as error:
                raise ValueError(str(error)) from error

    async def context(self, task: AgentTask) -> Any:
        """The context of a run: what ``agent_context`` makes, or an object of :attr:`context_class`; None without both.

        Raises :class:`adapters.AgentSetupError`.
        """
        if "agent_context" in self.hooks:
            return await call_for("agent_context", self.hooks["agent_context"], task)
        return None if self.context_class is None else made_of(self.context_class, task)

    async def config(self, task: AgentTask) -> dict[str, Any]:
        """Further arguments of the framework's own method, which ``agent_config`` makes.

        Raises :class:`adapters.AgentSetupError`.
        """
        if "agent_config" not in self.hooks:
            return {}
        config = await call_for("agent_config", self.hooks["agent_config"], task)
        if not isinstance(config, Mapping):
            raise AgentSetupError(f"agent_config returned {config!r:.200}: it returns a dict")
        return dict(config)

    async def close(self) -> None:
        """Close what runs of the agent share: called once, on the event loop of the rollouts."""

    async def in_thread(self, work: Callable[[], T], task: AgentTask) -> T:
        """What ``work``, which blocks, returns: it runs in a thread of its own. The driver is then ``threaded``."""
        return await asyncio.wrap_future(in_thread(work, name=f"agent {task['id']}"))

    def result_types(self) -> Iterator[Any]:
        """The declared classes of its results."""
        yield getattr(self.agent, self.result_field, None)


def lacks(names: Iterable[str], what: str) -> ValueError:
    """The error for a task without ``names``, which the agent, a ``what``, needs."""
    lacking = ", ".join(sorted(names))
    return ValueError(f"the task has no {lacking!r}, which the {what} needs: make its input with --agent-input")


def own_copy(agent: Any, memo: dict[int, Any], shared: Collection[str] = ()) -> Any:
    """A copy of an agent that remembers. ``memo`` is that of ``copy.deepcopy``.

    It shares the members ``shared``, and those that cannot be copied, such as the connections of a client.
    """
    other, members = copy.copy(agent), vars(agent)
    memo |= {id(agent): other, **{id(members[name]): members[name] for name in shared if name in members}}
    for name, value in members.items():
        known = {*memo}
        try:
            vars(other)[name] = copy.deepcopy(value, memo)
        except Exception:  # half of it may be copied
            for key in memo.keys() - known:
                del memo[key]
    return other


def class_names(kind: type) -> list[str]:
    """The full names of a class, of those that it derives from, and of its own class: no framework is imported."""
    return [f"{each.__module__}.{each.__qualname__}" for each in (*kind.__mro__, type(kind))]


def _class_of(agent: Any) -> str | None:
    """The name of the class of an object that is in the table."""
    return next((name for name in class_names(type(agent)) if name in _CLASSES), None)


def framework_of(agent: Any) -> str | None:
    """The framework that an object belongs to, such as ``openai-agents``; ``function``; or None."""
    if (name := _class_of(agent)) is not None:
        return _CLASSES[name].replace("_", "-")
    return "function" if callable(agent) and not inspect.isclass(agent) else None


def is_agent(value: Any) -> bool:
    """Whether a value is surely an agent of a framework."""
    return _class_of(value) not in (None, *_RUNNABLES)


def driver_of(agent: Any, name: str, hooks: Hooks = NO_HOOKS) -> Driver:
    """The driver of an agent's framework. Raises ``ValueError``."""
    if (framework := framework_of(agent)) is None:
        kind = type(agent)
        shown = repr(agent) if kind.__module__ == "builtins" else f"a {kind.__qualname__} of {kind.__module__}"
        frameworks = ", ".join(sorted({module.replace("_", "-") for module in _CLASSES.values()}))
        raise ValueError(
            f"agent {name!r} is {shown:.200}: give an agent of a framework ({frameworks}), a function of the task, "
            "or a LitAgent of Agent Lightning"
        )
    module = import_module(f"{__name__}.{framework.replace('-', '_')}")
    driver: Driver = module.FrameworkDriver(agent, name, hooks)
    return driver

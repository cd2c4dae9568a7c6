"""Any agent object as a backend: a LangGraph graph, an agent of the OpenAI Agents SDK, or a function of the task.

The object runs as it is: its own models, clients, prompts, tools, turn limits and output types. It gets the task by
its fields, and never a gold answer. :mod:`groundwire.adapters.unmodified.redirection` redirects its LLM calls.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from groundwire.adapters._failures import agent_failure, causes
from groundwire.adapters._types import (
    AgentError,
    Answer,
    Backend,
    BackendError,
    Endpoint,
    EndpointError,
    PromptTooLongError,
    Question,
    ToolError,
)
from groundwire.adapters.unmodified.answers import judged_answer
from groundwire.adapters.unmodified.environment import set_environment
from groundwire.adapters.unmodified.lit_agent import LitAgentBackend, is_lit_agent
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.loading import load_object
from groundwire.tools.sql import DatabaseError

if TYPE_CHECKING:
    from groundwire.adapters.unmodified.redirection import AttemptCalls

__all__ = ["FRAMEWORKS", "AgentTask", "UnmodifiedAgent", "agent_backend", "agent_task"]

FRAMEWORKS = ("custom", "langgraph", "openai-agents")
"""The backends that run an agent of the user's; ``custom`` finds the framework from the object."""
_Framework = Literal["langgraph", "openai-agents", "function"]


class AgentTask(dict[str, Any]):
    """The part of a task that an agent may see: ``id``, ``question``, ``database`` and the task's other columns.

    Columns can be read as items and as attributes.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the task has no {name!r}; it has {', '.join(self)}") from None


def agent_task(question: Question) -> AgentTask:
    """What an agent gets of its task."""
    own = {"id": question.id, "question": question.text, "database": question.database}
    return AgentTask({**question.columns, **own})


def agent_backend(
    agent: Any,
    *,
    framework: str = "custom",
    agent_input: str | Callable[[AgentTask], Any] | None = None,
    agent_output: str | Callable[[Any], str] | None = None,
    train_model: str | None = None,
) -> Backend:
    """The backend that runs ``agent``, an object or its name (``module:name`` or ``path/to/file.py:name``).

    ``framework`` is one of :data:`FRAMEWORKS`. ``agent_input`` makes the agent's input from the task, ``agent_output``
    the answer from its result; without them the fields decide. ``train_model`` is a regular expression: calls to other
    models go to their own provider, and are not trained. A function of ``(question, endpoint)`` calls the policy itself
    (:class:`groundwire.adapters.custom.CustomBackend`). A ``LitAgent`` of Agent Lightning gets the whole task and
    returns its reward. Raises ``ValueError`` if ``agent`` is no agent.
    """
    name = agent if isinstance(agent, str) else getattr(agent, "name", None) or getattr(agent, "__name__", repr(agent))
    set_environment()
    found = (
        load_object(agent, option="agent", kinds=(_is_agent_object, _is_agent_function))
        if isinstance(agent, str)
        else agent
    )
    if isinstance(found, Backend):
        return found
    options = {"agent_input": agent_input, "agent_output": agent_output, "train_model": train_model}
    given = [option for option, value in options.items() if value is not None]
    if is_lit_agent(found):
        _reject(given, f"agent {name!r} is a LitAgent, which gets the whole task and returns its reward")
        return LitAgentBackend(found)
    kind = _framework(found)
    if kind is None:
        raise ValueError(
            f"agent {name!r} is {found!r:.200}: give a compiled LangGraph graph, an Agent of the OpenAI Agents SDK, a "
            "function of the task, or a LitAgent of Agent Lightning"
        )
    if framework not in ("custom", kind):
        raise ValueError(f"agent {name!r} is no agent of {framework} but of {kind}: leave --backend out")
    if kind == "function" and _required_parameters(found) == 2:
        from groundwire.adapters.custom import CustomBackend

        _reject(given, f"agent {name!r} is a function of (question, endpoint), which makes its own calls")
        return CustomBackend(agent=found)
    if kind == "function" and _required_parameters(found) > 1:
        raise ValueError(f"agent {name!r} takes {inspect.signature(found)}; it is called with the task")
    return UnmodifiedAgent(
        found,
        name=str(name),
        framework=kind,
        make_input=load_object(agent_input, option="agent_input") if isinstance(agent_input, str) else agent_input,
        read_output=load_object(agent_output, option="agent_output") if isinstance(agent_output, str) else agent_output,
        train_model=None if train_model is None else re.compile(train_model),
    )


def _reject(options: Sequence[str], reason: str) -> None:
    if options:
        raise ValueError(f"{reason}: leave out {' and '.join(options)}")


class UnmodifiedAgent:
    """Runs ``agent`` once for each question; see :func:`agent_backend`."""

    agents: tuple[str, ...] = ()

    def __init__(
        self,
        agent: Any,
        *,
        name: str,
        framework: _Framework,
        make_input: Callable[[AgentTask], Any] | None = None,
        read_output: Callable[[Any], str] | None = None,
        train_model: re.Pattern[str] | None = None,
    ) -> None:
        self._agent, self._name, self.framework = agent, name, framework
        self._make_input, self._read_output, self._train_model = make_input, read_output, train_model
        self._default_input, self._run = _DRIVERS[framework]
        self.threaded = framework == "function" and not _is_async(agent)
        """Whether each rollout runs in a thread, which cannot be interrupted."""
        self.calls_tools = train_model is None and _has_tools(agent, framework)

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question. Raises a :class:`adapters.BackendError`."""
        from groundwire.adapters.unmodified.redirection import AttemptCalls, redirected

        calls = AttemptCalls(endpoint=endpoint, train_model=self._train_model)
        task = agent_task(question)
        with redirected(calls):
            try:
                given = (self._make_input or partial(self._default_input, self._agent))(task)
                result = await self._run(self._agent, given, task)
                text = self._answer(result, given, question, calls)
            except BackendError:
                raise
            except Exception as error:
                failure = _typed(error, calls)
                failure.steps = calls.conversation.steps()
                raise failure from error
        if not calls.traced:
            raise AgentError(_no_call(self._name, calls))
        return Answer(text=text, steps=calls.conversation.steps())

    def _answer(self, result: Any, given: Any, question: Question, calls: AttemptCalls) -> str:
        if self._read_output is None:
            known = given if isinstance(given, Mapping) else {}
            return judged_answer(result, question.form, calls.conversation, known)
        text = self._read_output(result)
        if not isinstance(text, str):
            raise AgentError(f"agent_output returned {text!r:.200}: it returns the answer as str")
        return text


def _framework(agent: Any) -> _Framework | None:
    """The framework that an object belongs to, by its classes, so that no framework need be imported."""
    classes = {f"{each.__module__}.{each.__qualname__}" for each in type(agent).__mro__}
    if {"langgraph.pregel.main.Pregel", "langchain_core.runnables.base.Runnable"} & classes:
        return "langgraph"
    if "agents.agent.AgentBase" in classes:
        return "openai-agents"
    return "function" if callable(agent) and not inspect.isclass(agent) else None


def _has_tools(agent: Any, framework: _Framework) -> bool:
    """Whether a model is surely asked with tools."""
    if framework == "openai-agents":
        return bool(agent.tools or agent.handoffs or agent.mcp_servers)
    nodes = getattr(agent, "nodes", {}).values() if framework == "langgraph" else ()
    return any(type(getattr(node, "bound", None)).__name__ == "ToolNode" for node in nodes)


def _is_agent_object(value: Any) -> bool:
    """Whether a value is surely an agent. LangChain's models, prompts and tools could be run, but are none."""
    if is_lit_agent(value):
        return value.__module__ != "agentlightning.litagent.litagent"
    return _framework(value) == "openai-agents" or any(each.__name__ == "Pregel" for each in type(value).__mro__)


def _is_agent_function(value: Any) -> bool:
    return _framework(value) == "function" and _required_parameters(value) in (1, 2)


def _required_parameters(function: Any) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C: its signature is unknown
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.default is each.empty and each.kind in kinds for each in parameters)


def _graph_input(graph: Any, task: AgentTask) -> Any:
    """The fields that the graph's input schema names; ``messages`` holds the question."""
    schema = getattr(getattr(graph, "builder", None), "input_schema", None)
    names = set(getattr(schema, "__annotations__", {}))
    for base in getattr(schema, "__mro__", ()):
        names |= set(getattr(base, "__annotations__", {}))
    if not names:
        return task
    given = {name: task[name] for name in task if name in names}
    if "messages" in names and "messages" not in given:
        given["messages"] = [{"role": "user", "content": task["question"]}]
    if not given:
        raise AgentError(
            f"the graph's input has the fields {', '.join(sorted(names))}, and the task has {', '.join(task)}: make "
            "the input with --agent-input module:function"
        )
    return given


def _sdk_input(agent: Any, task: AgentTask) -> Any:
    return task["question"]


def _function_input(function: Any, task: AgentTask) -> Any:
    return task


async def _run_graph(graph: Any, given: Any, task: AgentTask) -> Any:
    return await graph.ainvoke(given)


async def _run_sdk_agent(agent: Any, given: Any, task: AgentTask) -> Any:
    from agents import RunConfig, Runner

    # Traces would be sent to OpenAI.
    return await Runner.run(agent, given, context=task, run_config=RunConfig(tracing_disabled=True))


async def _run_function(function: Any, given: Any, task: AgentTask) -> Any:
    if _is_async(function):
        result = function(given)
    else:  # it may block, so it has a thread of its own
        result = await asyncio.wrap_future(in_thread(lambda: _call(function, given), name=f"agent {task['id']}"))
    while inspect.isawaitable(result):
        result = await result
    return result


_DRIVERS: dict[_Framework, tuple[Callable[[Any, AgentTask], Any], Callable[[Any, Any, AgentTask], Awaitable[Any]]]] = {
    "langgraph": (_graph_input, _run_graph),
    "openai-agents": (_sdk_input, _run_sdk_agent),
    "function": (_function_input, _run_function),
}
"""For each framework: the input that it makes of a task, and a run of an agent."""


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _call(function: Any, given: Any) -> Any:
    try:
        return function(given)
    except StopIteration as error:  # a future cannot hold it
        raise AgentError(f"the agent raised {error!r}") from error


def _typed(error: Exception, calls: AttemptCalls) -> BackendError:
    """The failure of a rollout whose agent raised ``error``."""
    for each in causes(error):
        if isinstance(each, BackendError):
            return each
        if isinstance(each, DatabaseError):
            return ToolError(str(each))
    if calls.error is not None:
        status, code, message = calls.error
        kind = PromptTooLongError if code == "context_length_exceeded" else EndpointError
        outcome = f"answered {status}: {message}" if status else f"gave no answer: {message}"
        return kind(f"the model's endpoint {outcome}", status=status)
    failure = agent_failure(error)
    if calls.traced:
        return failure
    elsewhere = calls.models or calls.hosts
    return type(failure)(
        f"{failure}; {_no_call('the agent', calls)}" if elsewhere else f"{failure} (before any LLM call)"
    )


def _no_call(name: str, calls: AttemptCalls) -> str:
    message = f"{name} made no LLM call that can be traced"
    if calls.models:
        return f"{message}: none of its models ({', '.join(calls.models)}) matches --train-model"
    if calls.hosts:
        return (
            f"{message}; it called {', '.join(calls.hosts)}: the policy serves OpenAI's chat completions and "
            "Responses, and Anthropic's Messages, through httpx, aiohttp or requests"
        )
    return f"{message}, and no HTTP request at all: a call in another process needs --backend command"

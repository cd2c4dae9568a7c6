"""How the agents of each framework get a task and are run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, get_type_hints
from uuid import uuid4

from groundwire.adapters._types import AgentSetupError, Endpoint, Question
from groundwire.adapters.agents.answers import field_names
from groundwire.tools.binding import Binder, BindingError, Value, is_async
from groundwire.tools.daemon_threads import in_thread

TEXT_NAMES = (
    *("prompt", "query", "text", "input", "message", "user_message", "user_input", "user_query", "user_prompt"),
    *("problem", "instruction", "user_question", "question_text", "nl_question"),
)
_TEXT = Value("text", "the question", "text", ("question",), TEXT_NAMES)
_QUESTION = Value("question", "the Question", "object", (), annotation="Question")
_OTHERS = (
    Value("task", "the task", "mapping", ("task",), ("row", "item", "example", "sample", "record", "inputs", "state")),
    Value("database", "the database", "text", ("database",), ("db_path", "db", "database_path", "db_file")),
    Value("messages", "a message with the question", "list", (), ("messages",)),
    Value("endpoint", "the endpoint", "object", ("endpoint",), annotation="Endpoint"),
)
_VALUES = (_TEXT, _QUESTION, *_OTHERS)
_WITH_ENDPOINT = (replace(_QUESTION, names=_TEXT.names), replace(_TEXT, names=()), *_OTHERS)
"""For a function of an endpoint, which is written for groundwire: its ``question`` is a :class:`adapters.Question`."""

_ASKED = ("messages", *TEXT_NAMES)
"""The fields of a graph that get the question, if it has none of that name: the first that it has."""
_SHOWN = 1000  # characters of an input


class AgentTask(dict[str, Any]):
    """The part of a task that an agent may see: ``id``, ``question``, ``database`` and the task's other columns.

    Columns can be read as items and as attributes.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(self._lacks(name))

    def __missing__(self, name: str) -> Any:
        raise KeyError(self._lacks(name))

    def _lacks(self, name: str) -> str:
        return f"the agent sees no {name!r} but {', '.join(self)}; agent_columns names what it needs of the others"


def agent_task(question: Question) -> AgentTask:
    """What an agent gets of its task."""
    own = {"id": question.id, "question": question.text, "database": question.database}
    return AgentTask({**question.columns, **own})


def framework_of(agent: Any) -> Literal["langgraph", "openai-agents", "function"] | None:
    """The framework that an object belongs to, by its classes, so that no framework need be imported."""
    classes = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(agent).__mro__}
    if {"langgraph.pregel.main.Pregel", "langchain_core.runnables.base.Runnable"} & classes:
        return "langgraph"
    if "agents.agent.AgentBase" in classes:
        return "openai-agents"
    return "function" if callable(agent) and not inspect.isclass(agent) else None


class _Driver:
    """Runs ``agent``.

    ``describe`` says how it is called for a task. ``arguments`` makes the arguments of a call from the task, or from
    what ``agent_input`` made of it; both raise ``ValueError`` if it cannot be called. ``show`` writes a call in one
    line. ``result_types`` are the declared classes of its results.
    """

    threaded = False
    """Whether each run has a thread."""
    own_calls = False
    """Whether the agent sends its calls to the endpoint that it gets."""

    def __init__(self, agent: Any, name: str) -> None:
        self.agent, self.name = agent, name


class _Graph(_Driver):
    def describe(self, task: AgentTask) -> str:
        return f"{self.name}.ainvoke({', '.join(self._input(task))})"

    def arguments(self, source: Any, question: Question, endpoint: Endpoint) -> Any:
        return self._input(source) if isinstance(source, AgentTask) else source

    def _input(self, task: AgentTask) -> Mapping[str, Any]:
        """The fields of the input schema that the task has. ``messages`` has the question if no other field has it."""
        names = field_names(getattr(getattr(self.agent, "builder", None), "input_schema", None))
        fields = {name: task[name] for name in names if name in task} if names else task
        asked = next((name for name in _ASKED if name in names), None)
        if asked is not None and not fields.keys() & {"question", "messages"}:
            question = task["question"]
            fields = {**fields, asked: [{"role": "user", "content": question}] if asked == "messages" else question}
        if not fields:
            raise ValueError(
                f"the graph's input has the fields {', '.join(sorted(names))}, and the task has {', '.join(task)}: "
                "make the input with --agent-input module:function"
            )
        return fields

    def show(self, arguments: Any) -> str:
        return f"{self.name}.ainvoke({arguments!r:.{_SHOWN}})"

    async def run(self, arguments: Any, task: AgentTask) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}  # of this rollout alone, for a graph with a checkpointer
        result = await self.agent.ainvoke(arguments, config)
        stops = [node for when in ("before", "after") for node in getattr(self.agent, f"interrupt_{when}_nodes", ())]
        if stops and hasattr(getattr(self.agent, "checkpointer", None), "aget_tuple"):
            stops = (await self.agent.aget_state(config)).next  # those at which it stands
        if stops:
            raise AgentSetupError(
                f"the graph was interrupted at {', '.join(stops)}, and nobody continues it in a rollout: compile "
                "it without interrupt_before and interrupt_after"
            )
        return result

    def result_types(self) -> Iterator[Any]:
        yield getattr(getattr(self.agent, "builder", None), "output_schema", None)


class _SdkAgent(_Driver):
    def describe(self, task: AgentTask) -> str:
        if any(getattr(server, "session", self) is None for server in getattr(self.agent, "mcp_servers", ())):
            raise ValueError(
                f"agent {self.name!r} has mcp_servers that are not connected: give the name of a function without "
                "parameters, an asynccontextmanager that connects them with `async with` and yields the agent"
            )
        return f"Runner.run({self.name}, the question, context=the task)"

    def arguments(self, source: Any, question: Question, endpoint: Endpoint) -> Any:
        return source["question"] if isinstance(source, AgentTask) else source

    def show(self, arguments: Any) -> str:
        return f"Runner.run({self.name}, {arguments!r:.{_SHOWN}})"

    async def run(self, arguments: Any, task: AgentTask) -> Any:
        from agents import RunConfig, Runner

        # Traces would be sent to OpenAI.
        return await Runner.run(self.agent, arguments, context=task, run_config=RunConfig(tracing_disabled=True))

    def result_types(self) -> Iterator[Any]:
        for agent in (self.agent, *getattr(self.agent, "handoffs", ())):
            kind = getattr(agent, "output_type", None)
            yield getattr(kind, "output_type", kind)  # an AgentOutputSchema, or the class itself


class _Function(_Driver):
    def __init__(self, function: Any, name: str) -> None:
        super().__init__(function, name)
        self._binder, self.own_calls = agent_binder(function, name)
        self.threaded = not is_async(function)

    def describe(self, task: AgentTask) -> str:
        return f"{self.name}{self._binder.describe(task)}"

    def arguments(self, source: Any, question: Question, endpoint: Endpoint) -> inspect.BoundArguments:
        if not isinstance(source, Mapping):
            return self._binder.signature.bind(source)
        task = source if isinstance(source, AgentTask) else AgentTask(source)
        text = task.get("question", question.text)
        values = {
            "task": task,
            "text": text,
            "question": question,
            "messages": [{"role": "user", "content": text}],
            "endpoint": endpoint,
            "database": task.get("database", question.database),
        }
        return self._binder.arguments(values, task)

    def show(self, arguments: inspect.BoundArguments) -> str:
        pairs = [f"{name}={value!r:.{_SHOWN}}" for name, value in arguments.arguments.items()]
        return f"{self.name}({', '.join(pairs)})"

    async def run(self, arguments: inspect.BoundArguments, task: AgentTask) -> Any:
        """The result. What the function yields is read to the end."""
        call = partial(self.agent, *arguments.args, **arguments.kwargs)

        def read(work: Callable[[], Any]) -> Any:
            result = work()
            return _whole(list(result)) if isinstance(result, Iterator) else result

        def in_own_thread(work: Callable[[], Any]) -> Awaitable[Any]:
            return asyncio.wrap_future(in_thread(lambda: read(work), name=f"agent {task['id']}"))

        result = await in_own_thread(call) if self.threaded else call()
        while inspect.isawaitable(result):
            result = await result
        if isinstance(result, AsyncIterator):
            return _whole([item async for item in result])
        return await in_own_thread(lambda: result) if isinstance(result, Iterator) else result

    def result_types(self) -> Iterator[Any]:
        try:
            yield get_type_hints(self.agent).get("return")
        except Exception:  # a name that only a type checker knows
            return


Driver: TypeAlias = _Graph | _SdkAgent | _Function
_DRIVERS: dict[str, type[Driver]] = {"langgraph": _Graph, "openai-agents": _SdkAgent, "function": _Function}


def driver_of(agent: Any, name: str) -> Driver:
    """The driver of an agent's framework. Raises ``ValueError``."""
    if (framework := framework_of(agent)) is not None:
        return _DRIVERS[framework](agent, name)
    raise ValueError(
        f"agent {name!r} is {agent!r:.200}: give a compiled LangGraph graph, an Agent of the OpenAI Agents SDK, a "
        "function of the task, or a LitAgent of Agent Lightning"
    )


def agent_binder(function: Callable[..., Any], name: str) -> tuple[Binder, bool]:
    """What the parameters of an agent get, and whether it gets an endpoint and so makes its own calls.

    Raises ``ValueError`` if they fit no task.
    """
    needs = ("text", "task", "question", "messages")
    example = "def agent(question: str), def agent(task), or def agent(question, endpoint)"
    binder = Binder(function, f"agent {name!r}", _VALUES, ("task",), needs, example, by_kind=True)
    if own_calls := binder.means("endpoint"):
        binder = replace(binder, values=_WITH_ENDPOINT)
    binder.check()
    return binder, own_calls


def takes_a_task(function: Any) -> bool:
    """Whether one of its parameters, which all have defaults, gets a task, or it takes any (``**task``)."""
    try:
        agent_binder(function, "")[0].bind(())
    except BindingError:
        return False
    return True


def _whole(items: list[Any]) -> Any:
    """Pieces of text as one text; of anything else, such as the updates of a state, the last."""
    texts = [_piece(item) for item in items]
    if None in texts:
        return next((item for item in reversed(items) if item is not None), "")
    return "".join(text for text in texts if text)


def _piece(item: Any) -> str | None:
    """The text of a piece of a stream: of a string, or of a chunk of a message; None for anything else."""
    if isinstance(item, str | bytes):
        return item if isinstance(item, str) else item.decode("utf-8", "replace")
    if choices := getattr(item, "choices", None):
        item = getattr(choices[0], "delta", None)
    text = getattr(item, "content", None) if "Chunk" in type(item).__name__ or choices else None
    return text if isinstance(text, str) else "" if choices else None

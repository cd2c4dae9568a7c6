"""Functions of the task, plain or asynchronous, and generators."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_type_hints

from groundwire.adapters._types import Endpoint, Question
from groundwire.adapters.agents.drivers import NO_HOOKS, SHOWN, TEXT_NAMES, AgentTask, Driver, Hooks
from groundwire.tools.binding import Binder, BindingError, Value, is_async

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


class FrameworkDriver(Driver):
    """A function."""

    def __init__(self, agent: Any, name: str, hooks: Hooks = NO_HOOKS) -> None:
        super().__init__(agent, name, hooks)
        if hooks:
            raise ValueError(f"agent {name!r} is a function, which makes its own context: leave out {', '.join(hooks)}")
        self._binder, self.own_calls = agent_binder(agent, name)
        self.threaded = not is_async(agent)

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
        pairs = [f"{name}={value!r:.{SHOWN}}" for name, value in arguments.arguments.items()]
        return f"{self.name}({', '.join(pairs)})"

    async def run(self, agent: Any, arguments: inspect.BoundArguments, task: AgentTask) -> Any:
        """The result. What the function yields is read to the end."""
        call = partial(agent, *arguments.args, **arguments.kwargs)

        def read(work: Callable[[], Any]) -> Any:
            result = work()
            return _whole(list(result)) if isinstance(result, Iterator) else result

        result = await self.in_thread(partial(read, call), task) if self.threaded else call()
        while inspect.isawaitable(result):
            result = await result
        if isinstance(result, AsyncIterator):
            return _whole([item async for item in result])
        return await self.in_thread(partial(read, lambda: result), task) if isinstance(result, Iterator) else result

    def result_types(self) -> Iterator[Any]:
        try:
            yield get_type_hints(self.agent).get("return")
        except Exception:  # a name that only a type checker knows
            return


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

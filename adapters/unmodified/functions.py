"""A function as an agent: what its parameters get, the end of what it yields, and functions that make the agent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from contextvars import Context
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from groundwire.tools.binding import Binder, BindingError, Value, is_async
from groundwire.tools.daemon_threads import in_thread

__all__ = [
    "TEXT_NAMES",
    "AgentInTheMaking",
    "agent_binder",
    "checked_options",
    "make_agent",
    "options_of",
    "run_function",
    "takes_a_task",
]

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


def options_of(function: Callable[..., Any], without: Collection[str] = ()) -> list[str]:
    """The parameters of a function or a class that are its options, without those of the names ``without``."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind in kinds and each.name not in without]


def checked_options(
    function: Callable[..., Any], name: str, options: Mapping[str, Any], known: Sequence[str]
) -> dict[str, Any]:
    """The options of the agent ``name`` as the parameters of the function that makes it declare them.

    Raises ``ValueError`` for one that is not ``known``, and for a value of another type.
    """
    try:
        hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except Exception:  # a name that only a type checker knows
        hints = {}
    checked = {}
    for option, value in options.items():
        if option not in known:
            has = ", ".join(known) or "none"
            raise ValueError(f"agent {name!r} has no option {option!r:.60}; it has {has}")
        try:
            checked[option] = TypeAdapter(hints.get(option, Any)).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise ValueError(f"the option {option} of agent {name!r} is {value!r:.100}; it must be {reason}") from None
    return checked


def make_agent(function: Any, name: str, options: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """What a function without a task returns, which is the agent; anything else is returned as it is.

    Such a function takes nothing but ``options``, which have defaults, or a ``config`` as in langgraph.json, and is run
    once: at once, or an asynchronous one in the first rollout (:class:`AgentInTheMaking`). Raises ``ValueError``.
    """
    try:
        parameters = inspect.signature(function).parameters.values() if callable(function) else None
    except (TypeError, ValueError):  # written in C
        parameters = None
    if parameters is None or any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return _without_options(function, name, options)
    required = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    if required not in ([], ["config"]) or (not required and takes_a_task(function)):
        return _without_options(function, name, options)
    checked = checked_options(function, name, options, options_of(function, required))
    make = partial(function, *[{"configurable": {}}] * len(required), **checked)
    if is_async(function) and not inspect.isclass(function):
        return AgentInTheMaking(make)
    try:
        made = make()
    except Exception as error:
        raise ValueError(
            f"agent {name!r} takes no task, so it was run to make the agent: it raised {error!r}"
        ) from error
    managed = isinstance(made, AbstractAsyncContextManager | AbstractContextManager)
    if inspect.isawaitable(made):
        return AgentInTheMaking(lambda: made)
    return AgentInTheMaking(make) if managed else made


def _without_options(agent: Any, name: str, options: Mapping[str, Any]) -> Any:
    if options:
        raise ValueError(
            f"agent {name!r} is no function that makes an agent, so it has no options: leave out {', '.join(options)}"
        )
    return agent


def takes_a_task(function: Any) -> bool:
    """Whether one of its parameters, which all have defaults, gets a task, or it takes any (``**task``)."""
    try:
        agent_binder(function, "")[0].bind(())
    except BindingError:
        return False
    return True


async def run_function(call: Callable[[], Any], *, threaded: bool, name: str) -> Any:
    """The result of an agent's function. What it yields is read to the end; if ``threaded``, in a thread."""
    result = await asyncio.wrap_future(in_thread(lambda: _drained(call()), name=name)) if threaded else call()
    while inspect.isawaitable(result):
        result = await result
    if isinstance(result, AsyncIterator):
        return _whole([item async for item in result])
    if isinstance(result, Iterator):
        return await asyncio.wrap_future(in_thread(lambda: _drained(result), name=name))
    return result


def _drained(result: Any) -> Any:
    return _whole(list(result)) if isinstance(result, Iterator) else result


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
    found = getattr(item, "content", None) if "Chunk" in type(item).__name__ or choices else None
    return found if isinstance(found, str) else "" if choices else None


class AgentInTheMaking:
    """The agent that ``make`` returns, awaits or enters: once, on the event loop of the rollouts, in a task of its own,
    which also leaves what it has entered.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: asyncio.Future[Any] | None = None

    async def get(self) -> Any:
        """The agent. Raises what ``make`` raises."""
        if self._made is None:
            self._made, self._ended = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._task = Context().run(asyncio.create_task, self._keep(self._made))  # it is of no single rollout
        return await asyncio.shield(self._made)

    async def _keep(self, agent: asyncio.Future[Any]) -> None:
        async with AsyncExitStack() as entered:
            try:
                made = self._make()
                made = await made if inspect.isawaitable(made) else made
                if isinstance(made, AbstractAsyncContextManager):
                    made = await entered.enter_async_context(made)
                elif isinstance(made, AbstractContextManager):
                    made = entered.enter_context(made)
                agent.set_result(made)
            except Exception as error:
                agent.set_exception(error)
            await self._ended.wait()

    async def close(self) -> None:
        """Leave what was entered."""
        if self._made is not None:
            self._ended.set()
            await self._task
            self._made = None

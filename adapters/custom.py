"""Any function as a backend: ``--backend custom --agent my_module:my_function``.

An ``async def`` runs on the event loop that all rollouts share, so it must not block. A plain ``def`` may (with a
synchronous client, ``graph.invoke``): each rollout of it has a thread of its own. A thread cannot be interrupted, so
after the rollout's time limit it goes on until it returns, and what it returns is dropped.

The function is given a :class:`adapters.Question` and an :class:`adapters.Endpoint` and returns the answer, as text or
as an :class:`adapters.Answer` with a trace. Whatever makes its calls with the endpoint's base URL is traced; calls that
send ``endpoint.agent_headers(name)`` are traced under that name. Errors of the ``openai`` package get their type, and a
function that wants to say which boundary failed raises a :class:`adapters.BackendError` itself.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from groundwire.adapters._openai_client import typed_failures
from groundwire.adapters._types import AgentError, Answer, Endpoint, Question
from groundwire.tools.daemon_threads import in_thread

__all__ = ["CustomBackend"]

Function: TypeAlias = "Callable[[Question, Endpoint], str | Answer | Awaitable[str | Answer]]"


class CustomBackend:
    """``agent`` is the function, or ``module:function``. Raises ``ValueError`` where it is neither.

    ``agents`` are the names in the function's own attribute ``agents``, if it has one; ``threaded`` says whether it
    runs in threads.
    """

    def __init__(self, *, agent: str | Function) -> None:
        self._function = _find(agent) if isinstance(agent, str) else agent
        self._name = agent if isinstance(agent, str) else getattr(agent, "__qualname__", repr(agent))
        _check(self._function, self._name)
        self.threaded = not _is_async(self._function)
        self.agents: tuple[str, ...] = tuple(getattr(self._function, "agents", ()))

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question. Raises a :class:`adapters.BackendError`."""
        with typed_failures(endpoint):
            answer: Any = self._in_thread(question, endpoint) if self.threaded else self._function(question, endpoint)
            while inspect.isawaitable(answer):  # a plain def may return one: what decorates an async def often does
                answer = await answer
        if isinstance(answer, str):
            return Answer(text=answer)
        if not isinstance(answer, Answer):
            raise AgentError(f"{self._name} returned {answer!r}: an agent returns its answer as str or adapters.Answer")
        return answer

    async def _in_thread(self, question: Question, endpoint: Endpoint) -> Any:
        def called() -> Any:
            with typed_failures(endpoint):  # here, since no future can hold a StopIteration
                return self._function(question, endpoint)

        return await asyncio.wrap_future(in_thread(called, name=f"agent {question.id}"))


def _find(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"agent is {name!r}; write it as module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever it is: the module is somebody else's code
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            why = f"there is no module {missing!r} in this folder or on PYTHONPATH"
        else:
            why = f"{module_name} cannot be imported: {type(error).__name__}: {error}"
        raise ValueError(f"agent {name!r}: {why}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        there = [
            each
            for each, value in vars(module).items()
            if getattr(value, "__module__", None) == module_name and not each.startswith("_") and not _problem(value)
        ]
        raise ValueError(
            f"agent {name!r}: {module_name} has no {attribute!r}; its functions of (question, endpoint): "
            f"{', '.join(there) or 'none'}"
        ) from None


def _check(function: Any, name: str) -> None:
    if (problem := _problem(function)) is not None:
        raise ValueError(f"agent {name!r} {problem}")


def _problem(function: Any) -> str | None:
    """Why it cannot be an agent; None where it can."""
    if not callable(function) or inspect.isclass(function):
        return f"is no function but {function!r}; write it as: def agent(question, endpoint), or async def"
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return f"takes {inspect.signature(function)}; it is called with (question, endpoint)"
    except ValueError:  # written in C: what it takes will show
        return None
    return None


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

"""Any async function as a backend: ``--backend custom --agent my_module:my_function``.

The function is given a :class:`adapters.Question` and an :class:`adapters.Endpoint` and returns the answer, as text or
as an :class:`adapters.Answer` with a trace. Whatever makes its calls with the endpoint's base URL is traced; calls that
send ``endpoint.agent_headers(name)`` are traced under that name. Errors of the ``openai`` package get their type, and a
function that wants to say which boundary failed raises a :class:`adapters.BackendError` itself.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from adapters._client import typed_failures
from adapters._contract import AgentError, Answer, Endpoint, Question

__all__ = ["CustomBackend"]

Function = Callable[[Question, Endpoint], Awaitable["str | Answer"]]


class CustomBackend:
    """``agent`` is the function, or ``module:function``. Raises ``ValueError`` where it is neither.

    ``agents`` are the names in the function's own attribute ``agents``, if it has one.
    """

    def __init__(self, *, agent: str | Function) -> None:
        self._function = _find(agent) if isinstance(agent, str) else agent
        self._name = agent if isinstance(agent, str) else getattr(agent, "__qualname__", repr(agent))
        _check(self._function, self._name)
        self.agents: tuple[str, ...] = tuple(getattr(self._function, "agents", ()))

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question. Raises a :class:`adapters.BackendError`."""
        with typed_failures(endpoint):
            answer = await self._function(question, endpoint)
        if isinstance(answer, str):
            return Answer(text=answer)
        if not isinstance(answer, Answer):
            raise AgentError(f"{self._name} returned {answer!r}: an agent returns its answer as str or adapters.Answer")
        return answer


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
        there = [each for each, value in vars(module).items() if inspect.iscoroutinefunction(value)]
        raise ValueError(
            f"agent {name!r}: {module_name} has no {attribute!r}; its async functions: {', '.join(there) or 'none'}"
        ) from None


def _check(function: Any, name: str) -> None:
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))):  # noqa: B004
        raise ValueError(f"agent {name!r} is no async function; write it as: async def agent(question, endpoint)")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"agent {name!r} takes {inspect.signature(function)}; it is called with (question, endpoint)"
        ) from error

"""Any function as a backend: ``--backend custom --agent my_module:my_function``.

An ``async def`` runs on the event loop of all rollouts, so it must not block. A plain ``def`` may block (a synchronous
client, ``graph.invoke``): each of its rollouts has its own thread. A thread cannot be interrupted, so after the
rollout's time limit it runs to its end, and its result is dropped.

The function gets a :class:`adapters.Question` and an :class:`adapters.Endpoint` and returns the answer, as text or as
an :class:`adapters.Answer` with steps. All calls to the endpoint's base URL are traced, under the name in
``endpoint.agent_headers(name)`` if they send it. Errors of the ``openai`` package get their type; for other causes the
function raises a :class:`adapters.BackendError` itself.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from groundwire.adapters._failures import typed_failures
from groundwire.adapters._types import AgentError, Answer, Endpoint, Question
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.loading import load_object
from groundwire.tools.types import AnswerForm

__all__ = ["CustomBackend"]

Function: TypeAlias = "Callable[[Question, Endpoint], str | Answer | Awaitable[str | Answer]]"


class CustomBackend:
    """``agent`` is the function, or ``module:function``. Raises ``ValueError`` for anything else.

    ``agents`` and ``prompts`` are the function's attributes of these names, if it has them. ``threaded`` is True for a
    plain ``def``.
    """

    def __init__(self, *, agent: str | Function) -> None:
        self._function = load_object(agent, option="agent") if isinstance(agent, str) else agent
        self._name = agent if isinstance(agent, str) else getattr(agent, "__qualname__", repr(agent))
        if (problem := _problem(self._function)) is not None:
            raise ValueError(f"agent {self._name!r} {problem}")
        self.threaded = not _is_async(self._function)
        self.agents: tuple[str, ...] = tuple(getattr(self._function, "agents", ()))
        self._prompts: dict[str, str] = dict(getattr(self._function, "prompts", {}))

    def default_prompts(self, form: AnswerForm) -> dict[str, str]:
        """The named prompts that the function has as its attribute ``prompts``; it reads ``endpoint.prompts``."""
        return dict(self._prompts)

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question. Raises a :class:`adapters.BackendError`."""
        with typed_failures(endpoint):
            answer: Any = self._in_thread(question, endpoint) if self.threaded else self._function(question, endpoint)
            while inspect.isawaitable(answer):  # a plain def may return one, e.g. the wrapper of a decorator
                answer = await answer
        if isinstance(answer, str):
            return Answer(text=answer)
        if not isinstance(answer, Answer):
            raise AgentError(f"{self._name} returned {answer!r}: an agent returns its answer as str or adapters.Answer")
        return answer

    async def _in_thread(self, question: Question, endpoint: Endpoint) -> Any:
        def call() -> Any:
            with typed_failures(endpoint):  # here, because a future cannot hold a StopIteration
                return self._function(question, endpoint)

        return await asyncio.wrap_future(in_thread(call, name=f"agent {question.id}"))


def _problem(function: Any) -> str | None:
    """Why ``function`` cannot be an agent; None if it can."""
    if not callable(function) or inspect.isclass(function):
        return f"is no function but {function!r}; write it as: def agent(question, endpoint), or async def"
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return f"takes {inspect.signature(function)}; it is called with (question, endpoint)"
    except ValueError:  # written in C: its signature is unknown
        return None
    return None


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

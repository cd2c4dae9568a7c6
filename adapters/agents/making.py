"""Functions that make the agent: their options, and the agents that they have made."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from contextvars import Context
from functools import partial
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from groundwire.adapters.agents.drivers import Driver, driver_of, takes_a_task
from groundwire.tools.binding import is_async

OF_THE_RUN = ("form", "prompts")
"""Parameters that get the form of the answers, ``sql`` or ``prose``, and the named prompts of the run."""
_KEPT = 8
"""Agents that are kept although no rollout runs them: each set of prompts has its own, with its connections."""


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


def maker_of(function: Any, name: str, options: Mapping[str, Any]) -> Maker | None:
    """The maker of a function that takes nothing but ``options``, which have defaults, or a ``config`` as in
    langgraph.json; None for anything else.

    Raises ``ValueError`` for options that it does not have.
    """
    try:
        parameters = [*inspect.signature(function).parameters.values()] if callable(function) else None
    except (TypeError, ValueError):  # written in C
        parameters = None
    required = [
        each.name
        for each in parameters or ()
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if (
        parameters is None
        or any(each.kind is each.VAR_POSITIONAL for each in parameters)
        or required not in ([], ["config"])
        or (not required and takes_a_task(function))
    ):
        if options:
            raise ValueError(
                f"agent {name!r} is no function that makes an agent, so it has no options: leave out "
                f"{', '.join(options)}"
            )
        return None
    known = options_of(function, (*required, *OF_THE_RUN))
    config: list[Any] = [{"configurable": {}}] * len(required)
    make = partial(function, *config, **checked_options(function, name, options, known))
    return Maker(make, name, {*OF_THE_RUN} & {each.name for each in parameters})


class Maker:
    """Makes agents with ``make``, and keeps them: one for each set of prompts and each form of answers, if ``make``
    ``takes`` them.

    What it returns is the agent, or is awaited or entered: on the event loop of the rollouts, in a task of its own,
    which also leaves what it has entered.
    """

    def __init__(self, make: Callable[..., Any], name: str, takes: Collection[str]) -> None:
        self._make, self._name, self._takes = make, name, takes
        self._made: dict[Any, _Made] = {}

    @property
    def default_prompts(self) -> dict[str, str]:
        """The default of its parameter ``prompts``: the named prompts that a run can replace."""
        parameter = inspect.signature(self._make).parameters.get("prompts")
        default = parameter.default if parameter is not None else None
        return dict(default) if isinstance(default, Mapping) else {}

    def first(self) -> Any:
        """The agent with its own prompts, if it is made at once; else None. Raises ``ValueError``."""
        function = self._make.func if isinstance(self._make, partial) else self._make
        if "form" in self._takes or (is_async(function) and not inspect.isclass(function)):
            return None
        try:
            agent = self._make()
        except Exception as error:
            raise ValueError(
                f"agent {self._name!r} takes no task, so it was run to make the agent: it raised {error!r}"
            ) from error
        if isinstance(agent, AbstractAsyncContextManager | AbstractContextManager):
            return None
        if inspect.isawaitable(agent):
            self._made[self._key({}, "")] = _Made(lambda: agent, self._name)
            return None
        return agent

    @asynccontextmanager
    async def agent(self, prompts: Mapping[str, str], form: str) -> AsyncIterator[Driver]:
        """The agent of a rollout, in its framework's driver. Raises what ``make`` raises."""
        key = self._key(prompts, form)
        made = self._made.pop(key, None)
        if made is None:
            of_the_run = {"prompts": dict(prompts) or None, "form": form}
            given = {name: of_the_run[name] for name in self._takes if of_the_run[name] is not None}
            made = _Made(partial(self._make, **given), self._name)
        self._made[key] = made  # the last is the latest
        made.users += 1
        try:
            for key, earlier in [*self._made.items()][: max(0, len(self._made) - _KEPT)]:
                if not earlier.users and self._made.pop(key, None) is not None:
                    await earlier.close()
            yield await made.get()
        finally:
            made.users -= 1

    async def close(self) -> None:
        """Leave what was entered."""
        while self._made:
            await self._made.popitem()[1].close()

    def _key(self, prompts: Mapping[str, str], form: str) -> Any:
        own = tuple(sorted(prompts.items())) if "prompts" in self._takes else ()
        return own, form if "form" in self._takes else ""


class _Made:
    """An agent that is made at its first use."""

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        self._make, self._name = make, name
        self._agent: asyncio.Future[Driver] | None = None
        self.users = 0

    async def get(self) -> Driver:
        if self._agent is None:
            self._agent, self._ended = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._task = Context().run(asyncio.create_task, self._keep(self._agent))  # it is of no single rollout
        return await asyncio.shield(self._agent)

    async def _keep(self, agent: asyncio.Future[Driver]) -> None:
        async with AsyncExitStack() as entered:
            try:
                made = self._make()
                made = await made if inspect.isawaitable(made) else made
                if isinstance(made, AbstractAsyncContextManager):
                    made = await entered.enter_async_context(made)
                elif isinstance(made, AbstractContextManager):
                    made = entered.enter_context(made)
                agent.set_result(driver_of(made, self._name))
            except Exception as error:
                agent.set_exception(error)
            await self._ended.wait()

    async def close(self) -> None:
        if self._agent is not None:
            self._ended.set()
            await self._task
            self._agent = None

"""Functions that make the agent: their options, and the agents that they have made."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from contextvars import Context
from functools import partial
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from groundwire.adapters.agents.drivers import NO_HOOKS, Driver, Hooks, driver_of, is_agent
from groundwire.adapters.agents.drivers.function import takes_a_task
from groundwire.adapters.agents.early_runs import EarlyCallError, agent_that_ran, making
from groundwire.tools.binding import is_async

OF_THE_RUN = ("form", "prompts")
"""Parameters that get the form of the answers, ``sql`` or ``prose``, and the named prompts of the run."""
_KEPT = 8  # agents that are kept although no rollout runs them: each set of prompts has its own, with its connections
T = TypeVar("T")


def options_of(function: Callable[..., Any], without: Collection[str] = ()) -> list[str]:
    """The parameters of a function or a class that are its options, without those of the names ``without``."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds and parameter.name not in without]


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
        kind = hints.get(option, Any)
        if hasattr(kind, "load_component") and isinstance(value, Mapping):  # of AutoGen: what its files say
            checked[option] = kind.load_component(value)
            continue
        try:
            checked[option] = TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise ValueError(f"the option {option} of agent {name!r} is {value!r:.100}; it must be {reason}") from None
    return checked


def maker_of(function: Any, name: str, options: Mapping[str, Any], hooks: Hooks) -> Maker | None:
    """The maker of a function that takes nothing but ``options``, which have defaults, or a ``config`` as in
    langgraph.json; None for anything else.

    Raises ``ValueError`` for options that it does not have.
    """
    if (required := _required_of_maker(function, options)) is None:
        if options:
            raise ValueError(
                f"agent {name!r} is no function that makes an agent, so it has no options: leave out "
                f"{', '.join(options)}"
            )
        return None
    known = options_of(function, (*required, *OF_THE_RUN))
    config: list[Any] = [{"configurable": {}}] * len(required)
    make = partial(function, *config, **checked_options(function, name, options, known))
    return Maker(make, name, {*OF_THE_RUN} & {*options_of(function)}, hooks)


def _required_of_maker(function: Any, options: Collection[str]) -> list[str] | None:
    """The parameters of a function or class that makes agents which have no default and are no option; None if it is
    none.
    """
    if is_agent(function) and not inspect.isclass(function):  # one that can be called
        return None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not callable, or written in C
        return None
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if parameter.kind is not parameter.VAR_POSITIONAL or not inspect.isclass(function)  # of a metaclass
    ]
    if required and {*required} <= {*options}:
        return []
    is_maker = not required and (inspect.isclass(function) or not takes_a_task(function))
    return required if required == ["config"] or is_maker else None


class Kept(Generic[T]):
    """What a context manager yields: it is entered at the first use, and left by ``close``, in a task of its own, which
    belongs to no single rollout.
    """

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self._context = context
        self._value: asyncio.Future[T] | None = None
        self.users = 0

    async def get(self) -> T:
        """The value. Raises what entering raises."""
        if self._value is None:
            self._value, self._closed = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._task = Context().run(asyncio.create_task, self._keep(self._value))
        return await asyncio.shield(self._value)  # one rollout may be cancelled while others wait

    async def _keep(self, value: asyncio.Future[T]) -> None:
        try:
            async with self._context as entered:
                value.set_result(entered)
                await self._closed.wait()
        except Exception as error:
            if value.done():
                raise
            value.set_exception(error)

    async def close(self) -> None:
        """Leave the context manager."""
        if self._value is not None:
            self._closed.set()
            await self._task


class Maker:
    """Makes agents with ``make``, and keeps them: one for each set of prompts and each form of answers, if ``make``
    ``takes`` them.

    What it returns is the agent, or is awaited or entered, on the event loop of the rollouts. ``hooks`` are for its
    driver.
    """

    def __init__(self, make: Callable[..., Any], name: str, takes: Collection[str], hooks: Hooks = NO_HOOKS) -> None:
        self._make, self._name, self._takes, self._hooks = make, name, takes, hooks
        self._agents: dict[str, Kept[Driver]] = {}

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
            with making():
                agent = self._make()
        except EarlyCallError as error:
            return agent_that_ran(error)
        except Exception as error:
            raise ValueError(
                f"agent {self._name!r} takes no task, so it was run to make the agent: it raised {error!r}"
            ) from error
        if isinstance(agent, AbstractAsyncContextManager | AbstractContextManager):
            return None
        if inspect.isawaitable(agent):
            self._agents[repr({})] = Kept(_entered(lambda: agent, self._name, self._hooks))
            return None
        return agent

    @asynccontextmanager
    async def agent(self, prompts: Mapping[str, str], form: str) -> AsyncIterator[Driver]:
        """The agent of a rollout, in its framework's driver. Raises what ``make`` raises."""
        of_the_run = {"prompts": dict(prompts), "form": form}
        arguments = {name: value for name, value in of_the_run.items() if value and name in self._takes}
        key = repr(arguments)
        agent = self._agents.pop(key, None) or Kept(_entered(partial(self._make, **arguments), self._name, self._hooks))
        self._agents[key] = agent  # the last is the latest
        agent.users += 1
        try:
            for earlier in [*self._agents][:-_KEPT]:
                if earlier in self._agents and not self._agents[earlier].users:
                    await self._agents.pop(earlier).close()
            yield await agent.get()
        finally:
            agent.users -= 1

    async def close(self) -> None:
        """Leave what was entered."""
        while self._agents:
            await self._agents.popitem()[1].close()


@asynccontextmanager
async def _entered(make: Callable[[], Any], name: str, hooks: Hooks) -> AsyncIterator[Driver]:
    """The agent that ``make`` returns, or that is awaited or entered."""
    async with AsyncExitStack() as stack:
        try:
            with making():
                agent = make()
                agent = await agent if inspect.isawaitable(agent) else agent
        except EarlyCallError as error:
            agent = agent_that_ran(error)
        if isinstance(agent, AbstractAsyncContextManager):
            agent = await stack.enter_async_context(agent)
        elif isinstance(agent, AbstractContextManager):
            agent = stack.enter_context(agent)
        driver = driver_of(agent, name, hooks)
        stack.push_async_callback(driver.close)
        yield driver

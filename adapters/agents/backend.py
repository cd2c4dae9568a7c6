"""Any agent object as a backend: an agent of a framework, or a function.

The object runs as it is: its own models, clients, prompts, tools, turn limits and output types. It gets the task by
its fields or parameters, and never a gold answer. :mod:`groundwire.adapters.agents.redirection` redirects its LLM
calls. An agent is, in this order:

===============================  ==============================================  ==========================
a ``LitAgent``                   by its class                                    :class:`LitAgentBackend`
a backend                        by its class, or its ``agents`` and ``run``     itself
a function that makes the agent  no parameter without a default gets a task      what it makes
a LangGraph graph                by its class                                    ``graph.ainvoke``
an agent of the SDK              by its class                                    ``Runner.run``
an agent of another framework    by its class                                    its driver
a function of the task           it can be called with the task                  a call, in a thread if not async
===============================  ==============================================  ==========================
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from groundwire.adapters._types import (
    AgentError,
    AgentSetupError,
    Answer,
    Backend,
    Endpoint,
    Question,
    as_backend,
    is_backend,
)
from groundwire.adapters.agents import drivers
from groundwire.adapters.agents.answers import ASK, check_done, judged_answer, lacks_answer, own_steps
from groundwire.adapters.agents.app_environment import set_environment
from groundwire.adapters.agents.discovery import agent_of_project
from groundwire.adapters.agents.drivers import AgentTask, Driver, Hooks
from groundwire.adapters.agents.drivers.function import takes_a_task
from groundwire.adapters.agents.early_runs import EarlyCallError, making
from groundwire.adapters.agents.failures import no_call, refused_failure, rollout_failure
from groundwire.adapters.agents.making import Maker, maker_of
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.loading import load_object

if TYPE_CHECKING:
    from groundwire.adapters.agents.redirection import AttemptCalls

FRAMEWORKS = ("custom", "langgraph", "openai-agents")
"""The backends that run an agent of the user's; ``custom`` finds the framework from the object."""
_LIT_AGENT = "agentlightning.litagent.litagent.LitAgent"


def agent_backend(
    agent: Any,
    *,
    framework: str = "custom",
    agent_input: str | Callable[[AgentTask], Any] | None = None,
    agent_output: str | Callable[[Any], str] | None = None,
    agent_config: str | Callable[..., Any] | None = None,
    agent_context: str | Callable[..., Any] | None = None,
    train_model: str | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Backend:
    """The backend that runs ``agent``, an object or its name (``module:name`` or ``path/to/file.py:name``).

    ``framework`` is one of :data:`FRAMEWORKS`. A function is called by the names of its parameters; one that takes no
    task makes the agent, with ``options`` as its keyword arguments. ``agent_input`` makes the agent's input from the
    task, ``agent_output`` the answer from its result; without them the fields decide. ``agent_context`` makes the
    context of a framework's agent, of nothing or of the task, and ``agent_config`` a dict with further arguments of its
    run. ``train_model`` is a regular expression: calls to other models go to their own provider, and are not trained;
    without it, none leaves for a known provider. A function with an ``endpoint`` calls the policy itself. A
    ``LitAgent`` of Agent Lightning gets the whole task and returns its reward. Raises ``ValueError`` if ``agent`` is no
    agent.
    """
    name = agent_of_project(agent) if isinstance(agent, str) else _name(agent)
    set_environment(name if isinstance(agent, str) else None)
    if isinstance(agent, str):
        with making():  # a script may run it
            kinds = (_is_agent_object, _is_agent_function)
            agent = load_object(name, option="agent", kinds=kinds, ends=EarlyCallError)
    hooks: dict[str, Any] = {"agent_config": agent_config, "agent_context": agent_context}
    given = {"agent_input": agent_input, "agent_output": agent_output, "train_model": train_model, **hooks}
    settings: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    if is_lit_agent(agent):
        rejected = [*settings.keys() - {"train_model"}, *options]
        _reject(rejected, f"agent {name!r} is a LitAgent, which gets the whole task and returns its reward")
        return LitAgentBackend(agent, train_model)
    if is_backend(agent) and not drivers.is_agent(agent):
        return as_backend(agent)
    hooks = {option: _function(option, settings.pop(option)) for option in hooks if option in settings}
    maker = maker_of(agent, name, options, hooks)
    made = agent if maker is None else maker.first()
    if is_backend(made) and not drivers.is_agent(made):
        return as_backend(made)
    kind = drivers.framework_of(made)
    if maker is not None and made is not None and kind is None:
        raise ValueError(f"agent {name!r} is run to make the agent, as it takes no task, and returned {made!r:.200}")
    if framework not in ("custom", kind) and kind:
        raise ValueError(f"agent {name!r} is no agent of {framework} but of {kind}: leave --backend out")
    return AgentBackend(made, name=name if maker is None else f"{name}()", settings=settings, maker=maker, hooks=hooks)


def _name(agent: Any) -> str:
    names = (getattr(getattr(agent, "func", agent), attribute, None) for attribute in ("name", "__name__"))
    return next((name for name in names if isinstance(name, str)), type(agent).__name__)


def _function(option: str, value: Any) -> Any:
    return load_object(value, option=option) if isinstance(value, str) else value


def _reject(options: Collection[str], reason: str) -> None:
    if options:
        raise ValueError(f"{reason}: leave out {' and '.join(options)}")


class AgentBackend(Backend):
    """Runs ``agent``, or the agents of ``maker``, once for each question; see :func:`agent_backend`.

    ``settings`` are ``agent_input``, ``agent_output`` and ``train_model``, ``hooks`` are ``agent_context`` and
    ``agent_config``, those that are given.
    """

    def __init__(
        self,
        agent: Any,
        *,
        name: str,
        settings: Mapping[str, Any],
        maker: Maker | None = None,
        hooks: Hooks = drivers.NO_HOOKS,
    ) -> None:
        set_environment()
        self._name, self._maker = name, maker
        self._driver = None if agent is None else drivers.driver_of(agent, name, hooks)
        """None if the agent is made in the first rollout."""
        own_calls = self._driver is not None and self._driver.own_calls
        if own_calls:
            rejected = settings.keys() - {"train_model"}
            _reject(rejected, f"agent {name!r} is a function with an endpoint, which makes its own calls")
        self._make_input, self._read_output = (
            _function(option, settings.get(option)) for option in ("agent_input", "agent_output")
        )
        self._train_model = re.compile(settings["train_model"]) if "train_model" in settings else None
        self.agents = tuple(getattr(agent, "agents", ())) if own_calls else ()
        self._prompts = dict(getattr(agent, "prompts", {})) if own_calls else maker.default_prompts if maker else {}
        self.threaded = self._driver is not None and self._driver.threaded
        self.calls_tools = self._train_model is None and self._driver is not None and self._driver.calls_tools

    def default_prompts(self, form: str) -> dict[str, str]:
        """Those of the parameter ``prompts`` of a function that makes the agent, or of the attribute ``prompts`` of a
        function with an endpoint.
        """
        return dict(self._prompts)

    def describe_call(self, question: Question) -> str:
        """How the agent is called for questions like this one. Raises ``ValueError`` if it cannot be called, or if
        which part of its result is the answer is not known.
        """
        if self._driver is None:
            return f"{self._name}, which is made in the first rollout"
        if self._read_output is None:
            for kind in self._driver.result_types():
                if fields := ", ".join(lacks_answer(kind, question.answers)):
                    raise ValueError(
                        f"agent {self._name!r} returns {fields}, and which is the answer is not known: {ASK}"
                    )
        task = drivers.agent_task(question)
        self._driver.check_context(task)
        return f"{self._name}(what agent_input returns)" if self._make_input else self._driver.describe(task)

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question. Raises a :class:`adapters.BackendError`."""
        from groundwire.adapters.agents.redirection import AttemptCalls, redirected

        task, called = drivers.agent_task(question), ""
        async with AsyncExitStack() as made:
            driver = await self._made(made, question, endpoint)
            calls = AttemptCalls(endpoint=endpoint, train_model=self._train_model, redirects=not driver.own_calls)
            with redirected(calls):
                try:
                    source = task if self._make_input is None else self._make_input(task)
                    try:
                        arguments = driver.arguments(source, question, endpoint)
                    except (ValueError, TypeError) as error:
                        raise AgentSetupError(str(error)) from error
                    called = driver.show(arguments)
                    before = _copy(arguments if isinstance(arguments, Mapping) else source)  # the agent may change it
                    result = await driver.run(driver.fresh(), arguments, task)
                    if calls.refused and not calls.traced:  # the agent may have gone on without a reply
                        raise refused_failure(calls)
                    answer = self._answer(result, before, question, calls)
                except Exception as error:
                    failure = rollout_failure(error, calls)
                    failure.steps = failure.steps or calls.conversation.steps()
                    failure.input = called
                    raise failure from (None if failure is error else error)
        untraced = "" if calls.traced or driver.own_calls else no_call(self._name, calls)
        return replace(answer, input=called, no_call=untraced)

    async def stop(self) -> None:
        """Leave the context managers that made agents, and close what the agents share."""
        if self._driver is not None:
            await self._driver.close()
        if self._maker is not None:
            await self._maker.close()

    async def _made(self, stack: AsyncExitStack, question: Question, endpoint: Endpoint) -> Driver:
        if self._maker is None or (self._driver is not None and not endpoint.prompts):
            assert self._driver is not None
            return self._driver
        try:
            return await stack.enter_async_context(self._maker.agent(endpoint.prompts, question.form))
        except Exception as error:
            raise AgentSetupError(f"agent {self._name!r} takes no task, so it makes the agent: {error!r}") from error

    def _answer(self, result: Any, agent_input: Mapping[str, Any], question: Question, calls: AttemptCalls) -> Answer:
        if isinstance(result, Answer):
            return result
        check_done(result)
        steps = own_steps(result) or calls.conversation.steps()
        if self._read_output is None:
            text, name = judged_answer(result, question.answers, steps, agent_input)
            return Answer(text=text, judged_field=name, steps=steps)
        text = self._read_output(result)
        if not isinstance(text, str):
            raise AgentSetupError(f"agent_output returned {text!r:.200}: it returns the answer as str")
        return Answer(text=text, judged_field="agent_output", steps=steps)


class LitAgentBackend(Backend):
    """Runs ``agent``, a ``LitAgent`` or a class of them that is made without arguments.

    The runner calls :meth:`rollout` in place of :meth:`run`. With ``train_model`` it may ask providers of models.
    Raises ``ValueError`` if the class needs arguments.
    """

    def __init__(self, agent: Any, train_model: str | None = None) -> None:
        self._train_model = None if train_model is None else re.compile(train_model)
        try:
            self.agent: Any = agent() if inspect.isclass(agent) else agent
        except TypeError as error:
            raise ValueError(f"agent {agent.__qualname__!r} cannot be made ({error}): name an object of it") from error

    def describe_call(self, question: Question) -> str:
        """How the agent is called."""
        return f"{type(self.agent).__name__}.training_rollout(the whole task, resources, rollout)"

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Always raises :class:`adapters.AgentError`."""
        raise AgentError("a LitAgent needs the whole task: it runs in a training run or an evaluation only")

    async def rollout(
        self, task: Mapping[str, Any], resources: Mapping[str, Any], rollout: Any, endpoint: Endpoint
    ) -> Any:
        """What the agent returns for an attempt; a plain method has its own thread.

        Raises a :class:`adapters.BackendError`.
        """
        from groundwire.adapters.agents.redirection import AttemptCalls, redirected

        prefix = "training" if rollout.mode == "train" else "validation"
        calls = AttemptCalls(endpoint=endpoint, train_model=self._train_model, redirects=False)
        with redirected(calls):
            try:
                if self.agent.is_async():
                    return await getattr(self.agent, f"{prefix}_rollout_async")(task, resources, rollout)
                call = partial(getattr(self.agent, f"{prefix}_rollout"), task, resources, rollout)
                return await asyncio.wrap_future(in_thread(call, name=f"agent {rollout.rollout_id}"))
            except Exception as error:
                failure = rollout_failure(error, calls)
                raise failure from (None if failure is error else error)


def is_lit_agent(agent: Any) -> bool:
    """Whether ``agent`` is a ``LitAgent`` or a class of them. Imports nothing."""
    return _LIT_AGENT in drivers.class_names(agent if inspect.isclass(agent) else type(agent))


def _copy(agent_input: Any) -> dict[str, Any]:
    values = agent_input.items() if isinstance(agent_input, Mapping) else ()
    return {name: list(value) if isinstance(value, list) else value for name, value in values}


def _is_agent_object(value: Any) -> bool:
    """Whether a value is surely an agent."""
    return value.__module__ != _LIT_AGENT.rpartition(".")[0] if is_lit_agent(value) else drivers.is_agent(value)


def _is_agent_function(value: Any) -> bool:
    return drivers.framework_of(value) == "function" and takes_a_task(value)

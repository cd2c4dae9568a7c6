"""The SQL agents as backends: they run as any agent does, but their first request is known, and checked, before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any

from groundwire.adapters._types import Question
from groundwire.adapters.agents.backend import AgentBackend
from groundwire.adapters.agents.drivers import driver_of
from groundwire.adapters.agents.making import maker_of
from groundwire.adapters.sql_agents.prompts import PROFILES, texts, write
from groundwire.adapters.sql_agents.toolkit import SQLToolkit, check_max_turns


def sql_backend(
    make: Callable[..., Any], agents: tuple[str, ...], names: Mapping[str, tuple[str, ...]]
) -> Callable[..., SQLAgentBackend]:
    """What a backend is registered with: a function with the options of ``make``, which makes its agent."""

    @wraps(make)
    def backend(**options: Any) -> SQLAgentBackend:
        return SQLAgentBackend(make, agents, names, options)

    return backend


class SQLAgentBackend(AgentBackend):
    """Runs the agent that ``make`` makes with the ``options``. ``names`` are those of its prompts, for each form of
    answers; the first two make its first request. Raises ``ValueError`` for a wrong option.
    """

    reads_only = True

    def __init__(
        self,
        make: Callable[..., Any],
        agents: tuple[str, ...],
        names: Mapping[str, tuple[str, ...]],
        options: Mapping[str, Any],
    ) -> None:
        name = make.__name__
        maker = maker_of(make, name, options, lambda made: driver_of(made, name))
        super().__init__(None, name=name, settings={"agent_output": _answer}, maker=maker)
        own = {field.name for field in fields(SQLToolkit)}
        self._toolkit = SQLToolkit(**{option: value for option, value in options.items() if option in own})
        check_max_turns(options.get("max_turns", 1))
        self._profile, self._names = options.get("prompt_profile", "short"), names
        self.agents, self.calls_tools = agents, "tool_system" in names["sql"]
        self.first_prompt = self._first_prompt

    def default_prompts(self, form: str) -> dict[str, str]:
        """The agent's named prompts."""
        return {name: PROFILES[self._profile][name] for name in self._names[form]}

    def describe_call(self, question: Question) -> str:
        """Nothing: it is the project's own."""
        return ""

    def _first_prompt(self, question: Question, prompts: Mapping[str, str]) -> str:
        names = self._names[question.form]
        own, (system, user) = texts(self._profile, names, prompts), names[:2]
        schema = self._toolkit.schema(question.database)
        return write(system, schema, own=own) + write(user, question.text, own=own)


def _answer(result: Mapping[str, Any]) -> str:
    return str(result["answer"] if "answer" in result else result["sql"])

"""What the SQL agents share: what they read of their database, the schema and the rows of a query, and how they are
backends. They run as any agent does, but their first request is known, and checked, before.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_type_hints

from groundwire.adapters._types import Question
from groundwire.adapters.agents.backend import AgentBackend
from groundwire.adapters.agents.making import OF_THE_RUN, Maker, checked_options, options_of
from groundwire.adapters.sql_agents.prompts import texts, write
from groundwire.tools.schema import table_info
from groundwire.tools.sql import DatabaseError, QueryError, render, run_query

MAX_ROWS = 100


@dataclass(frozen=True, kw_only=True)
class SQLToolkit:
    """The options that all SQL agents have; the starter policy has seen only the default ones.

    ``max_turns`` counts turns with queries. ``table_info_truncate`` and ``execution_truncate`` are the most characters
    of the schema (cut after a whole table) and of a query's result. ``example_values`` is the number of example values
    of each column, and ``show_keys`` includes primary and foreign keys. Raises ``ValueError`` for a number that is too
    small.
    """

    max_turns: int = 2
    prompt_profile: Literal["short", "full"] = "short"
    table_info_truncate: int = 4000
    example_values: int = 0
    show_keys: bool = False
    execution_truncate: int = 72
    query_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns is {self.max_turns}, but an agent needs at least one turn to write a query")
        for name, least in (("table_info_truncate", 1), ("example_values", 0), ("execution_truncate", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")

    def schema(self, database: str) -> str:
        """The tables as CREATE TABLE statements. Raises :class:`groundwire.tools.sql.DatabaseError`."""
        return table_info(
            database, max_chars=self.table_info_truncate, example_values=self.example_values, show_keys=self.show_keys
        ).text

    def result(self, database: str, sql: str) -> tuple[str, bool]:
        """The rows of a query as text and True, or its error as the model reads it and False.

        Raises :class:`groundwire.tools.sql.DatabaseError`: the model cannot repair a broken database.
        """
        try:
            rows = run_query(database, sql, timeout_s=self.query_timeout_s, max_rows=MAX_ROWS)
        except DatabaseError:
            raise
        except QueryError as error:
            return self.error(error), False
        return render(rows, max_chars=self.execution_truncate), True

    async def query(self, database: str, sql: str) -> tuple[str, bool]:
        """As :meth:`result`, in a thread: a query may take seconds, and every other rollout runs on this loop."""
        return await asyncio.to_thread(self.result, database, sql)

    def error(self, error: QueryError) -> str:
        """An error as the model reads it."""
        return f"Error: {error}"[: self.execution_truncate]


@dataclass(frozen=True, kw_only=True)
class SQLGraphOptions(SQLToolkit):
    """The options of the LangGraph agent.

    Its last query is executed but not checked, because no check could change the answer any more; ``check_last`` checks
    it, as the published recipe does.
    """

    check_last: bool = False


def sql_backend(
    name: str,
    make: Callable[..., Any],
    agents: tuple[str, ...],
    prompts: Mapping[str, tuple[str, ...]],
    options_class: type[SQLToolkit] = SQLToolkit,
) -> Callable[..., SQLAgentBackend]:
    """What a backend is registered with: a function that takes the fields of ``options_class`` as its options.

    It raises ``ValueError`` for a wrong option.
    """

    def backend(**options: Any) -> SQLAgentBackend:
        checked = checked_options(options_class, name, options, options_of(options_class))
        return SQLAgentBackend(name, make, agents, prompts, options_class(**checked))

    backend.__signature__ = inspect.signature(options_class)  # type: ignore[attr-defined]
    backend.__annotations__ = get_type_hints(options_class)
    return backend


class SQLAgentBackend(AgentBackend):
    """Runs the agent that ``make`` makes with the options ``toolkit``.

    ``prompts`` are the names of its prompts for each form of answers; the first two make its first request.
    """

    reads_only = True

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        agents: tuple[str, ...],
        prompts: Mapping[str, tuple[str, ...]],
        toolkit: SQLToolkit,
    ) -> None:
        maker = Maker(partial(make, toolkit), name, OF_THE_RUN)
        super().__init__(None, name=name, settings={"agent_output": _answer}, maker=maker)
        self._toolkit, self._prompt_names = toolkit, prompts
        self.agents, self.calls_tools = agents, "tool_system" in prompts["sql"]
        self.first_prompt = self._first_prompt

    def default_prompts(self, form: str) -> dict[str, str]:
        """The agent's named prompts."""
        return texts(self._toolkit.prompt_profile, self._prompt_names[form])

    def describe_call(self, question: Question) -> str:
        """Nothing: it is the project's own."""
        return ""

    def _first_prompt(self, question: Question, prompts: Mapping[str, str]) -> str:
        names = self._prompt_names[question.form]
        own, (system, user) = texts(self._toolkit.prompt_profile, names, prompts), names[:2]
        schema = self._toolkit.schema(question.database)
        return write(system, schema, own=own) + write(user, question.text, own=own)


def _answer(result: Mapping[str, Any]) -> str:
    return str(result["answer"] if "answer" in result else result["sql"])

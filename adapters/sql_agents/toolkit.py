"""The schema text and the query tool that all reference agents have."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, Literal

from groundwire.adapters._types import Question
from groundwire.adapters.sql_agents import full_prompts, prompts
from groundwire.adapters.sql_agents.named_prompts import Messages, check_names, default_prompts
from groundwire.tools.schema import table_info
from groundwire.tools.sql import DatabaseError, QueryError, render, run_query

__all__ = ["MAX_ROWS", "SQLToolkit", "check_max_turns"]

_PROFILES = {"short": prompts, "full": full_prompts}

MAX_ROWS = 100


@dataclass(kw_only=True)
class SQLToolkit:
    """What an agent reads of its database.

    ``table_info_truncate`` and ``execution_truncate`` are the most characters of the schema (cut after a whole table;
    None: all) and of a query's result. ``example_values`` is the number of example values of each column, and
    ``show_keys`` includes primary and foreign keys. ``prompt_profile`` is ``short``, the prompts of the starter, or
    ``full``, with rules and common mistakes for models that read instructions.
    """

    reads_only = True
    prompt_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The names of the agent's prompts, for each form of answers; the first two make its first request."""
    table_info_truncate: int | None = 4000
    example_values: int = 0
    show_keys: bool = False
    execution_truncate: int = 72
    query_timeout_s: float = 5.0
    prompt_profile: Literal["short", "full"] = "short"

    @property
    def prompts(self) -> ModuleType:
        """The module with the functions that write the agent's messages. Raises ``ValueError`` for no profile."""
        if self.prompt_profile not in _PROFILES:
            raise ValueError(f"prompt_profile is {self.prompt_profile!r}; it is one of {', '.join(_PROFILES)}")
        return _PROFILES[self.prompt_profile]

    def default_prompts(self, form: str) -> dict[str, str]:
        """The agent's named prompts for questions with answers of ``form``."""
        return default_prompts(self.prompts, self.prompt_names[form])

    def messages(self, given: Mapping[str, str], form: str) -> Messages:
        """The agent's messages, with the ``given`` prompts. Raises ``ValueError`` for one that it does not have."""
        if given:
            check_names(given, self.prompt_names[form])
        return Messages(self.prompts, given)

    def first_prompt(self, question: Question, prompts: Mapping[str, str]) -> str:
        """The text of the agent's first request. Raises :class:`groundwire.tools.sql.DatabaseError`."""
        messages, (system, user) = self.messages(prompts, question.form), self.prompt_names[question.form][:2]
        return messages.write(system, self.schema(question.database)) + messages.write(user, question.text)

    def schema(self, database: str) -> str:
        """The tables as CREATE TABLE statements. Raises :class:`groundwire.tools.sql.DatabaseError`."""
        return table_info(
            database, max_chars=self.table_info_truncate, example_values=self.example_values, show_keys=self.show_keys
        ).text

    def result(self, database: str, sql: str) -> tuple[str, bool]:
        """As :meth:`query_or_error`, in this thread."""
        try:
            rows = run_query(database, sql, timeout_s=self.query_timeout_s, max_rows=MAX_ROWS)
        except QueryError as error:
            return f"Error: {error}"[: self.execution_truncate], False
        return render(rows, max_chars=self.execution_truncate), True

    async def query(self, database: str, sql: str) -> str:
        """Run a query and return its rows as text. Raises a :class:`groundwire.tools.sql.QueryError`."""
        # In a thread: a query may take seconds, and every other rollout runs on this loop.
        result = await asyncio.to_thread(run_query, database, sql, timeout_s=self.query_timeout_s, max_rows=MAX_ROWS)
        return render(result, max_chars=self.execution_truncate)

    async def query_or_error(self, database: str, sql: str) -> tuple[str, bool]:
        """The rows as text and True, or the error as the model reads it and False.

        Raises :class:`groundwire.tools.sql.DatabaseError`: the model cannot repair a broken database.
        """
        try:
            return await self.query(database, sql), True
        except DatabaseError:
            raise
        except QueryError as error:
            return f"Error: {error}"[: self.execution_truncate], False


def check_max_turns(max_turns: int) -> None:
    """Raise ``ValueError`` if an agent with ``max_turns`` could write no query."""
    if max_turns < 1:
        raise ValueError(f"max_turns is {max_turns}, but an agent needs at least one turn to write a query")

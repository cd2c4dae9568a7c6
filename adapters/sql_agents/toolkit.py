"""What an SQL agent reads of its database: the schema, and the rows of a query."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from groundwire.tools.schema import table_info
from groundwire.tools.sql import DatabaseError, QueryError, render, run_query

MAX_ROWS = 100


@dataclass(frozen=True, kw_only=True)
class SQLToolkit:
    """The options that all SQL agents have; the starter policy has seen only the default ones.

    ``table_info_truncate`` and ``execution_truncate`` are the most characters of the schema (cut after a whole table)
    and of a query's result. ``example_values`` is the number of example values of each column, and ``show_keys``
    includes primary and foreign keys. Raises ``ValueError`` for a length below 0.
    """

    table_info_truncate: int = 4000
    example_values: int = 0
    show_keys: bool = False
    execution_truncate: int = 72
    query_timeout_s: float = 5.0

    def __post_init__(self) -> None:
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


def check_max_turns(max_turns: int) -> None:
    """Raise ``ValueError`` if an agent with ``max_turns`` could write no query."""
    if max_turns < 1:
        raise ValueError(f"max_turns is {max_turns}, but an agent needs at least one turn to write a query")

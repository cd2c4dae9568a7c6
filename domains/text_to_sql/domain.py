"""The base class of the domains whose answers are SQL queries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from groundwire.domains._types import Domain, Task, TaskData
from groundwire.domains.text_to_sql.gold_trust import with_gold_trust
from groundwire.tools.sql.answers import SQL

__all__ = ["SqlDomain"]


class SqlDomain(Domain):
    """Text-to-SQL. A task has at least id, db_id, question, query (the gold) and db_path (absolute)."""

    answers = SQL
    gold_columns: Sequence[str] = ("query", "hardness")

    def database(self, task: Task) -> str:
        """The absolute path of the task's SQLite file."""
        return str(task["db_path"])

    def with_gold_trust(self, data: TaskData, file: Path, *, seed: int = 0) -> tuple[TaskData, str]:
        """See :mod:`groundwire.domains.text_to_sql.gold_trust`."""
        return with_gold_trust(data, file, seed=seed)

"""A domain for tests that bring their tasks along."""

from __future__ import annotations

from typing import Any

from groundwire.domains import Domain, Task
from groundwire.tools.sql.answers import SQL


class NoData(Domain):
    """Its tasks name their database themselves, if they need one; nothing can be loaded."""

    name, default_reward, answers = "test", "test", SQL

    def load(self, data_dir: str | None = None) -> Any:
        raise AssertionError

    def database(self, task: Task) -> str:
        return str(task.get("db_path", ""))

    def database_folders(self, data_dir: str | None = None) -> list[str]:
        return []

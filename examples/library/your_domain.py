"""Your own domain: questions, their database, and a reward.

    python examples/library/your_domain.py --ci-fast
    python examples/library/your_domain.py --data-dir my_folder      # with your library.sqlite and questions.csv

docs/your-domain.md explains it. Your own package would register the domain through the entry-point group
``groundwire`` and use ``groundwire run --domain library``; here the file registers itself.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from groundwire.domains import DataError, Task, TaskData
from groundwire.tools.plugins import hookimpl, plugin

BUNDLED = Path(__file__).parent


class Library:
    """Questions about one database, answered with SQL; a task is a row of questions.csv plus ``db_path``."""

    name = "library"
    default_reward = "spider_exec_match"  # compares the results of ``query`` and of the answer

    def load(self, data_dir: str | None = None) -> TaskData:
        """Read the folder. Raises :class:`DataError` with one sentence for missing or broken files."""
        folder = Path(data_dir or BUNDLED).resolve()
        database, questions = folder / "library.sqlite", folder / "questions.csv"
        for file in (database, questions):
            if not file.is_file():
                raise DataError(f"{folder} has no {file.name}; name a folder with library.sqlite and questions.csv.")
        with questions.open(newline="", encoding="utf-8") as file:
            tasks: list[Task] = [{**row, "db_path": str(database)} for row in csv.DictReader(file)]
        return TaskData(
            train=[task for task in tasks if task["split"] == "train"],
            validation=[task for task in tasks if task["split"] == "validation"],
            source=f"{folder}: {len(tasks)} questions",
        )

    def database(self, task: Task) -> str:
        """The path of the task's SQLite file, for the agent's tools."""
        return str(task["db_path"])


class Plugin:
    """The plugin that a package's entry point would name."""

    @hookimpl
    def register_domains(self, register: Any) -> None:
        """Add this file's domain."""
        register("library", Library())


if __name__ == "__main__":
    import sys

    from groundwire.train.run import app

    plugin(Plugin())
    app(["--domain", "library", *sys.argv[1:]])

"""What is private to a rollout: a copy of its task's database, which the agent's own tools may change."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from groundwire.tools.sql import DatabaseCopies, DatabaseStates

__all__ = ["PrivateTasks"]


class PrivateTasks:
    """Private copies of tasks, for the rollouts of a runner. ``database`` returns the path of a task's database."""

    def __init__(self, database: Callable[[Mapping[str, Any]], str]) -> None:
        self._database = database
        self._copies = DatabaseCopies()
        self._seen = DatabaseStates()

    @asynccontextmanager
    async def copy_of(self, task: dict[str, Any]) -> AsyncIterator[tuple[dict[str, Any], str]]:
        """The task with a copy in place of its database, and the copy's path; empty if it has none.

        Raises ``OSError`` at the start if the copy cannot be made.
        """
        database = self._database(task)
        if not os.path.isfile(database):  # noqa: ASYNC240 - as cheap as a dict
            yield task, database
            return
        copy = await asyncio.to_thread(self._copies.take, database)
        reusable = True
        try:
            yield {name: copy.path if value == database else value for name, value in task.items()}, copy.path
        except asyncio.CancelledError:  # the agent's thread runs on
            reusable = False
            raise
        finally:
            self._copies.give_back(copy, reusable=reusable)

    def remember(self, tasks: Iterable[Mapping[str, Any]]) -> None:
        """Note the state of the databases of ``tasks``, for :meth:`warning`."""
        self._seen.update(DatabaseStates.of({self._database(task) for task in tasks} - {""}))

    def warning(self) -> str:
        """A message that names the databases that were changed since they were remembered or copied; else empty."""
        return DatabaseStates({**self._copies.originals, **self._seen}).warning()

    def close(self) -> None:
        """Remove the copies."""
        self._copies.close()

"""What a domain is: its tasks, the database of each, and the reward they are judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from groundwire.tools.errors import UserError
from groundwire.tools.types import AnswerForm

__all__ = ["DataError", "Domain", "Task", "TaskData", "answer_form"]

Task = Mapping[str, Any]
"""A row of the domain's data, gold included: at least ``id`` and ``question``.

Only the trainer and the reward see it whole. What a backend is given is built from ``id``, ``question`` and
:meth:`Domain.database`, never from the row.
"""


class DataError(UserError):
    """The domain's data is missing or broken; the message names the path, what was wrong and what to do."""


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The tasks of a domain, and one line that says where they came from."""

    train: list[Task]
    validation: list[Task]
    source: str
    left_out: dict[str, int] = field(default_factory=dict)
    """Reason to number of tasks left out, e.g. ``{"gold returns no rows": 254}``."""
    folder: str | None = None
    """The ``data_dir`` that a later process needs to read the same; None where that is the one which was given."""


class Domain(Protocol):
    """A set of tasks with one way to judge them."""

    name: str
    default_reward: str
    # And ``form: AnswerForm = "prose"`` where answers are sentences: see answer_form.

    def load(self, data_dir: str | None = None) -> TaskData:
        """Read the tasks of ``data_dir``, or of the domain's own default. Raises :class:`DataError`."""
        ...

    def database(self, task: Task) -> str:
        """The path of the task's SQLite file, or an empty string."""
        ...


def answer_form(domain: Domain) -> AnswerForm:
    """What answers the domain's questions: its attribute ``form``, ``sql`` where it has none."""
    form: AnswerForm = getattr(domain, "form", "sql")
    return form

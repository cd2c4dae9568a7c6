"""The contract of a domain: tasks, the database of each, and the reward that judges them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from groundwire.tools.errors import UserError
from groundwire.tools.text import is_damaged, valid_texts

__all__ = [
    "Breakdowns",
    "DataError",
    "Domain",
    "Task",
    "TaskData",
    "breakdowns_of",
    "database_folders",
    "is_inside",
    "load_split",
]

Task = Mapping[str, Any]
"""A row of the domain's data with its gold answer, and at least ``id`` and ``question``.

Only the trainer and the reward see the whole row. An agent gets :func:`groundwire.domains.visible_columns`.
"""

Breakdowns = Mapping[str, Mapping[str, str]]
"""Task columns by which accuracy is also reported: for each the labels of its values, in display order.

Values without a label follow by name.
"""


class DataError(UserError):
    """The domain's data is missing or broken; the message names the path, the problem and the remedy."""


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The tasks of a domain. ``source`` is one line about their origin."""

    train: list[Task]
    validation: list[Task]
    source: str
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of training tasks left out, by reason, e.g. ``{"gold returns no rows": 254}``."""
    folder: str | None = None
    """The ``data_dir`` with which another process reads the same data; None if it is the given one."""
    notes: tuple[str, ...] = ()
    """What :func:`load_split` has to say about the tasks."""


class Domain(Protocol):
    """A set of tasks with one reward. The optional attribute ``form`` is the form of answers, ``sql`` or ``prose``;
    without it the reward says it (:func:`groundwire.rewards.judges_sql`).

    The optional attribute ``gold_columns`` names the columns that hold the gold answer or are made from it, the answer
    itself first, and ``bundled`` is the folder of data that ships with the domain.
    """

    name: str
    default_reward: str

    def load(self, data_dir: str | None = None) -> TaskData:
        """Read the tasks of ``data_dir``, or of the domain's own default. Raises :class:`DataError`."""
        ...

    def database(self, task: Task) -> str:
        """The path of the task's SQLite file, or an empty string."""
        ...


def load_split(domain: Domain, split: str | None, data_dir: str | None = None) -> TaskData:
    """The domain's data with the tasks of ``split`` for validation: ``train``, ``validation`` (also None), or another.

    A domain's optional method ``load_split(split, data_dir)`` reads others. The texts of the tasks are valid Unicode.
    Raises :class:`DataError`.
    """
    data = _load_split(domain, split, data_dir)
    tasks = [*data.train, *data.validation]
    if not (damaged := sum(map(is_damaged, tasks))):
        return data
    note = f"{damaged:,} of {len(tasks):,} tasks have U+FFFD in place of a character that was cut or not decoded"
    return replace(data, train=valid_texts(data.train), validation=valid_texts(data.validation), notes=(note,))


def _load_split(domain: Domain, split: str | None, data_dir: str | None) -> TaskData:
    own = getattr(domain, "load_split", None)
    if split in (None, "validation", "train") or own is None:
        data = domain.load(data_dir)
        if split not in (None, "validation", "train"):
            raise DataError(f"domain {domain.name!r} has no split {split!r}; it has train and validation.")
        return replace(data, validation=data.train) if split == "train" else data
    found: TaskData = own(split, data_dir)
    return found


def breakdowns_of(domain: Domain) -> Breakdowns:
    """The domain's attribute ``breakdowns``; empty without one."""
    found: Breakdowns = getattr(domain, "breakdowns", {})
    return found


def database_folders(domain: Domain, data_dir: str | None = None) -> list[Path]:
    """The folders that a runner's agents may read databases in, or the databases, without symbolic links.

    A domain's optional method ``database_folders(data_dir)`` returns them. Without it the data is loaded, and they are
    its databases. Raises :class:`DataError` if the data cannot be found.
    """
    own = getattr(domain, "database_folders", None)
    if own is not None:
        found = own(data_dir)
    else:
        data = domain.load(data_dir)
        found = {path for task in (*data.train, *data.validation) if (path := domain.database(task))}
    resolved = {Path(path).resolve() for path in found}
    return sorted(path for path in resolved if resolved.isdisjoint(path.parents))


def is_inside(path: Any, folders: Iterable[Path]) -> bool:
    """Whether ``path`` without symbolic links is one of ``folders``, or inside one. False for anything but a path."""
    try:
        real = os.path.join(os.path.realpath(os.fspath(path)), "")
        return any(real.startswith(os.path.join(folder, "")) for folder in folders)
    except (OSError, ValueError, TypeError):  # a null character, or no text
        return False

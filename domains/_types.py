"""The contract of a domain: tasks, the database of each, and the reward that judges them."""

from __future__ import annotations

import asyncio
import difflib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from groundwire.tools.errors import UserError
from groundwire.tools.plugins import PluginError
from groundwire.tools.sql import DatabaseCopies
from groundwire.tools.sql.answers import KINDS
from groundwire.tools.text import is_damaged, valid_texts
from groundwire.tools.types import AnswerKind

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


class PrivateTasks:
    """Private copies of tasks, for the rollouts of a runner. ``database`` returns the path of a task's database."""

    def __init__(self, database: Callable[[Task], str]) -> None:
        self._database = database
        self._copies = DatabaseCopies()

    @asynccontextmanager
    async def copy_of(self, task: dict[str, Any]) -> AsyncIterator[tuple[dict[str, Any], str]]:
        """The task with a copy in place of its database, and the copy's path; empty if it has none.

        Raises ``OSError`` at the start if the copy cannot be made.
        """
        database = self._database(task)
        if not os.path.exists(database):  # noqa: ASYNC240 - as cheap as a dict
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

    def remember(self, tasks: Iterable[Task]) -> None:
        """Note the state of the databases of ``tasks``, for :meth:`warning`."""
        self._copies.remember({self._database(task) for task in tasks} - {""})

    def warning(self) -> str:
        """A message that names the databases that were changed since they were remembered or copied; else empty."""
        return self._copies.warning()

    def close(self) -> None:
        """Remove the copies."""
        self._copies.close()


class Domain:
    """A set of tasks with one reward: a base class, whose attributes and methods a domain overrides as it needs.

    ``name``, :meth:`load` and :meth:`database` are the least. An object with these, which derives from nothing, is a
    domain as well (:func:`as_domain`).
    """

    name: str
    default_reward: str = ""
    answers: AnswerKind | None = None
    """How an answer is read in an agent's result, such as ``groundwire.tools.sql.answers.SQL``. None: as the reward
    says (:func:`groundwire.rewards.judges_sql`)."""
    gold_columns: Sequence[str] = ()
    """The columns that hold the gold answer or are made from it, the answer itself first."""
    breakdowns: Breakdowns = MappingProxyType({})
    bundled: Path | None = None
    """The folder of data that ships with the domain."""

    def load(self, data_dir: str | None = None) -> TaskData:
        """Read the tasks of ``data_dir``, or of the domain's own default. Raises :class:`DataError`."""
        raise NotImplementedError(f"the domain {self.name!r} has no method load(data_dir)")

    def load_split(self, split: str, data_dir: str | None = None) -> TaskData:
        """As :meth:`load`, with the tasks of ``split`` for validation, if the domain has others than these two.

        Raises :class:`DataError`.
        """
        data = self.load(data_dir)
        if split not in ("validation", "train"):
            raise DataError(f"domain {self.name!r} has no split {split!r}; it has train and validation.")
        return data

    def database(self, task: Task) -> str:
        """The path of the task's SQLite file, or an empty string."""
        return ""

    def database_folders(self, data_dir: str | None = None) -> Iterable[str | Path]:
        """The folders that a runner's agents may read databases in, or the databases. Raises :class:`DataError`."""
        data = self.load(data_dir)
        return {path for task in (*data.train, *data.validation) if (path := self.database(task))}

    def write_predictions(self, folder: Path, tasks: Sequence[Task], answers: Mapping[str, str], sample: int) -> None:
        """Write the ``answers``, by task id, as another evaluator of this domain reads them."""

    def prepare(self, source: Path, out: Path) -> dict[str, Any]:
        """Write a checked copy of ``source``, and return the report on it. Raises :class:`DataError`, ``OSError``."""
        raise DataError(f"domain {self.name!r} has nothing to prepare: give its folder as --data-dir.")


HOOKS = frozenset(name for name in (*vars(Domain), *Domain.__annotations__) if not name.startswith("_"))
"""What a domain may override."""


def as_domain(value: Any, name: str = "") -> Domain:
    """``value`` as a domain, registered as ``name``: an object that derives from nothing gets the defaults.

    Raises :class:`groundwire.tools.plugins.PluginError` for an attribute that is nearly the name of a hook.
    """
    own = {attribute for attribute in dir(value) if not attribute.startswith("_")}
    has = {hook for hook in HOOKS if getattr(type(value), hook, None) is not getattr(Domain, hook, None)} & own
    for attribute in sorted(own - HOOKS - {"form"}):
        if near := difflib.get_close_matches(attribute, HOOKS - has, n=1, cutoff=0.85):
            raise PluginError(f"domain {name or value.name!r} has {attribute!r}, which is no hook: is it {near[0]!r}?")
    domain = value
    if not isinstance(value, Domain):
        domain = Domain()
        vars(domain).update({hook: getattr(value, hook) for hook in HOOKS & own})
    if (form := getattr(value, "form", None)) is not None:
        if form not in KINDS:
            raise PluginError(f"domain {domain.name!r} has the form {form!r}; it is one of {', '.join(KINDS)}")
        domain.answers = KINDS[form]
    return domain


def load_split(domain: Domain, split: str | None, data_dir: str | None = None) -> TaskData:
    """The domain's data with the tasks of ``split`` for validation: ``train``, ``validation`` (also None), or another.

    The texts of the tasks are valid Unicode. Raises :class:`DataError`.
    """
    if split in (None, "validation", "train"):
        data = domain.load(data_dir)
        data = replace(data, validation=data.train) if split == "train" else data
    else:
        data = domain.load_split(split, data_dir)
    tasks = [*data.train, *data.validation]
    if not (damaged := sum(map(is_damaged, tasks))):
        return data
    note = f"{damaged:,} of {len(tasks):,} tasks have U+FFFD in place of a character that was cut or not decoded"
    return replace(data, train=valid_texts(data.train), validation=valid_texts(data.validation), notes=(note,))


def database_folders(domain: Domain, data_dir: str | None = None) -> list[Path]:
    """The domain's folders of databases, without symbolic links. Raises :class:`DataError` if there is no data."""
    resolved = {Path(path).resolve() for path in domain.database_folders(data_dir)}
    return sorted(path for path in resolved if resolved.isdisjoint(path.parents))


def is_inside(path: Any, folders: Iterable[Path]) -> bool:
    """Whether ``path`` without symbolic links is one of ``folders``, or inside one. False for anything but a path."""
    try:
        real = os.path.join(os.path.realpath(os.fspath(path)), "")
        return any(real.startswith(os.path.join(folder, "")) for folder in folders)
    except (OSError, ValueError, TypeError):  # a null character, or no text
        return False

"""Which tasks are held out for validation where the data does not say it, and what training and validation share.

A policy that was trained on a question, or on a document, does better on it than on new ones. So tasks with the same
question are held out together, and so are those of one database, document or group. The choice depends on the texts
alone: it is the same on each machine and in any order, and few tasks change sides when others are added.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence

from groundwire.domains._types import DataError, Task, TaskData
from groundwire.tools.files import shorten_repr

_SUBJECTS = re.compile(r"(db|database|doc|document)(id|name|path|key)?")
_GROUPS = re.compile(rf"{_SUBJECTS.pattern}|group(id|name|key)?")
"""Names of columns, without case and punctuation, whose values are a database, a document or a group."""
_QUESTION, _ROW = "question", "id"
_END = "?!.,;:。؟। "


def group_columns(tasks: Iterable[Task], named: str | None = None) -> list[str]:
    """The columns by which tasks belong together: the ``named`` one, else those with the usual names.

    Raises :class:`DataError` if no task has the named one.
    """
    present = {name: None for task in tasks for name in task if isinstance(name, str)}
    if named is not None and named not in present:
        raise DataError(f"group_column is {named!r}; the tasks have the columns {', '.join(present)}")
    return [name for name in present if _GROUPS.fullmatch(_plain(name))] if named is None else [named]


def hold_out(
    tasks: Sequence[Task], share: float, *, source: str, column: str | None = None
) -> tuple[list[Task], list[Task], str]:
    """The tasks for training, those that are held out, and how they were chosen.

    ``column`` is as in :func:`group_columns`. Where whole groups do not come near the ``share`` (half of it to twice
    as much), it is by the groups alone, else by question alone. Raises :class:`DataError`.
    """
    if not 0 < share < 1 or len(tasks) < 2:
        raise DataError(
            f"{source}: {len(tasks)} tasks, of which validation={share:g} is held out: give two tasks or more and a "
            "share between 0 and 1, or the validation tasks"
        )
    wanted = min(len(tasks) - 1, max(1, round(share * len(tasks))))
    values = {name: len({_value(task, name) for task in tasks} - {""}) for name in group_columns(tasks, column)}
    several = [name for name, count in values.items() if count > 1]
    counts = ", ".join(f"{name} has {count} value{'s' * (count != 1)}" for name, count in values.items())
    ways = [((_QUESTION, *several), "" if several else counts)]
    if several:
        ways += [(tuple(several), "several of them have the same questions"), ((_QUESTION,), counts)]
    ways.append(((_ROW,), "too few different questions"))
    # The first way whose whole groups come near the share. The last one, single rows, always does.
    choices = ((way, why, _choose(together(tasks, way), wanted)) for way, why in ways)
    way, why, held_out = next(choice for choice in choices if wanted <= 2 * len(choice[2]) <= 4 * wanted)
    parts: tuple[list[Task], list[Task]] = [], []
    for index, task in enumerate(tasks):
        parts[index in held_out].append(task)
    return *parts, f"held out by {' and '.join(way)}" + (f" alone: {why}" if why else "")


def check_given(train: Sequence[Task], validation: Sequence[Task]) -> None:
    """Raise :class:`DataError` if validation tasks that somebody gave have questions of training tasks.

    The same question about another database or document is another one.
    """
    both = set(group_columns(train)) & set(group_columns(validation))
    names = (_QUESTION, *(name for name in both if _SUBJECTS.fullmatch(_plain(name))))
    trained = {tuple(_value(task, name) for name in names) for task in train}
    shared = [task for task in validation if tuple(_value(task, name) for name in names) in trained]
    if shared:
        raise DataError(
            f"{len(shared):,} of the {len(validation):,} validation tasks have questions of training tasks, such "
            f"as {shorten_repr(shared[0][_QUESTION])}: their score would show what was memorised. Give other tasks, or "
            "set allow_shared"
        )


def shared_notes(data: TaskData, column: str | None = None) -> list[str]:
    """A sentence about the questions, databases, documents and groups of validation that training has as well."""
    if not data.train:
        return []
    shared = []
    for name in (_QUESTION, *group_columns([*data.train, *data.validation], column)):
        trained = {_value(task, name) for task in data.train} - {""}
        judged = list(filter(None, (_value(task, name) for task in data.validation)))
        judged = judged if name == _QUESTION else list(set(judged))
        if count := sum(value in trained for value in judged):
            shared.append(f"{count:,} of {len(judged):,} {'questions' if name == _QUESTION else name}")
    return [f"validation shares with training: {', '.join(shared)}"] if shared else []


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def question_key(task: Task) -> str:
    """The question in Unicode's form NFKC, without case, surplus spaces and the punctuation at its end."""
    text = " ".join(unicodedata.normalize("NFKC", str(task[_QUESTION])).casefold().split())
    return text.rstrip(_END) or text


def _value(task: Task, name: str) -> str:
    """What is compared; empty if there is none."""
    if name == _QUESTION:
        return question_key(task)
    value = task.get(name)
    missing = value is None or (isinstance(value, float) and math.isnan(value))  # as data frames have it
    return "" if missing else str(value).strip()


def together(tasks: Sequence[Task], names: Sequence[str]) -> list[list[int]]:
    """The indices of tasks that share a value of any of the columns, also through others; by a hash of their values."""
    parents: dict[str, str] = {}  # a forest of values (union-find): tasks of one tree belong together

    def root(value: str) -> str:
        while (parent := parents.setdefault(value, value)) != value:
            parents[value] = value = parents[parent]  # the path is halved, or long chains would take quadratic time
        return value

    firsts = []
    for task in tasks:
        values = [f"{name}={value}" for name in names if (value := _value(task, name))]
        first, *others = values or [f"{_QUESTION}={_value(task, _QUESTION)}"]
        for other in others:
            parents[root(other)] = root(first)
        firsts.append(first)
    groups: dict[str, list[int]] = defaultdict(list)
    for index, first in enumerate(firsts):
        groups[root(first)].append(index)

    def key(group: Sequence[int]) -> bytes:
        return hashlib.sha256(min(firsts[index] for index in group).encode("utf-8", "surrogatepass")).digest()

    return sorted(groups.values(), key=key)


def _choose(groups: Iterable[Sequence[int]], wanted: int) -> set[int]:
    """The first groups, without those that would lead away from the wanted size."""
    chosen: set[int] = set()
    for group in groups:
        if abs(len(chosen) + len(group) - wanted) < abs(len(chosen) - wanted):
            chosen.update(group)
    return chosen

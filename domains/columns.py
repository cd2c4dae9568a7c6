"""Which columns of a task its agent sees: none that the reward reads, or that is named like a gold answer."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from groundwire.domains._types import DataError, Domain, Task
from groundwire.tools.binding import GOLD_WORDS

_GOLD = re.compile("|".join((*GOLD_WORDS, "sql", "reward", "completion", "^(response|output|chosen|rejected)s?$")))
_NO_GOLD = re.compile("preference|resolution|sqlite")
_THE_GOLD = (*GOLD_WORDS, "query", "sql", "")
"""Words in the names of gold columns, those first that most surely name the answer itself."""
_ALWAYS_SHOWN = frozenset({"id", "question", "database", "db_path"})


def visible_columns(
    domain: Domain, task: Task, *, read: Collection[str] = (), shown: Collection[str] = ()
) -> dict[str, Any]:
    """The columns of ``task`` that its agent may see.

    Hidden are the domain's ``gold_columns``, the names that the reward may ``read``
    (:func:`groundwire.rewards.names_read`), and names with a word for a gold answer: gold, truth, expected, answer,
    label, target, reference, solution, sql, reward, completion; and response, output, chosen, rejected. A nested column
    loses its hidden keys, or is hidden if no other is left. ``shown`` are exceptions: ``label``, ``info.label``.
    """
    return _divide(task, domain, read, shown)[0]


def columns_line(domain: Domain, tasks: Iterable[Task], *, read: Collection[str], shown: Collection[str]) -> str:
    """One line that names the columns of ``tasks`` that agents see, and those that are hidden.

    Raises :class:`DataError` if one of the exceptions ``shown`` is no column.
    """
    seen, hidden, known = {"question": None}, dict[str, None](), set[str]()
    for task in {hash((*task, *_inner_names(task))): task for task in tasks}.values():  # one of each kind
        columns, lost = _divide(task, domain, read, shown)
        seen |= dict.fromkeys(columns)
        hidden |= dict.fromkeys(lost)
        known |= set(map(str, task))
    if unknown := [name for name in shown if not {name, name.partition(".")[0]} & known]:
        raise DataError(f"agent_columns names {unknown[0]!r}, and no task has it; they have {', '.join(sorted(known))}")
    seen.pop("id", None)
    return f"the agent sees: {', '.join(map(str, seen))}; hidden: {', '.join(hidden) or 'nothing'}"


def gold_answer(task: Task, first: Iterable[str] = (), *, read: Collection[str] = ()) -> str:
    """The gold answer of ``task``, for people: of the columns ``first``, of those that the reward may ``read``, or of
    the likeliest by its name; "" if there is none.
    """
    return _text([value for _, value in _gold_columns(task, first, read)])


def gold_value(task: Task, first: Iterable[str] = (), *, read: Collection[str] = ()) -> Any:
    """The value of the column in which :func:`gold_answer` finds the gold, such as a list or a table; None without."""
    columns = _gold_columns(task, first, read)
    # Tests may be read, and are no gold.
    columns.sort(key=lambda column: column[0] not in first and not _is_gold(column[0]))
    for name, value in columns:
        nested = isinstance(value, Mapping) and not any(word in _squeezed(name) for word in GOLD_WORDS)
        if (gold := gold_value(value) if nested else value) not in (None, "", [], {}):
            return gold
    return None


def _gold_columns(task: Task, first: Iterable[str], read: Collection[str]) -> list[tuple[str, Any]]:
    """The columns that may hold the gold, the likeliest first."""
    named = [name for name in task.keys() - _ALWAYS_SHOWN if name in read or _is_gold(name) or name == "query"]
    named.sort(key=lambda name: (name not in read, not _is_gold(name), _rank(name, task[name])))
    return [(name, task.get(name)) for name in (*first, *named)]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return next(filter(None, map(_text, value)), "")
    return gold_answer(value) if isinstance(value, Mapping) else "" if value is None else str(value)


def _rank(name: str, value: Any) -> tuple[int, str]:
    names = _squeezed([name, *value] if isinstance(value, Mapping) else name)
    return next(index for index, word in enumerate(_THE_GOLD) if word in names), str(name)


def _inner_names(task: Task) -> Iterable[str]:
    return (name for value in task.values() if isinstance(value, Mapping) for name in value)


def _squeezed(name: object) -> str:
    return re.sub(r"[\W_]+", "", str(name)).casefold()


@lru_cache(maxsize=4096)
def _is_gold(name: object) -> bool:
    return _GOLD.search(_NO_GOLD.sub("", _squeezed(name))) is not None


def _divide(
    fields: Mapping[str, Any], domain: Domain | None, read: Collection[str], shown: Collection[str], path: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The visible part of ``fields`` (of a task of ``domain``, or nested ones), and the paths of what is hidden."""
    seen, hidden = dict[str, Any](), list[str]()
    for name, value in fields.items():
        place = f"{path}{name}"
        if place in shown or (domain is not None and name in _ALWAYS_SHOWN):
            seen[name] = value
            continue
        inner, lost = _divide_value(value, read, shown, f"{place}.")
        # A nested column whose keys are hidden one by one is not hidden as a whole because the reward reads it.
        is_read = name in read and name not in _ALWAYS_SHOWN and not lost
        if _is_gold(name) or name in (domain.gold_columns if domain else ()) or is_read:
            keys = value if isinstance(value, Mapping) else {}
            inner = {key: keys[key] for key in keys if f"{place}.{key}" in shown}
            lost = [f"{place}.{key}" for key in keys if key not in inner] or [place]
        if inner or not lost:
            seen[name] = inner
        hidden += lost if inner or not lost else [place]
    return seen, hidden


def _divide_value(value: Any, read: Collection[str], shown: Collection[str], path: str) -> tuple[Any, list[str]]:
    """As :func:`_divide`, for a column's value; an empty one if nothing of it is visible."""
    if isinstance(value, Mapping):
        return _divide(value, None, read, shown, path)
    if isinstance(value, list | tuple):
        divided = [_divide_value(item, read, shown, path) for item in value]
        lost = list(dict.fromkeys(place for _, places in divided for place in places))
        inner = [item for item, _ in divided]
        return (inner if any(inner) else []) if lost else value, lost
    if isinstance(value, str) and value[:1] in ("{", "["):  # a nested column of a CSV file
        with contextlib.suppress(ValueError, RecursionError):
            inner, lost = _divide_value(json.loads(value), read, shown, path)
            return (json.dumps(inner, ensure_ascii=False) if inner else "") if lost else value, lost
    return value, []

"""Which columns of a task its agent sees.

Hidden is what the reward reads, and what is named like a gold answer; nested columns, too. The question, the id and the
database are always shown, and so are the columns that the setting ``agent_columns`` names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from groundwire.domains._types import DataError, Domain, Task

__all__ = ["check_shown", "columns_line", "gold_answer", "visible_columns"]

_GOLD = re.compile(
    "gold|truth|expected|answer|label|target|(?<!p)reference|(?<!re)solution|sql(?!ite)|reward|completion"
    "|^(response|output|chosen)s?$"
)
_THE_GOLD = ("gold", "truth", "expected", "answer", "solution", "reference", "target", "label", "query", "sql", "")
"""Words in the names of gold columns, those first that most surely name the answer itself."""
_SHOWN = frozenset({"id", "question", "database", "db_path"})
_SHAPES = 1000
"""Tasks whose nested columns are listed; others have the same ones, or are listed by their own names only."""


def visible_columns(
    domain: Domain, task: Task, *, read: Collection[str] = (), shown: Collection[str] = ()
) -> dict[str, Any]:
    """The columns of ``task`` that its agent may see.

    Hidden are the domain's ``gold_columns``, the names that the reward may ``read``
    (:func:`groundwire.rewards.names_read`), and names with a word for a gold answer: gold, truth, expected, answer,
    label, target, reference, solution, sql, reward, completion; and response, output and chosen. A nested column loses
    its hidden keys, or is hidden if no other is left. ``shown`` are exceptions, such as ``label`` or ``info.label``.
    """
    return _divide(task, _hides(domain, read), frozenset(shown) | _SHOWN)[0]


def columns_line(domain: Domain, tasks: Iterable[Task], *, read: Collection[str], shown: Collection[str]) -> str:
    """One line that names the columns of ``tasks`` that agents see, and those that are hidden."""
    seen, hidden = dict.fromkeys(["question"]), dict[str, None]()
    for task in _of_each_shape(tasks):
        columns, lost = _divide(task, _hides(domain, read), frozenset(shown) | _SHOWN)
        seen |= dict.fromkeys(columns)
        hidden |= dict.fromkeys(lost)
    seen.pop("id", None)
    return f"the agent sees: {', '.join(seen)}; hidden: {', '.join(hidden) or 'nothing'}"


def check_shown(tasks: Iterable[Task], shown: Collection[str]) -> None:
    """Raise :class:`DataError` if one of the exceptions ``shown`` names no column of ``tasks``."""
    known = {name for task in tasks for name in task} if shown else set()
    if unknown := [name for name in shown if name.partition(".")[0] not in known and name not in known]:
        raise DataError(f"agent_columns names {unknown[0]!r}, and no task has it; they have {', '.join(sorted(known))}")


def gold_answer(task: Task, first: Iterable[str] = (), *, read: Collection[str] = ()) -> str:
    """The gold answer of ``task``, for people: of the columns ``first``, of those that the reward may ``read``, or of
    the likeliest by its name; "" if there is none.
    """
    others = sorted(
        task.keys() - _SHOWN, key=lambda name: (name not in read, not _is_gold(name), _rank(name, task[name]))
    )
    named = [name for name in others if name in read or _is_gold(name) or name == "query"]
    texts = (_text(task[name]) for name in [*(name for name in first if name in task), *named])
    return next((text for text in texts if text), "")


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return gold_answer(value)
    if isinstance(value, list | tuple):
        return next((text for each in value if (text := _text(each))), "")
    return "" if value is None else str(value)


def _squeezed(name: object) -> str:
    return re.sub(r"[\W_]+", "", str(name)).casefold()


@lru_cache(maxsize=4096)
def _is_gold(name: object) -> bool:
    return _GOLD.search(_squeezed(name)) is not None


def _rank(name: str, value: Any) -> tuple[int, str]:
    names = _squeezed([name, *value] if isinstance(value, Mapping) else name)
    return next(index for index, word in enumerate(_THE_GOLD) if word in names), name


def _hides(domain: Domain, read: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(getattr(domain, "gold_columns", ())), frozenset(read)


def _divide(
    fields: Mapping[str, Any], hides: tuple[frozenset[str], frozenset[str]], shown: frozenset[str], path: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The visible part of ``fields``, and the paths of what is hidden."""
    own, read = hides
    seen, hidden = dict[str, Any](), list[str]()
    for name, value in fields.items():
        place = f"{path}{name}"
        if place in shown:
            seen[name] = value
            continue
        inner, lost = _divide_value(value, (frozenset(), read), shown, f"{place}.")
        if _is_gold(name) or name in own or (name in read and not lost):
            inner = {key: each for key, each in _fields(value) if f"{place}.{key}" in shown}
            lost = [f"{place}.{key}" for key, _ in _fields(value) if key not in inner]
            lost = lost if inner else [place]
        if lost and not inner:
            hidden.append(place)
        else:
            seen[name] = inner
            hidden += lost
    return seen, hidden


def _fields(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else ()


def _divide_value(value: Any, hides: Any, shown: frozenset[str], path: str) -> tuple[Any, list[str]]:
    if isinstance(value, Mapping):
        return _divide(value, hides, shown, path)
    if isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
        parts = [_divide_value(each, hides, shown, path) for each in value]
        lost = list(dict.fromkeys(place for _, places in parts for place in places))
        return [inner for inner, _ in parts] if any(inner for inner, _ in parts) else [], lost
    if isinstance(value, str) and value[:1] in ("{", "["):  # a nested column of a CSV file
        try:
            inner, lost = _divide_value(json.loads(value), hides, shown, path)
        except (ValueError, RecursionError):
            return value, []
        return (json.dumps(inner, ensure_ascii=False) if inner else "") if lost else value, lost
    return value, []


def _of_each_shape(tasks: Iterable[Task]) -> Iterable[Task]:
    shapes: dict[tuple[str, ...], Task] = {}
    for number, task in enumerate(tasks):
        key = tuple(task)
        if number < _SHAPES or key not in shapes:
            shapes[key] = task
            yield task

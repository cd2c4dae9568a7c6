"""Calls a user's function, an agent or a reward, by the names and annotations of its parameters.

A parameter gets the value that its name means, else the task's column of its name, else the value of which its name is
an alias. What nothing fits and has no default is refused, with what would fit.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

_KINDS = re.compile(
    r"\b(?:(?P<list>list|sequence|iterable|tuple)|(?P<mapping>dict|mapping|agenttask)|(?P<text>str))\b", re.I
)
"""What an annotation says of a value: the first of these words."""
GOLD_WORDS = ("gold", "truth", "expected", "answer", "solution", "reference", "target", "label")
"""Words in the names of gold answers, those first that most surely name the answer itself."""
_GOLD = re.compile("|".join((*GOLD_WORDS, "true", "expect", "ref", "want", "correct")), re.IGNORECASE)
"""Parameters with such a name get a column of it, or nothing."""
_TASK = re.compile("task|row|item|example|sample|record|data|entry|instance|case", re.IGNORECASE)
_SAYS_NOTHING = re.compile(r"_\w*|[^\W_]{1,2}|arg\d?", re.IGNORECASE)


def is_async(function: Any) -> bool:
    """Whether a function is called on the event loop."""
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(kind(candidate) for kind in kinds for candidate in (function, getattr(function, "__call__", None)))  # noqa: B004


class BindingError(ValueError):
    """Nothing fits the parameters ``left`` of a function, or none of its parameters gets what it needs."""

    def __init__(self, message: str, left: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.left = left


@dataclass(frozen=True)
class Value:
    """What a parameter gets whose name is one of ``names``, or whose class is ``annotation``: even where the task has a
    column of this name; one of ``aliases``: where it has none. Batches are the names that stand for many samples.
    """

    name: str
    words: str
    kind: Literal["text", "mapping", "list", "object"]
    names: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    annotation: str = ""
    batches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Binder:
    """Binds the parameters of ``function`` to ``values`` and to the columns of a task.

    ``positional`` are the values for parameters whose names say nothing. With ``by_kind`` an annotation (``str``,
    ``dict``, ``list``) chooses the value of its kind, and a column is enough; without, one of ``needs`` must be taken.
    ``example`` is what would fit.
    """

    function: Callable[..., Any]
    title: str
    values: Sequence[Value]
    positional: tuple[str, ...]
    needs: tuple[str, ...]
    example: str
    by_kind: bool = False
    _calls: dict[frozenset[str], _Call] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def signature(self) -> inspect.Signature:
        """The function's signature: ``(*args)`` if it is written in C and has none."""
        try:
            return inspect.signature(self.function)
        except (TypeError, ValueError):
            return inspect.signature(lambda *args: None)

    def bind(self, columns: Collection[str]) -> _Call:
        """How the function is called for a task with ``columns``. Raises :class:`BindingError`."""
        key = frozenset(columns)
        if key not in self._calls:
            self._calls[key] = _Call(self, key)
        return self._calls[key]

    def check(self) -> None:
        """Raise :class:`BindingError` if the function cannot be called, whatever the columns are."""
        try:
            self.bind(())
        except BindingError as error:
            if not error.left:
                raise

    def arguments(self, values: Mapping[str, Any], columns: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments of a call. Raises :class:`BindingError`."""
        bound, sources = self.bind(columns), {"value": values, "column": columns}
        named = {name: sources[kind][source] for name, (kind, source) in bound.sources.items()}
        if bound.rest:
            used = {source for _, source in bound.sources.values()}
            named |= {name: value for name, value in columns.items() if name not in used and name not in named}
        if bound.batched:
            named = {name: [value] for name, value in named.items()}
        arguments: dict[str, Any] = {}
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                arguments[name] = tuple(values[value] for value in bound.positional)
            elif parameter.kind is parameter.VAR_KEYWORD:
                arguments[name] = named if bound.rest else {}
            elif name in named:
                arguments[name] = named.pop(name)
            elif parameter.kind is parameter.POSITIONAL_ONLY:  # or the ones behind it would move forward
                arguments[name] = parameter.default
        return inspect.BoundArguments(self.signature, arguments)

    def means(self, name: str) -> bool:
        """Whether a parameter has a name or the class of the value ``name``, and no annotation of another kind."""
        [value] = [value for value in self.values if value.name == name]
        return any(
            (parameter.name in value.names and _kind(parameter) in (None, value.kind))
            or _annotation(parameter) == value.annotation != ""
            for parameter in self.signature.parameters.values()
        )

    def describe(self, columns: Collection[str]) -> str:
        """The call in words. Raises :class:`BindingError`."""
        bound, words = self.bind(columns), {value.name: value.words for value in self.values}
        arguments = [words[value] for value in bound.positional]
        for name, (kind, source) in bound.sources.items():
            arguments.append(f"{name}={words[source] if kind == 'value' else f'the column {source}'}")
        if bound.rest:
            arguments.append(f"**{bound.rest}=the other columns")
        return f"({', '.join(arguments)}){', each in a list of one' if bound.batched else ''}"


class _Call:
    """What the parameters of ``binder`` get from a task with ``columns``. Raises :class:`BindingError`.

    ``sources`` has for each ``value`` or ``column``, and its name. If ``batched``, each argument is in a list of one.
    ``rest`` is the parameter ``**rest``, if it gets the columns that are left. ``positional`` are the values of
    ``*args``, if nothing is known of the parameters.
    """

    def __init__(self, binder: Binder, columns: Collection[str]) -> None:
        parameters = binder.signature.parameters
        variadic = {parameter.kind: name for name, parameter in parameters.items()}
        rest, many = (variadic.get(kind) for kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL))
        fixed = binder.function.keywords if isinstance(binder.function, partial) else {}
        named = {name: parameter for name, parameter in parameters.items() if name not in (rest, many, *fixed)}
        required = [name for name, parameter in named.items() if parameter.default is parameter.empty]
        self._binder, self._named = binder, named
        self.sources: dict[str, tuple[str, str]] = {}
        self.rest, self.positional = "", tuple[str, ...]()
        for value in binder.values:
            meant = [name for name in value.names if name in named]
            meant += [name for name in named if value.annotation and _annotation(named[name]) == value.annotation]
            for name in sorted(meant, key=lambda parameter: (parameter not in required, parameter in columns))[:1]:
                self._give(name, value)
        self.batched = any(name in self.sources for value in binder.values for name in value.batches)
        for name in self._left(named):
            column = name if name in columns or not self.batched else name.removesuffix("s")
            if column in columns:
                self.sources[name] = "column", column
        for value in binder.values:
            for name in (parameter for parameter in value.aliases if parameter in named):
                self._give(name, value)
        self._guess(self._left(required))
        if not self.sources and not required and many:
            self.positional = binder.positional
            return
        left = self._left(required)
        alone = bool(rest and not self.sources and len(binder.positional) == 1)
        if left or not (alone or (binder.by_kind and self._by_column()) or any(map(self._taken, binder.needs))):
            raise BindingError(_refusal(binder, left, columns), left)
        if rest and (alone or (len(binder.positional) > 1 and not self._taken("task"))):
            self.rest = rest
        self.sources = {name: self.sources[name] for name in named if name in self.sources}

    def _taken(self, value: str) -> bool:
        return ("value", value) in self.sources.values()

    def _by_column(self) -> bool:
        return any(kind == "column" for kind, _ in self.sources.values())

    def _left(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self.sources]

    def _give(self, name: str, value: Value | None) -> None:
        """Give a parameter ``value``, or the one of the kind that its annotation asks for, if both are free."""
        wanted = _kind(self._named[name])
        if value is not None and wanted not in (None, value.kind) and name not in value.batches:
            value = self._of_kind(wanted)
        if value is not None and name not in self.sources and not self._taken(value.name):
            self.sources[name] = "value", value.name

    def _guess(self, left: Sequence[str]) -> None:
        """Give values to parameters whose names mean none, if there is one way to do it."""
        positional = self._binder.positional
        values = {choice.name: choice for choice in self._binder.values}
        free = [choice for choice in positional[:2] if not self._taken(choice)]
        if len(positional) > 1 and (
            self._by_column() or not (left and (_TASK.search(left[0]) or _SAYS_NOTHING.fullmatch(left[0])))
        ):
            free = [choice for choice in free if choice != "task"]
        known = {name for choice in values.values() for name in (*choice.names, *choice.aliases)}
        if len(left) == 1 and left[0] not in known and not _GOLD.search(left[0]):
            if (kind := _kind(self._named[left[0]])) and (value := self._of_kind(kind)):
                self._give(left[0], value)
            elif len(free) == 1 and (not self.sources or len(positional) > 1):
                self._give(left[0], values[free[0]])
        elif not self.sources and 2 <= len(left) <= len(positional) and all(map(_SAYS_NOTHING.fullmatch, left)):
            for name, choice in zip(left, positional, strict=False):
                self._give(name, values[choice])

    def _of_kind(self, kind: str | None) -> Value | None:
        return next((value for value in self._binder.values if self._binder.by_kind and value.kind == kind), None)


def _refusal(binder: Binder, left: Sequence[str], columns: Collection[str]) -> str:
    takes = f"{binder.title} takes {binder.signature}, and"
    if not left:
        return f"{takes} none gets {' or '.join(binder.needs)}: write {binder.example}"
    return (
        f"{takes} nothing fits {' and '.join(map(repr, left))}: write {binder.example}, or name parameters like the "
        f"columns {', '.join(sorted(columns))}"
    )


def _kind(parameter: inspect.Parameter) -> str | None:
    """What the annotation says of a value; None if nothing."""
    match = _KINDS.search(_annotation(parameter))
    return match.lastgroup if match else None


def _annotation(parameter: inspect.Parameter) -> str:
    """The annotation of a parameter as text, without its quotes and its first modules."""
    text = "" if parameter.annotation is parameter.empty else inspect.formatannotation(parameter.annotation)
    return re.sub(r"^[\w.]*\.", "", text.strip("'\""))

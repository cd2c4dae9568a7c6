"""What a run of an agent gets besides its input, made of the task: its context, and further arguments of the run."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from groundwire.adapters._types import AgentSetupError
from groundwire.adapters.agents.answers import field_names
from groundwire.tools.infrastructure import causes

_ASK = "name a function that makes it, --agent-context module:function"
_SAYS_NOTHING = (None, type(None), Any, object)


class _MissingColumnError(KeyError):
    """A context has no such column."""


class Columns(dict[str, Any]):
    """The columns of a task, which can be read as items and as attributes: as a context, an agent may change them."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(self._lacks(name))

    def __missing__(self, name: str) -> Any:
        raise _MissingColumnError(self._lacks(name))

    def _lacks(self, name: str) -> str:
        return f"no {name!r} in {', '.join(self)}"


def made_of(kind: Any, task: Mapping[str, Any]) -> Any:
    """An object of the class ``kind``: its defaults, and the task's columns with the names of its fields.

    A class of mappings gets all columns, a typed dict those of its fields. Raises :class:`adapters.AgentSetupError`.
    """
    columns = copy.deepcopy(dict(task))  # the agent may change them
    kind = get_origin(kind) or kind
    names = field_names(kind)
    if _is_mapping(kind):
        return Columns({name: columns[name] for name in names if name in columns} if names else columns)
    try:
        if kind in (str, int, float, bool):
            raise TypeError("it has no fields")
        return kind(**{name: columns[name] for name in inspect.signature(kind).parameters if name in columns})
    except Exception as error:
        name, lacking = getattr(kind, "__qualname__", repr(kind)), set(required_fields(kind)) - columns.keys()
        why = f"it needs {', '.join(sorted(lacking))}" if lacking else " ".join(str(error).split())
        raise AgentSetupError(
            f"the agent's context, {name}, cannot be made of its defaults and of the task's columns of the same names "
            f"({why}): {_ASK}"
        ) from error


def required_fields(kind: Any) -> list[str]:
    """The fields of a dataclass, a pydantic model or another class that have no default; none of a typed dict."""
    if _is_mapping(kind) or not field_names(kind):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(kind).parameters.values()
    return [
        parameter.name for parameter in parameters if parameter.kind in named and parameter.default is parameter.empty
    ]


@contextmanager
def lacks_are_setup(context: Any) -> Iterator[list[BaseException | None]]:
    """Raise :class:`adapters.AgentSetupError` for what the agent did not find in its ``context``.

    What is added to the list are exceptions that the framework has handled.
    """
    errors: list[BaseException | None] = []
    try:
        yield errors
    except Exception as error:
        errors.append(error)
        raise
    finally:
        for cause in (cause for error in errors for cause in causes(error)):
            if isinstance(cause, _MissingColumnError) or getattr(cause, "obj", errors) is context:
                raise AgentSetupError(
                    f"the agent's context lacks something that it reads ({cause.args[0]}): {_ASK}"
                ) from cause


async def call_for(option: str, function: Callable[..., Any], task: Mapping[str, Any]) -> Any:
    """What the function of an option returns, which takes no parameter, or the task; a class is made of the task.

    Raises :class:`adapters.AgentSetupError`.
    """
    if inspect.isclass(function):
        return made_of(function, task)
    try:
        value = function(task) if inspect.signature(function).parameters else function()
        return await value if inspect.isawaitable(value) else value
    except Exception as error:
        raise AgentSetupError(f"{option} raised {type(error).__name__}: {error}") from error


def declared_context(objects: Iterable[Any], wrappers: Iterable[str]) -> Any:
    """The class of contexts that agents and their functions are declared for; None if none of them says it.

    An object of a generic class says it itself (``Agent[Context](…)``), a function by the annotation of a parameter
    whose class is one of ``wrappers`` (``RunContextWrapper[Context]``).
    """
    for thing in objects:
        hints = [getattr(thing, "__orig_class__", None)]
        if callable(thing):
            with suppress(Exception):  # a name that only a type checker knows
                hints += get_type_hints(thing).values()
        for hint in hints:
            if getattr(get_origin(hint), "__name__", "") in wrappers:
                for argument in get_args(hint):
                    for kind in get_args(argument) if get_origin(argument) in (Union, UnionType) else (argument,):
                        if kind not in _SAYS_NOTHING and not hasattr(kind, "__bound__"):
                            return kind
    return None


def _is_mapping(kind: Any) -> bool:
    return hasattr(kind, "__total__") or (inspect.isclass(kind) and issubclass(kind, Mapping))

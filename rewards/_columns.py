"""Which columns of a task a reward reads: found in its code before it has judged an answer, and seen when it judges.

The code is only looked at, never called: a call may raise for an answer that is none, and may cost a judge's verdict.
"""

from __future__ import annotations

import dis
import gc
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import _lru_cache_wrapper, partial
from itertools import pairwise
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from groundwire.rewards._functions import VALUES

_CALLS = 3  # how far functions are followed: to those that the reward calls, to those that these call, and so on
_MOST = 100  # texts of a container; a larger one is data
_WRAPPERS = (partial, MethodType, CellType, staticmethod, classmethod, property, _lru_cache_wrapper)
_FIELD = re.compile(r"[{(](\w+)[})]")  # in a template: ``{name}`` or ``%(name)s``
_NO_COLUMNS = frozenset({"judge", *(name for value in VALUES for name in value.names)})  # parameters that get no column


def names_read(reward: Any) -> frozenset[str]:
    """The texts in the code of ``reward``, of which some are the names of columns that it reads.

    Its parameters, constants, defaults, attributes, and the constants of the user's functions that it calls. A reward
    of another environment has them as its attribute ``reads``.
    """
    reads = getattr(reward, "reads", None)
    names, seen = set(reads if isinstance(reads, list) else ()), dict[int, Any]()
    package = _module(inspect.unwrap(getattr(reward, "func", reward))).partition(".")[0]
    waiting = [(reward, 0)]
    while waiting:
        value, calls = waiting.pop()
        if isinstance(value, str):
            names.update((value, *_FIELD.findall(value)))
        elif id(value) not in seen and calls <= _CALLS:
            seen[id(value)] = value  # kept, or another object could get its id
            waiting += [(inner, calls) for inner in _parts(value, package)]
            if isinstance(value, FunctionType) and _is_followed(value, package):
                waiting += [(used, calls + 1) for used in _globals(value, package)]
    with suppress(TypeError, ValueError):  # a function that is written in C
        parameters = inspect.signature(reward).parameters.keys() - _NO_COLUMNS
        names |= parameters | {name.removesuffix("s") for name in parameters}
    return frozenset(names)


def _parts(value: Any, package: str) -> Iterable[Any]:
    """What may have names that ``value`` asks for."""
    parts: Iterable[Any] = ()
    if isinstance(value, CodeType):
        parts = _constants(value)
    elif isinstance(value, FunctionType):
        own = (value.__code__, value.__defaults__, value.__kwdefaults__, *(value.__closure__ or ()))
        parts = (getattr(value, "__wrapped__", None), *(own if _is_followed(value, package) else ()))
    elif isinstance(value, dict | tuple | list | set | frozenset):
        few = (*value, *(value.values() if isinstance(value, dict) else ())) if len(value) <= _MOST else ()
        parts = (item for item in few if not isinstance(item, dict))  # those are rows of data
    elif isinstance(value, _WRAPPERS):
        parts = gc.get_referents(value)
    elif isinstance(value, type) and _is_users(_module(value), package):
        parts = (*vars(value).values(), *value.__bases__)
    elif not isinstance(value, type | ModuleType) and _is_users(_module(type(value)), package):
        parts = (type(value), *getattr(value, "__dict__", {}).values())
    return parts


def _constants(code: CodeType) -> Iterator[Any]:
    """The texts that the code loads, without the names of a call's arguments and a dict's keys, and its inner code."""
    for instruction, after in pairwise(dis.get_instructions(code)):  # the last one returns
        names = isinstance(instruction.argval, tuple) and after.opname.startswith(("CALL", "BUILD_CONST_KEY_MAP"))
        if instruction.opname == "LOAD_CONST" and not names:
            yield instruction.argval


def _globals(function: FunctionType, package: str) -> list[Any]:
    """The values that the names in the code of a function stand for, those in the user's modules included."""
    codes = [function.__code__]
    codes += (constant for code in codes for constant in code.co_consts if isinstance(constant, CodeType))
    names = {name for code in codes for name in code.co_names}
    used = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [value for value in used if isinstance(value, ModuleType) and _is_users(value.__name__, package)]
    used += [vars(module)[name] for module in modules for name in names if name in vars(module)]
    operations = {instruction.opname for code in codes for instruction in dis.get_instructions(code)}
    unpacks = not operations.isdisjoint(("DICT_MERGE", "DICT_UPDATE"))
    return [*used, *names] if unpacks and _is_users(_module(function), package) else used  # Row(**task).column


def _module(value: Any) -> str:
    if isinstance(value, FunctionType):  # functools.wraps copies the name of another module
        return str(value.__globals__.get("__name__"))
    return getattr(value, "__module__", None) or type(value).__module__


def _is_followed(function: FunctionType, package: str) -> bool:
    """Whether a function may read a task: one of the user's, and of ours one that has it and wraps no other."""
    is_ours = _module(function).startswith("groundwire.rewards") and not hasattr(function, "__wrapped__")
    return (is_ours and "task" in function.__code__.co_varnames) or _is_users(_module(function), package)


def _is_users(module: str, package: str) -> bool:
    """Whether a module is not installed, or is of the package of the reward."""
    top, file = module.partition(".")[0], getattr(sys.modules.get(module), "__file__", None) or ""
    is_ours = top == "groundwire" or top in sys.stdlib_module_names
    return not is_ours and (top == package or not {"site-packages", "dist-packages"} & set(Path(file).parts))


class RecordedTask(dict[str, Any]):
    """A task that adds the names of the columns that are read, nested ones too, to ``names``."""

    def __init__(self, task: Mapping[str, Any], names: set[str]) -> None:
        super().__init__({name: _recorded(value, names) for name, value in task.items()})
        self._names = names

    def __getitem__(self, name: str) -> Any:
        self._names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        self._names.add(name)
        return super().get(name, default)


def _recorded(value: Any, names: set[str]) -> Any:
    if isinstance(value, Mapping):
        return RecordedTask(value, names)
    return [_recorded(item, names) for item in value] if isinstance(value, list) else value

"""Which columns of a task a reward reads: found in its code before it has judged an answer, and seen when it judges.

The code is only looked at, never called: a call may raise for an answer that is none, and may cost a judge's verdict.
"""

from __future__ import annotations

import dis
import inspect
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["RecordedTask", "names_read"]

_DEPTH = 3
"""Steps from the reward to a function that it calls, to one that this calls, and so on."""
_MOST = 100
"""Texts of a container; a larger one is data."""
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_ARGUMENTS = frozenset({"task", "answer", "steps", "judge", "self"})


def names_read(reward: Any) -> frozenset[str]:
    """The texts in the code of ``reward``, of which some are the names of columns that it reads.

    Its parameters, constants, defaults, attributes, and the constants of the user's functions that it calls. A reward
    of another environment has them as its attribute ``reads``.
    """
    names = set[str](getattr(reward, "reads", ()))
    seen, found = set[int](), [(reward, 0)]
    package = _module(inspect.unwrap(getattr(reward, "func", reward))).partition(".")[0]
    while found:
        value, depth = found.pop()
        if isinstance(value, str):
            names.add(value)
        elif depth <= _DEPTH and id(value) not in seen:
            seen.add(id(value))
            found += [(part, depth) for part in _parts(value, package)]
            if isinstance(value, FunctionType) and _is_own(_module(value), package):
                found += [(part, depth + 1) for part in _globals(value, package)]
    return frozenset(names | _parameters(reward))


def _parts(value: Any, package: str) -> Iterator[Any]:
    """What may have names that ``value`` asks for."""
    if isinstance(value, dict | tuple | list | set | frozenset):
        if len(value) <= _MOST:
            yield from (*value, *value.values()) if isinstance(value, dict) else value
    elif isinstance(value, CodeType):
        yield from _constants(value)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        if _is_own(_module(value), package):
            yield from (value.__code__, value.__defaults__, tuple((value.__kwdefaults__ or {}).values()))
            yield from _contents(value)
        yield getattr(value, "__wrapped__", None)
    elif isinstance(value, type):
        if _is_users(_module(value), package):
            yield from (getattr(each, "__func__", each) for each in vars(value).values())
            yield from value.__bases__
    elif not isinstance(value, ModuleType) and _is_users(_module(type(value)), package):
        yield from (type(value), tuple(getattr(value, "__dict__", {}).values()))


def _constants(code: CodeType) -> Iterator[Any]:
    """The texts that the code loads, without the names of a call's arguments and a dict's keys, and its inner code."""
    instructions = list(dis.get_instructions(code))
    for instruction, after in zip(instructions, [*instructions[1:], None], strict=True):
        names = after is not None and (after.opname.startswith("CALL") or after.opname == "BUILD_CONST_KEY_MAP")
        if instruction.opname == "LOAD_CONST" and not (isinstance(instruction.argval, tuple) and names):
            yield instruction.argval


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _globals(function: FunctionType, package: str) -> Iterator[Any]:
    """The values that the names in the code of a function stand for, those in the user's modules included."""
    codes, names = [function.__code__], set[str]()
    for code in codes:
        names.update(code.co_names)
        codes += (each for each in code.co_consts if isinstance(each, CodeType))
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    for module in [each for each in values if isinstance(each, ModuleType) and _is_own(each.__name__, package)]:
        values += [vars(module)[name] for name in names if name in vars(module)]
    yield from values


def _module(value: Any) -> str:
    return getattr(value, "__module__", None) or type(value).__module__


def _is_own(module: str, package: str) -> bool:
    """Whether a module is the user's, or has rewards of ours."""
    return module.startswith("groundwire.rewards") or _is_users(module, package)


def _is_users(module: str, package: str) -> bool:
    """Whether a module is not installed, or is of the package of the reward."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if top == "groundwire" or top in sys.stdlib_module_names:
        return False
    return top == package or not file.startswith(_INSTALLED)


def _parameters(reward: Any) -> set[str]:
    try:
        return set(inspect.signature(reward).parameters) - _ARGUMENTS
    except (TypeError, ValueError):  # written in C
        return set()


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

    def pop(self, name: str, *default: Any) -> Any:
        """As of a dict."""
        self._names.add(name)
        return super().pop(name, *default)


def _recorded(value: Any, names: set[str]) -> Any:
    if isinstance(value, Mapping):
        return RecordedTask(value, names)
    return [_recorded(each, names) for each in value] if isinstance(value, list) else value

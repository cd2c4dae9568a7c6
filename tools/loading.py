"""Loads an object that a user names: ``module:name``, or ``path/to/file.py:name``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

_log = logging.getLogger(__name__)


class MissingPackageError(ValueError):
    """The module that a name means needs a package that is not installed."""


def load_object(
    name: str,
    *,
    option: str,
    kinds: Sequence[Callable[[Any], bool]] = (callable,),
    ends: type[BaseException] | tuple[()] = (),
) -> Any:
    """The object that ``name`` means, the value of ``option``. An exception ``ends`` ends the import of its module, and
    what the module has defined before counts.

    Raises ``ValueError``, :class:`MissingPackageError` among others: if the module has no such name, the message lists
    its own of the first of ``kinds`` that it has.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"{option} is {name!r}; write it as module:name or path/to/file.py:name")
    module = _import(name, place, option, ends)
    target: Any = module
    for step in attribute.split("."):
        if not hasattr(target, step):
            own = _fitting(module, kinds)
            within = [item for item in sys.modules.items() if item[0].startswith(f"{place}.")]
            found = {"it": own} if own else {inner: _fitting(loaded, kinds[:1]) for inner, loaded in within}
            listed = "; ".join(f"{inner} has {', '.join(names)}" for inner, names in found.items() if names)
            raise ValueError(f"{option} {name!r}: {place} has no {attribute!r}; {listed or 'it has nothing that fits'}")
        target = getattr(target, step)
    return target


def _fitting(module: Any, kinds: Sequence[Callable[[Any], bool]]) -> list[str]:
    """The names of a module's own objects of the first of ``kinds`` that it has."""
    own = {
        name: value
        for name, value in vars(module).items()
        if name.isidentifier() and name[0] != "_"
        if not inspect.isroutine(value) or value.__module__ == module.__name__
    }
    return next(filter(None, ([name for name, value in own.items() if is_kind(value)] for is_kind in kinds)), [])


def _import(name: str, place: str, option: str, ends: type[BaseException] | tuple[()]) -> Any:
    try:
        return _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ends as error:
        return _begun(error, place)
    except (Exception, SystemExit) as error:  # the module is foreign code and may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if isinstance(error, FileNotFoundError) and error.filename == str(Path(place)):
            why = f"there is no file {place}"
        elif missing and f"{place}.".startswith(f"{missing}."):
            why = f"there is no module {missing!r} in this folder or on PYTHONPATH"
        elif missing:
            why = f"{place} needs the package {missing!r}, which is not installed here"
            raise MissingPackageError(f"{option} {name!r}: {why}") from error
        else:
            why = f"{place} cannot be imported: {type(error).__name__}: {error}"
        raise ValueError(f"{option} {name!r}: {why}") from error


def _begun(error: BaseException, place: str) -> ModuleType:
    """The module whose import ``error`` has ended."""
    path = str(Path(place).resolve())
    for frame, line in walk_tb(error.__traceback__):
        own = frame.f_globals
        if frame.f_code.co_name == "<module>" and (own["__name__"] == place or own.get("__file__") == path):
            _log.warning("%s, line %d: %s; the rest of the file is left out", place, line, error)
            module = ModuleType(own["__name__"])
            vars(module).update(own)
            sys.modules[module.__name__] = module
            return module
    raise error


def _import_file(path: Path) -> Any:
    """The module in a file. Its folder is on the path, as for a script, so that it finds the modules beside it."""
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    path = path.resolve()
    for loaded in list(sys.modules.values()):
        if getattr(loaded, "__file__", None) == str(path):
            return loaded
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # for pickle and for annotations that are read later
    spec.loader.exec_module(module)
    return module

"""What running agents changes in this process, and how it is given back when a run of ``fit`` or ``evaluate`` ends.

Agents that are handed over as objects run in the process of their author's notebook, which goes on afterwards.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from wrapt import FunctionWrapper, register_post_import_hook, resolve_path

_undo: list[Callable[[], None]] = []
_runs: dict[object, int] = {}  # how many changes there were when each present run began
_lock = threading.Lock()


def undo_later(undo: Callable[[], None]) -> None:
    """Call ``undo`` when the present run ends."""
    _undo.append(undo)


@contextmanager
def given_back() -> Iterator[None]:
    """Undo all that was changed in this block, in reverse order; of blocks that overlap, when the last one ends."""
    run = object()
    with _lock:
        _runs[run] = len(_undo)
    try:
        yield
    finally:
        with _lock:
            before = _runs.pop(run)
            _runs.update({other: min(before, began) for other, began in _runs.items()})
            while not _runs and len(_undo) > before:
                _undo.pop()()


def set_variable(name: str, value: str) -> None:
    """Set an environment variable."""
    before = os.environ.get(name)
    if before == value:
        return
    os.environ[name] = value

    def undo() -> None:
        if os.environ.get(name) == value:  # else somebody has set it since
            os.environ.pop(name)
            os.environ.update({} if before is None else {name: before})

    undo_later(undo)


def wrap(module: str, path: str, wrapper: Callable[..., Any]) -> None:
    """Put ``wrapper`` around a function of ``module`` as soon as that is imported, as wrapt calls wrappers."""
    is_over, installed = threading.Event(), list[Callable[[], None]]()

    def install(imported: Any) -> None:
        if is_over.is_set():
            return
        try:
            parent, name, original = resolve_path(imported, path)
        except AttributeError:  # another version of the package
            return
        is_own, wrapped = name in vars(parent), FunctionWrapper(original, wrapper)
        setattr(parent, name, wrapped)

        def undo() -> None:
            if vars(parent).get(name) is not wrapped:  # somebody has wrapped it since
                return
            if is_own:
                setattr(parent, name, original)
            else:
                delattr(parent, name)

        installed.append(undo)

    def give_back() -> None:
        is_over.set()
        for undo in installed:
            undo()

    undo_later(give_back)  # with the run that asked for it, not the one in which ``module`` is imported
    register_post_import_hook(install, module)


def skip(methods: Iterable[tuple[str, str]], when: Callable[[Any], object]) -> None:
    """Let ``methods``, each a module and its path there, do nothing where ``when`` is true of the arguments' values.

    Such a call returns None, which is awaited of a coroutine.
    """

    async def nothing() -> None: ...

    def skipped(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not when((*args, *kwargs.values())):
            return wrapped(*args, **kwargs)
        return nothing() if inspect.iscoroutinefunction(wrapped) else None

    for module, path in methods:
        wrap(module, path, skipped)

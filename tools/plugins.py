"""Plugins: three pluggy hooks, each of which receives a ``register`` callback.

A plugin is a module with functions marked ``@hookimpl``; a package names its module in the entry-point group
``groundwire``. The built-in backends, rewards and domains register through the same hooks.

    UserError
    ├── PluginError        an installed plugin cannot be loaded
    └── UnknownNameError   no plugin registered the name
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any, Generic, TypeVar

import pluggy

from groundwire.tools.errors import UserError

__all__ = ["NAMESPACE", "PluginError", "Registry", "UnknownNameError", "hookimpl", "plugin"]

NAMESPACE = "groundwire"
T = TypeVar("T")

hookimpl = pluggy.HookimplMarker(NAMESPACE)
_hookspec = pluggy.HookspecMarker(NAMESPACE)


class _Hooks:
    @_hookspec
    def register_backends(self, register: Callable[[str, Any], None]) -> None:
        """Register agent frameworks: ``register(name, backend)``."""

    @_hookspec
    def register_rewards(self, register: Callable[[str, Any], None]) -> None:
        """Register reward functions: ``register(name, reward)``."""

    @_hookspec
    def register_domains(self, register: Callable[[str, Any], None]) -> None:
        """Register domains: ``register(name, domain)``."""


_PLUGINS: list[Any] = []


def plugin(module: Any) -> None:
    """Register a module or object with hook functions, from a script; call it before the first look-up of a name."""
    _PLUGINS.append(module)


class PluginError(UserError):
    """An installed plugin cannot be loaded; the message names it and the cause."""

    exit_code = 1


class UnknownNameError(UserError):
    """No plugin registered the name; the message lists the registered names."""


class Registry(Generic[T]):
    """Objects by name, collected through one hook on first use.

    ``builtin`` is the module that registers this project's own names. A registered value is the object, or a
    ``"module:attribute"`` string that is imported on the first :meth:`get`, so listing names imports no framework.
    """

    def __init__(self, kind: str, hook: str, builtin: str) -> None:
        self._kind, self._hook, self._builtin = kind, hook, builtin
        self._entries: dict[str, Any] | None = None

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._loaded())

    def check(self, name: str) -> None:
        """Raise :class:`UnknownNameError` if ``name`` is not registered. Imports nothing."""
        if name not in self._loaded():
            raise UnknownNameError(f"unknown {self._kind} {name!r}; known: {', '.join(self.names())}")

    def get(self, name: str) -> T:
        """The object registered under ``name``.

        Raises :class:`UnknownNameError`, :class:`PluginError`, and ``ImportError`` or ``AttributeError`` if a package
        is missing: the caller adds how to install it.
        """
        self.check(name)
        entries = self._loaded()
        entry = entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            try:
                entries[name] = entry = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError):
                raise
            except Exception as error:  # a plugin's module may raise anything
                raise PluginError(
                    f"{self._kind} {name!r} ({entry}) cannot be loaded: {type(error).__name__}: {error}"
                ) from error
        return entry

    def _loaded(self) -> dict[str, Any]:
        if self._entries is None:
            manager = pluggy.PluginManager(NAMESPACE)
            manager.add_hookspecs(_Hooks)
            manager.register(importlib.import_module(self._builtin), self._builtin)
            for point in metadata.entry_points(group=NAMESPACE):
                try:
                    manager.load_setuptools_entrypoints(NAMESPACE, point.name)
                except Exception as error:  # a plugin's module may raise anything
                    package = f" of the package {point.dist.name}" if point.dist else ""
                    raise PluginError(
                        f"plugin {point.name!r} ({point.value}){package} cannot be loaded: {type(error).__name__}: "
                        f"{error}; repair the package, or uninstall it"
                    ) from error
            for module in _PLUGINS:
                manager.register(module)
            entries: dict[str, Any] = {}

            def register(name: str, value: Any) -> None:
                if name in entries:
                    raise ValueError(f"{self._kind} {name!r} is registered twice: {entries[name]!r} and {value!r}")
                entries[name] = value

            getattr(manager.hook, self._hook)(register=register)
            self._entries = entries
        return self._entries

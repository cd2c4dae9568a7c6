"""Plugins: three pluggy hooks, ``register_backends``, ``register_rewards`` and ``register_domains``.

A plugin is a module with functions of these names marked ``@hookimpl``, which receive a callback, ``register(name,
value)``; a package names its module in the entry-point group ``groundwire``. The built-in backends, rewards and domains
register through the same hooks.
"""

from __future__ import annotations

import importlib
from functools import cached_property
from importlib import metadata
from typing import Any, Generic, TypeVar

import pluggy

from groundwire.tools.errors import UserError

__all__ = ["NAMESPACE", "PluginError", "Registry", "UnknownNameError", "hookimpl", "plugin"]

NAMESPACE = "groundwire"
T = TypeVar("T")

hookimpl = pluggy.HookimplMarker(NAMESPACE)
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

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._entries)

    def check(self, name: str) -> None:
        """Raise :class:`UnknownNameError` if ``name`` is not registered. Imports nothing."""
        if name not in self._entries:
            raise UnknownNameError(f"unknown {self._kind} {name!r}; known: {', '.join(self.names())}")

    def get(self, name: str) -> T:
        """The object registered under ``name``.

        Raises :class:`UnknownNameError`, :class:`PluginError`, and ``ImportError`` or ``AttributeError`` if a package
        is missing: the caller adds how to install it.
        """
        self.check(name)
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            try:
                self._entries[name] = entry = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError):
                raise
            except Exception as error:  # a plugin's module may raise anything
                raise PluginError(
                    f"{self._kind} {name!r} ({entry}) cannot be loaded: {type(error).__name__}: {error}"
                ) from error
        return entry

    @cached_property
    def _entries(self) -> dict[str, Any]:
        manager = pluggy.PluginManager(NAMESPACE)
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
                raise PluginError(
                    f"the {self._kind} {name!r} is registered twice, as {entries[name]!r} and {value!r}: uninstall one "
                    "of the packages, or give it another name"
                )
            entries[name] = value

        getattr(manager.hook, self._hook)(register=register)
        return entries

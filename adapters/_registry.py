"""The backend registry: names to factories, whose keyword arguments are the backend's options."""

from __future__ import annotations

from collections.abc import Callable

from groundwire.adapters._types import Backend
from groundwire.tools.plugins import Registry

__all__ = ["check", "get", "names"]

_registry: Registry[Callable[..., Backend]] = Registry(
    "backend", hook="register_backends", builtin="groundwire.adapters._builtin"
)
check = _registry.check
get = _registry.get
names = _registry.names

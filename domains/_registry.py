"""The domain registry."""

from __future__ import annotations

from groundwire.domains._types import Domain
from groundwire.tools.plugins import PluginError, Registry

__all__ = ["check", "get", "names"]

_registry: Registry[Domain] = Registry("domain", hook="register_domains", builtin="groundwire.domains._builtin")
check = _registry.check
names = _registry.names


def get(name: str) -> Domain:
    """The domain ``name``. Raises :class:`groundwire.tools.plugins.UnknownNameError` and
    :class:`groundwire.tools.plugins.PluginError`.
    """
    try:
        return _registry.get(name)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"domain {name!r} cannot be imported: {error}") from error

"""The domain registry."""

from __future__ import annotations

from domains._contract import Domain
from tools.plugins import Registry

__all__ = ["get", "names"]

_registry: Registry[Domain] = Registry("domain", hook="register_domains", builtin="domains._builtin")
get = _registry.get
names = _registry.names

"""The domain registry."""

from __future__ import annotations

from domains._contract import Domain
from tools.plugins import Registry

__all__ = ["check", "get", "names"]

_registry: Registry[Domain] = Registry("domain", hook="register_domains", builtin="domains._builtin")
check = _registry.check
get = _registry.get
names = _registry.names

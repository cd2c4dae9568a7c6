"""The reward registry; its built-in names come from :mod:`rewards._builtin`, through the hook that anybody uses."""

from __future__ import annotations

from rewards._contract import Reward
from tools.plugins import Registry

__all__ = ["check", "get", "names"]

_registry: Registry[Reward] = Registry("reward", hook="register_rewards", builtin="rewards._builtin")
check = _registry.check
get = _registry.get
names = _registry.names

"""The reward registry; its built-in names come from :mod:`rewards._builtin`, through the hook that anybody uses."""

from __future__ import annotations

from rewards._contract import Reward
from tools.plugins import Registry

__all__ = ["get", "names"]

_registry: Registry[Reward] = Registry("reward", hook="register_rewards", builtin="rewards._builtin")
get = _registry.get
names = _registry.names

"""How a run ends that cannot go on: by its settings, by an agent, or by what became of its rollouts."""

from __future__ import annotations

__all__ = ["ConfigError", "EventLoopError", "RolloutsFailedError"]


class ConfigError(ValueError):
    """A setting that is unknown or out of range; the message names it, its value and what it may be."""


class RolloutsFailedError(RuntimeError):
    """Rollouts fail so steadily that it makes no sense to go on; the message says of what."""


class EventLoopError(RuntimeError):
    """The event loop of the rollouts is blocked, or gone; the message says where, or of what."""

"""What a user can mend: in a run's settings, and in an agent."""

from __future__ import annotations

__all__ = ["ConfigError", "EventLoopError"]


class ConfigError(ValueError):
    """A setting that is unknown or out of range; the message names it, its value and what it may be."""


class EventLoopError(RuntimeError):
    """The event loop of the rollouts is blocked, or gone; the message says where, or of what."""

"""What a user can mend in a run's settings."""

from __future__ import annotations

__all__ = ["ConfigError"]


class ConfigError(ValueError):
    """A setting that is unknown or out of range; the message names it, its value and what it may be."""

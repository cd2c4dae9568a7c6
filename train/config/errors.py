"""Errors of settings."""

from __future__ import annotations

from groundwire.tools.errors import UserError


class ConfigError(UserError):
    """A setting is unknown or out of range; the message names it, its value and the values it may have."""

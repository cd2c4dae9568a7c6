"""The error that ends a run of the local trainer because of its model."""

from __future__ import annotations

from groundwire.tools.errors import UserError

__all__ = ["NonFiniteGradientError"]


class NonFiniteGradientError(UserError):
    """Several updates in a row had a gradient that is not finite; the message says what to change."""

    exit_code = 1

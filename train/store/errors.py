"""Errors of the Lightning store."""

from __future__ import annotations

from groundwire.adapters.tracing.spans import SinkRefusedError
from groundwire.tools.errors import UserError

DAMAGED = "StoreFileError"
"""The ``error_type`` of a response whose request will fail again, because the store's file is damaged."""


class StoreAddressError(UserError):
    """No usable store answers at the address, or the store's server cannot listen there."""


class StoreFileError(UserError):
    """The file cannot hold a store: not writable, in use, not SQLite, or of another version."""


class MongoStoreError(UserError):
    """MongoDB cannot hold a store."""


class StoreGoneError(UserError):
    """The store stopped answering and did not come back in time."""

    exit_code = 1


class StoreLostDataError(UserError):
    """The store came back without rollouts that it had acknowledged: emptied, older, or in memory."""

    exit_code = 1


class StoreFailedError(SinkRefusedError):
    """The store answers a request with a server error again and again."""

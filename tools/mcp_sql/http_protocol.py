"""Uvicorn's HTTP protocol, which closes connections that send no request: Uvicorn itself keeps them for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_FIRST_REQUEST_S = 30.0


class ClosingProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection whose first request must be complete in time, up to its body."""

    def connection_made(self, transport: Any) -> None:
        """Start the timer."""
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(_FIRST_REQUEST_S, self._close_unused, transport)

    def _close_unused(self, transport: Any) -> None:
        if getattr(self, "cycle", None) is None:  # no request so far
            transport.close()

"""The refusal of a request, which each wire API formats in its own way."""

from __future__ import annotations

from typing import Any

__all__ = ["RefusedError", "error_body"]


class RefusedError(Exception):
    """A request that is answered with ``status`` and a message.

    ``code`` is an error code of OpenAI's API (the default is the status); ``param`` is the field at fault.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's API formats it."""
        kind = "invalid_request_error" if self.status in range(400, 500) else "upstream_error"
        return error_body(str(self), kind=kind, code=self.code or self.status, param=self.param)


def error_body(message: str, *, kind: str, code: str | int, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's API formats it, so that every client raises its own error type."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

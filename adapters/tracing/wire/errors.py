"""The refusal of a request, which each wire API formats in its own way."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from groundwire.tools.files import shorten_repr

__all__ = [
    "RefusedError",
    "error_body",
    "reject_unserved",
    "require_list",
    "require_object",
    "require_text",
    "warn_ignored",
]

_log = logging.getLogger(__name__)


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


def require_list(value: Any, name: str) -> list[Any]:
    """``value``, the field ``name``, if it is a list. Raises :class:`RefusedError`."""
    if not isinstance(value, list):
        raise RefusedError(400, f"{name} must be a list, not {shorten_repr(value)}", param=name)
    return value


def reject_unserved(request: Mapping[str, Any], unserved: Mapping[str, str]) -> None:
    """Raise :class:`RefusedError` for a field of ``unserved``, and for several choices.

    The values of ``unserved`` say what to do instead. Only chat completions have several choices.
    """
    for name, advice in unserved.items():
        if request.get(name):
            raise RefusedError(400, f"{name} is not served: {advice}", param=name)
    if request.get("n") not in (None, 1):
        raise RefusedError(
            400, f"n is {shorten_repr(request['n'])}: only chat completions have several choices", param="n"
        )


def require_object(value: Any, name: str) -> Mapping[str, Any]:
    """``value``, the field ``name``, if it is an object. Raises :class:`RefusedError`."""
    if not isinstance(value, dict):
        raise RefusedError(400, f"{name} must be an object, not {shorten_repr(value)}", param=name)
    return value


def require_text(value: Any, name: str) -> str:
    """``value``, the field ``name``, if it is a string. Raises :class:`RefusedError`."""
    if not isinstance(value, str):
        raise RefusedError(400, f"{name} must be text, not {shorten_repr(value)}", param=name)
    return value


@functools.cache
def warn_ignored(api: str, field: str) -> None:
    """Warn once that the policy cannot honour a field of requests."""
    _log.warning("agents send the field %s of the %s API, which has no effect on the policy", field, api)

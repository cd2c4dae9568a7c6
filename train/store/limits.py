"""What a request may contain. Other values are refused before any of them reaches a table.

A number that SQLite cannot hold, or JSON too deep to be read again, would otherwise fail later, in a request of
another client.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from groundwire.tools.numbers import check_finite

MAX_REQUEST_BYTES = 16 << 20
"""A call of a million tokens is about 10 MB of JSON."""
MAX_ITEMS = 10_000
"""Spans, rollouts or ids in one request."""
_MAX_DEPTH = 64
_MAX_NUMBERS = 1 << 20  # token ids in a list
_MAX_BRACKETS = 1 << 19  # a list takes 60 bytes and a microsecond
_MAX_TIME = 253_402_300_800.0  # the year 10000


class BadRequestError(ValueError):
    """A request is outside of what a store accepts; the message says how. ``status`` is that of the response."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!a} has characters that cannot be printed")
    return text


def _check_json(value: Any) -> Any:
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"the JSON is nested more than {_MAX_DEPTH} levels deep")
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    check_finite(value)
    return value


def check_attributes(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """``attributes``, if each is a number, text, or a list of either. Raises ``ValueError``."""
    for name, value in attributes.items():
        kinds = set(map(type, value)) if isinstance(value, list) else {type(value)}
        if not (kinds <= {str} or kinds <= {bool, int, float}):
            raise ValueError(f"attribute {name!r:.60} is neither a number, nor text, nor a list of either")
        if isinstance(value, list) and len(value) > _MAX_NUMBERS:
            raise ValueError(f"attribute {name!r:.60} has {len(value)} items; at most {_MAX_NUMBERS} are allowed")
    return attributes


T = TypeVar("T")
Id = Annotated[str, Field(max_length=256), AfterValidator(_check_printable)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]  # exact in every JSON reader; SQLite can count on for ever
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Time = Annotated[float, Field(ge=0, lt=_MAX_TIME)]
Items = Annotated[list[T], Field(max_length=MAX_ITEMS)]
AnyJson = Annotated[Any, AfterValidator(_check_json)]
Table = Annotated[dict[str, Any], AfterValidator(_check_json)]
# For a union of eight types, as Agent Lightning declares them, pydantic would try one after the other, and keep an
# error for each token id.
Attributes = Annotated[dict[str, Any], AfterValidator(check_attributes)]


def check_json_size(body: bytes) -> None:
    """Check JSON text before it is parsed. Raises :class:`BadRequestError`."""
    if (brackets := body.count(b"[") + body.count(b"{")) > _MAX_BRACKETS:
        raise BadRequestError(f"the JSON of the request has {brackets} opening brackets, more than {_MAX_BRACKETS}")


def problem(error: Exception) -> str:
    """What is wrong with a request: the first field that does not fit, without its value, which may be long."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"])) or "the body"
    return f"the request does not fit agentlightning 0.3: {field}: {first['msg'].removeprefix('Value error, ')}"


def decompress(body: bytes) -> bytes:
    """Decompress gzip or zlib, both of which OpenTelemetry's exporter can send.

    Raises :class:`BadRequestError` beyond ``MAX_REQUEST_BYTES``, and ``zlib.error``.
    """
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)
    data = decompressor.decompress(body, MAX_REQUEST_BYTES)
    if not decompressor.eof:
        raise BadRequestError(f"the body is cut, or has more than {MAX_REQUEST_BYTES >> 20} MiB when decompressed")
    return data

"""What a request may contain. Other values are refused before any of them reaches a table.

A number that SQLite cannot hold, or JSON too deep to be read again, would otherwise fail later, in a request of
another client.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

MAX_REQUEST_BYTES = 16 << 20
"""A call of a million tokens is about 10 MB of JSON."""
MAX_ITEMS = 10_000
"""Spans, rollouts or ids in one request."""
_MAX_ID_LENGTH = 256
_MAX_INTEGER = 1 << 53  # exact in every JSON reader; SQLite can count on for ever
_MAX_TIME = 253_402_300_800.0  # the year 10000
_MAX_DEPTH = 64

_ID = re.compile(r".*_ids?(_in)?")
_TIME = re.compile(r".*_time|timestamp")
_INTEGERS = {"limit": -1, "offset": 0, "sequence_id": 0, "max_attempts": 1}
"""The smallest values; the server checks ``limit`` and ``offset`` further."""
_MAX_NUMBERS = 1 << 20  # token ids in a list
_MAX_BRACKETS = 1 << 19  # a list takes 60 bytes and a microsecond
_END = object()
_ANY_JSON = ("input", "metadata", "heartbeat_stats")


class RefusedValueError(ValueError):
    """A value is outside of what a store accepts; the message gives its name, the value and the limit."""


def check_json_size(body: bytes) -> None:
    """Check JSON text before it is parsed. Raises :class:`RefusedValueError`."""
    if (brackets := body.count(b"[") + body.count(b"{")) > _MAX_BRACKETS:
        raise RefusedValueError(f"the JSON of the request has {brackets} opening brackets, more than {_MAX_BRACKETS}")


def check_request(path: Mapping[str, str], body: Any) -> None:
    """Check the ids in a request's path, all fields of its parsed body that Agent Lightning declares, and the depth of
    all other JSON, without recursion. Raises :class:`RefusedValueError`.
    """
    for parameter, text in path.items():
        _check_id(parameter, text)
    # Lists of ids are the only bodies without a model. An empty name stands for JSON of any form.
    levels: list[Iterator[tuple[str, Any]]] = [iter([("_ids", body)])]
    while levels:
        name, value = next(levels[-1], ("", _END))
        if value is _END:
            levels.pop()
        elif isinstance(value, (BaseModel, dict, list, tuple)):
            if len(levels) > _MAX_DEPTH:
                raise RefusedValueError(f"the JSON of the request is nested more than {_MAX_DEPTH} levels deep")
            levels.append(_children(name, value))
        elif name:
            _check_field(name, value)


def _check_id(name: str, value: str) -> None:
    if len(value) > _MAX_ID_LENGTH:
        raise RefusedValueError(f"{name} has {len(value)} characters; at most {_MAX_ID_LENGTH} are allowed")
    if not value.isprintable():
        raise RefusedValueError(f"{name} is {value!a}; only printable characters are allowed")


def _children(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        for field, item in vars(value).items():
            if field == "attributes":
                _check_attributes(item)
            else:
                yield "" if field in _ANY_JSON else field, item
        yield from (("", extra) for extra in (value.model_extra or {}).values())
    elif isinstance(value, dict):
        yield from (("", item) for item in value.values())
    else:
        if name and len(value) > MAX_ITEMS:
            raise RefusedValueError(f"{name.strip('_')} has {len(value)} items; at most {MAX_ITEMS} are allowed")
        yield from ((name, item) for item in value)


def _check_attributes(attributes: Mapping[str, Any] | None) -> None:
    """Check that each value is a number, text, or a list of either."""
    for name, value in (attributes or {}).items():
        kinds = set(map(type, value)) if isinstance(value, list) else {type(value)}
        if not (kinds <= {str} or kinds <= {bool, int, float}):
            raise RefusedValueError(f"attribute {name!r:.60} is neither a number, nor text, nor a list of either")
        if isinstance(value, list) and len(value) > _MAX_NUMBERS:
            raise RefusedValueError(
                f"attribute {name!r:.60} has {len(value)} items; at most {_MAX_NUMBERS} are allowed"
            )


def _check_field(name: str, value: Any) -> None:
    if isinstance(value, str) and _ID.fullmatch(name):
        _check_id(name.strip("_"), value)
    elif isinstance(value, int) and name in _INTEGERS and not _INTEGERS[name] <= value <= _MAX_INTEGER:
        raise RefusedValueError(f"{name} is {value}; it must be from {_INTEGERS[name]} to {_MAX_INTEGER}")
    elif isinstance(value, (int, float)) and _TIME.fullmatch(name) and not 0 <= value <= _MAX_TIME:
        raise RefusedValueError(f"{name} is {value}; it must be in seconds since 1970, before the year 10000")
    elif isinstance(value, float) and math.isnan(value):
        raise RefusedValueError(f"{name} is not a number")


def first_problem(error: ValidationError) -> str:
    """The first field that does not fit, and why; without the value, which may be long."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"])) or "the body"
    return f"the request does not fit agentlightning 0.3: {field}: {first['msg']}"


def decompress(body: bytes) -> bytes:
    """Decompress gzip or zlib, both of which OpenTelemetry's exporter can send.

    Raises :class:`RefusedValueError` beyond ``MAX_REQUEST_BYTES``, and ``zlib.error``.
    """
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)
    data = decompressor.decompress(body, MAX_REQUEST_BYTES)
    if not decompressor.eof:
        raise RefusedValueError(f"the body is cut, or has more than {MAX_REQUEST_BYTES >> 20} MiB when decompressed")
    return data

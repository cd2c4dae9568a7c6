"""What a request may contain. Other values are refused before any of them reaches a table.

A number that SQLite cannot hold, or JSON too deep to be read again, would otherwise fail later, in a request of
another client.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

__all__ = ["MAX_ITEMS", "MAX_REQUEST_BYTES", "RefusedValueError", "check_id", "check_request", "first_problem"]

MAX_REQUEST_BYTES = 32 << 20
"""The longest call is far below it: a million tokens are about 10 MB of JSON."""
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
_ANY_JSON = ("input", "metadata", "heartbeat_stats")


class RefusedValueError(ValueError):
    """A value is outside of what a store accepts; the message gives its name, the value and the limit."""


def check_request(path: Mapping[str, str], body: Any) -> None:
    """Check the ids in a request's path and its parsed body. Raises :class:`RefusedValueError`."""
    for name, value in path.items():
        check_id(name, value)
    _check_tree(body)


def check_id(name: str, value: str) -> None:
    """Check the length and the characters of an id. Raises :class:`RefusedValueError`."""
    if len(value) > _MAX_ID_LENGTH:
        raise RefusedValueError(f"{name} has {len(value)} characters; at most {_MAX_ID_LENGTH} are allowed")
    if not value.isprintable():
        raise RefusedValueError(f"{name} is {value!a}; only printable characters are allowed")


def _check_tree(body: Any) -> None:
    """Check all fields that Agent Lightning declares, and the depth of all other JSON, without recursion."""
    pending: list[tuple[str, Any, int]] = [("_ids", body, 0)]  # lists of ids are the only bodies without a model
    while pending:
        name, value, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise RefusedValueError(f"the JSON of the request is nested more than {_MAX_DEPTH} levels deep")
        children: Iterable[tuple[str, Any]] = ()
        if isinstance(value, BaseModel):
            declared = type(value).model_fields
            # The values of attributes are numbers, text and lists of them.
            children = [
                ("" if field in _ANY_JSON else field, getattr(value, field))
                for field in declared
                if field != "attributes"
            ]
            children += [("", extra) for extra in (value.model_extra or {}).values()]
        elif isinstance(value, Mapping):
            children = [("", item) for item in value.values()]
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            if name and len(value) > MAX_ITEMS:
                what = name.strip("_")
                raise RefusedValueError(f"{what} has {len(value)} items; at most {MAX_ITEMS} are allowed")
            children = [(name, item) for item in value]
        elif name:
            _check_field(name, value)
        pending += [(child, item, depth + 1) for child, item in children if child or not _is_leaf(item)]


def _is_leaf(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _check_field(name: str, value: Any) -> None:
    if isinstance(value, str) and _ID.fullmatch(name):
        check_id(name.strip("_"), value)
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

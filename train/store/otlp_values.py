"""Attributes and values of OTLP's protobuf messages as JSON."""

from __future__ import annotations

from typing import Any


def plain_attributes(pairs: Any) -> dict[str, Any]:
    """Attributes by their names."""
    return {pair.key: plain_value(pair.value) for pair in pairs}


def plain_value(value: Any) -> Any:
    """A value; bytes as hexadecimal, as Agent Lightning's store has them."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return plain_attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return None if kind is None else getattr(value, kind)

"""A text that a regular expression matches, for rewards that pay for a form."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_MOST = 50
_SPECIAL = re.compile(r"[\\\[\](){}*+?|^$]")


def matching(pattern: str, fill: str) -> str:
    """A short text that ``pattern`` matches, with ``fill`` where it takes any text; empty if it is no pattern."""
    if not _SPECIAL.search(pattern):
        return ""
    try:
        return _text(_parser.parse(pattern, re.DOTALL), fill)
    except (re.error, RecursionError, OverflowError):
        return ""


def _text(tree: Any, fill: str) -> str:
    return "".join(_of(str(operation), value, fill) for operation, value in tree)


def _of(operation: str, value: Any, fill: str) -> str:  # noqa: PLR0911 - one for each operation
    if operation == "LITERAL":
        return chr(value)
    if operation in ("ANY", "NOT_LITERAL"):
        return "x"
    if operation == "IN":
        return _member(value)
    if operation.endswith("_REPEAT"):
        least, _, inner = value
        [(kind, argument), *more] = list(inner) or [("", None)]
        if not more and (str(kind) == "ANY" or (str(kind) == "IN" and len(_member(argument)) and _is_wide(argument))):
            return fill
        return _text(inner, fill) * min(max(least, 1), _MOST)
    if operation == "SUBPATTERN":
        return _text(value[-1], fill)
    if operation == "ATOMIC_GROUP":
        return _text(value, fill)
    if operation == "BRANCH":
        return _text(value[1][0], fill)
    return _text(value[1], fill) if operation == "ASSERT" and value[0] > 0 else ""


def _is_wide(members: Any) -> bool:
    kinds = {str(kind) for kind, _ in members}
    return "NEGATE" in kinds or (
        "CATEGORY" in kinds and not any(str(value).endswith("SPACE") for _, value in members[:1])
    )


def _member(members: Any) -> str:
    kind, value = str(members[0][0]), members[0][1]
    if kind == "LITERAL":
        return chr(value)
    if kind == "RANGE":
        return chr(value[0])
    return {"CATEGORY_DIGIT": "7", "CATEGORY_SPACE": " "}.get(str(value), "x")

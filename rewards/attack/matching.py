"""A text that a regular expression matches, for rewards that pay for a form."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_MOST = 50
_ANY = "\0"  # stands for any character, or one of many
_SPECIAL = re.compile(r"[\\\[\](){}*+?|^$]")


def matching(pattern: str, fill: str) -> str:
    """A short text that ``pattern`` matches, with ``fill`` where it takes any text; empty if it is no pattern."""
    try:
        tree = _parser.parse(pattern, re.DOTALL) if _SPECIAL.search(pattern) else ()
        return _text(tree, fill).replace(_ANY, "x")
    except (re.error, RecursionError, OverflowError):
        return ""


def _text(tree: Any, fill: str) -> str:
    return "".join(_of(str(operation), value, fill) for operation, value in tree)


def _of(operation: str, value: Any, fill: str) -> str:
    if operation.endswith("_REPEAT"):
        least, _, inner = value
        member = _of(str(inner[0][0]), inner[0][1], fill) if len(inner) == 1 else ""
        return fill if member == _ANY else _text(inner, fill).replace(_ANY, "x") * min(max(least, 1), _MOST)
    if operation == "IN":
        kinds = {str(kind) for kind, _ in value} if len(value) > 1 else ()
        operation, value = ("ANY", None) if {"NEGATE", "CATEGORY"} & {*kinds} else (str(value[0][0]), value[0][1])
    texts = {"LITERAL": lambda: chr(value), "RANGE": lambda: chr(value[0]), "ATOMIC_GROUP": lambda: _text(value, fill)}
    texts |= {"BRANCH": lambda: _text(value[1][0], fill), "SUBPATTERN": lambda: _text(value[-1], fill)}
    texts |= {"ASSERT": lambda: _text(value[1], fill) if value[0] > 0 else ""}
    texts |= {"CATEGORY": lambda: {"CATEGORY_SPACE": " ", "CATEGORY_DIGIT": "7"}.get(str(value), _ANY)}
    return _ANY if operation in ("ANY", "NOT_LITERAL") else texts.get(operation, lambda: "")()

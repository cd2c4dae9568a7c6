"""Text from anywhere as valid Unicode.

A program that cuts a text in the middle of an emoji, as those in JavaScript do, leaves half of a surrogate pair, and so
does ``json.loads('"\\\\ud83d"')``. UTF-8 has no bytes for it: no file, store or socket can hold it.
"""

from __future__ import annotations

import logging
from operator import is_
from typing import Any

__all__ = ["is_damaged", "valid_text", "valid_texts"]

_log = logging.getLogger(__name__)
_first: list[str] = []
"""The first text of this process that was not valid."""


def valid_text(text: str) -> str:
    """``text`` with U+FFFD in place of each half of a surrogate pair. Says so once in a process."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if not _first:
            _first.append(text[max(0, error.start - 20) : error.end])
            _log.warning("half of a character (a surrogate without its pair) becomes U+FFFD; first here: %a", _first[0])
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # the halves of a pair are joined
    return text


def is_damaged(value: Any) -> bool:
    """Whether any text in ``value`` has U+FFFD: a character was cut, or not decoded."""
    if isinstance(value, dict):
        return any(map(is_damaged, (*value, *value.values())))
    return "\ufffd" in value if isinstance(value, str) else type(value) in (list, tuple) and any(map(is_damaged, value))


def valid_texts(value: Any) -> Any:
    """``value`` with :func:`valid_text` of all its texts, also inside of lists, tuples and dicts, their keys too.

    It is ``value`` itself if nothing had to change.
    """
    if isinstance(value, str):
        return valid_text(value)
    if type(value) not in (dict, list, tuple):
        return value
    old = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    new = [valid_texts(each) for each in old]
    if all(map(is_, old, new)):
        return value
    half = len(new) // 2
    return dict(zip(new[:half], new[half:], strict=True)) if isinstance(value, dict) else type(value)(new)

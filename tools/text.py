"""Text from anywhere as valid Unicode.

A program that cuts a text in the middle of an emoji, as those in JavaScript do, leaves half of a surrogate pair, and
JSON can hold one. UTF-8 has no bytes for it: no file, store or socket can.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

_log = logging.getLogger(__name__)
_DAMAGED = re.compile("[\ud800-\udfff\ufffd]")
_MOST, _NAME_CHARS, _REASON_CHARS, _LINE_CHARS = 20, 60, 200, 140
_first: list[str] = []  # the first text of this process that was not valid


_STEERING = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Characters that move the cursor, clear the screen, name the window, or change the order of what is read."""


def visible(text: str, *, one_line: bool = False) -> str:
    """``text`` with an escape such as ``\\x1b`` for each character that would steer a terminal; with ``one_line`` also
    for the ends of lines.
    """
    if one_line:
        text = text.replace("\n", r"\n")
    return _STEERING.sub(lambda match: repr(match[0])[1:-1], text) if not text.isprintable() else text


def valid_text(text: str) -> str:
    """``text`` with U+FFFD in place of each half of a surrogate pair. Says so once in a process."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if not _first:
            _first.append(text[max(0, error.start - 20) : error.end])
            _log.warning("half of a character (a surrogate without its pair) becomes U+FFFD; first here: %a", _first[0])
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # the halves of a pair are joined
    return text


def printable(text: str) -> str:
    """``text`` in one line that any terminal, file or socket takes: other characters, and backslashes, as escapes.

    Different texts stay different. A byte of a file's name that is no UTF-8 is such a character.
    """
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text)


def with_reasons(reasons: Mapping[str, str]) -> str:
    """Names with what is wrong with each, for a message of one line: ``a (it is empty), b (it is a pipe)``."""
    named = [f"{_cut(name, _NAME_CHARS)} ({_cut(reason, _REASON_CHARS)})" for name, reason in reasons.items()]
    return first_of(named, _MOST)


def _cut(text: str, length: int) -> str:
    text = printable(text)
    return text if len(text) <= length else f"{text[:length]}..."


def valid_texts(value: Any) -> Any:
    """``value`` with :func:`valid_text` of all its texts, also inside of lists, tuples and dicts, their keys too."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, dict):
        return {valid_texts(key): valid_texts(item) for key, item in value.items()}
    return type(value)(map(valid_texts, value)) if type(value) in (list, tuple) else value


def one_line(text: str) -> str:
    """The beginning of ``text`` in one line."""
    return " ".join(text.split())[:_LINE_CHARS]


def first_of(names: Collection[str], most: int = 5) -> str:
    """The first ``names``, and how many more there are."""
    shown = ", ".join([*names][:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def texts_in(value: Any) -> Iterator[str]:
    """All texts in ``value``, those in a text of JSON too, such as the arguments of a tool call."""
    if isinstance(value, str):
        yield value
        if value.lstrip().startswith("{"):
            with suppress(ValueError, RecursionError):
                yield from texts_in(json.loads(value))
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_in(item)


def is_damaged(value: Any) -> bool:
    """Whether any text in ``value`` has half of a surrogate pair, or U+FFFD: a character was cut, or not decoded."""
    if isinstance(value, str):
        return not value.isascii() and _DAMAGED.search(value) is not None
    items = (*value, *value.values()) if isinstance(value, dict) else value
    return isinstance(items, list | tuple) and any(map(is_damaged, items))

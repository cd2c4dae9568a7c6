"""Makes text fit to leave a process in error messages, log lines, spans and files: no secrets, and valid Unicode. On a
terminal it has, besides, no character that steers it.

A provider may repeat the key that it refuses, and an error may quote a URL with a password. Known secrets are the
values of environment variables with names like ``OPENAI_API_KEY``, and those that :func:`register_secret` was given. A
part of a secret is not recognised, so text must be masked before it is cut.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from groundwire.tools.text import valid_text, valid_texts, visible

_NAMES = ("API_KEY", "ACCESS_KEY", "SECRET_KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD")
MIN_LENGTH = 6
"""Shorter values are words of ordinary text, such as the key ``none`` of a server that needs none."""
_MASK = "***"
_CREDENTIALS = re.compile(r"(://)[^\s/?#'\"<>\\]+@")
_NUMBERS = {int, float}
_registered: set[str] = set()


def register_secret(value: str | None) -> None:
    """Mask ``value`` from now on: a secret that comes from another variable, an option or a file."""
    if value:
        _registered.add(value)


def mask_secrets(text: str) -> str:
    """``text`` as valid Unicode, with ``$NAME`` or ``***`` for each known secret, and URLs without password."""
    return secret_masker()(text)


def terminal_text(text: str, *, one_line: bool = False) -> str:
    """``text`` as a terminal may show it, whoever wrote it: without secrets, and with no character that steers it."""
    return visible(mask_secrets(text), one_line=one_line)


def say(text: str, *, err: bool = False) -> None:
    """Print a line: what our commands write to standard output and error goes through here, or
    :func:`groundwire.tools.terminal.show_line`.
    """
    print(terminal_text(text), file=sys.stderr if err else sys.stdout, flush=True)


class SafeFormatter(logging.Formatter):
    """Log lines as :func:`say` prints them."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One message is one line, whatever an id in it contains; only tracebacks have several."""
        return terminal_text(super().formatMessage(record), one_line=True)

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the traceback that belongs to it."""
        return terminal_text(super().format(record))


def format_unhandled_messages() -> None:
    """Format messages for which nobody has set up logging: Python prints them to standard error."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(SafeFormatter())


def say_traceback(*error: Any) -> None:
    """For ``sys.excepthook``."""
    say("".join(traceback.format_exception(*error)).rstrip(), err=True)


def secret_masker() -> Callable[[str], str]:
    """:func:`mask_secrets` for many texts: it reads the environment once."""
    secrets = dict.fromkeys(_registered, _MASK)
    secrets |= {value: f"${name}" for name, value in os.environ.items() if name.upper().endswith(_NAMES)}
    forms = {form: mark for value, mark in secrets.items() for form in (value, quote(value, safe=""))}
    # The longest first: a secret may be a part of another.
    ordered = sorted((form for form in forms if len(form) >= MIN_LENGTH), key=len, reverse=True)

    def mask(text: str) -> str:
        text = valid_text(text)
        for form in ordered:
            if form in text:
                text = text.replace(form, forms[form])
        return _CREDENTIALS.sub(r"\1", text) if "@" in text else text

    return mask


def masked_values(value: Any, mask: Callable[[str], str] | None = None) -> Any:
    """``value`` with all its texts masked, also inside of lists, tuples and mappings, whose names are valid Unicode."""
    mask = mask or secret_masker()
    if isinstance(value, str):
        return mask(value)
    if value is None or type(value) in _NUMBERS:
        return value
    if isinstance(value, Mapping):
        return {valid_texts(name): masked_values(item, mask) for name, item in value.items()}
    if isinstance(value, list | tuple) and not set(map(type, value)) <= _NUMBERS:  # token ids are long lists
        return [masked_values(item, mask) for item in value]
    return value


def has_credentials(url: str) -> bool:
    """Whether ``url`` has a user, a password or a query, which may be a key."""
    return "@" in url or "?" in url

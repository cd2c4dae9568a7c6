"""Read files that others wrote, or that a crash left: whatever they hold, the result is a value or an error message.

``OSError`` and ``ValueError`` are all that these functions raise, so a caller adds only the file's name and the remedy.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import reprlib
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from groundwire.tools.text import valid_text

MAX_BYTES = 64 << 20
"""Size of the largest JSON or settings file that is read: its values may take twenty times the memory."""
_ESCAPES = re.compile(r"\\\\|\\u([dD][89a-fA-F][0-9a-fA-F]{2})")
"""The escaped halves of surrogate pairs. An escaped backslash is no beginning of one."""


def read_bytes(file: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises ``OSError``, also for a pipe, a device or more than ``max_bytes``."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(file))
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MB", str(file))
        return opened.read()  # read(max_bytes) would allocate so much


def give_usual_mode(file: Path) -> None:
    """Give ``file`` the mode of one that ``open`` makes: safetensors leaves its files to their owner alone."""
    new = file.with_name(f".{file.name}.mode")
    new.touch()
    file.chmod(new.stat().st_mode)
    new.unlink()


def new_database(path: str | Path) -> None:
    """Make an empty file for SQLite, unless there is one: its own would be closed to the group, whatever the umask."""
    with suppress(OSError):  # SQLite says what is wrong
        Path(path).touch(exist_ok=False)


class GivenTwiceError(ValueError):
    """A table has a key twice: which value is meant is not known."""


def unique_keys(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A table of its keys and values. Raises :class:`GivenTwiceError`."""
    table = {}
    for key, value in pairs:
        if key in table:
            raise GivenTwiceError(f"{shorten_repr(key)} is given twice: keep one")
        table[key] = value
    return table


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """The value of a JSON text, with U+FFFD for half of a surrogate pair.

    Raises ``ValueError``, also for deep ones, and with ``unique`` for a key that an object has twice.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        value = from_json(text)
    except (TypeError, ValueError):  # TypeError: half of a surrogate pair that is not escaped
        valid = valid_text(_ESCAPES.sub(lambda escape: chr(int(escape[1], 16)) if escape[1] else escape[0], text))
        if valid == text:
            raise
        value = from_json(valid)
    if unique:
        json.loads(text, object_pairs_hook=unique_keys)
    return value


def read_json(file: Path, *, unique: bool = False) -> Any:
    """The value of a JSON file. Raises ``OSError`` and ``ValueError``, as :func:`parse_json`."""
    return parse_json(read_bytes(file), unique=unique)


def first_error(adapter: TypeAdapter[Any], value: Any) -> str:
    """What is wrong with ``value``, and where: ``calls.0.agent is 3: Input should be a valid string``; else empty."""
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        if first["type"] == "missing":
            return f"there is no {place}"
        requirement = first["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
        return f"{place} is {shorten_repr(first['input'])}: {requirement}"
    return ""


class _Shortener(reprlib.Repr):
    def repr1(self, value: Any, level: int) -> str:
        try:
            return super().repr1(value, level)
        except Exception:  # an int of too many digits, or an object whose own fails
            return f"<{type(value).__name__}>"


_shortener = _Shortener()
_shortener.maxlevel, _shortener.maxstring, _shortener.maxother, _shortener.maxlong = 2, 80, 80, 40
shorten_repr = _shortener.repr
"""``repr`` for an error message: at most about a hundred characters, however large the value is."""
_LOCK, _UNLOCKED = ".lock", ".unlocked"


class TemporaryFolder:
    """An empty folder whose name begins with ``prefix``; it exists until :meth:`remove` or the end of the process.

    Removes those of the same ``prefix`` whose processes were killed. Raises ``OSError`` if it cannot be made.
    """

    def __init__(self, prefix: str) -> None:
        _remove_abandoned(prefix)
        self._folder = tempfile.TemporaryDirectory(prefix=prefix)
        self.path = Path(self._folder.name)
        # The file gets its final name with the lock, so no other process finds it without one.
        self._lock = (self.path / _UNLOCKED).open("w")
        if os.name == "posix":  # elsewhere nobody removes what another process uses
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / _UNLOCKED).rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        self._folder.cleanup()
        self._lock.close()


def _remove_abandoned(prefix: str) -> None:
    """Remove the folders of ``prefix`` that no process uses: the end of a process frees its lock."""
    if os.name != "posix":
        return
    import fcntl

    # Not Path.glob, which may raise for the folder of another user.
    for lock in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{prefix}*", _LOCK)):
        try:
            with open(lock, "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.dirname(lock), ignore_errors=True)
        except OSError:  # in use, another user's, or removed meanwhile
            continue

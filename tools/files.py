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
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from weakref import WeakSet

from groundwire.tools.text import valid_text

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MAX_BYTES = 64 << 20
"""Size of the largest JSON or settings file that is read: its values may take twenty times the memory."""
_ESCAPES = re.compile(r"\\\\|\\u([dD][89a-fA-F][0-9a-fA-F]{2})")
"""The escaped halves of surrogate pairs. An escaped backslash is no beginning of one."""
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
_BLOCK, _DISK_BLOCK = 1 << 20, 512


def check_regular(file: str | Path) -> os.stat_result:
    """The status of a regular file, or of the one that a link leads to. Raises ``OSError``, also for any other kind."""
    try:
        status = os.stat(file)
    except ValueError as error:  # a null byte, or a character that no file's name has
        raise OSError(errno.EINVAL, "no file can have this name", str(file)) from error
    return _regular(file, status)


def _regular(file: str | Path, status: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is not a regular file but {kind}", str(file))
    return status


def open_regular(file: str | Path) -> BinaryIO:
    """Open a regular file for reading, and never wait. Raises ``OSError``, also for a pipe, a socket or a device."""
    check_regular(file)  # to open a device may do something
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # to open what is a pipe by now would wait for its writer
    try:
        _regular(file, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy the content of a regular file, without its holes. Raises ``OSError``."""
    with open_regular(source) as original, open(target, "wb") as copy:
        descriptor, size = original.fileno(), os.fstat(original.fileno()).st_size
        end = 0
        while end < size:
            start, end = _next_data(descriptor, end, size)
            copy.seek(start)
            while start < end and (block := os.pread(descriptor, min(end - start, _BLOCK), start)):
                start += copy.write(block)
        copy.truncate(size)


def _next_data(descriptor: int, start: int, size: int) -> tuple[int, int]:
    """Where the first bytes after ``start`` that are no hole begin and end."""
    try:
        begin = os.lseek(descriptor, start, os.SEEK_DATA)
        return begin, os.lseek(descriptor, begin, os.SEEK_HOLE)
    except (AttributeError, OSError) as error:  # a system or file system that knows no holes; ENXIO: no data follows
        return (size if getattr(error, "errno", None) == errno.ENXIO else start), size


def size_on_disk(file: str | Path) -> int:
    """The bytes of a regular file without its holes. Raises ``OSError``."""
    status = check_regular(file)
    return min(status.st_size, getattr(status, "st_blocks", status.st_size) * _DISK_BLOCK)


def read_bytes(file: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises ``OSError``, also for a pipe, a device or more than ``max_bytes``."""
    with open_regular(file) as opened:
        if os.fstat(opened.fileno()).st_size > max_bytes:
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
    from pydantic_core import from_json  # here, as pydantic below: many commands do without

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


def parse_toml(text: str) -> dict[str, Any]:
    """The values of a TOML text. Raises ``ValueError``."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def read_json(file: Path, *, unique: bool = False) -> Any:
    """The value of a JSON file. Raises ``OSError`` and ``ValueError``, as :func:`parse_json`."""
    return parse_json(read_bytes(file), unique=unique)


def first_error(adapter: TypeAdapter[Any], value: Any) -> str:
    """What is wrong with ``value``, and where: ``calls.0.agent is 3: Input should be a valid string``; else empty."""
    from pydantic import ValidationError

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
_folders: WeakSet[TemporaryFolder] = WeakSet()


class TemporaryFolder:
    """An empty folder in ``parent``, by default that of temporary files, whose name begins with ``prefix``. It exists
    until :meth:`remove`, the end of its ``with`` block, or the end of the process.

    Removes those of the same ``prefix`` whose processes were killed. Raises ``OSError`` if it cannot be made.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        _remove_abandoned(prefix, parent or Path(tempfile.gettempdir()))
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
        self.path, self._owner = Path(self._folder.name), os.getpid()
        _folders.add(self)
        # The file gets its final name with the lock, so no other process finds it without one.
        self._lock = (self.path / _UNLOCKED).open("w")
        if os.name == "posix":  # elsewhere nobody removes what another process uses
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / _UNLOCKED).rename(self.path / _LOCK)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder and everything in it, unless this is a fork of the process that made it."""
        if self._owner == os.getpid():
            self._folder.cleanup()
            self._lock.close()


def remove_temporary_folders() -> None:
    """Remove all that there are, before an end of the process that calls no exit handlers."""
    for folder in list(_folders):
        folder.remove()


def _remove_abandoned(prefix: str, parent: Path) -> None:
    """Remove the folders of ``prefix`` that no process uses: the end of a process frees its lock."""
    if os.name != "posix":
        return
    import fcntl

    # Not Path.glob, which may raise for the folder of another user.
    for lock in glob.glob(os.path.join(glob.escape(str(parent / prefix)) + "*", _LOCK)):
        try:
            with open(lock, "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.dirname(lock), ignore_errors=True)
        except OSError:  # in use, another user's, or removed meanwhile
            continue

"""The one way in to the file of a database: to open it never waits, writes nothing and leaves nothing behind.

What is no regular file, or has a pipe or the like in the place of one of its logs, is refused before SQLite, which
would wait for a writer, sees it. A pipe that takes such a place after the check gets one (:func:`without_waiting`). How
a database is opened depends on what is beside it:

- a write-ahead log and its index (``-shm``): a program may be using it, so with SQLite's locks;
- a log without an index: with an index of the connection's own, in memory, because SQLite would write one;
- no log of a database in WAL mode, or one without a transaction: as ``immutable``, because SQLite would write a log and
  an index, or delete the log;
- else with SQLite's locks. SQLite refuses a database that a killed program left to be repaired.

A connection without locks checks that the file did not change while it was read (:meth:`ReadOnly.check_unchanged`).
"""

from __future__ import annotations

import errno
import functools
import os
import re
import sqlite3
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from urllib.parse import quote

from groundwire.tools.files import check_regular, open_regular
from groundwire.tools.text import printable

SUFFIXES = (".sqlite", ".sqlite3", ".db")
"""Of the files that are taken for SQLite databases, in any case."""
_MAGIC = b"SQLite format 3\0"
TO_BE_REPAIRED = "a program was ended while it wrote to it; open it once with one that may write, which repairs it"
DAMAGED_ENTRY = "its entry in sqlite_master is damaged"
_LOCK_WAIT_S, _PIPE_CHECK_S = 1.0, 0.25
# Low numbers slow down heavy queries (18 % at 100, 4 % at 1000); with high ones slow opcodes exceed the deadline.
OPCODES_PER_CHECK = 100
_HEADER_SIZE = 100  # of a database file, in bytes
_WAL_MODE = b"\x02\x02"
_LOG_MAGIC = {b"\x37\x7f\x06\x82": "<", b"\x37\x7f\x06\x83": ">"}  # the order of bytes in its checksums
_LOG_HEADER_SIZE, _FRAME_HEADER_SIZE = 32, 24
_PAGE_SIZES = {2**power for power in range(9, 17)}
_JOURNAL, _LOG, _INDEX = "-journal", "-wal", "-shm"
LOGS = (_LOG, _JOURNAL)
"""The ends of the names of the files that hold a part of a database's content."""
_SCHEMA_DAMAGE = re.compile(r"malformed database schema \((.*?)\)(?: - (.*))?", re.DOTALL)

SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What a statement of SQLite raises: the second if SQLite's message repeats text of the file that is no UTF-8."""

# Bytes that are not UTF-8 are dropped, as in Spider's evaluator.
_decode = functools.partial(str, encoding="utf-8", errors="ignore")


def sqlite_message(error: Exception) -> str:
    """The text of an error, of :data:`SQLITE_ERRORS` or other."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is no UTF-8: {error.object.decode(errors='backslashreplace')}"
    return str(error)


def has_suffix(path: str | PurePath) -> bool:
    """Whether a file has the name of a database."""
    return os.path.splitext(path)[1].lower() in SUFFIXES


def file_problem(path: str | Path) -> str:
    """Why ``path`` is no readable file that begins like a SQLite database; empty if it is one."""
    try:
        _read_header(os.fspath(path))
        _files_beside(os.fspath(path))
    except OSError as error:
        return printable(error.strerror or str(error))
    return ""


def is_sqlite(path: str | Path) -> bool:
    """Whether ``path`` is a readable file that begins like a SQLite database."""
    return not file_problem(path)


def logs_of(path: str) -> dict[str, str]:
    """Where the logs of a database would be, by their ends."""
    return {end: _target(path) + end for end in LOGS}


def _target(path: str) -> str:
    """What the names of a database's logs begin with: SQLite follows a link before it looks beside the file."""
    return os.path.realpath(path) if os.path.islink(path) else path


def files_of(path: str) -> dict[str, str]:
    """The files that hold a database, by what their names end with: ``""``, and those of :data:`LOGS` that exist."""
    return {"": path, **{end: log for end, log in logs_of(path).items() if os.path.exists(log)}}


def signature(path: str) -> tuple[int, ...]:
    """A key that changes with the database or its write-ahead log.

    Raises OSError if there is no regular file, or what is no file in place of a log: SQLite would wait for it.
    """
    status, target = check_regular(path), _target(path)
    _status_beside(target + _JOURNAL)
    log = _status_beside(target + _LOG)
    key = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    return key if log is None else (*key, log.st_ino, log.st_mtime_ns, log.st_size)


def _status_beside(path: str) -> os.stat_result | None:
    """The status of a log; None if there is none. Raises OSError for what is no regular file."""
    if not os.access(path, os.F_OK):  # half the time of an exception, and this is asked before every query
        return None
    try:
        return check_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OSError(error.errno, f"{path} beside it must be a file: {error.strerror}") from error


def _files_beside(path: str) -> dict[str, str]:
    """The files beside a database that belong to it, by their ends. Raises OSError for what is no regular file."""
    files = {end: _target(path) + end for end in (*LOGS, _INDEX)}
    return {end: file for end, file in files.items() if _status_beside(file) is not None}


def _read_header(path: str) -> bytes:
    """The first bytes of a database. Raises OSError for what is none."""
    with open_regular(path) as file:
        header = file.read(_HEADER_SIZE)
    if not header:
        raise OSError(errno.EINVAL, "the file is empty")  # SQLite would open it as a database without tables
    if not header.startswith(_MAGIC):
        raise OSError(errno.EINVAL, "it is no SQLite database, or an encrypted one")
    return header


def _check_complete(path: str, header: bytes) -> None:
    """Raise OSError if the file is cut. SQLite does not notice a cut in the last page: its values become NULL."""
    page_size, pages, changes, pages_valid_for = (
        int.from_bytes(header[start:end], "big") for start, end in ((16, 18), (28, 32), (24, 28), (92, 96))
    )
    page_size = 65536 if page_size == 1 else page_size
    if not page_size:
        return
    size = os.path.getsize(path)
    # Versions of SQLite before 3.7.0 do not update the number of pages.
    expected = page_size * pages if pages and changes == pages_valid_for else -(-size // page_size) * page_size
    if size < expected:
        raise OSError(errno.EINVAL, f"the file is cut: it has {size} of {expected} bytes")


def _has_transaction(log: str) -> bool:
    """Whether SQLite finds a whole transaction in a write-ahead log (https://www.sqlite.org/fileformat2.html#walformat).

    Raises OSError.
    """
    with open_regular(log) as file:
        header = file.read(_LOG_HEADER_SIZE)
        order, page_size = _LOG_MAGIC.get(header[:4]), int.from_bytes(header[8:12], "big")
        if len(header) < _LOG_HEADER_SIZE or order is None or page_size not in _PAGE_SIZES:
            return False
        sums = _checksum(header[:24], order, (0, 0))
        if header[24:] != struct.pack(">2I", *sums):
            return False
        while len(frame := file.read(_FRAME_HEADER_SIZE + page_size)) == _FRAME_HEADER_SIZE + page_size:
            sums = _checksum(frame[:8] + frame[_FRAME_HEADER_SIZE:], order, sums)
            if frame[8:24] != header[16:24] + struct.pack(">2I", *sums):
                return False
            if frame[4:8] != bytes(4):  # the last of a transaction has the number of pages
                return True
    return False


def _checksum(content: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    first, second = sums
    words = iter(struct.unpack(f"{order}{len(content) // 4}I", content))
    for even, odd in zip(words, words, strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


class _Reading:
    """What SQLite reads now. A thread gives pipes among it a writer for a moment, and they are read no more."""

    def __init__(self) -> None:
        self._paths: dict[object, str] = {}
        self._begun, self._lock, self._is_watched = threading.Event(), threading.Lock(), False

    @contextmanager
    def path(self, path: str) -> Iterator[None]:
        key = object()
        self._paths[key] = path
        if not self._begun.is_set():  # to set it takes much longer
            self._begun.set()
        if not self._is_watched:
            with self._lock, suppress(RuntimeError):  # no more threads may be started
                if not self._is_watched:
                    threading.Thread(target=self._watch, daemon=True).start()
                    self._is_watched = True
        try:
            yield
        finally:
            del self._paths[key]

    def _watch(self) -> None:
        while True:
            self._begun.wait()
            self._begun.clear()
            while before := dict(self._paths):
                time.sleep(_PIPE_CHECK_S)
                for path in {path for key, path in before.items() if key in self._paths}:
                    for file in (path, *(_target(path) + end for end in (*LOGS, _INDEX))):
                        with suppress(OSError):  # it is not there, or nobody waits
                            if stat.S_ISFIFO(os.stat(file).st_mode):
                                os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))


_reading = _Reading()
os.register_at_fork(after_in_child=_reading.__init__)  # type: ignore[misc]
without_waiting = _reading.path
"""A context in which SQLite reads the database at a path, and does not wait if a pipe has taken the place of a file."""


class ReadOnly(sqlite3.Connection):
    """A read-only connection, made by :func:`open_readonly`."""

    path: str
    index: str
    """Of the write-ahead log; empty if this connection has the database's locks, and may see others change it."""
    signature: tuple[int, ...]
    damage: tuple[str, str] | None = None
    """An entry of the schema that cannot be read, and why. SQLite leaves it out, with all others like it."""

    def is_current(self, now: tuple[int, ...] | None = None) -> bool:
        """Whether the file, which has the signature ``now``, is still the one that was opened, to be read as it was."""
        try:
            return self.signature == (now or signature(self.path)) and not (self.index and os.path.exists(self.index))
        except OSError:
            return False

    def check_unchanged(self) -> None:
        """Raise OSError if the file changed while it was read without locks."""
        if self.index and not self.is_current():
            raise OSError(errno.EBUSY, "another program changed it meanwhile; try again")


def open_readonly(path: str, *, stop: Callable[[], bool] | None = None) -> ReadOnly:
    """A read-only connection without limits, whose schema has been read. Raises OSError and :data:`SQLITE_ERRORS`.

    ``stop`` is asked at SQLite's steps, now and later; when it returns true, the statement fails.
    """
    key, header, beside = signature(path), _read_header(path), _files_beside(path)
    if not beside and len(header) == _HEADER_SIZE:  # with one of them the file may be changing now
        _check_complete(path, header)
    options = ""
    if _LOG in beside and _INDEX not in beside and os.name == "posix":
        options = "&vfs=unix-none" if _has_transaction(beside[_LOG]) else "&immutable=1"
    elif header[18:20] == _WAL_MODE and _LOG not in beside:
        options = "&immutable=1"
    if "immutable" in options and _JOURNAL in beside:  # which SQLite would overlook
        with open_regular(beside[_JOURNAL]) as file:
            if file.read(1) not in (b"", b"\0"):
                raise OSError(errno.EROFS, TO_BE_REPAIRED)
    raw = sqlite3.connect(
        f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode=ro{options}",
        uri=True,
        timeout=_LOCK_WAIT_S,
        isolation_level=None,
        check_same_thread=False,  # several threads use it, one after another
        factory=ReadOnly,
    )
    raw.path, raw.signature, raw.index = path, key, _target(path) + _INDEX if options else ""
    raw.text_factory = _decode
    if stop is not None:
        raw.set_progress_handler(stop, OPCODES_PER_CHECK)
    try:
        if "vfs" in options:
            raw.execute("PRAGMA locking_mode=EXCLUSIVE").close()  # with no other connection to share an index with
        _read_schema(raw)
    except BaseException:
        raw.close()
        raise
    return raw


def _read_schema(raw: ReadOnly) -> None:
    read = "SELECT 1 FROM sqlite_master LIMIT 0"
    try:
        raw.execute(read).close()
    except SQLITE_ERRORS as error:
        match = _SCHEMA_DAMAGE.match(str(error))
        # A name in SQLite's message that is no UTF-8 is an error of another class, or one without a message.
        if match is None and isinstance(error, sqlite3.Error) and str(error):
            raise
        raw.damage = (match[1], match[2] or DAMAGED_ENTRY) if match else ("", DAMAGED_ENTRY)
        # Named after what it allows those who may write: here it has SQLite go on at a damaged entry.
        raw.execute("PRAGMA writable_schema=ON").close()
        raw.execute(read).close()

"""The schema of a database, as far as it can be read: what a part of it lacks hides nothing else.

A view may read a dropped table or need a function of its application, a virtual table needs a module, and an entry of
the schema may be damaged. Such a table is left out, and :attr:`Catalog.skipped` says why.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import signal
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from groundwire.tools.infrastructure import is_sqlite_failure
from groundwire.tools.sql.errors import DatabaseError, readable
from groundwire.tools.sql.opening import (
    DAMAGED_ENTRY,
    SQLITE_ERRORS,
    ReadOnly,
    open_readonly,
    signature,
    sqlite_message,
    without_waiting,
)
from groundwire.tools.worker_process import WorkerEndedError, WorkerPool, answer_requests, time_limit

Kind = Literal["table", "virtual table", "view"]

_VIEW_S, _VIEWS_S = 0.1, 0.5
"""CPU time to find the columns of a view, and of all. Each of some nested views may take twice that of the one before.
"""
_INLINE_SELECTS_WITH_CTE = 3
_HEAP_BYTES, _PROCESS_S = 96 * 1024 * 1024, 10.0
_VIRTUAL = re.compile(r"CREATE\s+VIRTUAL\s", re.IGNORECASE)
_HIDDEN, _GENERATED, _CORRUPT = 1, (2, 3), 11


@dataclass(frozen=True)
class ColumnDefinition:
    """``key`` is its place in the primary key, from 1; 0 outside of it. A ``generated`` one cannot be written."""

    name: str
    type: str
    key: int
    generated: bool


@dataclass(frozen=True)
class ForeignKey:
    """``parent_columns`` is empty for the primary key of ``parent``."""

    columns: tuple[str, ...]
    parent: str
    parent_columns: tuple[str, ...]


@dataclass(frozen=True)
class TableDefinition:
    """A table or view, without the hidden columns of a virtual table. ``sql`` is the statement that made it."""

    name: str
    kind: Kind
    sql: str
    columns: tuple[ColumnDefinition, ...]
    foreign_keys: tuple[ForeignKey, ...]

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [column.name for column in self.columns]

    @property
    def primary_key(self) -> list[str]:
        """The columns of the primary key, in its order."""
        return [column.name for column in sorted(self.columns, key=lambda column: column.key) if column.key]


@dataclass(frozen=True)
class Catalog:
    """The tables and views by name, in the order of the file, and why others cannot be used."""

    tables: Mapping[str, TableDefinition]
    skipped: Mapping[str, str]

    def find(self, name: str) -> TableDefinition | None:
        """The table ``name``, in any case of letters."""
        exact = self.tables.get(name)
        return exact or next((table for key, table in self.tables.items() if key.lower() == name.lower()), None)


def quote_identifier(name: str) -> str:
    """The identifier, quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def read_catalog(database: str | Path) -> Catalog:
    """The schema of the SQLite file ``database``. Raises :class:`groundwire.tools.sql.DatabaseError`."""
    path = os.fspath(database)
    with readable(path):
        return _read(path, signature(path))


def may_fill_memory(*statements: str) -> bool:
    """Whether SQLite needs much memory to compile one of these together with the others.

    It copies a common table expression for each use before it calls the authorizer, so several that use each other can
    fill the memory.
    """
    lowered = [text for text in map(str.lower, statements) if "with" in text]
    return sum(text.count("select") + text.count("values") for text in lowered) > _INLINE_SELECTS_WITH_CTE


def views_may_fill_memory(raw: ReadOnly, listed: list[Entry]) -> bool:
    """Whether a query of these views may, which its own text does not show, and no :func:`limit_heap` prevents it."""
    views = (entry.sql for entry in listed if entry.kind == "view")
    return may_fill_memory(*views) and raw.execute("PRAGMA hard_heap_limit").fetchone() == (0,)


class Entry(NamedTuple):
    """A row of sqlite_master about a table or view."""

    name: str
    kind: Kind
    sql: str


def entries(raw: ReadOnly) -> list[Entry]:
    """The tables and views that the schema names, without SQLite's own. Raises sqlite3.Error."""
    rows = raw.execute("SELECT name, type, sql FROM sqlite_master").fetchall()
    named = [(str(name), kind, str(sql)) for name, kind, sql in rows if kind not in ("index", "trigger")]
    return [
        Entry(name, "virtual table" if _VIRTUAL.match(sql) else "view" if kind == "view" else "table", sql)
        for name, kind, sql in named
        if not name.lower().startswith("sqlite_")
    ]


@lru_cache(maxsize=256)
def _read(path: str, _signature: tuple[int, ...]) -> Catalog:
    tables, skipped, limit = dict[str, TableDefinition](), dict[str, str](), _Limit()
    with without_waiting(path), contextlib.closing(open_readonly(path)) as raw:
        raw.set_authorizer(limit.authorize)
        listed = entries(raw)
        if views_may_fill_memory(raw, listed):
            return _read_in_process(path)
        for entry in listed:
            try:
                with limit.of_view() if entry.kind == "view" else contextlib.nullcontext():
                    table = _read_table(raw, entry)
            except MemoryError:
                if entry.kind != "view":
                    raise
                skipped[entry.name] = "its columns take too much memory to find"
            except SQLITE_ERRORS as error:
                if not limit.expired and is_sqlite_failure(error) and not is_damage(error):
                    raise  # of the whole file, such as a lock
                skipped[entry.name] = limit.expired or sqlite_message(error)
            else:
                if table.columns:
                    tables.setdefault(entry.name, table)
                else:
                    skipped[entry.name] = DAMAGED_ENTRY
        raw.check_unchanged()
    if raw.damage is not None and (raw.damage[0] or not skipped):
        name, reason = raw.damage
        if sum(entry.name == name for entry in listed) > 1:
            name = f"another {name}"
        tables.pop(name, None)
        skipped[name] = reason
    return Catalog(tables, {name: reason for name, reason in skipped.items() if name not in tables})


def is_damage(error: Exception) -> bool:
    """Whether an error is about a part of the file; Python 3.10 has no codes."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == _CORRUPT or "malformed" in str(error)


class _Limit:
    """Stops statements about views: before SQLite 3.41 a progress handler does not run while columns are found."""

    def __init__(self) -> None:
        self._left, self._end = _VIEWS_S, math.inf
        self.expired = ""

    @contextlib.contextmanager
    def of_view(self) -> Iterator[None]:
        started = time.thread_time()  # on a busy machine the same
        self._end, self.expired = started + min(_VIEW_S, self._left), ""
        try:
            yield
        finally:
            self._end, self._left = math.inf, self._left - (time.thread_time() - started)

    def authorize(self, *_: Any) -> int:
        if time.thread_time() < self._end:
            return sqlite3.SQLITE_OK
        self.expired = f"its columns take more than {_VIEW_S:g} s to find, or those of all views {_VIEWS_S:g} s"
        return sqlite3.SQLITE_DENY


def _read_table(raw: ReadOnly, entry: Entry) -> TableDefinition:
    quoted = quote_identifier(entry.name)
    columns = tuple(
        ColumnDefinition(name, type_ or "", key, hidden in _GENERATED)
        for _, name, type_, _, _, key, hidden in raw.execute(f"PRAGMA table_xinfo({quoted})")
        if hidden != _HIDDEN
    )
    links: dict[int, tuple[str, list[str], list[str]]] = {}
    listed = raw.execute(f"PRAGMA foreign_key_list({quoted})") if "references" in entry.sql.lower() else ()
    for number, _, parent, column, parent_column, *_ in listed:
        _, own, parents = links.setdefault(number, (parent, [], []))
        own.append(column)
        if parent_column is not None:
            parents.append(parent_column)
    # SQLite lists the keys in reverse order of declaration.
    keys = [ForeignKey(tuple(own), parent, tuple(parents)) for parent, own, parents in reversed(links.values())]
    return TableDefinition(*entry, columns=columns, foreign_keys=tuple(keys))


_workers = WorkerPool("groundwire.tools.sql.catalog", max_idle=0)


def limit_heap() -> None:
    """Limit SQLite's memory in this process, a worker's: in any other it would hold for what else uses SQLite there."""
    with contextlib.closing(sqlite3.connect(":memory:")) as raw:
        raw.execute(f"PRAGMA hard_heap_limit={_HEAP_BYTES}").close()


def _read_in_process(path: str) -> Catalog:
    try:
        answer = _workers.ask(lambda: path.encode(errors="surrogateescape"))
    except (WorkerEndedError, OSError) as error:
        raise DatabaseError(f"the views of {path} cannot be read: {error}") from error
    result: Catalog | DatabaseError = pickle.loads(answer or b"")  # noqa: S301 - from our own process
    if isinstance(result, DatabaseError):
        raise result
    return result


def serve(descriptor: int, parent: int) -> None:
    """Answer requests, each the path of a database, with its catalog."""
    limit_heap()
    answer_requests(_answer, descriptor, parent)


def _answer(path: bytes) -> bytes:
    with time_limit(signal.ITIMER_REAL, _PROCESS_S):
        try:
            return pickle.dumps(read_catalog(path.decode(errors="surrogateescape")))
        except DatabaseError as error:
            return pickle.dumps(error)

"""A store in one SQLite file.

Each public call is one transaction: an acknowledged call is in the file, any other has left no trace, and a rollout is
never taken from the queue without its attempt. The file is in WAL mode with ``synchronous=NORMAL``: a commit survives a
killed process; only a power failure can lose the last commits. The write-ahead log is written into the file by a
thread, with a connection of its own: it waits for the disk, and no client waits with it. One process owns the file, so
the rollouts that were used last are cached as objects: parsing JSON costs more than finding it. Calls, annotations and
outcomes are rows of JSON in the form in which runners send them, with packed token ids; they are read once, by the
trainer.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from cachetools import LRUCache
from pydantic_core import from_json, to_json

from groundwire.adapters.tracing import LLMCall, to_span
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.tools import clock
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.files import new_database
from groundwire.tools.numbers import check_finite
from groundwire.train.store.agent_lightning import (
    Request,
    outcome_span,
    outcome_span_id,
    read_record,
    read_request,
    read_resources,
    read_span,
    request_json,
    resources_json,
    span_json,
)
from groundwire.train.store.base import StateMachine, attempt_of, without_secrets
from groundwire.train.store.errors import StoreFileError
from groundwire.train.store.rollout import TRANSITIONS, Attempt, Outcome, Rollout

MEMORY = ""
"""The path of a store without a file of its own.

What is larger than the page cache goes to a temporary file, which ends with the store.
"""
_APPLICATION_ID, _SCHEMA_VERSION = 0x4C520D00, 2
_PAGE_CACHE_KIB = 16 << 10  # and as much to sort
_CACHED = 8 << 20  # bytes of JSON
_SCAN_S = 2.0
_PAGE_SIZE, _PAGE_ROWS = 512 << 10, 250
"""Characters and rows after which a page ends: others wait for it."""
_LOG_BYTES, _FULL_LOG_PAGES = 32 << 20, 128 << 8
"""About how much is written before the thread writes the log into the file, and in pages of 4 KiB where it is too slow,
and a commit does it.
"""
_COMMIT_BYTES = 16 << 10  # of pages that change with any row
_LOCKED_S = 1.0
_DELETED = 2000
"""Spans that are deleted at once."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (id INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL UNIQUE, status TEXT NOT NULL,
    mode TEXT, resources_id TEXT, start_time REAL NOT NULL, end_time REAL, last_number INTEGER NOT NULL DEFAULT 0,
    request TEXT NOT NULL, attempts TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS rollouts_status ON rollouts (status);
CREATE INDEX IF NOT EXISTS rollouts_end ON rollouts (end_time);
CREATE TABLE IF NOT EXISTS queue (id INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spans (id INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, attempt_id TEXT NOT NULL,
    span_id TEXT NOT NULL, sequence_id INTEGER NOT NULL, body TEXT NOT NULL, UNIQUE (rollout_id, attempt_id, span_id));
CREATE INDEX IF NOT EXISTS spans_order ON spans (rollout_id, sequence_id, id, attempt_id);
CREATE INDEX IF NOT EXISTS spans_of_attempt ON spans (rollout_id, attempt_id);
CREATE TABLE IF NOT EXISTS resources (id INTEGER PRIMARY KEY, resources_id TEXT NOT NULL UNIQUE,
    update_time REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS workers (id INTEGER PRIMARY KEY, worker_id TEXT NOT NULL UNIQUE, body TEXT NOT NULL);
"""
_NEXT_SPANS = "SELECT id, body FROM spans WHERE rollout_id = ? AND attempt_id = ? AND id > ? ORDER BY id"
ROLLOUT_COLUMNS = "rollout_id, status, start_time, end_time, request, attempts"


class SqliteStore(StateMachine):
    """A :class:`groundwire.train.store.base.RolloutStore` in the file ``path``, which is created if needed.

    For one event loop. ``scan_s`` is as for :class:`StateMachine`. Raises :class:`StoreFileError`.
    """

    def __init__(self, path: str | Path, *, scan_s: float = _SCAN_S) -> None:
        super().__init__(scan_s=scan_s)
        self._path = os.path.abspath(path) if str(path) != MEMORY else MEMORY
        self._conn, self._lock = _open(self._path)
        self._in_call, self._written = False, 0
        self._thread = ThreadPoolExecutor(1, "log of the store")
        self._cache: LRUCache[str, tuple[Rollout, int]] = LRUCache(maxsize=_CACHED, getsizeof=itemgetter(1))

    def close(self) -> None:
        """Close the file, after the WAL has been written into it."""
        self._thread.shutdown()
        self._conn.close()
        if self._lock is not None:
            self._lock.close()

    def prune(self, *, keep_s: float) -> bool:
        """Delete some of the rollouts that ended ``keep_s`` seconds ago, with all their data; whether there are more.

        Few spans are deleted at a time, of the oldest rollouts first, so that no request waits for long: call it again
        until it is False. The file does not shrink; the space is used again.
        """
        left = _DELETED
        with self._transaction():
            oldest = "SELECT rollout_id FROM rollouts WHERE end_time < ? ORDER BY end_time LIMIT ?"
            rows = self._conn.execute(oldest, (clock.now() - keep_s, _DELETED)).fetchall()
            for (rollout_id,) in rows:
                left -= 1 + self._delete_spans(rollout_id, left)
                if left <= 0:
                    break
                for table in ("queue", "rollouts"):
                    self._conn.execute(f"DELETE FROM {table} WHERE rollout_id = ?", (rollout_id,))  # noqa: S608
                self._cache.pop(rollout_id, None)
            return bool(rows)

    def _delete_spans(self, rollout_id: str, limit: int) -> int:
        """Delete the last spans of a rollout, its outcome first: what is left of it is read as a failure."""
        last = "SELECT id FROM spans WHERE rollout_id = ? ORDER BY sequence_id DESC, id DESC LIMIT ?"
        return self._conn.execute(f"DELETE FROM spans WHERE id IN ({last})", (rollout_id, limit)).rowcount  # noqa: S608

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        with self._transaction():
            counts = Counter(rollout_id for rollout_id, _ in attempts)
            numbers = {name: itertools.count(self._next_number(name, count)) for name, count in counts.items()}
            return [next(numbers[rollout_id]) for rollout_id, _ in attempts]

    async def add_calls(self, calls: Sequence[LLMCall]) -> None:
        self._add([to_span(without_secrets(call, self._mask)) for call in calls])

    async def add_annotations(self, spans: Sequence[SpanRecord]) -> None:
        self._add([without_secrets(span, self._mask) for span in spans])

    def _add(self, spans: Sequence[SpanRecord]) -> None:
        with self._transaction():
            for span in spans:
                self.add_span_rows(span.rollout_id, span.attempt_id, [span_json(span)])

    def add_span_rows(self, rollout_id: str, attempt_id: str, spans: Sequence[Mapping[str, Any]]) -> list[str]:
        """Store spans of an attempt, which are JSON; returns the ids of the new ones, without those that are beyond the
        rollout's limit. Raises ``ValueError``.
        """
        with self._transaction():
            rollout = self._known(rollout_id)
            attempt, new, outcome_id = attempt_of(rollout, attempt_id), [], outcome_span_id(rollout_id, attempt_id)
            for span in spans:
                limited = span["span_id"] != outcome_id
                if limited and attempt.is_full:
                    continue
                body = to_json(span, inf_nan_mode="strings").decode()  # JSON has neither NaN nor infinity
                row = (rollout_id, attempt_id, span["span_id"], span["sequence_id"], body)
                insert = "INSERT OR IGNORE INTO spans (rollout_id, attempt_id, span_id, sequence_id, body)"
                inserted = self._conn.execute(f"{insert} VALUES (?, ?, ?, ?, ?)", row)
                self._written += len(body)
                if inserted.rowcount and limited and not self._has_room(rollout, attempt, len(body)):
                    self._conn.execute("DELETE FROM spans WHERE id = ?", (inserted.lastrowid,))
                elif inserted.rowcount:
                    new.append(span["span_id"])
            if new:
                last = max(span["sequence_id"] for span in spans)
                raise_number = "UPDATE rollouts SET last_number = max(last_number, ?) WHERE rollout_id = ?"
                self._conn.execute(raise_number, (last, rollout_id))
                self._note_calls(rollout, attempt)
            return new

    async def put_resources(self, resources_id: str, resources: Mapping[str, Any]) -> None:
        with self._transaction():
            self._put_resources(resources_id, resources_json(resources))

    async def get_resources(self, resources_id: str | None) -> Mapping[str, Any] | None:
        update = self._resources(resources_id)
        return None if update is None else read_resources(update)

    async def forget(self, rollout_id: str) -> None:
        while self._path == MEMORY and self._delete_spans(rollout_id, _DELETED):  # noqa: ASYNC110 - others are served
            await asyncio.sleep(0)

    def _resources(self, resources_id: str | None) -> dict[str, Any] | None:
        """Named resources as Agent Lightning's ``ResourcesUpdate``; without an id the newest."""
        which, values = ("WHERE resources_id = ?", [resources_id]) if resources_id is not None else ("", [])
        newest = f"SELECT body FROM resources {which} ORDER BY update_time DESC, id DESC LIMIT 1"  # noqa: S608
        row = self._conn.execute(newest, values).fetchone()
        return None if row is None else self._parsed("resources", row[0])

    def _put_resources(self, resources_id: str, resources: Mapping[str, Any]) -> dict[str, Any]:
        now, before = clock.now(), self._resources(resources_id)
        update = {
            "resources_id": resources_id,
            "create_time": now if before is None else before["create_time"],
            "update_time": now,
            "version": 1 if before is None else before["version"] + 1,
            "resources": resources,
        }
        self._conn.execute(
            "INSERT INTO resources (resources_id, update_time, body) VALUES (?, ?, ?) "
            "ON CONFLICT (resources_id) DO UPDATE SET update_time = excluded.update_time, body = excluded.body",
            (resources_id, now, to_json(update).decode()),
        )
        return update

    def _next_number(self, rollout_id: str, count: int = 1) -> int:
        """The first of ``count`` numbers."""
        row = self._conn.execute("SELECT last_number FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
        if row is None:
            raise ValueError(f"Rollout {rollout_id} not found")
        number = self._parsed("rollouts", row[0], int) + 1
        last = (number + count - 1, rollout_id)
        self._conn.execute("UPDATE rollouts SET last_number = ? WHERE rollout_id = ?", last)
        return number

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """A nested call belongs to the outer transaction. Calls never wait, so no other call can run in between."""
        if self._in_call:
            yield
            return
        self._in_call = True
        self._conn.execute("BEGIN")
        try:
            yield
            self._conn.execute("COMMIT")
            self._note_commit()
        except BaseException:
            if self._conn.in_transaction:
                self._conn.execute("ROLLBACK")
            self._cache.clear()
            raise
        finally:
            self._in_call = False

    def _note_commit(self) -> None:
        self._written += _COMMIT_BYTES
        if self._path != MEMORY and self._written > _LOG_BYTES:
            self._written = 0
            self._thread.submit(self._empty_log)

    def _empty_log(self) -> None:
        with (
            suppress(sqlite3.Error),
            closing(sqlite3.connect(f"{Path(self._path).as_uri()}?mode=rw", uri=True)) as conn,
        ):
            conn.execute("PRAGMA user_version").fetchone()  # opens the log
            conn.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()  # waits for nobody, and nobody for it

    def _find(self, rollout_id: str) -> Rollout | None:
        if (cached := self._cache.get(rollout_id)) is not None:
            return cached[0]
        by_id = f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE rollout_id = ?"  # noqa: S608
        row = self._conn.execute(by_id, (rollout_id,)).fetchone()
        return None if row is None else self._of_row(row)

    def _in_status(self, statuses: Collection[str]) -> Iterable[Rollout]:
        places = ", ".join("?" * len(statuses))
        by_status = f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE status IN ({places}) ORDER BY id"  # noqa: S608
        return [self._of_row(row) for row in self._conn.execute(by_status, [*statuses]).fetchall()]

    def _of_row(self, row: tuple[Any, ...]) -> Rollout:
        rollout_id, status, started, ended, request, attempts = row
        if (cached := self._cache.get(rollout_id)) is not None:
            return cached[0]
        rollout = self._parsed("rollouts", request, lambda text: read_request(Request.model_validate_json(text)))
        rollout.rollout_id, rollout.status, rollout.started, rollout.ended = rollout_id, status, started, ended
        rollout.attempts = self._parsed("rollouts", attempts, lambda text: [Attempt(**one) for one in from_json(text)])
        if status not in TRANSITIONS:
            raise sqlite3.DatabaseError("table rollouts: a value is damaged")
        self._cache[rollout_id] = rollout, min(len(request) + len(attempts), _CACHED)
        return rollout

    def _parsed(self, table: str, text: Any, parse: Any = from_json) -> Any:
        """Raises ``sqlite3.DatabaseError`` for a value that this program did not write."""
        try:
            return parse(text)
        except (ValueError, TypeError) as error:
            raise sqlite3.DatabaseError(f"table {table}: a value is damaged") from error

    def _insert(self, rollout: Rollout) -> None:
        check_finite({"input": rollout.task})  # SQLite reads none of a JSON text with such a number
        if rollout.resources_id is None and (newest := self._resources(None)) is not None:
            rollout.resources_id = newest["resources_id"]
        fields = (rollout.rollout_id, rollout.status, rollout.mode, rollout.resources_id, rollout.started)
        self._conn.execute(
            "INSERT INTO rollouts (rollout_id, status, mode, resources_id, start_time, request, attempts) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*fields, to_json(request_json(rollout)).decode(), _attempts_json(rollout)),
        )

    def _save(self, rollout: Rollout) -> None:
        self._conn.execute(
            "UPDATE rollouts SET status = ?, end_time = ?, attempts = ? WHERE rollout_id = ?",
            (rollout.status, rollout.ended, _attempts_json(rollout), rollout.rollout_id),
        )

    def _push(self, rollout_id: str) -> None:
        self._conn.execute("INSERT INTO queue (rollout_id) VALUES (?)", (rollout_id,))

    def _pop(self) -> str | None:
        row = self._conn.execute("SELECT id, rollout_id FROM queue ORDER BY id LIMIT 1").fetchone()
        if row is None:
            return None
        if not isinstance(row[1], str):
            raise sqlite3.DatabaseError("table queue: a value is damaged")
        self._conn.execute("DELETE FROM queue WHERE id = ?", row[:1])
        return row[1]

    async def _with_calls(self, rollout: Rollout) -> Rollout:
        copy = replace(rollout, attempts=[replace(attempt) for attempt in rollout.attempts])
        if not rollout.attempts:
            return copy
        ids, last = (rollout.rollout_id, rollout.attempts[-1].attempt_id), 0
        bodies = list[str]()
        has_more = True
        while has_more:
            rows, has_more = self._page(_NEXT_SPANS, (*ids, last), _PAGE_ROWS)
            bodies += [body for _, body in rows]
            if has_more:
                last = rows[-1][0]
                await asyncio.sleep(0)

        def read() -> Any:
            spans = (self._parsed("spans", body, lambda text: read_span(from_json(text))) for body in bodies)
            return read_record(list(spans))

        copy.calls, copy.annotations, copy.outcome = await asyncio.wrap_future(in_thread(read, name="spans"))
        return copy

    def _page(self, select: str, values: Sequence[Any], limit: int, offset: int = 0) -> tuple[list[Any], bool]:
        """The first ``limit`` rows of a query (-1: all), or fewer, of a few megabytes, and whether there are more: the
        store serves other clients before the next ones.
        """
        rows, size, most = list[Any](), 0, limit + 1 if limit >= 0 else -1
        for row in self._conn.execute(f"{select} LIMIT ? OFFSET ?", (*values, most, offset)):
            if len(rows) == limit or size > _PAGE_SIZE:
                return rows, True
            rows.append(row)
            size += sum(len(value) for value in row if isinstance(value, str))
        return rows, False

    def _set_outcome(self, rollout: Rollout, attempt: Attempt, outcome: Outcome) -> None:
        outcome, number = without_secrets(outcome, self._mask), self._next_number(rollout.rollout_id)
        self._add([outcome_span(outcome, rollout.rollout_id, attempt.attempt_id, number)])


def _attempts_json(rollout: Rollout) -> str:
    return to_json([asdict(attempt) for attempt in rollout.attempts]).decode()


def _lock_log(path: str) -> BinaryIO:
    """The write-ahead log of a store, locked: SQLite takes no lock of this file. Raises ``BlockingIOError``."""
    log = open(f"{path}-wal", "ab")  # noqa: SIM115 - as long as the store
    try:
        import fcntl

        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        raise
    except (ImportError, OSError):  # a system, or a file system, without such locks
        pass
    return log


def _open(path: str) -> tuple[sqlite3.Connection, BinaryIO | None]:
    """A connection to the file, and its lock, for one owner."""
    conn = lock = None
    try:
        if path != MEMORY:
            new_database(path)
        options: Any = {"isolation_level": None, "check_same_thread": False, "cached_statements": 256}
        conn = sqlite3.connect(path, timeout=_LOCKED_S, **options)  # another store may be looking whether it is free
        conn.execute("BEGIN IMMEDIATE")
        tables = conn.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        [application_id] = conn.execute("PRAGMA application_id").fetchone()
        [version] = conn.execute("PRAGMA user_version").fetchone()
        if tables and application_id != _APPLICATION_ID:
            raise StoreFileError(f"{path} is not a store; give another file")
        if tables and version != _SCHEMA_VERSION:
            raise StoreFileError(f"{path} is a store of version {version}, not {_SCHEMA_VERSION}; give another file")
        conn.execute(f"PRAGMA application_id={_APPLICATION_ID}")
        conn.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
        for statement in _SCHEMA.split(";"):
            conn.execute(statement)
        conn.execute("COMMIT")
        conn.execute("PRAGMA journal_mode=WAL")
        conn.execute("PRAGMA synchronous=NORMAL")
        conn.execute(f"PRAGMA wal_autocheckpoint={_FULL_LOG_PAGES}")
        conn.execute(f"PRAGMA cache_size=-{_PAGE_CACHE_KIB}")
        if path != MEMORY:
            conn.execute("SELECT count(*) FROM rollouts")  # opens the log
            lock = _lock_log(path)
    except (sqlite3.Error, UnicodeDecodeError, StoreFileError, OSError) as error:  # SQLite's may repeat damaged text
        if conn is not None:
            conn.close()
        if isinstance(error, StoreFileError):
            raise
        if isinstance(error, BlockingIOError) or "locked" in str(error):
            raise StoreFileError(f"{path} is in use by another store: stop it, or give another file") from error
        if isinstance(error, (sqlite3.OperationalError, OSError)):
            raise StoreFileError(f"{path} cannot be written ({error}): give a file in a writable folder") from error
        raise StoreFileError(f"{path} is not a SQLite database ({error}): give another file") from error
    return conn, lock

"""A Lightning store in one SQLite file: Agent Lightning's store logic over collections that are tables.

Each public call of the store is one transaction: an acknowledged call is in the file, any other has left no trace, and
a rollout is never taken from the queue without its attempt. The file is in WAL mode with ``synchronous=NORMAL``: a
commit survives a killed process; only a power failure can lose the last commits. One process owns the file. In memory
are SQLite's page cache and the items used last, so memory does not grow with the history.
"""

from __future__ import annotations

import functools
import inspect
import sqlite3
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from agentlightning.store.collection.base import LightningCollections
from agentlightning.store.collection_based import CollectionBasedLightningStore
from agentlightning.types import Attempt, ResourcesUpdate, Rollout, Worker

from groundwire.train.store.backends.base import IgnoreLateChanges
from groundwire.train.store.backends.sqlite_tables import KeyValueTable, QueueTable, Table
from groundwire.train.store.errors import StoreFileError
from groundwire.train.store.limits import CheckedSpan

__all__ = ["MEMORY", "SqliteLightningStore"]

T = TypeVar("T")
MEMORY = ":memory:"
"""The path of a store without a file."""
_APPLICATION_ID, _SCHEMA_VERSION = 0x4C520D00, 1
_PAGE_CACHE_KIB = 32 << 10
_CACHED = 8 << 20
_SCAN_S = 2.0
_PRUNED = 20


class SqliteLightningStore(IgnoreLateChanges):
    """Agent Lightning's store in the file ``path``, which is created if needed. For one event loop.

    ``scan_s`` is the shortest time, in seconds, between two scans for unresponsive attempts. Raises
    :class:`StoreFileError`.
    """

    def __init__(self, path: str | Path, *, scan_s: float = _SCAN_S) -> None:
        super().__init__(collections=SqliteCollections(path), scan_debounce_seconds=scan_s)

    def prune(self, *, keep_s: float) -> int:
        """Delete some rollouts that ended more than ``keep_s`` seconds ago, with all their data; returns how many.

        Few are deleted at a time, the oldest first, so that no request waits for long: call it again until it is 0.
        The file does not shrink; the space is used again.
        """
        return self.collections.run(self._prune(time.time() - keep_s))

    async def _prune(self, ended_before: float) -> int:
        collections = self.collections
        rollouts = [
            rollout
            for status in ("succeeded", "failed", "cancelled")
            for rollout in await collections.rollouts.query({"status": {"exact": status}}, limit=_PRUNED)
            if rollout.end_time is not None and rollout.end_time < ended_before
        ]
        for rollout in rollouts:
            for table in (collections.spans, collections.attempts, collections.rollouts):
                table.delete_rollout(rollout.rollout_id)
            await collections.rollout_queue.remove(rollout.rollout_id)
            await collections.span_sequence_ids.pop(rollout.rollout_id)
        return len(rollouts)

    def close(self) -> None:
        """Close the file."""
        self.collections.close()


def _in_one_transaction(method: Any) -> Any:
    @functools.wraps(method)
    async def transaction(self: SqliteLightningStore, *args: Any, **kwargs: Any) -> Any:
        return self.collections.run(method(self, *args, **kwargs))

    return transaction


for _name, _method in inspect.getmembers(CollectionBasedLightningStore, inspect.iscoroutinefunction):
    # wait_for_rollout and wait_for_rollouts only read, and they wait.
    if not _name.startswith(("_", "wait_")) or _name == "_scan_for_unhealthy_rollouts":
        setattr(SqliteLightningStore, _name, _in_one_transaction(_method))


class SqliteCollections(LightningCollections):
    """The tables of one file."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._conn = _open(str(path))
        self._in_call = False
        table = functools.partial(Table, self._conn)
        self._rollouts = table(Rollout, "rollouts", key=("rollout_id",), indexed=("status",), cached=_CACHED)
        self._attempts = table(Attempt, "attempts", key=("rollout_id", "attempt_id"), cached=_CACHED)
        self._spans = table(CheckedSpan, "spans", key=("rollout_id", "attempt_id", "span_id"))
        self._resources = table(
            ResourcesUpdate, "resources", key=("resources_id",), indexed=("update_time",), cached=_CACHED
        )
        self._workers = table(Worker, "workers", key=("worker_id",), cached=_CACHED)
        self._queue = QueueTable(self._conn, "rollout_queue")
        self._sequences = KeyValueTable(self._conn, "span_sequence_ids")

    collection_name = "sqlite"
    rollouts = property(attrgetter("_rollouts"))
    attempts = property(attrgetter("_attempts"))
    spans = property(attrgetter("_spans"))
    resources = property(attrgetter("_resources"))
    workers = property(attrgetter("_workers"))
    rollout_queue = property(attrgetter("_queue"))
    span_sequence_ids = property(attrgetter("_sequences"))

    @asynccontextmanager
    async def atomic(self, **_: Any) -> AsyncIterator[SqliteCollections]:
        """Nothing: each call of the store is one transaction already."""
        yield self

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call of the store as one transaction; a nested call belongs to the outer transaction.

        The calls never wait for anything, so no other call can run in between.
        """
        if self._in_call:
            return _result(call)
        self._in_call = True
        self._conn.execute("BEGIN")
        try:
            result = _result(call)
            self._conn.execute("COMMIT")
            return result
        except BaseException:
            if self._conn.in_transaction:
                self._conn.execute("ROLLBACK")
            for table in (self._rollouts, self._attempts, self._resources, self._workers):
                table.clear_cache()
            raise
        finally:
            self._in_call = False

    def close(self) -> None:
        """Close the file, after the WAL has been written into it."""
        self._conn.close()


def _result(call: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    call.close()
    raise RuntimeError(f"{call} waited in the middle of a transaction")


def _open(path: str) -> sqlite3.Connection:
    try:
        conn = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0, cached_statements=256)
    except sqlite3.Error as error:
        raise StoreFileError(f"{path} cannot be opened ({error}): give a file in a writable folder") from error
    try:
        # One owner: the lock is taken at the first access and held until the process ends.
        conn.execute("PRAGMA locking_mode=EXCLUSIVE")
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
        conn.execute("COMMIT")
        conn.execute("PRAGMA journal_mode=WAL")
        conn.execute("PRAGMA synchronous=NORMAL")
        conn.execute(f"PRAGMA cache_size=-{_PAGE_CACHE_KIB}")
    except (sqlite3.Error, UnicodeDecodeError, StoreFileError) as error:  # SQLite's message may repeat damaged text
        conn.close()
        if isinstance(error, StoreFileError):
            raise
        if "locked" in str(error):
            raise StoreFileError(f"{path} is in use by another store: stop it, or give another file") from error
        if isinstance(error, sqlite3.OperationalError):
            raise StoreFileError(f"{path} cannot be written: {error}") from error
        raise StoreFileError(f"{path} is not a SQLite database ({error}): give another file") from error
    return conn

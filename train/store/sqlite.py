"""A Lightning store in one SQLite file: Agent Lightning's own store logic over collections that are tables.

Every public call of the store is one transaction, so whatever was acknowledged is in the file and whatever was not has
left no trace: a rollout is never taken from the queue without its attempt. The file is in WAL mode with
``synchronous=NORMAL``: a commit survives the process being killed at any moment; only a power failure can take the last
ones. One process owns the file. Memory holds SQLite's page cache and the items used last: history costs disk, no RAM.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from agentlightning.store.base import LightningStoreCapabilities
from agentlightning.store.collection.base import LightningCollections
from agentlightning.store.collection_based import CollectionBasedLightningStore
from agentlightning.types import Attempt, ResourcesUpdate, Rollout, Span, Worker

from groundwire.train.store.ended_attempts import IgnoreLateSpans
from groundwire.train.store.errors import StoreFileError
from groundwire.train.store.sqlite_collections import KeyValueTable, QueueTable, Table

__all__ = ["MEMORY", "SqliteLightningStore"]

T = TypeVar("T")
MEMORY = ":memory:"
"""The path of a store that keeps nothing."""
_APPLICATION, _SCHEMA = 0x4C520D00, 1
_CACHE_KIB = 32 << 10
_KEEP = 1024
_SCAN_S = 2.0
# All but the two that wait, wait_for_rollout and wait_for_rollouts, which only read.
_CALLS = [
    *("start_rollout", "enqueue_rollout", "enqueue_many_rollouts", "dequeue_rollout", "dequeue_many_rollouts"),
    *("start_attempt", "update_rollout", "update_attempt", "update_worker", "add_resources", "update_resources"),
    *("get_next_span_sequence_id", "get_many_span_sequence_ids", "add_span", "add_many_spans", "add_otel_span"),
    *("query_rollouts", "query_attempts", "query_spans", "query_workers", "query_resources", "get_rollout_by_id"),
    *("get_latest_attempt", "get_resources_by_id", "get_latest_resources", "get_worker_by_id"),
    "_scan_for_unhealthy_rollouts",
]


class SqliteLightningStore(IgnoreLateSpans):
    """Agent Lightning's store on ``path``, which is made where it is not there. Use it from one event loop.

    ``scan_s`` is how often it looks for attempts that stopped reporting. Raises :class:`StoreFileError`.
    """

    def __init__(self, path: str | Path, *, scan_s: float = _SCAN_S) -> None:
        super().__init__(collections=SqliteCollections(path), scan_debounce_seconds=scan_s)

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """For one event loop; nothing is copied to other processes."""
        return LightningStoreCapabilities(thread_safe=False, async_safe=True, zero_copy=False, otlp_traces=False)

    def close(self) -> None:
        """Close the file."""
        self.collections.close()


def _in_one_transaction(name: str) -> Any:
    method = getattr(CollectionBasedLightningStore, name)

    @functools.wraps(method)
    async def whole(self: SqliteLightningStore, *args: Any, **kwargs: Any) -> Any:
        return self.collections.run(method(self, *args, **kwargs))

    return whole


for _name in _CALLS:
    setattr(SqliteLightningStore, _name, _in_one_transaction(_name))


class SqliteCollections(LightningCollections):
    """The tables of one file."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._conn = _open(str(path))
        self._depth = 0
        table = functools.partial(Table, self._conn)
        self._rollouts = table(Rollout, "rollouts", key=("rollout_id",), indexed=("status",), keep=_KEEP)
        self._attempts = table(Attempt, "attempts", key=("rollout_id", "attempt_id"), keep=_KEEP)
        self._spans = table(Span, "spans", key=("rollout_id", "attempt_id", "span_id"))
        self._resources = table(
            ResourcesUpdate, "resources", key=("resources_id",), indexed=("update_time",), keep=_KEEP
        )
        self._workers = table(Worker, "workers", key=("worker_id",), keep=_KEEP)
        self._queue = QueueTable(self._conn, "rollout_queue")
        self._sequences = KeyValueTable(self._conn, "span_sequence_ids")

    @property
    def collection_name(self) -> str:
        """A name for metrics."""
        return "sqlite"

    @property
    def rollouts(self) -> Table[Rollout]:
        """Rollouts by id."""
        return self._rollouts

    @property
    def attempts(self) -> Table[Attempt]:
        """Attempts by rollout and id."""
        return self._attempts

    @property
    def spans(self) -> Table[Span]:
        """Spans by rollout, attempt and id."""
        return self._spans

    @property
    def resources(self) -> Table[ResourcesUpdate]:
        """Resources by id."""
        return self._resources

    @property
    def workers(self) -> Table[Worker]:
        """Workers by id."""
        return self._workers

    @property
    def rollout_queue(self) -> QueueTable:
        """Ids of the rollouts that wait for a runner."""
        return self._queue

    @property
    def span_sequence_ids(self) -> KeyValueTable:
        """The last number given to a span, by rollout."""
        return self._sequences

    @asynccontextmanager
    async def atomic(self, **_: Any) -> AsyncIterator[SqliteCollections]:
        """Part of the transaction of the store's call."""
        yield self

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call of the store as one transaction; a call within a call is part of the outer one.

        None of them ever waits, so no other call can come between.
        """
        if self._depth:
            return _finish(call)
        self._depth = 1
        self._conn.execute("BEGIN")
        try:
            result = _finish(call)
            self._conn.execute("COMMIT")
            return result
        except BaseException:
            if self._conn.in_transaction:
                self._conn.execute("ROLLBACK")
            for table in (self._rollouts, self._attempts, self._resources, self._workers):
                table.forget()
            raise
        finally:
            self._depth = 0

    def close(self) -> None:
        """Close the file; what the WAL holds is moved into it."""
        self._conn.close()


def _finish(call: Coroutine[Any, Any, T]) -> T:
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    call.close()
    raise RuntimeError(f"{call} waited for something in the middle of a transaction")


def _open(path: str) -> sqlite3.Connection:
    try:
        conn = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0, cached_statements=256)
    except sqlite3.Error as error:
        raise StoreFileError(
            f"{path} cannot be opened: {error}; give a file in a folder that can be written"
        ) from error
    try:
        # One owner: the lock is taken with the first access and held; the system lets go of it when the process ends.
        conn.execute("PRAGMA locking_mode=EXCLUSIVE")
        conn.execute("BEGIN IMMEDIATE")
        tables = conn.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        marks = tuple(conn.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if tables and marks != (_APPLICATION, _SCHEMA):
            kind = f"a store of version {marks[1]}; this is {_SCHEMA}" if marks[0] == _APPLICATION else "not a store"
            raise StoreFileError(f"{path} is {kind}; give another file")
        conn.execute(f"PRAGMA application_id={_APPLICATION}")
        conn.execute(f"PRAGMA user_version={_SCHEMA}")
        conn.execute("COMMIT")
        conn.execute("PRAGMA journal_mode=WAL")
        conn.execute("PRAGMA synchronous=NORMAL")
        conn.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    except sqlite3.OperationalError as error:
        conn.close()
        if "locked" in str(error):
            raise StoreFileError(f"{path} is in use by another store; stop that one, or give another file") from error
        raise StoreFileError(f"{path} cannot be written: {error}") from error
    except sqlite3.DatabaseError as error:
        conn.close()
        raise StoreFileError(f"{path} is no SQLite database ({error}); give another file") from error
    except StoreFileError:
        conn.close()
        raise
    return conn

"""A Lightning store in one SQLite file: Agent Lightning's own store logic over collections that are tables.

Every public call of the store is one transaction, so whatever was acknowledged is in the file and whatever was not has
left no trace: a rollout is never taken from the queue without its attempt. The file is in WAL mode with
``synchronous=NORMAL``: a commit survives the process being killed at any moment; only a power failure can take the last
ones. One process owns the file. Nothing is kept in memory but SQLite's page cache, so history costs disk and no RAM.

A table has the primary key and the fields that are searched as columns, and the whole item as JSON.
"""

from __future__ import annotations

import functools
import json
import math
import sqlite3
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from agentlightning.store.base import LightningStoreCapabilities
from agentlightning.store.collection.base import (
    Collection,
    DuplicatedPrimaryKeyError,
    KeyValue,
    LightningCollections,
    Queue,
    ensure_numeric,
    normalize_filter_options,
    resolve_sort_options,
)
from agentlightning.store.collection_based import CollectionBasedLightningStore
from agentlightning.types import (
    Attempt,
    FilterField,
    FilterOptions,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    SortOptions,
    Span,
    Worker,
)
from pydantic import BaseModel

__all__ = ["MEMORY", "SqliteLightningStore", "StoreFileError"]

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
MEMORY = ":memory:"
"""The path of a store that keeps nothing."""
_APPLICATION, _SCHEMA = 0x4C520D00, 1
_CACHE_KIB = 32 << 10
_SCAN_S = 2.0


class StoreFileError(Exception):
    """The file cannot be a store: not writable, in use, no database, or of another version."""


class SqliteLightningStore(CollectionBasedLightningStore["SqliteCollections"]):
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


# The two that wait, wait_for_rollout and wait_for_rollouts, only read.
for _name in (
    "start_rollout enqueue_rollout enqueue_many_rollouts dequeue_rollout dequeue_many_rollouts start_attempt "
    "add_resources update_resources get_next_span_sequence_id get_many_span_sequence_ids add_span add_many_spans "
    "add_otel_span update_rollout update_attempt update_worker query_rollouts query_attempts query_spans query_workers "
    "query_resources get_rollout_by_id get_latest_attempt get_resources_by_id get_latest_resources get_worker_by_id "
    "_scan_for_unhealthy_rollouts"
).split():
    setattr(SqliteLightningStore, _name, _in_one_transaction(_name))


class SqliteCollections(LightningCollections):
    """The tables of one file."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._conn = _open(str(path))
        self._depth = 0
        table = functools.partial(_Table, self._conn)
        self._rollouts = table(Rollout, "rollouts", key=("rollout_id",), indexed=("status",))
        self._attempts = table(Attempt, "attempts", key=("rollout_id", "attempt_id"))
        self._spans = table(Span, "spans", key=("rollout_id", "attempt_id", "span_id"))
        self._resources = table(ResourcesUpdate, "resources", key=("resources_id",), indexed=("update_time",))
        self._workers = table(Worker, "workers", key=("worker_id",))
        self._queue = _QueueTable(self._conn, "rollout_queue")
        self._sequences = _KeyValueTable(self._conn, "span_sequence_ids")

    @property
    def collection_name(self) -> str:
        """A name for metrics."""
        return "sqlite"

    @property
    def rollouts(self) -> _Table[Rollout]:
        """Rollouts by id."""
        return self._rollouts

    @property
    def attempts(self) -> _Table[Attempt]:
        """Attempts by rollout and id."""
        return self._attempts

    @property
    def spans(self) -> _Table[Span]:
        """Spans by rollout, attempt and id."""
        return self._spans

    @property
    def resources(self) -> _Table[ResourcesUpdate]:
        """Resources by id."""
        return self._resources

    @property
    def workers(self) -> _Table[Worker]:
        """Workers by id."""
        return self._workers

    @property
    def rollout_queue(self) -> _QueueTable:
        """Ids of the rollouts that wait for a runner."""
        return self._queue

    @property
    def span_sequence_ids(self) -> _KeyValueTable:
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
        return end.value  # type: ignore[no-any-return]
    call.close()
    raise RuntimeError(f"{call.__name__} waited for something in the middle of a transaction")


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


class _Table(Collection[M], Generic[M]):
    """A collection as a table; its order is that of insertion."""

    def __init__(
        self,
        conn: sqlite3.Connection,
        model: type[M],
        name: str,
        *,
        key: tuple[str, ...],
        indexed: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self._conn, self._model, self._name, self._key = conn, model, name, key
        self._columns = (*key, *indexed)
        conn.execute(
            f"CREATE TABLE IF NOT EXISTS {name} (id INTEGER PRIMARY KEY, "
            + "".join(f"{column} NOT NULL, " for column in self._columns)
            + f"body TEXT NOT NULL, UNIQUE ({', '.join(key)}))"
        )
        for column in indexed:
            conn.execute(f"CREATE INDEX IF NOT EXISTS {name}_{column} ON {name} ({column})")
        self._insert = (
            f"INSERT INTO {name} ({', '.join(self._columns)}, body) VALUES ({', '.join('?' * len(self._columns))}, ?)"
        )
        self._by_key = " AND ".join(f"{column} = ?" for column in key)
        self._replace = (
            f"UPDATE {name} SET {''.join(f'{column} = ?, ' for column in indexed)}body = ? WHERE {self._by_key}"
        )

    @property
    def collection_name(self) -> str:
        return self._name

    def primary_keys(self) -> Sequence[str]:
        return self._key

    def item_type(self) -> type[M]:
        return self._model

    async def size(self) -> int:
        return int(self._conn.execute(f"SELECT count(*) FROM {self._name}").fetchone()[0])

    async def query(
        self,
        filter: FilterOptions | None = None,
        sort: SortOptions | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[M]:
        where, values = self._where(filter)
        rows = self._conn.execute(
            f"SELECT body FROM {self._name}{where}{self._order(sort)} LIMIT ? OFFSET ?", (*values, limit, offset)
        ).fetchall()
        total = offset + len(rows)
        if limit != -1 or (offset and not rows):
            total = self._conn.execute(f"SELECT count(*) FROM {self._name}{where}", values).fetchone()[0]
        return PaginatedResult(items=[self._read(row) for row in rows], limit=limit, offset=offset, total=total)

    async def get(self, filter: FilterOptions | None = None, sort: SortOptions | None = None) -> M | None:
        where, values = self._where(filter)
        row = self._conn.execute(f"SELECT body FROM {self._name}{where}{self._order(sort)} LIMIT 1", values).fetchone()
        return None if row is None else self._read(row)

    async def insert(self, items: Sequence[M]) -> None:
        self._conn.execute("SAVEPOINT batch")  # all of them or none
        try:
            self._conn.executemany(self._insert, [(*self._values(item, self._columns), _json(item)) for item in items])
        except sqlite3.IntegrityError as error:
            self._conn.execute("ROLLBACK TO batch")
            raise DuplicatedPrimaryKeyError(f"an item with this key is already in {self._name}: {error}") from error
        finally:
            self._conn.execute("RELEASE batch")

    async def update(self, items: Sequence[M], update_fields: Sequence[str] | None = None) -> Sequence[M]:
        return [self._update(item, update_fields) for item in items]

    async def upsert(self, items: Sequence[M], update_fields: Sequence[str] | None = None) -> Sequence[M]:
        stored = []
        for item in items:
            if self._find(item) is None:
                await self.insert([item])
                stored.append(item)
            else:
                stored.append(self._update(item, update_fields))
        return stored

    async def delete(self, items: Sequence[M]) -> None:
        for item in items:
            deleted = self._conn.execute(
                f"DELETE FROM {self._name} WHERE {self._by_key}", self._values(item, self._key)
            )
            if not deleted.rowcount:
                raise self._missing(item)

    def _find(self, item: M) -> M | None:
        query = f"SELECT body FROM {self._name} WHERE {self._by_key}"
        row = self._conn.execute(query, self._values(item, self._key)).fetchone()
        return None if row is None else self._read(row)

    def _update(self, item: M, fields: Sequence[str] | None) -> M:
        if fields is not None:
            found = self._find(item)
            if found is None:
                raise self._missing(item)
            item = found.model_copy(update={name: getattr(item, name) for name in fields})
        values = (*self._values(item, self._columns[len(self._key) :]), _json(item), *self._values(item, self._key))
        if not self._conn.execute(self._replace, values).rowcount:
            raise self._missing(item)
        return item

    def _missing(self, item: M) -> ValueError:
        key = ", ".join(
            f"{name}={value!r}" for name, value in zip(self._key, self._values(item, self._key), strict=True)
        )
        return ValueError(f"{self._name} has no item with {key}")

    def _read(self, row: tuple[str]) -> M:
        return self._model.model_validate_json(row[0])

    def _values(self, item: M, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(getattr(item, name) for name in names)

    def _expression(self, field: str) -> str:
        if field in self._columns:
            return field
        if field not in self._model.model_fields:
            raise ValueError(f"{self._name} have no field {field!r}; known: {', '.join(self._model.model_fields)}")
        return f"json_extract(body, '$.{field}')"

    def _where(self, options: FilterOptions | None) -> tuple[str, list[Any]]:
        filters, must, logic = normalize_filter_options(options)
        values: list[Any] = []
        parts = [self._condition(field, ops, values) for field, ops in (must or {}).items()]
        required = [one for part in parts for one in part]
        chosen = [one for field, ops in (filters or {}).items() for one in self._condition(field, ops, values)]
        if filters and (chosen or logic == "or"):  # "any of none" matches nothing
            required.append(f"({f' {logic.upper()} '.join(chosen) or '0'})")
        return (f" WHERE {' AND '.join(required)}" if required else ""), values

    def _condition(self, field: str, ops: FilterField, values: list[Any]) -> list[str]:
        expression, conditions = self._expression(field), []
        for name, expected in ops.items():
            if expected is None:
                continue
            if name == "exact":
                conditions.append(f"{expression} = ?")
                values.append(expected)
            elif name == "within":
                conditions.append(f"{expression} IN (SELECT value FROM json_each(?))")
                values.append(json.dumps(list(expected)))  # type: ignore[call-overload]
            elif name == "contains":
                conditions.append(f"instr({expression}, ?) > 0")
                values.append(expected)
            else:
                raise ValueError(f"unsupported filter operator {name!r} for field {field!r}")
        return conditions

    def _order(self, sort: SortOptions | None) -> str:
        field, direction = resolve_sort_options(sort)
        if field is None:
            return " ORDER BY id"
        expression = self._expression(field)
        # A time that has not come yet is later than all that have.
        last = f"{expression} IS NULL {direction}, " if field in ("end_time", "last_heartbeat_time") else ""
        return f" ORDER BY {last}{expression} {direction}, id"


class _QueueTable(Queue[str]):
    """A queue as a table."""

    def __init__(self, conn: sqlite3.Connection, name: str) -> None:
        super().__init__()
        self._conn, self._name = conn, name
        conn.execute(f"CREATE TABLE IF NOT EXISTS {name} (id INTEGER PRIMARY KEY, item TEXT NOT NULL)")
        conn.execute(f"CREATE INDEX IF NOT EXISTS {name}_item ON {name} (item)")

    @property
    def collection_name(self) -> str:
        return self._name

    def item_type(self) -> type[str]:
        return str

    async def has(self, item: str) -> bool:
        return self._conn.execute(f"SELECT 1 FROM {self._name} WHERE item = ?", (item,)).fetchone() is not None

    async def enqueue(self, items: Sequence[str]) -> Sequence[str]:
        self._conn.executemany(f"INSERT INTO {self._name} (item) VALUES (?)", [(item,) for item in items])
        return items

    async def dequeue(self, limit: int = 1) -> Sequence[str]:
        rows = self._front(limit)
        if rows:
            self._conn.execute(f"DELETE FROM {self._name} WHERE id <= ?", (rows[-1][0],))
        return [item for _, item in rows]

    async def peek(self, limit: int = 1) -> Sequence[str]:
        return [item for _, item in self._front(limit)]

    async def size(self) -> int:
        return int(self._conn.execute(f"SELECT count(*) FROM {self._name}").fetchone()[0])

    def _front(self, limit: int) -> list[tuple[int, str]]:
        query = f"SELECT id, item FROM {self._name} ORDER BY id LIMIT ?"
        return self._conn.execute(query, (max(0, limit),)).fetchall()


class _KeyValueTable(KeyValue[str, int]):
    """Counters as a table."""

    def __init__(self, conn: sqlite3.Connection, name: str) -> None:
        super().__init__()
        self._conn, self._name = conn, name
        conn.execute(f"CREATE TABLE IF NOT EXISTS {name} (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID")

    @property
    def collection_name(self) -> str:
        return self._name

    async def has(self, key: str) -> bool:
        return await self.get(key) is not None

    async def get(self, key: str, default: int | None = None) -> int | None:
        row = self._conn.execute(f"SELECT value FROM {self._name} WHERE key = ?", (key,)).fetchone()
        return default if row is None else row[0]

    async def set(self, key: str, value: int) -> None:
        self._conn.execute(f"INSERT OR REPLACE INTO {self._name} VALUES (?, ?)", (key, value))

    async def inc(self, key: str, amount: int) -> int:
        ensure_numeric(amount, description="amount")
        value = (await self.get(key) or 0) + amount
        await self.set(key, value)
        return value

    async def chmax(self, key: str, value: int) -> int:
        ensure_numeric(value, description="value")
        current = await self.get(key)
        if current is not None and current >= value:
            return current
        await self.set(key, value)
        return value

    async def pop(self, key: str, default: int | None = None) -> int | None:
        value = await self.get(key, default)
        self._conn.execute(f"DELETE FROM {self._name} WHERE key = ?", (key,))
        return value

    async def size(self) -> int:
        return int(self._conn.execute(f"SELECT count(*) FROM {self._name}").fetchone()[0])


def _json(item: BaseModel) -> str:
    if isinstance(item, Span) and not all(map(_finite, item.attributes.values())):
        # JSON has no NaN and no infinity, and a null could not be read back: their names are kept.
        plain = {name: value if _finite(value) else str(value) for name, value in item.attributes.items()}
        item = item.model_copy(update={"attributes": plain})
    return item.model_dump_json()


def _finite(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)

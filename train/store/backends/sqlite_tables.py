"""Agent Lightning's collections as tables of a SQLite database.

A table has columns for the primary key and for the fields that are searched most, and one for the whole item as JSON.
The items used last are cached as objects, because parsing JSON costs more than finding it. The cache is valid since one
process owns the file; after a rollback, call :meth:`Table.clear_cache`.
"""

# Names of tables and columns come from this package, values are always bound; the base classes document the methods.
# ruff: noqa: S608, D102

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

from agentlightning.store.collection.base import (
    Collection,
    DuplicatedPrimaryKeyError,
    KeyValue,
    Queue,
    ensure_numeric,
    normalize_filter_options,
    resolve_sort_options,
)
from agentlightning.types import FilterField, FilterOptions, PaginatedResult, SortOptions, Span
from cachetools import LRUCache
from pydantic import BaseModel, ValidationError

__all__ = ["KeyValueTable", "QueueTable", "Table"]

M = TypeVar("M", bound=BaseModel)
_PAGE_SIZE = 16 << 20
"""Characters after which a page ends, although its limit would allow more items."""
_OPERATORS = {
    "exact": "{} = ?",
    "within": "{} IN (SELECT value FROM json_each(?))",
    "contains": "instr({}, ?) > 0",
}


class _NamedTable:
    """Common parts of the three kinds of collections."""

    def __init__(self, conn: sqlite3.Connection, name: str) -> None:
        super().__init__()
        self._conn, self._name = conn, name

    @property
    def collection_name(self) -> str:
        return self._name

    async def size(self) -> int:
        return int(self._conn.execute(f"SELECT count(*) FROM {self._name}").fetchone()[0])

    def _damaged(self, row: str) -> sqlite3.DatabaseError:
        return sqlite3.DatabaseError(f"table {self._name}, row {row:.100}: the value is damaged")


class Table(_NamedTable, Collection[M], Generic[M]):
    """A collection as a table, in the order of insertion. The items used last are cached, ``cached`` bytes of JSON."""

    def __init__(
        self,
        conn: sqlite3.Connection,
        model: type[M],
        name: str,
        *,
        key: tuple[str, ...],
        indexed: tuple[str, ...] = (),
        cached: int = 0,
    ) -> None:
        super().__init__(conn, name)
        self._model, self._key, self._columns = model, key, (*key, *indexed)
        self._cache: LRUCache[tuple[Any, ...], tuple[M, int]] = LRUCache(maxsize=cached, getsizeof=itemgetter(1))
        conn.execute(
            f"CREATE TABLE IF NOT EXISTS {name} (id INTEGER PRIMARY KEY, "
            + "".join(f"{column} NOT NULL, " for column in self._columns)
            + f"body TEXT NOT NULL, UNIQUE ({', '.join(key)}))"
        )
        for column in indexed:
            conn.execute(f"CREATE INDEX IF NOT EXISTS {name}_{column} ON {name} ({column})")
        places, by_key = ", ".join("?" * len(self._columns)), " AND ".join(f"{column} = ?" for column in key)
        self._insert = f"INSERT INTO {name} ({', '.join(self._columns)}, body) VALUES ({places}, ?)"
        self._replace = f"UPDATE {name} SET {''.join(f'{column} = ?, ' for column in indexed)}body = ? WHERE {by_key}"
        self._select = f"SELECT {', '.join(key)}, body FROM {name}"
        self._select_one = f"{self._select} WHERE {by_key}"
        self._delete = f"DELETE FROM {name} WHERE {by_key}"

    def primary_keys(self) -> Sequence[str]:
        return self._key

    def item_type(self) -> type[M]:
        return self._model

    def clear_cache(self) -> None:
        """Read all items from the file again."""
        self._cache.clear()

    async def query(
        self,
        filter: FilterOptions | None = None,
        sort: SortOptions | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[M]:
        where, values = self._where(filter)
        found = self._conn.execute(
            f"{self._select}{where}{self._order(sort)} LIMIT ? OFFSET ?", (*values, limit, offset)
        )
        rows = found.fetchall() if limit == -1 else list(self._page(found))
        total = offset + len(rows)
        if (offset and not rows) or len(rows) == limit or found.fetchone():
            total = self._conn.execute(f"SELECT count(*) FROM {self._name}{where}", values).fetchone()[0]
        return PaginatedResult(items=[self._parse_row(row) for row in rows], limit=limit, offset=offset, total=total)

    async def get(self, filter: FilterOptions | None = None, sort: SortOptions | None = None) -> M | None:
        if (key := self._exact_key(filter)) is not None:
            return self._find(key)
        where, values = self._where(filter)
        row = self._conn.execute(f"{self._select}{where}{self._order(sort)} LIMIT 1", values).fetchone()
        return None if row is None else self._parse_row(row)

    async def insert(self, items: Sequence[M]) -> None:
        rows = [(*self._values(item, self._columns), _json(item)) for item in items]
        self._conn.execute("SAVEPOINT batch")  # all items or none
        try:
            self._conn.executemany(self._insert, rows)
        except sqlite3.IntegrityError as error:
            self._conn.execute("ROLLBACK TO batch")
            raise DuplicatedPrimaryKeyError(f"an item with this key is already in {self._name}: {error}") from error
        finally:
            self._conn.execute("RELEASE batch")
        for item, row in zip(items, rows, strict=True):
            self._add_to_cache(self._values(item, self._key), item, row[-1])

    async def update(self, items: Sequence[M], update_fields: Sequence[str] | None = None) -> Sequence[M]:
        return [self._update(item, update_fields) for item in items]

    async def upsert(self, items: Sequence[M], update_fields: Sequence[str] | None = None) -> Sequence[M]:
        stored = []
        for item in items:
            if self._find(self._values(item, self._key)) is None:
                await self.insert([item])
                stored.append(item)
            else:
                stored.append(self._update(item, update_fields))
        return stored

    async def delete(self, items: Sequence[M]) -> None:
        for item in items:
            key = self._values(item, self._key)
            self._cache.pop(key, None)
            if not self._conn.execute(self._delete, key).rowcount:
                raise self._not_found(key)

    def delete_rollout(self, rollout_id: str) -> None:
        """Delete all items of a rollout; for tables whose key begins with ``rollout_id``."""
        self._conn.execute(f"DELETE FROM {self._name} WHERE rollout_id = ?", (rollout_id,))
        for key in [key for key in self._cache if key[0] == rollout_id]:
            del self._cache[key]

    def _exact_key(self, options: FilterOptions | None) -> tuple[Any, ...] | None:
        """The primary key, if the filter selects exactly one."""
        if not options or set(options) != set(self._key):
            return None
        conditions = [dict(options[name]) for name in self._key]
        if any([*condition] != ["exact"] or condition["exact"] is None for condition in conditions):
            return None
        return tuple(condition["exact"] for condition in conditions)

    def _find(self, key: tuple[Any, ...]) -> M | None:
        if (cached := self._cache.get(key)) is not None:
            return cached[0]
        row = self._conn.execute(self._select_one, key).fetchone()
        return None if row is None else self._parse_row(row)

    def _parse_row(self, row: tuple[Any, ...]) -> M:
        key = row[:-1]
        if (cached := self._cache.get(key)) is not None:
            return cached[0]
        try:
            item = self._model.model_validate_json(row[-1])
        except ValidationError as error:
            raise self._damaged(repr(key)) from error
        self._add_to_cache(key, item, row[-1])
        return item

    def _page(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """The first rows, until they are large together."""
        size = 0
        for row in rows:
            if not isinstance(row[-1], str):
                raise self._damaged(repr(row[:-1]))
            yield row
            size += len(row[-1])
            if size > _PAGE_SIZE:
                return

    def _add_to_cache(self, key: tuple[Any, ...], item: M, body: str) -> None:
        self._cache.pop(key, None)
        if len(body) <= self._cache.maxsize:
            self._cache[key] = item, len(body)

    def _update(self, item: M, fields: Sequence[str] | None) -> M:
        key = self._values(item, self._key)
        if fields is not None:
            found = self._find(key)
            if found is None:
                raise self._not_found(key)
            item = found.model_copy(update={name: getattr(item, name) for name in fields})
        body = _json(item)
        values = (*self._values(item, self._columns[len(self._key) :]), body, *key)
        if not self._conn.execute(self._replace, values).rowcount:
            raise self._not_found(key)
        self._add_to_cache(key, item, body)
        return item

    def _not_found(self, key: tuple[Any, ...]) -> ValueError:
        named = ", ".join(f"{name}={value!r}" for name, value in zip(self._key, key, strict=True))
        return ValueError(f"{self._name} has no item with {named}")

    def _values(self, item: M, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(getattr(item, name) for name in names)

    def _column_expression(self, field: str) -> str:
        if field in self._columns:
            return field
        if field not in self._model.model_fields:
            raise ValueError(f"{self._name} have no field {field!r}; known: {', '.join(self._model.model_fields)}")
        return f"json_extract(body, '$.{field}')"

    def _where(self, options: FilterOptions | None) -> tuple[str, list[Any]]:
        filters, must, logic = normalize_filter_options(options)
        values: list[Any] = []
        required = [one for field, ops in (must or {}).items() for one in self._conditions(field, ops, values)]
        optional = [one for field, ops in (filters or {}).items() for one in self._conditions(field, ops, values)]
        if filters and (optional or logic == "or"):  # an "or" of no conditions matches nothing
            required.append(f"({f' {logic.upper()} '.join(optional) or '0'})")
        return (f" WHERE {' AND '.join(required)}" if required else ""), values

    def _conditions(self, field: str, ops: FilterField, values: list[Any]) -> Iterator[str]:
        """SQL conditions on one field; appends their parameters to ``values``."""
        expression = self._column_expression(field)
        for name, expected in ops.items():
            if expected is not None:
                if name not in _OPERATORS:
                    raise ValueError(f"unsupported filter operator {name!r} for field {field!r}")
                values.append(json.dumps(list(expected)) if name == "within" else expected)
                yield _OPERATORS[name].format(expression)

    def _order(self, sort: SortOptions | None) -> str:
        field, direction = resolve_sort_options(sort)
        if field is None:
            return " ORDER BY id"
        expression = self._column_expression(field)
        # A missing time lies in the future: it sorts after all others.
        last = f"{expression} IS NULL {direction}, " if field in ("end_time", "last_heartbeat_time") else ""
        return f" ORDER BY {last}{expression} {direction}, id"


class QueueTable(_NamedTable, Queue[str]):
    """A queue as a table."""

    def __init__(self, conn: sqlite3.Connection, name: str) -> None:
        super().__init__(conn, name)
        conn.execute(f"CREATE TABLE IF NOT EXISTS {name} (id INTEGER PRIMARY KEY, item TEXT NOT NULL)")
        conn.execute(f"CREATE INDEX IF NOT EXISTS {name}_item ON {name} (item)")

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

    async def remove(self, item: str) -> None:
        """Take an item out of the queue, if it is there."""
        self._conn.execute(f"DELETE FROM {self._name} WHERE item = ?", (item,))

    def _front(self, limit: int) -> list[tuple[int, str]]:
        query = f"SELECT id, item FROM {self._name} ORDER BY id LIMIT ?"
        rows = self._conn.execute(query, (max(0, limit),)).fetchall()
        for number, item in rows:
            if not isinstance(item, str):
                raise self._damaged(str(number))
        return rows


class KeyValueTable(_NamedTable, KeyValue[str, int]):
    """Counters as a table."""

    def __init__(self, conn: sqlite3.Connection, name: str) -> None:
        super().__init__(conn, name)
        conn.execute(f"CREATE TABLE IF NOT EXISTS {name} (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID")

    async def has(self, key: str) -> bool:
        return await self.get(key) is not None

    async def get(self, key: str, default: int | None = None) -> int | None:
        row = self._conn.execute(f"SELECT value FROM {self._name} WHERE key = ?", (key,)).fetchone()
        if row is not None and not isinstance(row[0], int):
            raise self._damaged(repr(key))
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


def _json(item: BaseModel) -> str:
    if isinstance(item, Span) and not all(map(_finite, item.attributes.values())):
        # JSON has neither NaN nor infinity: they are written as text.
        plain = {name: value if _finite(value) else str(value) for name, value in item.attributes.items()}
        item = item.model_copy(update={"attributes": plain})
    return item.model_dump_json()


def _finite(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)

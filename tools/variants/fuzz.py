"""Make one variant of a database: other rows, the same tables, types, keys and links.

Values come from the sampled rows, from the golds' conditions and from just beside them, so that each condition has rows
on both sides. A column without repeated values keeps none, one without NULL keeps none, and a link's values exist in
the table it points to: queries that mean the same for such data still agree.
"""

from __future__ import annotations

import contextlib
import math
import random
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from groundwire.tools.files import new_database
from groundwire.tools.sql import quote_identifier
from groundwire.tools.sql.connections import DENIED_FUNCTIONS
from groundwire.tools.variants.tables import Column, Schema, Table

_WRITE_S = 5.0
_MEETING = 0.5
"""The share of tables with a row that has known values in all its columns."""
_PAGE_BYTES = 512
"""SQLite's smallest: each table takes a page or more, and a variant's tables have a few rows."""
_ORPHAN_ROUNDS, _ORPHANS = 10, 0.6


@dataclass(frozen=True)
class RowStyle:
    """``rows`` of a table; ``keep``: the share of values as in the sampled row; ``known``: of values from golds."""

    rows: int
    keep: float
    known: float


def make_rows(
    schema: Schema, known: Mapping[str, Sequence[Any]], style: RowStyle, rng: random.Random
) -> dict[str, list[tuple[Any, ...]]]:
    """Rows for each table. ``known`` are values of golds by column name, in lower case."""
    made: dict[str, list[tuple[Any, ...]]] = {}
    values: dict[tuple[str, str], list[Any]] = {}
    for table in schema.tables:
        count = max(2, round(style.rows * rng.uniform(0.5, 1.5)))
        base = [rng.choice(table.rows) if table.rows else None for _ in range(count)]
        columns = [
            _column_values(column, [row[i] if row else None for row in base], values, known, style, rng)
            for i, column in enumerate(table.columns)
        ]
        if rng.random() < _MEETING:
            _let_meet(table, columns, known, rng)
        rows = _without_repeated_keys(table, list(zip(*columns, strict=False)))
        made[table.name] = rows
        for i, column in enumerate(table.columns):
            values[table.name.lower(), column.name.lower()] = [row[i] for row in rows if row[i] is not None]
    return made


def _column_values(
    column: Column,
    base: list[Any],
    made: Mapping[tuple[str, str], list[Any]],
    known: Mapping[str, Sequence[Any]],
    style: RowStyle,
    rng: random.Random,
) -> list[Any]:
    count = len(base)
    parents = made.get(column.link) if column.link else None
    if parents:
        if column.unique:
            return rng.sample(sorted(set(parents), key=repr), k=min(count, len(set(parents))))
        # A few parents have most of the children: counts and groups then differ, as they do in real data.
        weights = [rng.random() ** 3 + 0.01 for _ in parents]
        return _with_nulls(rng.choices(parents, weights, k=count), column, rng)
    wanted = [value for value in known.get(column.name.lower(), ()) if _fits(value, column)]
    near = [beside for value in wanted for beside in _near(value)]
    if column.unique:
        return _distinct(column, wanted, near, count, rng)
    pool = list(column.values) or _invented(column, rng)
    if len(pool) == 1 and isinstance(pool[0], (int, float, str)):
        pool += _near(pool[0])  # or a query would give the same result on every variant

    def value(kept: Any) -> Any:
        if wanted and rng.random() < style.known:
            return rng.choice(wanted if rng.random() < 0.6 else near or wanted)
        return _short(kept if kept is not None and rng.random() < style.keep else rng.choice(pool))

    return _with_nulls(list(map(value, base)), column, rng)


def _let_meet(table: Table, columns: list[list[Any]], known: Mapping[str, Sequence[Any]], rng: random.Random) -> None:
    """Move or write known values of all columns into one row, or few rows would fulfil two conditions."""
    for column, values in zip(table.columns, columns, strict=True):
        wanted = [value for value in known.get(column.name.lower(), ()) if _fits(value, column)]
        if not wanted or column.link is not None or not values:
            continue
        value = _as_stored(rng.choice(wanted), column)
        if value in values:
            values[values.index(value)] = values[0]
        values[0] = value


def _with_nulls(values: list[Any], column: Column, rng: random.Random) -> list[Any]:
    if not column.null_share:
        return values
    return [None if rng.random() < min(column.null_share, 0.3) else value for value in values]


def _distinct(column: Column, wanted: list[Any], near: list[Any], count: int, rng: random.Random) -> list[Any]:
    own = [_short(value) for value in column.values] or _invented(column, rng)
    first = [value for value in dict.fromkeys([*wanted, *near]) if rng.random() < 0.8]
    rest = rng.sample(own, k=len(own))
    values = dict.fromkeys(_as_stored(value, column) for value in [*first[: count // 2 + 1], *rest])
    numbers = [value for value in own if isinstance(value, (int, float))]
    step = 1
    while len(values) < count:
        values.setdefault(max(numbers) + step if len(numbers) * 2 > len(own) else _moved(str(rng.choice(own)), step))
        step += 1
    result = list(values)[:count]
    rng.shuffle(result)
    return result


def _as_stored(value: Any, column: Column) -> Any:
    """The value after SQLite's conversion for the column, so that no two become equal."""
    if isinstance(value, str) and any(isinstance(stored, (int, float)) for stored in column.values):
        with contextlib.suppress(ValueError):
            return int(value)
    return value


def _fits(value: Any, column: Column) -> bool:
    """A text does not go into a column of numbers, nor a number into one of texts."""
    if not column.values:
        return True
    numeric = sum(isinstance(stored, (int, float)) for stored in column.values) * 2 > len(column.values)
    if isinstance(value, str):
        return not numeric or value.lstrip("-").replace(".", "", 1).isdigit()
    return numeric or all(str(stored).lstrip("-").replace(".", "", 1).isdigit() for stored in column.values[:20])


def _short(value: Any) -> Any:
    """A float with few digits: the sum of such numbers does not depend on the order in which a query adds them."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 4096), exponent - 12)


def _near(value: Any) -> list[Any]:
    if isinstance(value, int):
        return [value + 1, value - 1] if value else [1]
    if isinstance(value, float):
        return [_short(value + 0.5), _short(value - 0.5)]
    bare = value.strip("%")
    if bare != value:  # a pattern of LIKE
        return [bare, f"{bare} x", f"x {bare}", f"x {bare} x"]
    if _moved(value, 1) != f"{value} 1":
        return [_moved(value, 1), _moved(value, -1)]
    return [f"{value} x"] if value else []


def _moved(value: str, step: int) -> str:
    """Another text of the same kind: some days later, a larger number, or the text with a number after it."""
    with contextlib.suppress(ValueError, OverflowError):
        if value.isascii() and value.isdigit():
            return str(max(0, int(value) + step)).zfill(len(value))
        return str(date.fromisoformat(value[:10]) + timedelta(days=step)) + value[10:]
    return f"{value} {step}"


def _invented(column: Column, rng: random.Random) -> list[Any]:
    """Values for a column of which no row is known."""
    if any(word in column.type for word in ("INT", "NUM", "DEC", "REAL", "FLOA", "DOUB", "BOOL")):
        return [rng.randrange(1, 60) for _ in range(8)]
    return [f"{column.name} {letter}" for letter in "abcdefgh"]


def _without_repeated_keys(table: Table, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    names = [column.name for column in table.columns]
    key = [names.index(name) for name in table.key if name in names]
    return list({tuple(row[i] for i in key): row for row in rows}.values()) if key else rows


def write_database(path: Path, schema: Schema, rows: Mapping[str, Sequence[tuple[Any, ...]]]) -> None:
    """Write a new SQLite file. Rows that a constraint refuses are left out. Raises sqlite3.Error.

    The tables are made by the statements of the original database. They are data: an authorizer lets them create
    tables and views of this file and nothing else, and a deadline ends them.
    """
    deadline = time.perf_counter() + _WRITE_S
    new_database(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.set_progress_handler(lambda: time.perf_counter() > deadline, 1000)
        for setting in (f"page_size = {_PAGE_BYTES}", "journal_mode = OFF", "synchronous = OFF"):
            connection.execute(f"PRAGMA {setting}")
        connection.execute("BEGIN")
        connection.set_authorizer(_authorize)
        for table in schema.tables:
            connection.execute(table.ddl)
            target, *names = map(quote_identifier, (table.name, *(column.name for column in table.columns)))
            places = ", ".join("?" * len(names))
            insert = f"INSERT OR IGNORE INTO {target} ({', '.join(names)}) VALUES ({places})"  # noqa: S608
            connection.executemany(insert, rows[table.name])
        for view in schema.views:
            with contextlib.suppress(sqlite3.Error):  # a query that needs it fails, and does not use this variant
                connection.execute(view)
        connection.set_authorizer(None)
        _delete_orphans(connection)
        connection.execute("COMMIT")


def _delete_orphans(connection: sqlite3.Connection) -> None:
    """Delete rows whose foreign key has no row, because a constraint refused that row; not most rows of a table.

    A foreign key that most rows break is broken in the original, too: it points to the wrong column.
    """
    for _ in range(_ORPHAN_ROUNDS):
        try:
            broken = connection.execute("PRAGMA foreign_key_check").fetchall()
        except sqlite3.OperationalError:  # a key that points to no unique column
            return
        deleted = 0
        for table in {row[0] for row in broken}:
            orphans = {row[1] for row in broken if row[0] == table and row[1] is not None}
            quoted = quote_identifier(table)
            (count,) = connection.execute(f"SELECT count(*) FROM {quoted}").fetchone()  # noqa: S608
            if len(orphans) <= _ORPHANS * count:
                connection.executemany(f"DELETE FROM {quoted} WHERE rowid = ?", [(row,) for row in orphans])  # noqa: S608
                deleted += len(orphans)
        if not deleted:
            return


_ALLOWED = frozenset(
    getattr(sqlite3, f"SQLITE_{name}")
    for name in ("CREATE_TABLE", "CREATE_VIEW", "CREATE_INDEX", "INSERT", "UPDATE", "READ", "FUNCTION", "SELECT")
)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    denied = action == sqlite3.SQLITE_FUNCTION and str(second).lower() in DENIED_FUNCTIONS
    return sqlite3.SQLITE_OK if action in _ALLOWED and not denied else sqlite3.SQLITE_DENY

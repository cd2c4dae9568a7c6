"""Odd and damaged databases: each is read right or refused in one sentence, in time, and no file is changed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import sqlite3
import string
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from chaos.processes import Processes
from chaos.tally import Tally

__all__ = ["run"]

_ROUND_S, _END_S, _QUERY_S = 10.0, 120.0, 1.0
_NAMES = ("x.sqlite", "x.SQLITE3", "a b?#%.db", "q'\"\n.sqlite", "caf\udce9.sqlite")
_TABLES = (
    "CREATE TABLE t{0} (a INTEGER PRIMARY KEY, b TEXT, c AS (a + 1), d AS (b || 'x') STORED)",
    "CREATE TABLE t{0} (a INT PRIMARY KEY, b REFERENCES t0 (a)) WITHOUT ROWID",
    'CREATE TABLE t{0} ("a""b", [c d], `e``f`)',
    "CREATE VIRTUAL TABLE t{0} USING fts5(a, b)",
    "CREATE VIRTUAL TABLE t{0} USING rtree(a, b, c)",
    "CREATE VIEW t{0} AS SELECT * FROM t{1}",
    "CREATE VIEW t{0} AS SELECT x.*, y.* FROM t{1} x, t{2} y",
    "CREATE INDEX t{0} ON t{1} (b)",
    "CREATE TRIGGER t{0} AFTER INSERT ON t{1} BEGIN DELETE FROM t{2}; END",
    "DROP TABLE t{1}",
)
_ENTRIES = (
    "CREATE VIRTUAL TABLE m USING vec0(x)",
    "CREATE VIEW m AS SELECT st_area(a) FROM t0",
    "CREATE TABLE m (((",
    "CREATE VIEW m AS SELECT * FROM m",
    "CREATE VIRTUAL TABLE m USING fts5(a, tokenize = 'none')",
    None,
)
_KINDS: tuple[Callable[[Path], Any], ...] = (
    os.mkfifo,
    Path.mkdir,
    Path.touch,
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path.name),
    lambda path: path.write_bytes(os.urandom(9000)),
)


def run(folder: Path, seconds: float, rng: random.Random, tally: Tally) -> None:
    """Processes of their own read one database after the other."""
    end = time.monotonic() + seconds
    with Processes(folder, tally) as processes:
        while time.monotonic() < end:
            seed = rng.randrange(1 << 31)
            process = processes.fork("reader of databases", read_odd_databases, str(folder / str(seed)), seed)
            deadline = time.monotonic() + _ROUND_S + _END_S
            while process.status is None and time.monotonic() < deadline:
                time.sleep(0.05)
            if process.status is None:
                tally.fault("hangs", "a reader of databases", f"seed {seed}: {process.output[-300:]}")
            elif process.status:
                tally.fault("crashes", "a reader of databases", f"seed {seed}: {process.output[-300:]}")
            tally.add("odd databases", process.output.count("read "))
            processes.kill(process)


def read_odd_databases(folder: str, seed: int) -> None:
    """Make databases and read them, for some seconds; a traceback is a fault."""
    rng, end, number = random.Random(seed), time.monotonic() + _ROUND_S, 0
    warnings.simplefilter("ignore")
    while time.monotonic() < end:
        number += 1
        place = Path(folder) / str(number)
        place.mkdir(parents=True)
        path = place / rng.choice(_NAMES)
        with suppress(sqlite3.Error):
            _make(path, rng)
        for _ in range(rng.choice([0, 1, 1, 2])):
            _disturb(path, rng)
        if rng.random() < 0.1:
            path = place / "link.db"
            path.symlink_to(next(place.iterdir(), path))
        print(f"read {number}: {str(path)!a}", flush=True)
        _read(str(path), place)
        shutil.rmtree(place)


def _make(path: Path, rng: random.Random) -> None:
    live = path.with_name("live")
    with closing(sqlite3.connect(live, isolation_level=None)) as writer:
        wal = rng.random() < 0.4
        if wal:
            writer.execute("PRAGMA journal_mode = WAL")
        for number in range(rng.randrange(1, 12)):
            with suppress(sqlite3.Error):
                statement = rng.choice(_TABLES if number else _TABLES[:3])
                writer.execute(statement.format(number, *rng.choices(range(12), k=2)))
        for _ in range(rng.randrange(20)):
            value = rng.choice([1, None, "text", "x" * 150_000, b"\0\xff" * 100, 1e300, "\U0001f600" * 9])
            with suppress(sqlite3.Error):
                writer.execute(f"INSERT INTO t{rng.randrange(12)} (a, b) VALUES (?, ?)", (rng.randrange(99), value))
        if rng.random() < 0.3:
            writer.execute("PRAGMA writable_schema = ON")
            kind = rng.choice(["table", "view", "index", "trigger", "tabme", None])
            name = rng.choice(["m", "t0", None, 5, b"\xff", "q" * 5000])
            values = (kind, name, name, rng.choice([0, 2, 10**9]), rng.choice(_ENTRIES))
            writer.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", values)
        for end in ("", "-wal", "-shm")[: rng.choice([2, 2, 3]) if wal else 1]:
            with suppress(FileNotFoundError):
                shutil.copy(f"{live}{end}", f"{path}{end}")
    for file in path.parent.glob("live*"):
        file.unlink()


def _disturb(path: Path, rng: random.Random) -> None:
    file = Path(f"{path}{rng.choice(['', '', '', '-wal', '-journal', '-shm'])}")
    if file.is_file() and rng.random() < 0.7:
        content = bytearray(file.read_bytes())
        for _ in range(rng.choice([1, 10, 200]) if content else 0):
            content[rng.randrange(min(len(content), rng.choice([100, 4096, 1 << 20])))] = rng.randrange(256)
        file.write_bytes(content[: rng.choice([len(content), len(content), rng.randrange(len(content) + 1)])])
    else:
        if file.is_dir():
            file.rmdir()
        file.unlink(missing_ok=True)
        rng.choice(_KINDS)(file)


def _read(path: str, folder: Path) -> None:
    from groundwire import rewards
    from groundwire.rewards import RewardError
    from groundwire.tools.mcp_sql.databases import Databases
    from groundwire.tools.schema import describe_table, table_info
    from groundwire.tools.sql import DatabaseCopies, QueryError, read_catalog, run_query
    from groundwire.tools.text import visible

    def reward() -> None:
        task = {"id": "1", "question": "q", "query": "SELECT * FROM t0", "db_path": path, "db_id": "t"}
        asyncio.run(rewards.get("spider_exec_match")(task, "SELECT a FROM t1", []))

    def copy() -> None:
        copies = DatabaseCopies()
        with suppress(OSError):
            run_query(copies.take(path).path, "SELECT * FROM t0", timeout_s=_QUERY_S)
        copies.close()

    readers: list[Callable[[], Any]] = [
        *(lambda name=name: run_query(path, f"SELECT * FROM {name}", timeout_s=_QUERY_S) for name in ("t0", "t5", "m")),
        lambda: table_info(path, max_chars=4000),
        *(lambda name=name: describe_table(path, name) for name in read_names(path, read_catalog, QueryError)),
        reward,
        copy,
        lambda: Databases(path).names(),
        lambda: Databases(folder).names(),
    ]
    before = _content(folder)
    for number, read in enumerate(readers):
        started = time.monotonic()
        try:
            read()
        except (QueryError, RewardError) as error:
            if visible(str(error)) != str(error):
                print(f"Traceback (most recent call last):\nAssertionError: {str(error)!a}", file=sys.stderr)
        except Exception:
            traceback.print_exc()
        if time.monotonic() - started > _END_S / 4:
            print(f"Traceback (most recent call last):\nAssertionError: reader {number} is slow", file=sys.stderr)
    if (after := _content(folder)) != before:
        print(f"Traceback (most recent call last):\nAssertionError: {before} -> {after}", file=sys.stderr)


def read_names(path: str, read_catalog: Callable[[str], Any], error: type[Exception]) -> list[str]:
    """Some tables of a database, and one that it does not have."""
    with suppress(error):
        catalog = read_catalog(path)
        return [*[*catalog.tables, *catalog.skipped][:4], string.ascii_letters]
    return []


def _content(folder: Path) -> dict[str, Any]:
    """All that a reader could change, but the index of a log, which programs write together."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:8] if file.is_file() and not file.is_symlink() else ""
        for file in sorted(folder.iterdir())
        if not (file.name.endswith("-shm") and file.is_file())
    }

"""What the guard around a small query costs, against the same query on a bare open connection.

Run as ``python -m benchmarks.bench_sql``.
"""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._results import record
from groundwire.tools.sql import run_query

QUERIES = {
    "one row by key": "SELECT name FROM item WHERE id = 500",
    "count": "SELECT count(*) FROM item WHERE price > 900",
    "ten rows": "SELECT id, name, price FROM item ORDER BY id LIMIT 10",
    "thousand rows": "SELECT id, name, price FROM item",
}
ROUNDS, REPEATS = 15, 200


def main() -> None:
    """Print microseconds a query, bare and guarded, and the median ratio over interleaved rounds."""
    asyncio.run(asyncio.to_thread(_measure))  # where agents' queries run; the main thread's wait for a thread each


def _measure() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.sqlite"
        bare = sqlite3.connect(path)
        bare.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL)")
        bare.executemany("INSERT INTO item VALUES (?, ?, ?)", [(n, f"item {n}", n * 1.5) for n in range(1000)])
        bare.commit()
        print(f"{'query':16}{'bare us':>10}{'guarded us':>12}{'ratio':>8}")
        for name, sql in QUERIES.items():
            pairs = [
                (_time(lambda sql=sql: bare.execute(sql).fetchall()), _time(lambda sql=sql: run_query(path, sql)))
                for _ in range(ROUNDS)
            ]
            ratio = statistics.median(guarded / plain for plain, guarded in pairs)
            plain, guarded = (min(times) * 1e6 for times in zip(*pairs, strict=True))
            figure, rival = f"guarded query, {name}", "bare connection"
            record(figure, guarded, unit="µs", against=rival, theirs=plain, less_is_better=True)
            print(f"{name:16}{plain:10.1f}{guarded:12.1f}{ratio:8.2f}")
        bare.close()


def _time(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(REPEATS):
        run()
    return (time.perf_counter() - started) / REPEATS


if __name__ == "__main__":
    main()

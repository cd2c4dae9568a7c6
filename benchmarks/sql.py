"""Time of a small query through ``tools.sql``, and on an open connection without any protection."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from pathlib import Path
from statistics import median

from benchmarks._results import median_s, record
from groundwire.tools.sql import run_query

QUERIES = {
    "one row by key": "SELECT name FROM item WHERE id = 500",
    "count": "SELECT count(*) FROM item WHERE price > 900",
    "ten rows": "SELECT id, name, price FROM item ORDER BY id LIMIT 10",
    "thousand rows": "SELECT id, name, price FROM item",
}
ROUNDS, REPEATS = 15, 200


def main() -> None:
    """Print microseconds per query, bare and guarded, and the median ratio over alternating rounds."""
    asyncio.run(asyncio.to_thread(_measure))  # agents' queries run in threads; in the main thread each needs a new one


def _measure() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.sqlite"
        bare = sqlite3.connect(path)
        bare.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL)")
        bare.executemany("INSERT INTO item VALUES (?, ?, ?)", [(n, f"item {n}", n * 1.5) for n in range(1000)])
        bare.commit()
        print(f"{'query':16}{'bare us':>10}{'guarded us':>12}{'ratio':>8}")
        for name, sql in QUERIES.items():
            ways = (lambda sql=sql: bare.execute(sql).fetchall(), lambda sql=sql: run_query(path, sql))
            pairs = [[median_s(run, passes=1, repeats=REPEATS) for run in ways] for _ in range(ROUNDS)]
            ratio = median(guarded / plain for plain, guarded in pairs)
            plain, guarded = (min(times) * 1e6 for times in zip(*pairs, strict=True))
            figure, against = f"guarded query, {name}", "bare connection"
            record(figure, guarded, unit="µs", against=against, theirs=plain, less_is_better=True)
            print(f"{name:16}{plain:10.1f}{guarded:12.1f}{ratio:8.2f}")
        bare.close()


if __name__ == "__main__":
    main()

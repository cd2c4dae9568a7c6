"""An MCP SQL server in its own process, and a database for it."""

from __future__ import annotations

import contextlib
import re
import signal
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

from programs import Program, until

SLOW = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"
COMMAND = [sys.executable, "-m", "tools.mcp_sql"]


def make_database(path: Path, table: str = "singer") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as conn, conn:
        conn.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, name TEXT, age INT)")
        conn.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", [(i, f"name {i}", 20 + i) for i in range(300)])
        conn.execute(f"CREATE VIEW old AS SELECT name FROM {table} WHERE age > 60")
    return path


@contextlib.contextmanager
def http_server(database: Path, *options: str) -> Iterator[tuple[str, Program]]:
    """(URL, process) of a server on a free port."""
    arguments = ("--database", str(database), "--transport", "http", "--port", "0", *options)
    server = Program("-m", "tools.mcp_sql", *arguments)
    try:
        until(lambda: re.search(r"^serving .*\n", server.stderr_so_far(), re.MULTILINE), server)
        yield re.findall(r"^serving .* (\S+)\n", server.stderr_so_far(), re.MULTILINE)[0], server
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGKILL)
            server.wait(600)

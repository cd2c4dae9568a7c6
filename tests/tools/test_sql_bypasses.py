"""Known bypasses of a read-only SQL tool: each is refused or limited, and no file changes."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from spider_folder import make_database

from groundwire.tools.sql import NotAllowedError, QueryTimeoutError, SqlError, run_query
from groundwire.tools.sql.connections import MAX_VALUE_LENGTH

WRITES = [
    "INSERT INTO t VALUES (9, 'x')",
    "UPDATE t SET b = 'x'",
    "DELETE FROM t",
    "DELETE FROM t RETURNING a",
    "REPLACE INTO t SELECT * FROM t",
    "WITH x AS (SELECT 1) DELETE FROM t",
    "WITH x AS (SELECT 1) INSERT INTO t SELECT 1, 'x'",
    "EXPLAIN DELETE FROM t",
    "CREATE TABLE u AS SELECT * FROM t",
    "CREATE TEMP TABLE u (a)",
    "CREATE VIEW v AS SELECT 1",
    "CREATE TRIGGER g AFTER INSERT ON t BEGIN DELETE FROM t; END",
    "CREATE VIRTUAL TABLE v USING fts5(a)",
    "CREATE INDEX j ON t (b)",
    "DROP TABLE t",
    "DROP INDEX i",
    "ALTER TABLE t RENAME TO u",
    "ALTER TABLE t ADD COLUMN c",
    "UPDATE sqlite_master SET sql = ''",
    "REINDEX",
    "ANALYZE",
    "VACUUM",
    "VACUUM INTO '{folder}/copy.sqlite'",
    "ATTACH '{folder}/new.sqlite' AS n",
    "ATTACH 'file:{folder}/new.sqlite?mode=rwc' AS n",
    "ATTACH ':memory:' AS n",
    "DETACH main",
    "BEGIN",
    "BEGIN EXCLUSIVE",
    "COMMIT",
    "SAVEPOINT s",
    "PRAGMA writable_schema = 1",
    "PRAGMA query_only = 0",
    "PRAGMA user_version = 7",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA journal_mode(WAL)",
    "PRAGMA temp_store_directory = '/'",
    "PRAGMA table_info(t)",
    "/* SELECT */ DELETE FROM t",
    "-- SELECT\nDELETE FROM t",
    "\ufeffDELETE FROM t",
    "SELECT 1; DELETE FROM t",
    "SELECT 1; -- harmless\nDELETE FROM t",
    "SELECT 1;;; DROP TABLE t",
    "SELECT 1; SELECT 2",
    "SELECT * FROM pragma_table_info('t')",
    "SELECT * FROM pragma_user_version",
]
FUNCTIONS = [
    "SELECT load_extension('/tmp/x.so')",
    "SELECT LOAD_EXTENSION('x', 'y')",
    "SELECT readfile('/etc/passwd')",
    "SELECT writefile('{folder}/out', 'x')",
    "SELECT edit('x')",
    "SELECT fts3_tokenizer('simple', x'00')",
    "SELECT * FROM fsdir('/')",
]
NO_SQL = [
    "DELETE\u00a0FROM t",
    "\uff24ELETE FROM t",
    "SELECT 1\0; DELETE FROM t",
    "DELETE FROM t WHERE a = ?",
    "' OR 1=1; DROP TABLE t; --",
]
LONG, SHORT = "substr(hex(zeroblob(49999)), 1 + x % 2)", "hex(zeroblob(25000)) || x"
OBJECT = (
    """SELECT '{' || group_concat('"k' || (a.x * 1000 + b.x) || '":1') || '}' AS j FROM many a, many b WHERE a.x < 7"""
)
DOUBLING = [f"c{n + 1} AS (SELECT x FROM c{n} UNION SELECT x FROM c{n})" for n in range(29)]
FOR_EVER = [
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION SELECT x + 1 FROM c) SELECT max(x) FROM c",
    "SELECT count(*) FROM " + ", ".join(f"many AS m{n}" for n in range(8)),
    "SELECT * FROM many a, many b, many c, many d ORDER BY a.x * b.x - c.x * d.x LIMIT 1",
    "SELECT count(*) FROM many a, many b, many c WHERE instr(hex(zeroblob(5000 + a.x)), '0')",
    "SELECT sum(hex(zeroblob(50000 + a.x)) LIKE '%" + "0" * 400 + "1') FROM many a, many b",
    # SQLite checks no deadline within a row of these, which takes from ten seconds to minutes.
    f"SELECT printf('{'%.*c' * 60}', {', '.join(['2147483647', 'x'] * 60)}) FROM many",
    f"SELECT {' + '.join([f'instr({LONG}, {SHORT})'] * 900)} FROM many",
    f"WITH o AS ({OBJECT}) SELECT {', '.join(['length(json_patch(j, j))'] * 400)} FROM o",
    # It never runs: while it is planned, every name expands to two more.
    f"WITH c0 AS (SELECT 1 AS x), {', '.join(DOUBLING)} SELECT * FROM c29",
]
MUCH_MEMORY = [
    FOR_EVER[-1],
    "SELECT * FROM doubling",
    f"SELECT {', '.join([f'length({LONG})'] * 1900)} FROM many",
    f"SELECT {', '.join(['x + 0.5'] * 1900)} FROM many",
    "SELECT replace(hex(zeroblob(1000)), '0', '\U0001f600') FROM many a, many b",
]
BIG_VALUES = [
    "SELECT length(replace(hex(zeroblob(400000000)), '00', 'ab'))",
    "WITH RECURSIVE c(s) AS (SELECT 'xxxxxxxx' UNION ALL SELECT s || s FROM c) SELECT length(s) FROM c",
    "SELECT zeroblob(800000000)",
    "SELECT length(randomblob(800000000))",
    "SELECT length(group_concat(hex(zeroblob(5000)))) FROM many a, many b",
]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bypass") / "t.sqlite"
    make_database(
        path,
        "CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT); INSERT INTO t VALUES (1, 'one'), (2, 'two');"
        "CREATE INDEX i ON t (b);"
        "CREATE TABLE many AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 1000)"
        " SELECT x FROM c;"
        f"CREATE VIEW doubling AS WITH c0 AS (SELECT 1 AS x), {', '.join(DOUBLING)} SELECT * FROM c29;",
    )
    return path


@pytest.fixture(autouse=True)
def no_file_changes(database: Path) -> Iterator[None]:
    before = _digests(database.parent)
    yield
    assert _digests(database.parent) == before
    assert run_query(database, "SELECT count(*) FROM t").rows == [(2,)]


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("sql", WRITES)
def test_a_statement_that_does_not_read_is_refused(database: Path, sql: str) -> None:
    with pytest.raises((NotAllowedError, SqlError)):
        run_query(database, sql.replace("{folder}", str(database.parent)))


def test_the_error_names_the_refused_action(database: Path) -> None:
    for sql, what in [
        ("DELETE FROM t", "DELETE"),
        ("DROP TABLE t", "changing the schema"),
        ("PRAGMA user_version", "PRAGMA"),
        ("ATTACH ':memory:' AS n", "ATTACH"),
    ]:
        with pytest.raises(NotAllowedError, match=f"^{what}.* is not allowed: write one SELECT statement$"):
            run_query(database, sql)


@pytest.mark.parametrize("sql", [*FUNCTIONS, *NO_SQL])
def test_functions_that_access_files_are_an_error(database: Path, sql: str) -> None:
    with pytest.raises((NotAllowedError, SqlError)):
        run_query(database, sql.replace("{folder}", str(database.parent)))


@pytest.mark.parametrize("count_steps", [True, False])
@pytest.mark.parametrize("sql", FOR_EVER)
def test_an_endless_query_is_stopped(database: Path, sql: str, count_steps: bool) -> None:
    started = time.perf_counter()
    with pytest.raises((QueryTimeoutError, SqlError)):
        run_query(database, sql, timeout_s=0.1, count_steps=count_steps)
    # Not a measurement: each of these would take minutes or never end.
    assert time.perf_counter() - started < 100


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sees open files where Linux shows them")
def test_a_query_that_needs_a_process_leaves_no_file_open_here(tmp_path: Path) -> None:
    database = tmp_path / "t.sqlite"
    view = f"CREATE VIEW v AS WITH c0 AS (SELECT 1 AS x), {', '.join(DOUBLING)} SELECT * FROM c29"
    make_database(database, f"CREATE TABLE t (a); INSERT INTO t VALUES (1); {view};")
    gc.collect()
    gc.disable()
    try:
        assert run_query(database, "SELECT a FROM t").rows == [(1,)]
    finally:
        gc.enable()
    assert str(database) not in [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory where Linux shows it")
@pytest.mark.parametrize("sql", MUCH_MEMORY)
def test_no_query_needs_much_memory(database: Path, sql: str) -> None:
    code = (
        "import resource\nfrom groundwire.tools.sql.query import workers\n"
        "from groundwire.tools.sql import QueryError, run_query\n"
        f"try:\n    run_query({str(database)!r}, {sql!r}, timeout_s=10, max_rows=10**6, max_bytes=16_000_000)\n"
        "except QueryError:\n    pass\n"
        "workers.close()\n"
        "_, _, here = open('/proc/self/status').read().partition('VmHWM:')\n"
        "print(here.split()[0], resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert max(map(int, done.stdout.split())) * 1024 < 200 * 10**6


@pytest.mark.parametrize("sql", BIG_VALUES)
def test_no_expression_creates_a_huge_value(database: Path, sql: str) -> None:
    with pytest.raises(SqlError, match=r"too big|too much memory"):
        run_query(database, sql, timeout_s=10)


def test_a_row_of_many_long_values_is_not_kept(database: Path) -> None:
    wide = ", ".join(["hex(zeroblob(40000))"] * 300)
    result = run_query(database, f"SELECT {wide}", max_bytes=1_000_000)
    assert (result.rows, result.truncated) == ([], True)


def test_a_padded_number_cannot_be_huge(database: Path) -> None:
    try:
        ((length,),) = run_query(database, "SELECT length(printf('%800000000d', 1))").rows
    except SqlError:
        length = None  # it depends on the version of SQLite whether this is an error or NULL
    assert length is None or length <= MAX_VALUE_LENGTH


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 'DELETE FROM t; DROP TABLE t'",
        'SELECT b AS "drop" FROM t',
        "SELECT replace(b, 'one', 'update') FROM t",
        "WITH x AS (SELECT a FROM t) SELECT * FROM x",
        "VALUES (1), (2)",
        "SELECT sql FROM sqlite_master",
        "EXPLAIN QUERY PLAN SELECT * FROM t",
        "SELECT value FROM json_each('[1, 2]')",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 3) SELECT * FROM c",
    ],
)
def test_a_query_is_never_refused_for_its_text(database: Path, sql: str) -> None:
    assert run_query(database, sql).rows


def test_a_full_text_index_can_be_read(tmp_path: Path) -> None:
    make_database(
        tmp_path / "f.sqlite", "CREATE VIRTUAL TABLE doc USING fts5(body); INSERT INTO doc VALUES ('hello world')"
    )
    assert run_query(tmp_path / "f.sqlite", "SELECT body FROM doc WHERE doc MATCH 'hello'").rows == [("hello world",)]

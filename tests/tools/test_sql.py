"""Running SQL: results, error messages for agents, and the connection pool."""

from __future__ import annotations

import _thread
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from spider_folder import make_database

from groundwire.tools.sql import (
    DatabaseError,
    NotAllowedError,
    QueryError,
    QueryResult,
    QueryTimeoutError,
    SqlError,
    connections,
    render,
    run_query,
)

COUNT_FOR_EVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
FOREVER = float("inf")
ROWS_FOR_EVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x, 'text' FROM c"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.sqlite"
    make_database(
        path,
        "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL, photo BLOB);"
        "INSERT INTO item VALUES (1, 'pen', 1.5, x'ff00'), (2, 'ink', NULL, NULL);"
        "CREATE TABLE sale (item_id INT, day TEXT); INSERT INTO sale VALUES (1, 'mon')",
    )
    return path


def test_a_query_answers_with_columns_and_rows(database: Path) -> None:
    result = run_query(database, "SELECT id, name AS label, price, photo FROM item")
    assert result.columns == ["id", "label", "price", "photo"]
    assert result.rows == [(1, "pen", 1.5, b"\xff\x00"), (2, "ink", None, None)]
    assert not result.truncated
    assert result.elapsed_s > 0


def test_a_query_without_rows_still_has_columns(database: Path) -> None:
    result = run_query(str(database), "SELECT id FROM item WHERE 0")
    assert (result.columns, result.rows, result.truncated) == (["id"], [], False)


def test_comments_and_one_trailing_semicolon_are_no_second_statement(database: Path) -> None:
    assert run_query(database, "/* a */ SELECT 1; -- done").rows == [(1,)]


def test_rows_are_capped(database: Path) -> None:
    result = run_query(database, ROWS_FOR_EVER, max_rows=3)
    assert (result.rows, result.truncated) == ([(1, "text"), (2, "text"), (3, "text")], True)
    assert not run_query(database, "SELECT id FROM item", max_rows=2).truncated


def test_bytes_are_capped(database: Path) -> None:
    result = run_query(database, ROWS_FOR_EVER, max_rows=10**9, max_bytes=1200)
    assert (len(result.rows), result.truncated) == (100, True)
    empty = f"SELECT '', '' FROM ({ROWS_FOR_EVER})"  # an object in memory, too
    assert len(run_query(database, empty, max_rows=10**9, max_bytes=1200).rows) == 150


@pytest.mark.parametrize("text", ["", "abc", "x" * 200, "x" * 4000])
def test_the_limit_of_bytes_is_exact(database: Path, text: str) -> None:
    numbers = "WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 700)"
    sql = f"{numbers} SELECT i, '{text}', 0.5 FROM n"  # short enough to run in this process
    size = 8 + max(len(text), 4) + 8
    for rows in (0, 1, 2, 533, 600, 699):
        assert len(run_query(database, sql, max_bytes=size * rows).rows) == rows
        assert len(run_query(database, sql, max_bytes=size * (rows + 1) - 1).rows) == rows
        assert run_query(database, sql, max_bytes=size * rows).truncated
    assert not run_query(database, sql, max_bytes=size * 700).truncated
    assert len(run_query(database, sql, max_bytes=size * 700, max_rows=699).rows) == 699


def test_bad_bytes_do_not_count_as_work(tmp_path: Path) -> None:
    make_database(tmp_path / "x.sqlite", "CREATE TABLE t (s); INSERT INTO t VALUES (CAST(x'4A6F73E9' AS TEXT))")
    sql = "WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 900) SELECT s, sum(i) FROM t, n"
    first, second = (run_query(tmp_path / "x.sqlite", sql) for _ in range(2))
    assert first.rows == second.rows == [("Jos", 405450)]
    assert first.vm_steps == second.vm_steps > 0


def test_text_that_is_no_utf8_is_read_without_its_bad_bytes(tmp_path: Path) -> None:
    make_database(tmp_path / "x.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES (CAST(x'4A6F73E9' AS TEXT))")
    assert run_query(tmp_path / "x.sqlite", "SELECT a FROM t").rows == [("Jos",)]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT color FROM item", "no such column: color. Columns of item: id, name, price, photo"),
        (
            "SELECT T1.color FROM item AS T1 JOIN sale T2 ON T1.id = T2.item_id",
            "no such column: T1.color. Columns of item: id, name, price, photo",
        ),
        ("SELECT T2.x FROM item T1, sale T2", "no such column: T2.x. Columns of sale: item_id, day"),
        ("SELECT * FROM items", "no such table: items. Tables: item, sale"),
        ("SELECT x", "no such column: x. Tables: item, sale"),
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("SELECT YEAR(1)", "no such function: YEAR"),
        ("SELECT ?", "Incorrect number of bindings supplied"),
        ("SELECT '\0'", "null character"),
        ("SELECT '\ud800'", "surrogates not allowed"),
        ("SELECT 1 -- " + "x" * 200_000, "the query is too long: 200012 characters, at most 100000"),
    ],
)
def test_an_error_about_an_unknown_name_lists_the_existing_ones(database: Path, sql: str, message: str) -> None:
    with pytest.raises(SqlError) as caught:
        run_query(database, sql)
    assert message in str(caught.value)


@pytest.mark.parametrize("sql", ["", ";", "-- nothing", "SELECT 1; SELECT 2", "DELETE FROM item"])
def test_only_one_reading_statement_is_allowed(database: Path, sql: str) -> None:
    with pytest.raises(NotAllowedError, match="SELECT"):
        run_query(database, sql)


def test_a_query_ends_at_its_deadline_and_the_next_one_runs(database: Path) -> None:
    started = time.perf_counter()
    with pytest.raises(QueryTimeoutError, match=r"longer than 0\.1 s"):
        run_query(database, COUNT_FOR_EVER, timeout_s=0.1)
    assert time.perf_counter() - started > 0.1
    assert run_query(database, "SELECT count(*) FROM item").rows == [(2,)]


def test_a_query_can_be_cancelled_from_another_thread(database: Path) -> None:
    cancelled = threading.Event()
    timer = threading.Timer(0.05, cancelled.set)
    timer.start()
    with pytest.raises(QueryTimeoutError, match="cancelled"):
        run_query(database, COUNT_FOR_EVER, timeout_s=60, cancelled=cancelled)
    timer.join()


def test_an_exception_of_a_signal_handler_is_no_query_error(database: Path) -> None:
    def handler(*_: object) -> None:
        raise LookupError("from the handler")

    def query_with_signal_after(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        run_query(database, COUNT_FOR_EVER, timeout_s=60)

    assert run_query(database, "SELECT count(*) FROM item").rows == [(2,)]  # starts the thread that watches for pipes
    before, threads = signal.signal(signal.SIGALRM, handler), _thread._count()
    try:
        for moment in (*(0.0002 * number for number in range(1, 50)), 0.1):
            with pytest.raises(LookupError, match="from the handler"):
                query_with_signal_after(moment)
    finally:
        signal.signal(signal.SIGALRM, before)
    while _thread._count() > threads:  # the abandoned query stops
        time.sleep(0.01)
    assert run_query(database, "SELECT count(*) FROM item").rows == [(2,)]


def test_ctrl_c_during_a_query_is_an_interrupt(database: Path) -> None:
    code = (
        f"from groundwire.tools.sql import QueryError, run_query\n"
        f"try:\n    print('now', flush=True)\n    run_query({str(database)!r}, {COUNT_FOR_EVER!r}, timeout_s=60)\n"
        "except QueryError as error:\n    print('failed:', error)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=600)[0] == "interrupted\n"


@pytest.mark.parametrize("content", [b"", b"this is no database" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_broken_file_is_a_database_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.sqlite").write_bytes(content)
    with pytest.raises(DatabaseError, match=r"x\.sqlite cannot be read"):
        run_query(tmp_path / "x.sqlite", "SELECT 1")


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT malformed FROM item", "no such column: malformed"),
        ("SELECT [file is not a database] FROM item", "no such column: file is not a database"),
        ("SELECT [unable to open database file] FROM item", "no such column: unable to open database file"),
        ("SELECT [You can only execute one statement at a time.] FROM item", "no such column: You can only"),
        ("SELECT [readonly database] FROM item", "no such column: readonly database"),
        ("SELECT json('x')", "malformed JSON"),
        ("SELECT json_extract(name, '$') FROM item", "malformed JSON"),
        ("SELECT * FROM [database is locked]", "no such table: database is locked"),
        ("SELECT abs(-9223372036854775808)", "integer overflow"),
    ],
)
def test_a_query_with_an_error_is_no_database_error(database: Path, sql: str, message: str) -> None:
    with pytest.raises(SqlError, match=message):
        run_query(database, sql)


def test_a_damaged_page_is_a_database_error(database: Path) -> None:
    make_database(database, "CREATE TABLE big AS SELECT hex(zeroblob(9000)) AS a; PRAGMA page_size")
    content = bytearray(database.read_bytes())
    content[-4096 * 4 :] = b"\xff" * 4096 * 4
    database.write_bytes(content)
    with pytest.raises(DatabaseError, match="malformed"):
        run_query(database, "SELECT * FROM big")


def test_a_locked_database_is_a_database_error(database: Path) -> None:
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as writer:
        assert run_query(database, "SELECT count(*) FROM item").rows == [(2,)]
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DatabaseError, match="locked"):
            run_query(database, "SELECT count(*) FROM item")


@pytest.mark.parametrize("cut", [1, 2000, 4095, 4096, 6000])
@pytest.mark.parametrize("old_version", [False, True])
def test_a_cut_file_is_a_database_error(database: Path, cut: int, old_version: bool) -> None:
    make_database(database, "CREATE TABLE last AS SELECT hex(zeroblob(9000)) AS a, 1 AS b")
    content = bytearray(database.read_bytes())
    if old_version:
        content[92:96] = bytes(4)  # SQLite before 3.7.0 wrote no number of pages
    database.write_bytes(content[:-cut])
    with pytest.raises(DatabaseError, match=r"cut: it has \d+ of \d+ bytes|malformed"):
        run_query(database, "SELECT * FROM last")


def test_a_file_with_more_bytes_than_its_pages_is_read(database: Path) -> None:
    with database.open("ab") as file:
        file.write(b"appended")
    assert run_query(database, "SELECT count(*) FROM item").rows == [(2,)]


def test_a_missing_file_is_a_database_error_and_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="no database at"):
        run_query(tmp_path / "x.sqlite", "SELECT 1")
    with pytest.raises(DatabaseError, match="cannot be read"):
        run_query(tmp_path, "SELECT 1")
    assert os.listdir(tmp_path) == []


def test_a_path_may_contain_special_characters_of_uris(tmp_path: Path) -> None:
    path = tmp_path / "a?mode=rwc#%41 b.sqlite"
    make_database(path, "CREATE TABLE t (a)")
    assert run_query(path, "SELECT * FROM t").rows == []


def test_a_connection_is_reused_but_never_by_two_queries_at_once(database: Path) -> None:
    first = connections.acquire(str(database), FOREVER)
    second = connections.acquire(str(database), FOREVER)
    assert first is not second
    connections.release(first)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(connections.acquire, str(database), FOREVER).result() is first
    second.raw.close()
    first.raw.close()


def test_a_changed_file_is_opened_again(database: Path) -> None:
    assert run_query(database, "SELECT count(*) FROM item").rows == [(2,)]
    replacement = database.with_name("new.sqlite")
    make_database(replacement, "CREATE TABLE item (id)")
    os.replace(replacement, database)
    assert run_query(database, "SELECT count(*) FROM item").rows == [(0,)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files where Linux lists them")
def test_many_threads_on_many_databases_keep_few_files_open(tmp_path: Path) -> None:
    threads, databases = 32, 40
    rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 600)"  # of 0.6 MB
    make_database(tmp_path / "0.sqlite", f"CREATE TABLE t (a); INSERT INTO t {rows} SELECT hex(zeroblob(450)) FROM n")
    paths = [tmp_path / f"{number}.sqlite" for number in range(databases)]
    for path in paths[1:]:
        shutil.copy(paths[0], path)

    def work(first: int) -> None:
        for number in range(databases):
            assert run_query(paths[(first + number) % databases], "SELECT sum(a > 'x') FROM t").rows == [(0,)]

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert 0 < sum(name.startswith(str(tmp_path)) for name in files) <= connections._IDLE_CONNECTIONS


def test_a_query_limits_nothing_else_that_uses_sqlite_in_the_process(database: Path) -> None:
    """A limit of SQLite's heap holds for the whole process, and so for an agent's own databases."""
    assert run_query(database, "SELECT count(*) FROM sale").rows == [(1,)]
    with contextlib.closing(sqlite3.connect(":memory:")) as own:
        own.execute("CREATE TABLE t (a)")
        own.executemany("INSERT INTO t VALUES (zeroblob(?))", [(10_000_000,)] * 11)
        assert own.execute("SELECT sum(length(a)) FROM t").fetchone() == (110_000_000,)


def test_reading_a_database_in_wal_mode_creates_no_file(database: Path) -> None:
    make_database(database, "PRAGMA journal_mode = WAL; INSERT INTO sale VALUES (2, 'tue')")
    before = sorted(os.listdir(database.parent))
    assert before == ["shop.sqlite"]
    assert run_query(database, "SELECT count(*) FROM sale").rows == [(2,)]
    assert sorted(os.listdir(database.parent)) == before


def test_rows_in_a_write_ahead_log_are_read(database: Path) -> None:
    writer = sqlite3.connect(database, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    assert run_query(database, "SELECT count(*) FROM sale").rows == [(1,)]
    writer.execute("INSERT INTO sale VALUES (2, 'tue')")
    assert run_query(database, "SELECT count(*) FROM sale").rows == [(2,)]
    writer.close()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("trim('xxaxx', 'x')", "a"),
        ("ltrim('xyax', 'yx')", "ax"),
        ("rtrim(1.50, '5')", "1."),
        ("rtrim(120, '0')", "12"),
        ("trim(1e20, '1')", ".0e+20"),
        ("trim(NULL, 'x')", None),
        ("trim('a', NULL)", None),
        ("trim('a', '')", "a"),
        ("trim('  a ')", "a"),
    ],
)
def test_trim_returns_the_same_as_sqlites_own(database: Path, expression: str, value: str | None) -> None:
    assert run_query(database, f"SELECT {expression}").rows == [(value,)]
    assert sqlite3.connect(":memory:").execute(f"SELECT {expression}").fetchall() == [(value,)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot set SQLite's limits")
def test_a_value_is_bounded(database: Path) -> None:
    with pytest.raises(SqlError, match="too big"):
        run_query(database, "SELECT hex(zeroblob(400000000))")


RESULT = QueryResult(["a", "b"], [("x", 1), ("y", None), ("z", 2.5)], False, 0.0)


def test_rendering_is_tuples_in_a_list() -> None:
    assert render(RESULT) == "[('x', 1), ('y', None), ('z', 2.5)]"
    assert render(RESULT, columns=True) == "(a, b)\n[('x', 1), ('y', None), ('z', 2.5)]"
    assert render(QueryResult([], [], False, 0.0)) == "[]"


def test_rendering_cuts_whole_rows_and_counts_them() -> None:
    assert render(RESULT, max_chars=14) == "[('x', 1), ... 2 more rows]"
    assert render(RESULT, max_chars=25) == "[('x', 1), ('y', None), ... 1 more row]"
    truncated = QueryResult(["a"], [(1,), (2,)], True, 0.0)
    assert render(truncated) == "[(1,), (2,), ... and more rows]"
    assert render(truncated, max_chars=8) == "[(1,), ... 1 more row, and more]"


def test_rendering_cuts_a_first_row_that_is_too_long() -> None:
    assert render(QueryResult(["a"], [("x" * 100,)], False, 0.0), max_chars=10) == "[('xxxxxx...]"


def test_every_error_is_a_query_error() -> None:
    assert {each.__base__ for each in (SqlError, NotAllowedError, QueryTimeoutError, DatabaseError)} == {QueryError}

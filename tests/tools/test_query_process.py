"""Queries that run in a process of their own: same results, and a process that fails is replaced."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from programs import Program, children, is_running, until, wait_for
from spider_folder import make_database

from groundwire.tools.sql import (
    DatabaseError,
    NotAllowedError,
    QueryTimeoutError,
    SqlError,
    connections,
    run_query,
)
from groundwire.tools.sql.query import run_here, workers

HANGS = "SELECT printf('%.*c%.*c%.*c%.*c', 2147483647, a, 2147483647, a, 2147483647, a, 2147483647, a) FROM t"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "x.sqlite"
    make_database(
        path, "CREATE TABLE t (a INTEGER, b TEXT, c); INSERT INTO t VALUES (1, 'one é', x'00ff'), (2, '', NULL)"
    )
    workers.close()
    yield path
    workers.close()


def _in_process(sql: str) -> str:
    """The query with a condition that is always true and needs a process."""
    return f"{sql} WHERE printf('x') = 'x'"


def _idle_process_ids() -> list[int]:
    return [worker.process.pid for worker in workers._idle]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT a, b, c, a / 2.0, 9e999, -9e999, 9223372036854775807, CAST(x'4A6F73E9' AS TEXT) FROM t",
        "SELECT char(0, 55296, 128512) FROM t",
        "SELECT count(*), sum(a), avg(a), min(b), group_concat(b) FROM t",
        "SELECT a AS [a ''b], b AS a FROM t",
    ],
)
def test_a_process_gives_the_same_result(database: Path, sql: str) -> None:
    here = run_here(str(database), sql, 5.0, 10, 1000)
    result = run_query(database, _in_process(sql))
    assert (result.columns, repr(result.rows), result.truncated) == (here.columns, repr(here.rows), here.truncated)
    assert _idle_process_ids()


def test_the_steps_of_a_query_are_the_same_each_time_and_in_a_process(database: Path) -> None:
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {}) SELECT sum(i) FROM n"
    steps = [run_query(database, numbers.format(count)).vm_steps for count in (1000, 1000, 10_000)]
    assert 1000 < steps[0] == steps[1] < steps[2]
    assert abs(run_query(database, _in_process(numbers.format(1000))).vm_steps - steps[0]) <= 100


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT format('%.2f', 2)",
        "SELECT value FROM json_each('[1, 2]')",
        "WITH a AS (SELECT 1 AS x), b AS (SELECT x FROM a), c AS (SELECT x FROM b) SELECT * FROM c",
        f"SELECT 1 -- {'x' * 5000}",
        f"SELECT {','.join(['instr(1, 1)'] * 9)}",
        "SELECT length(hex(zeroblob(20000)))",
        f"SELECT {','.join(['hex(1)'] * 51)}",
    ],
)
def test_only_expensive_queries_need_a_process(database: Path, sql: str) -> None:
    with pytest.raises(connections.NeedsProcessError):
        run_here(str(database), sql, 5.0, 10, 1000)
    with sqlite3.connect(":memory:") as plain:
        assert run_query(database, sql).rows == plain.execute(sql).fetchall()


@pytest.mark.parametrize(
    ("sql", "error", "message"),
    [
        ("SELECT printf(x) FROM t", SqlError, "no such column: x. Columns of t: a, b, c"),
        ("SELECT json('x')", SqlError, "malformed JSON"),
        ("DELETE FROM t WHERE printf(a)", NotAllowedError, "DELETE is not allowed"),
        (f"-- {'x' * 6000}\n;", NotAllowedError, "nothing to read"),
    ],
)
def test_the_errors_are_the_same(database: Path, sql: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_query(database, sql)


def test_rows_are_capped_in_a_process(database: Path) -> None:
    result = run_query(database, _in_process("SELECT a FROM t"), max_rows=1)
    assert (result.rows, result.truncated) == ([(1,)], True)


def test_a_process_is_reused_until_it_is_killed_at_a_deadline(database: Path) -> None:
    assert run_query(database, _in_process("SELECT a FROM t")).rows == [(1,), (2,)]
    (first,) = _idle_process_ids()
    assert run_query(database, _in_process("SELECT a FROM t")).rows == [(1,), (2,)]
    assert _idle_process_ids() == [first]
    with pytest.raises(QueryTimeoutError, match=r"longer than 0\.1 s"):
        run_query(database, HANGS, timeout_s=0.1)
    assert _idle_process_ids() == []
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert run_query(database, _in_process("SELECT a FROM t")).rows == [(1,), (2,)]


def test_a_query_in_a_process_can_be_cancelled(database: Path) -> None:
    cancelled = threading.Event()
    timer = threading.Timer(0.3, cancelled.set)
    timer.start()
    with pytest.raises(QueryTimeoutError, match="cancelled"):
        run_query(database, HANGS, timeout_s=60, cancelled=cancelled)
    timer.join()


def test_an_idle_process_that_ended_is_replaced(database: Path) -> None:
    run_query(database, _in_process("SELECT a FROM t"))
    (pid,) = _idle_process_ids()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert run_query(database, _in_process("SELECT a FROM t")).rows == [(1,), (2,)]


def test_a_deadline_is_seen_if_other_code_waits_for_the_process(database: Path) -> None:
    run_query(database, _in_process("SELECT a FROM t"))
    (pid,) = _idle_process_ids()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(os.waitpid, pid, 0)
        with pytest.raises(QueryTimeoutError):
            run_query(database, HANGS, timeout_s=0.3)
        waiting.exception()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGKILL, DatabaseError), (signal.SIGSEGV, SqlError)])
def test_a_process_that_ends_during_a_query_fails_this_query_only(
    database: Path, number: signal.Signals, error: type[Exception]
) -> None:
    run_query(database, _in_process("SELECT a FROM t"))
    (pid,) = _idle_process_ids()
    timer = threading.Timer(0.2, os.kill, (pid, number))
    timer.start()
    with pytest.raises(error):
        run_query(database, HANGS, timeout_s=30)
    timer.join()
    assert run_query(database, _in_process("SELECT a FROM t")).rows == [(1,), (2,)]


def test_a_process_that_cannot_start_is_a_database_error(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(database.with_name("no-python")))
    with pytest.raises(DatabaseError, match="no process can be started for the query"):
        run_query(database, _in_process("SELECT a FROM t"))


def test_a_long_query_moves_to_a_process(database: Path) -> None:
    count = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT {}) SELECT count(*) FROM c"
    assert run_query(database, count.format(1000)).rows == [(1000,)]
    assert _idle_process_ids() == []
    with pytest.raises(QueryTimeoutError, match=r"longer than 0\.8 s"):
        run_query(database, count.format(-1), timeout_s=0.8)
    assert _idle_process_ids()


def test_temporary_files_are_bounded(database: Path) -> None:
    rows = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
    with pytest.raises(SqlError, match="too much temporary storage"):
        run_query(
            database, f"{rows} SELECT x FROM (SELECT x, hex(zeroblob(40000)) AS s FROM c) ORDER BY s", timeout_s=60
        )


def test_a_query_waits_for_a_free_process_until_its_deadline(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_free", threading.BoundedSemaphore(1))
    with ThreadPoolExecutor(1) as thread:
        hanging = thread.submit(run_query, database, HANGS, timeout_s=1.0)
        while workers._free.acquire(blocking=False):
            workers._free.release()
        with pytest.raises(QueryTimeoutError, match=r"longer than 0\.1 s"):
            run_query(database, _in_process("SELECT a FROM t"), timeout_s=0.1)
        with pytest.raises(QueryTimeoutError):
            hanging.result()


def test_more_queries_than_processes_wait_for_a_free_one(database: Path) -> None:
    sql = _in_process("SELECT a FROM t")
    with ThreadPoolExecutor(20) as threads:
        results = list(threads.map(lambda _: run_query(database, sql, timeout_s=60).rows, range(40)))
    assert results == [[(1,), (2,)]] * 40
    assert len(_idle_process_ids()) <= workers._max_idle


def test_a_forked_process_starts_its_own(database: Path) -> None:
    sql = _in_process("SELECT a FROM t")
    run_query(database, sql)
    before = _idle_process_ids()
    child = os.fork()
    if not child:
        try:
            same = _idle_process_ids() == []
            same = same and run_query(database, sql).rows == [(1,), (2,)] and _idle_process_ids() != before
            workers.close()
            os._exit(0 if same else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run_query(database, sql).rows == [(1,), (2,)]
    assert _idle_process_ids() == before


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_a_process_ends_with_its_killed_parent(database: Path) -> None:
    endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(printf('%d', n)) FROM c"
    code = f"from groundwire.tools.sql import run_query; run_query({str(database)!r}, {endless!r}, timeout_s=600)"
    parent = Program("-c", code)
    until(lambda: bool(children(parent.pid)), parent)
    [pid] = children(parent.pid)
    assert is_running(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(600)
    wait_for(lambda: not is_running(pid))

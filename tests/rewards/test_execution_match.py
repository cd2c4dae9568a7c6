"""Execution match: the ten official rules, the deviations of safe mode, and 10,450 official scores."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import hashlib
import json
import re
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from spider_folder import REAL, make_database

from groundwire.rewards import RewardError
from groundwire.rewards.spider.execution_match import (
    MatchResult,
    _compare,
    execution_match,
    first_statement,
    layout,
    normalise,
    same_result,
    spider_exec_match,
)

FOR_EVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"

SLOW = FOR_EVER.replace(" FROM c)", " FROM c LIMIT 1000000)")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("match") / "m.sqlite"
    make_database(
        path,
        "CREATE TABLE t (a INT, b TEXT, c REAL);"
        "INSERT INTO t VALUES (1, 'x', 1.0), (2, 'y', NULL), (2, 'Y', 2.5);"
        "CREATE TABLE bad (s TEXT); INSERT INTO bad VALUES (CAST(x'4A6F73E9' AS TEXT));"
        "CREATE TABLE empty (a INT)",
    )
    return path


def test_results_that_are_compared_take_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.sqlite"
    make_database(path, "CREATE TABLE t (n INT)")
    with contextlib.closing(sqlite3.connect(path)) as conn, conn:
        conn.executemany("INSERT INTO t VALUES (?)", ((n,) for n in range(200_000)))
    code = (
        "import resource\n"
        "from groundwire.rewards.spider.execution_match import execution_match\n"
        "memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = memory()\n"
        "gold, predicted = 'SELECT n + 1000, n + 2000 FROM t', 'SELECT n + 2000, n + 1000 FROM t'\n"
        f"result = execution_match(predicted, gold, {str(path)!r}, timeout_s=30)\n"
        "print(result.score, memory() - before)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    score, megabytes = map(float, run.stdout.split())
    assert score == 1.0
    assert megabytes < 200
    many = "SELECT n, n, n, n, n, n, n, n FROM t"
    with pytest.raises(RewardError, match="the gold query returns more than 250000 rows or 4000000 bytes"):
        execution_match(many, many, path, timeout_s=30)


def both(database: Path, gold: str, predicted: str) -> float:
    """The score, in official mode and in safe mode, which agree."""
    official = execution_match(predicted, gold, database, mode="official").score
    assert execution_match(predicted, gold, database).score == official
    return official


@pytest.mark.parametrize(
    ("rule", "gold", "predicted", "score"),
    [
        ("1: operators are joined", "SELECT b FROM t WHERE a > = 2", "SELECT b FROM t WHERE a ! = 1 AND a < = 2", 1),
        ("1: in strings too", "SELECT count(*) FROM t WHERE b = '> ='", "SELECT count(*) FROM t WHERE b = '>='", 1),
        ("2: distinct is dropped", "SELECT DISTINCT a FROM t", "SELECT a FROM t", 1),
        ("2: in aggregates too", "SELECT count(DISTINCT a) FROM t", "SELECT count(a) FROM t", 1),
        ("2: but not where it is meant otherwise", "SELECT DISTINCT a FROM t", "SELECT a FROM t GROUP BY a", 0),
        ("2: IS NOT DISTINCT FROM breaks", "SELECT a FROM t", "SELECT a FROM t WHERE a IS NOT DISTINCT FROM a", 0),
        ("2: of the gold the first statement", "SELECT a FROM t; SELECT b FROM t", "SELECT a FROM t", 1),
        ("3: gold's order matters", "SELECT a FROM t ORDER BY a", "SELECT a FROM t ORDER BY a DESC", 0),
        ("3: prediction's order does not", "SELECT a FROM t", "SELECT a FROM t ORDER BY a DESC", 1),
        ("3: only with one space", "SELECT a FROM t ORDER  BY a", "SELECT a FROM t ORDER BY a DESC", 1),
        ("3: even in a string", "SELECT a FROM t WHERE b != 'order by'", "SELECT a FROM t ORDER BY a DESC", 0),
        ("4: the year", "SELECT a + 2018 FROM t WHERE a > 1", "SELECT (year ( curdate( ) ) ) FROM t WHERE a > 1", 1),
        ("4: and the blank after it", "SELECT 2020 FROM t", "SELECT YEAR(CURDATE()) FROM t", 0),
        ("5: bad bytes are ignored", "SELECT s FROM bad", "SELECT 'Jos' FROM bad", 1),
        ("6: a failing prediction", "SELECT a FROM t", "SELECT z FROM t", 0),
        ("7: both empty, whatever the columns", "SELECT a FROM empty", "SELECT a, b FROM t WHERE a = 9", 1),
        ("7: one empty", "SELECT a FROM empty", "SELECT a FROM t", 0),
        ("7: row counts", "SELECT a FROM t", "SELECT a FROM t LIMIT 2", 0),
        ("7: more rows", "SELECT a FROM t", "SELECT a FROM t UNION ALL SELECT a FROM t", 0),
        ("7: column counts", "SELECT a FROM t", "SELECT a, b FROM t", 0),
        ("8: 10 and 10.0 sort differently beside 1", "SELECT 10, 1 FROM t", "SELECT 10.0, 1.0 FROM t", 0),
        ("8: 2 and 2.0 do not", "SELECT 1, 2 FROM t", "SELECT 2.0, 1 FROM t", 1),
        ("9: columns in another order", "SELECT a, b, c FROM t", "SELECT c, a, b FROM t", 1),
        ("9: rows ordered, columns not", "SELECT a, b FROM t ORDER BY b", "SELECT b, a FROM t ORDER BY b", 1),
        ("9: one order for all rows", "SELECT 1, 2 UNION ALL SELECT 2, 1", "SELECT 1, 1 UNION ALL SELECT 2, 2", 0),
        ("9: multisets", "SELECT a FROM t", "SELECT 1 UNION ALL SELECT a FROM t WHERE b != 'x'", 1),
        ("9: not sets", "SELECT a FROM t", "SELECT a FROM t WHERE b > 'Z' UNION ALL SELECT 1", 0),
        ("9: names do not count", "SELECT a FROM t", "SELECT a AS z FROM t", 1),
        ("10: 1 == 1.0", "SELECT c FROM t WHERE a = 1", "SELECT a FROM t WHERE a = 1", 1),
        ("10: 1 != '1'", "SELECT a FROM t WHERE a = 1", "SELECT CAST(a AS TEXT) FROM t WHERE a = 1", 0),
        ("10: NULL only to NULL", "SELECT c FROM t WHERE b = 'y'", "SELECT '' FROM t WHERE b = 'y'", 0),
        ("10: NULL to NULL", "SELECT c FROM t WHERE b = 'y'", "SELECT NULL FROM t WHERE b = 'y'", 1),
        ("10: no rounding", "SELECT 0.1 + 0.2 FROM t", "SELECT 0.3 FROM t", 0),
        ("10: case counts", "SELECT b FROM t WHERE b = 'y'", "SELECT b FROM t WHERE b = 'Y'", 0),
        ("10: bytes are no text", "SELECT 'x' FROM t", "SELECT x'78' FROM t", 0),
        ("10: big integers are exact", "SELECT 9007199254740993 FROM t", "SELECT 9007199254740992.0 FROM t", 0),
    ],
)  # fmt: skip
def test_the_official_rules(database: Path, rule: str, gold: str, predicted: str, score: int) -> None:
    assert both(database, gold, predicted) == score, rule


@pytest.mark.parametrize(
    ("deviation", "gold", "predicted"),
    [
        ("a write", "SELECT a FROM empty", "DELETE FROM t"),
        ("DDL", "SELECT a FROM empty", "DROP TABLE t"),
        ("WITH ... DELETE", "SELECT a FROM empty", "WITH x AS (SELECT 1) DELETE FROM t"),
        ("PRAGMA", "SELECT a FROM empty", "PRAGMA user_version = 7"),
        ("VACUUM INTO", "SELECT a FROM empty", "VACUUM INTO 'copy.sqlite'"),
        ("ATTACH", "SELECT a FROM empty", "ATTACH 'new.sqlite' AS n"),
        ("several statements", "SELECT a FROM t", "SELECT a FROM t; DROP TABLE t"),
        ("several harmless statements", "SELECT a FROM t", "SELECT a FROM t; SELECT 1"),
        ("no statement", "SELECT a FROM empty", ";"),
        ("only a comment", "SELECT a FROM empty", "-- nothing"),
        ("a literal answer", "SELECT count(*) FROM t", "VALUES (3)"),
        ("a literal answer with a SELECT", "SELECT count(*) FROM t", "SELECT 3"),
        ("a literal answer named as a table", "SELECT count(*) FROM t", "WITH t AS (SELECT 3) SELECT 3 FROM t"),
        ("a literal answer over the schema", "SELECT count(*) FROM t", "SELECT 3 FROM sqlite_master LIMIT 1"),
        ("a table that is not opened", "SELECT count(*) FROM t", "SELECT 3 WHERE 1 OR EXISTS (SELECT a FROM t)"),
        ("a table that is not opened, by IN", "SELECT count(*) FROM t", "SELECT 3 WHERE 1 OR 3 IN empty"),
        ("one in the order of one row", "SELECT count(*) FROM t", "SELECT 3 ORDER BY (SELECT a FROM t) IN empty"),
    ],
)
def test_safe_mode_scores_0_for(database: Path, deviation: str, gold: str, predicted: str) -> None:
    before = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in database.parent.iterdir()}
    assert execution_match(predicted, gold, database).score == 0, deviation  # first: then SQLite compiles the query
    assert execution_match(predicted, gold, database, mode="official").score == 1, deviation
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in database.parent.iterdir()} == before


@pytest.mark.parametrize("end", [";", " ; ", ";;", "; -- DROP TABLE t", " -- why\n", "/* a */"])
def test_a_trailing_semicolon_or_comment_is_not_a_second_statement(database: Path, end: str) -> None:
    assert both(database, "SELECT a FROM t", "SELECT a FROM t WHERE 1" + end) == 1


GOLD = "SELECT count(*) FROM t WHERE b = 'x' OR a < > 1"


@pytest.mark.parametrize(
    ("predicted", "gold", "same"),
    [
        (GOLD.replace("SELECT count", "select\n COUNT").replace("FROM t", "from \t T"), GOLD, True),
        (GOLD + " ;", GOLD, True),
        (GOLD.replace("'x'", "'X'"), GOLD, False),
        (GOLD.replace("'x'", "' x'"), GOLD, False),
        (GOLD.replace("< >", "<>"), GOLD, False),
        ("SELECT 'a' 'b' FROM t", "SELECT 'a''b' FROM t", False),
        ('SELECT "A  B" FROM t', 'SELECT "a b" FROM t', False),
        ("SELECT [A], `B` FROM t", "SELECT [A], `b` FROM t", False),
        ("SELECT a FROM t -- WHERE 0\n WHERE 1", "SELECT a FROM t -- WHERE 0 WHERE 1", False),
        ("SELECT a\x0bFROM t", "SELECT a FROM t", False),
        ("SELECT \u212a FROM t", "SELECT k FROM t", False),
        ("select Count ( * ), a FROM t WHERE b IN ( 'x' )", "SELECT count(*),a FROM t WHERE b IN('x')", True),
        ("SELECT a FROM t WHERE a = = 1", "SELECT a FROM t WHERE a == 1", False),
        ('SELECT "a_b" FROM (SELECT a  AS a_b FROM t)', 'SELECT "a_b" FROM (SELECT a AS a_b FROM t)', True),
        ('SELECT "max(a)" FROM (SELECT max( a) FROM t)', 'SELECT "max(a)" FROM (SELECT max(a) FROM t)', False),
        ("SELECT a FROM t" + " " * 5000, "SELECT a FROM t" + "\n" * 5000, True),
        ("SELECT a" + " " * 5000 + "FROM t", "SELECT a" + "\n" * 5000 + "FROM t", False),
    ],
)
def test_queries_of_one_layout_have_one_result(predicted: str, gold: str, same: bool) -> None:
    assert (layout(predicted) == layout(gold)) is same


def test_the_gold_in_another_layout_is_right_without_a_run(database: Path) -> None:
    found = execution_match("select A\nfrom t", "SELECT a FROM t", database)
    assert found == MatchResult(1.0, "the queries are equal")
    # It has another result each time.
    query = "SELECT random() FROM t"
    assert execution_match(query, query, database) == MatchResult(0.0, "the results differ")


def test_a_verdict_is_not_shared_by_queries_that_are_written_alike(database: Path) -> None:
    gold = "SELECT max(a) FROM t"
    for written, score in [("max(a)", 1), ("max( a)", 0)]:
        assert both(database, gold, f'SELECT "max(a)" FROM (SELECT {written} FROM t)') == score


@pytest.mark.parametrize(
    "predicted",
    [
        "SELECT 3, ' FROM t' WHERE 1 OR EXISTS (SELECT a FROM t)",
        "SELECT 3 -- FROM t \n WHERE 1 OR EXISTS (SELECT a FROM t)",
        "SELECT 3 /* FROM t */ WHERE 1 OR EXISTS (SELECT a FROM t)",
        "SELECT 3 FROM (SELECT 1) WHERE 1 OR EXISTS (SELECT a FROM t)",
        "SELECT 3 FROM json_each('[1]') WHERE 1 OR EXISTS (SELECT a FROM t)",
        "SELECT 3 WHERE 1 OR EXISTS (SELECT a FROM t) AND EXISTS (SELECT 3 FROM t)",
    ],
)
def test_a_table_is_not_read_because_it_is_named(database: Path, predicted: str) -> None:
    gold = (
        "SELECT 3, ' FROM t' FROM t LIMIT 1"
        if "'" in predicted and "json" not in predicted
        else "SELECT count(*) FROM t"
    )
    found = execution_match(predicted, gold, database)
    assert found == MatchResult(0.0, "the prediction reads no table, the gold does")


def test_a_result_that_goes_on_beyond_what_is_read_is_not_equal(database: Path) -> None:
    long = "SELECT a FROM t UNION ALL SELECT hex(zeroblob(3000000))"
    assert both(database, "SELECT a FROM t", long) == 0


def test_a_gold_that_reads_no_table_may_be_answered_without_one(database: Path) -> None:
    assert both(database, "SELECT 3", "VALUES (3)") == 1


def test_other_files_beside_the_database_are_ignored(tmp_path: Path) -> None:
    make_database(tmp_path / "x.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES (1)")
    (tmp_path / "x.sqlite-journal.bak").write_bytes(b"no database")
    assert both(tmp_path / "x.sqlite", "SELECT a FROM t", "SELECT a FROM t WHERE 1") == 1


@pytest.mark.parametrize("mode", ["safe", "official"])
def test_both_modes_are_bounded(database: Path, mode: Any) -> None:
    verdict = execution_match(FOR_EVER, "SELECT a FROM t", database, mode=mode, timeout_s=0.1)
    assert verdict == MatchResult(0.0, "the prediction failed: the query ran longer than 0.1 s")
    rows = FOR_EVER.replace("count(*)", "x")
    assert execution_match(rows, "SELECT a FROM t", database, mode=mode) == MatchResult(0.0, "the results differ")
    bomb = "SELECT length(replace(hex(zeroblob(400000000)), '00', 'ab'))"
    # Python 3.10 has no limit for a value's length; there SQLite's memory limit applies.
    assert re.search("too big|too much memory", execution_match(bomb, "SELECT a FROM t", database, mode=mode).reason)


@pytest.mark.parametrize("width", [10, 16, 100])
def test_equal_columns_do_not_multiply_the_attempts(database: Path, width: int) -> None:
    zeros = ", ".join(["0"] * width)
    assert both(database, f"SELECT {zeros} FROM t", f"SELECT {zeros} FROM t WHERE a > 0") == 1
    assert both(database, f"SELECT {zeros} FROM t", f"SELECT {zeros[:-1]}1 FROM t WHERE a > 0") == 0


def test_columns_are_matched_in_any_order() -> None:
    gold = [tuple((row * 7 + column * column) % 5 for column in range(12)) for row in range(40)]
    shuffled = [tuple(reversed(row)) for row in reversed(gold)]
    soon = time.perf_counter() + 10
    assert same_result(gold, shuffled, ordered=False, deadline=soon)
    assert not same_result(gold, shuffled, ordered=True, deadline=soon)
    assert same_result(gold, [tuple(reversed(row)) for row in gold], ordered=True, deadline=soon)


@pytest.mark.parametrize(
    ("sql", "normal"),
    [
        ("SELECT DISTINCT a", "SELECT  a"),
        ("SELECT count(distinct(a)), t.distinct", "SELECT count((a)), t."),
        ("SELECT 'distinct', \"distinct\", `distinct`, [distinct]", None),
        ("SELECT a -- distinct\n, /* distinct */ b", None),
        ("SELECT distincts, distinct_a, adistinct", None),
        ("SELECT 'it''s distinct', 'a \\' distinct '", None),
        ("SELECT 'open distinct", "SELECT 'open "),
    ],
)
def test_distinct_is_dropped_as_a_token(sql: str, normal: str | None) -> None:
    assert normalise(sql) == (sql if normal is None else normal)


@pytest.mark.parametrize(
    ("sql", "first"),
    [
        ("SELECT 1; SELECT 2", "SELECT 1;"),
        ("SELECT ';', \";\", `;` -- ;\n /* ; */; SELECT 2", "SELECT ';', \";\", `;` -- ;\n /* ; */;"),
        (";SELECT 1", ";"),
        ("SELECT 1", "SELECT 1"),
        ("CREATE TRIGGER g AFTER INSERT ON t BEGIN DELETE FROM t; END; SELECT 1",
         "CREATE TRIGGER g AFTER INSERT ON t BEGIN DELETE FROM t; END;"),
    ],
)  # fmt: skip
def test_the_first_statement_ends_at_a_real_semicolon(sql: str, first: str) -> None:
    assert first_statement(sql) == first


@pytest.mark.parametrize("gold", ["SELECT z FROM t", "SELEC", "", FOR_EVER])
def test_a_failing_gold_is_an_error_not_a_score(database: Path, gold: str) -> None:
    with pytest.raises(RewardError, match="the gold query failed"):
        execution_match("SELECT 1", gold, database, timeout_s=0.1)


def test_a_missing_or_broken_database_is_an_error_not_a_score(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="no database at"):
        execution_match("SELECT 1", "SELECT 1", tmp_path / "none.sqlite")
    (tmp_path / "bad.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(RewardError, match="cannot be read"):
        execution_match("SELECT 1", "SELECT 1", tmp_path / "bad.sqlite")


def test_an_unknown_mode_is_an_error(database: Path) -> None:
    with pytest.raises(ValueError, match="'safe' or 'official', not 'fast'"):
        execution_match("SELECT 1", "SELECT 1", database, mode="fast")  # type: ignore[arg-type]


def test_a_changed_database_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    make_database(path, "CREATE TABLE t (a); INSERT INTO t VALUES (1)")
    assert execution_match("SELECT count(*) FROM t", "SELECT a FROM t", path).score == 1
    make_database(path, "INSERT INTO t VALUES (2)")
    assert execution_match("SELECT count(*) FROM t", "SELECT a FROM t", path).score == 0


def test_the_cache_has_hashes_in_place_of_long_predictions(database: Path) -> None:
    prediction = f"SELECT a FROM t -- {'x' * 50_000}"
    before = len(_compare.cache)
    assert execution_match(prediction, "SELECT a FROM t", database).score == 1
    assert len(_compare.cache) == before + 1
    assert not any(prediction in key for key in _compare.cache)


async def test_the_reward_returns_a_float_and_does_not_block_the_loop(database: Path) -> None:
    task = {"id": "1", "query": "SELECT a FROM t", "db_path": str(database)}
    assert await spider_exec_match(task, "SELECT a FROM t WHERE 1", []) == 1.0
    assert await spider_exec_match(task, "SELECT b FROM t", []) == 0.0
    slow = asyncio.create_task(spider_exec_match(task, SLOW, []))
    await asyncio.sleep(0)
    assert await spider_exec_match(task, "SELECT a + 0 FROM t", []) == 1.0
    assert not slow.done()
    assert await slow == 0.0


async def test_a_task_without_a_gold_is_an_error() -> None:
    with pytest.raises(RewardError, match="needs 'query' in the task; it has db_path, id"):
        await spider_exec_match({"id": "1", "db_path": "x"}, "SELECT 1", [])


PARITY = REAL / "parity" / "public.jsonl.gz"
needs_parity = pytest.mark.skipif(not PARITY.is_file(), reason=f"the official verdicts are not at {PARITY}")


@functools.cache
def judge(prefix: str) -> list[tuple[dict[str, Any], dict[str, MatchResult | None]]]:
    """The official cases whose source begins with ``prefix``, with our results by mode; None if the gold fails.

    They are judged in a thread, as in a run: a query of the main thread starts a thread of its own.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_judge, prefix).result()


def _judge(prefix: str) -> list[tuple[dict[str, Any], dict[str, MatchResult | None]]]:
    judged = []
    with gzip.open(PARITY, "rt") as lines:
        cases = [case for case in map(json.loads, lines) if case["source"].startswith(prefix)]
    for case in sorted(cases, key=lambda case: case["db_id"]):
        folder = REAL / "parity" / "database" if case["db_id"] == "parity_edge" else REAL / "database"
        path = folder / case["db_id"] / f"{case['db_id']}.sqlite"
        limit = 0.05 if case["official"] == "timeout" else 30.0
        verdicts: dict[str, MatchResult | None] = {"safe": None, "official": None}
        for mode in verdicts:
            with contextlib.suppress(RewardError):
                verdicts[mode] = execution_match(case["pred"], case["gold"], path, mode=mode, timeout_s=limit)  # type: ignore[arg-type]
        judged.append((case, verdicts))
    return judged


@needs_parity
@pytest.mark.parametrize("mode", ["safe", "official"])
def test_every_published_prediction_gets_the_official_score(mode: Any) -> None:
    cases = [(case, verdicts[mode]) for case, verdicts in judge("model:")]
    assert len(cases) > 6000
    assert [case for case, verdict in cases if verdict is None or verdict.score != case["official"]] == []


# Deviations that the docstring of groundwire.rewards.spider.execution_match names, and cases without a score.
NEVER_EQUAL = {
    "the query answers differently every time": lambda case, _: case["source"] == "mut:nondeterministic",
    "the official evaluator crashes": lambda case, _: case["official"] == "error",
    "the official evaluator hangs": lambda case, _: case["official"] == "timeout",
}
SAFE = {
    "not a query": lambda case, reason: case["official"] == 1 and "write one SELECT" in reason,
    "several statements": lambda case, reason: case["official"] == 1 and "only one statement" in reason,
    "reads no table": lambda case, reason: case["official"] == 1 and "reads no table" in reason,
}
OFFICIAL = {"PRAGMA with rows": lambda case, _: case["pred"].lstrip().upper().startswith("PRAGMA")}


@needs_parity
@pytest.mark.parametrize(("mode", "deviations"), [("safe", SAFE), ("official", OFFICIAL)])
def test_every_changed_gold_gets_the_official_score_or_a_named_deviation(mode: Any, deviations: Any) -> None:
    cases = [(case, verdicts[mode]) for case, verdicts in judge("mut:")]
    assert len(cases) > 3000
    unnamed = [
        (case["source"], case["gold"], case["pred"], case["official"], verdict)
        for case, verdict in cases
        if (verdict is None or verdict.score != case["official"])
        and not any(named(case, verdict.reason if verdict else "") for named in (NEVER_EQUAL | deviations).values())
    ]
    assert unnamed == []

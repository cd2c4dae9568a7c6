"""Variants keep a database's structure and separate its golds from near misses."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from benchmarks._rewrites import rewrite
from spider_folder import make_database

from groundwire.rewards import get, in_training, total, with_time_limit, without_variants
from groundwire.rewards._sql import SqlAnswer, _tokens
from groundwire.rewards.attack import attack
from groundwire.rewards.spider.execution_match import execution_match, training_match
from groundwire.tools.sql.answers import SQL
from groundwire.tools.variants import NoVariantsError, cache, variants_of
from groundwire.tools.variants.build import build_variants, read_source
from groundwire.tools.variants.fuzz import write_database
from groundwire.tools.variants.mutations import memorised, mutations
from groundwire.tools.variants.tables import Schema, Table, read_schema
from groundwire.tools.variants.ties import depends_on_ties, tie_probes

SCRIPT = """
CREATE TABLE owner (id integer PRIMARY KEY, name text NOT NULL UNIQUE, city text);
CREATE TABLE pet (
    id integer PRIMARY KEY, name text, age int CHECK (age >= 0), kind text, owner_id int REFERENCES owner (id)
);
INSERT INTO owner VALUES (1, 'Ann', 'Oslo'), (2, 'Bob', 'Rome'), (3, 'Cem', NULL);
INSERT INTO pet VALUES (1, 'Rex', 3, 'dog', 1), (2, 'Ada', 5, 'cat', 1), (3, 'Tom', 9, 'cat', 2),
    (4, 'Kit', 7, 'cat', 3);
"""
GOLDS = (
    "SELECT name FROM pet WHERE age > 4 AND kind = 'cat'",
    "SELECT name FROM pet WHERE age > 2",
    "SELECT count(*) FROM pet WHERE kind = 'dog'",
    "SELECT T1.name FROM owner AS T1 JOIN pet AS T2 ON T1.id = T2.owner_id WHERE T2.kind = 'dog' AND T1.city = 'Oslo'",
    "SELECT name FROM pet ORDER BY age DESC LIMIT 1",
    "SELECT kind, max(age) FROM pet GROUP BY kind HAVING count(*) >= 1",
    "SELECT DISTINCT T1.city FROM owner AS T1 JOIN pet AS T2 ON T1.id = T2.owner_id",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def pets(tmp_path: Path) -> str:
    make_database(tmp_path / "pets.sqlite", SCRIPT)
    return str(tmp_path / "pets.sqlite")


def build(folder: Path, script: str = SCRIPT, gold: str = GOLDS[0]) -> list[Path]:
    make_database(folder / "pets.sqlite", script)
    (folder / "variants").mkdir()
    build_variants(read_source(str(folder / "pets.sqlite"), gold, "Which dogs live in Oslo?"), folder / "variants")
    return sorted((folder / "variants").glob("*.sqlite"))


def paid(predicted: str, gold: str, database: str) -> float:
    return training_match(SqlAnswer(predicted, gold, database, "")).value


def rows(path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def test_a_variant_keeps_tables_types_keys_and_links(pets: str) -> None:
    files = [file for gold in GOLDS for file in map(Path, variants_of(pets, gold))]
    for file in files:
        assert rows(file, "SELECT sql FROM sqlite_master ORDER BY name") == rows(
            Path(pets), "SELECT sql FROM sqlite_master ORDER BY name"
        )
        assert rows(file, "PRAGMA foreign_key_check") == []
        assert rows(file, "PRAGMA integrity_check") == [("ok",)]
        assert rows(file, "SELECT count(*) - count(DISTINCT name), count(*) - count(name) FROM owner") == [(0, 0)]
        assert rows(file, "SELECT count(*) FROM pet WHERE age IS NULL OR typeof(age) <> 'integer'") == [(0,)]


@pytest.mark.parametrize(
    ("gold", "near_miss"),
    [
        (GOLDS[0], "SELECT name FROM pet WHERE age > 4"),
        (GOLDS[1], "SELECT name FROM pet"),
        (GOLDS[1], "SELECT name FROM pet WHERE age >= 2"),
        (GOLDS[3], "SELECT T1.name FROM owner AS T1 JOIN pet AS T2 ON T1.id = T2.owner_id WHERE T2.kind = 'dog'"),
        (GOLDS[6], "SELECT DISTINCT city FROM owner"),
    ],
)
def test_a_near_miss_that_one_database_accepts_loses_on_a_variant(pets: str, gold: str, near_miss: str) -> None:
    assert execution_match(near_miss, gold, pets, keep_distinct=True).score == 1
    found = training_match(SqlAnswer(near_miss, gold, pets, ""))
    assert found.value == 0
    assert found.wrong_on in ("", *variants_of(pets, gold))


@pytest.mark.parametrize(
    ("gold", "copied"),
    [
        ("SELECT name FROM pet WHERE age > (SELECT avg(age) FROM pet)", "SELECT name FROM pet WHERE age > 6.0"),
        ("SELECT name FROM pet ORDER BY age DESC LIMIT 1", "SELECT name FROM pet WHERE age = 9"),
        ("SELECT count(*) FROM pet WHERE kind = 'cat'", "SELECT count(*) - 1 FROM pet"),
        ("SELECT name FROM pet WHERE kind = 'cat'", "SELECT name FROM pet WHERE kind LIKE 'c%'"),
    ],
)
def test_a_query_with_a_value_that_was_copied_from_the_database_loses(pets: str, gold: str, copied: str) -> None:
    assert execution_match(copied, gold, pets).score == 1
    assert paid(copied, gold, pets) == 0


def test_parts_of_a_gold_are_replaced_by_values_that_a_policy_can_copy() -> None:
    values = {"SELECT AVG(b) FROM t": 6.5, "SELECT b FROM t ORDER BY b DESC LIMIT 1": 9, 'SELECT COUNT(*) FROM "t"': 5}
    gold = "SELECT count(*) FROM t WHERE b > 4"
    assert memorised("SELECT a FROM t WHERE b > (SELECT avg(b) FROM t)", values.get) == [
        "SELECT a FROM t WHERE b > 6.5"
    ]
    assert memorised("SELECT a FROM t ORDER BY b DESC LIMIT 1", values.get) == ["SELECT a FROM t WHERE b = 9"]
    assert memorised(gold, (values | {gold: 3}).get) == ['SELECT COUNT(*) + -2 FROM "t"']
    assert memorised("not a query", values.get) == []


def test_dates_stay_dates_and_sums_do_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    values = ", ".join(f"({i % 9}.{i}1, '2026-0{1 + i % 4}-1{i % 9}')" for i in range(40))
    make_database(tmp_path / "t.sqlite", f"CREATE TABLE t (weight real, day text); INSERT INTO t VALUES {values}")
    for gold in ("SELECT count(*) FROM t WHERE day < '2026-03-01'", "SELECT avg(weight) FROM t"):
        for file in map(Path, variants_of(str(tmp_path / "t.sqlite"), gold)):
            assert rows(file, "SELECT count(*) FROM t WHERE date(day) IS NOT day") == [(0,)]
            weights = [weight for (weight,) in rows(file, "SELECT weight FROM t")]
            assert sum(weights) == sum(sorted(weights)) == sum(sorted(weights, reverse=True))


def test_a_gold_for_the_largest_value_finds_one_on_each_variant(pets: str) -> None:
    gold = "SELECT max(age) FROM pet WHERE kind = 'cat' AND name = 'Tom' AND owner_id = 1"
    with closing(sqlite3.connect(pets)) as connection, connection:
        connection.execute("UPDATE pet SET owner_id = 1")
    assert all(rows(Path(file), gold) != [(None,)] for file in variants_of(pets, gold))


def test_golds_and_rewrites_with_the_same_meaning_win_on_all_variants(pets: str) -> None:
    rng = random.Random(0)
    for gold in GOLDS:
        assert paid(gold, gold, pets) == 1
        for _ in range(30):
            other = rewrite(gold, rng)
            assert paid(other, gold, pets) == 1, (gold, other)


@pytest.mark.parametrize(
    ("other", "skipped"),
    [
        ("select  NAME from pet where age>4 AND kind = 'cat' ;", True),
        ("SELECT name FROM pet WHERE age > 4 AND kind = 'CAT'", False),
        ("SELECT name FROM pet WHERE age > 4 AND kind = 'cat' --", False),
    ],
)
def test_only_the_gold_in_another_layout_is_not_run_on_variants(other: str, skipped: bool) -> None:
    assert (_tokens(other) == _tokens(GOLDS[0])) is skipped


def test_in_and_select_distinct_are_equal_on_variants(pets: str) -> None:
    other = "SELECT DISTINCT city FROM owner WHERE id IN (SELECT owner_id FROM pet)"
    for file in variants_of(pets, GOLDS[6]):
        assert execution_match(other, GOLDS[6], file, keep_distinct=True).score == 1


def test_no_gold_is_judged_where_its_order_depends_on_ties(pets: str) -> None:
    files = variants_of(pets, GOLDS[4])
    assert not any(depends_on_ties(file, tie_probes(GOLDS[4])) for file in files)


def test_ties_are_found_where_a_limit_or_an_order_meets_them(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    make_database(path, "CREATE TABLE t (a, b); INSERT INTO t VALUES (1, 5), (2, 5), (3, 4), (4, 3)")

    def ties(sql: str) -> bool:
        return depends_on_ties(str(path), tie_probes(sql))

    assert ties("SELECT a FROM t ORDER BY b DESC LIMIT 1")
    assert ties("SELECT a FROM t ORDER BY b")
    assert ties("SELECT b FROM t WHERE a = (SELECT a FROM t ORDER BY b DESC LIMIT 1)")
    assert not ties("SELECT a FROM t ORDER BY b LIMIT 2")
    assert not ties("SELECT b FROM t ORDER BY b DESC LIMIT 1")
    assert depends_on_ties(str(path), tie_probes("SELECT b FROM t ORDER BY b DESC LIMIT 1"), equal_rows=True)
    assert not depends_on_ties(str(path), tie_probes("SELECT b FROM t ORDER BY b DESC LIMIT 2"), equal_rows=True)
    assert not ties("SELECT a AS x FROM t ORDER BY x LIMIT 1")
    assert not ties("SELECT a FROM t")


def test_the_same_data_gives_the_same_variants(tmp_path: Path) -> None:
    for one, other in zip(build(tmp_path / "a"), build(tmp_path / "b"), strict=True):
        assert rows(one, "SELECT * FROM pet") == rows(other, "SELECT * FROM pet")


def test_a_large_table_is_sampled_and_its_variants_are_small(tmp_path: Path) -> None:
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 50000)"
    script = f"CREATE TABLE t (a int, b text); INSERT INTO t {many} SELECT i, 'v' || (i % 7) FROM n"
    files = build(tmp_path, script, "SELECT count(*) FROM t WHERE b = 'v3' AND a > 0")
    assert files
    assert all(len(rows(file, "SELECT * FROM t")) < 400 for file in files)
    assert len(read_schema(str(tmp_path / "pets.sqlite")).tables[0].rows) <= 200


def test_without_variants_an_answer_is_judged_on_the_database_alone_and_counted(tmp_path: Path) -> None:
    database, gold = str(tmp_path / "docs.sqlite"), "SELECT a FROM docs"
    make_database(Path(database), "CREATE VIRTUAL TABLE docs USING fts5(a); INSERT INTO docs VALUES ('x')")
    found = training_match(SqlAnswer("SELECT docs.a FROM docs", gold, database, ""))
    assert (found.value, found.components()["metric/unchecked"]) == (1, 1)
    assert "virtual table docs" in found.unchecked
    task = {"id": 7, "question": "?", "query": gold, "db_path": database}
    assert "virtual table docs" in without_variants([task], on_end=lambda: None)["7"]


@pytest.mark.parametrize(
    "ddl",
    [
        "ATTACH 'other.sqlite' AS x",
        "PRAGMA writable_schema = 1",
        "DROP TABLE pet",
        "CREATE TRIGGER x AFTER INSERT ON pet BEGIN DELETE FROM pet; END",
        "VACUUM INTO 'copy.sqlite'",
    ],
)
def test_a_schema_that_does_more_than_create_tables_is_refused(
    ddl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pet = Table(name="pet", ddl="CREATE TABLE pet (a)", columns=(), key=(), rows=())
    hostile = Table(name="x", ddl=ddl, columns=(), key=(), rows=())
    with pytest.raises(sqlite3.Error):
        write_database(tmp_path / "n.sqlite", Schema(tables=(pet, hostile)), {"pet": [], "x": []})
    assert {path.name for path in tmp_path.iterdir()} <= {"n.sqlite", "n.sqlite-journal"}


def test_a_row_whose_parent_was_refused_is_left_out(tmp_path: Path) -> None:
    script = """
    CREATE TABLE owner (id integer PRIMARY KEY, code text CHECK (code <> 'b'));
    CREATE TABLE pet (id integer PRIMARY KEY, owner_id int REFERENCES owner (id));
    """
    make_database(tmp_path / "pets.sqlite", script)
    schema = read_schema(str(tmp_path / "pets.sqlite"))
    made = {"owner": [(1, "a"), (2, "b"), (3, "c")], "pet": [(1, 1), (2, 2), (3, 3)]}
    write_database(tmp_path / "n.sqlite", schema, made)
    assert rows(tmp_path / "n.sqlite", "SELECT * FROM pet ORDER BY id") == [(1, 1), (3, 3)]


MEMORISED = (
    "SELECT column1 FROM (VALUES ('Ada'), ('Tom'), ('Kit')) WHERE (SELECT count(*) FROM pet) >= 0",
    "SELECT r.* FROM json_each('[1]') JOIN (SELECT 'Ada' UNION ALL SELECT 'Tom' UNION ALL SELECT 'Kit') r",
    "SELECT r.* FROM (VALUES ('Ada'), ('Tom'), ('Kit')) r WHERE EXISTS (SELECT 1 FROM pet)",
    "WITH r(n) AS (VALUES ('Ada'), ('Tom'), ('Kit')) SELECT n FROM r UNION ALL SELECT name FROM pet WHERE 0",
    "SELECT name FROM pet WHERE id IN (2, 3, 4)",
    "SELECT CASE (SELECT count(*) FROM pet) WHEN 4 THEN column1 END FROM (VALUES ('Ada'), ('Tom'), ('Kit'))",
)


@pytest.mark.parametrize("answer", MEMORISED)
async def test_in_training_a_memorised_result_loses_and_validation_counts_the_database_alone(
    pets: str, answer: str
) -> None:
    task = {"query": GOLDS[0], "db_path": pets}
    reward = get("spider_exec_match")
    with in_training():
        value = await reward(task, answer, ())
    assert isinstance(value, dict)
    assert total(value) == 0
    assert value["metric/official"] == await reward(task, answer, ()) == float("json_each" not in answer)


async def test_a_sum_is_strict_in_training_too_and_a_users_columns_are_enough(pets: str) -> None:
    task = {"question": "?", "sql": GOLDS[0], "database": pets}
    reward = get("0.5*spider_exec_match+0.5*executes")
    assert total(await reward(task, MEMORISED[0], ())) == 0.5
    with in_training():
        assert total(await reward(task, MEMORISED[0], ())) == 0
        assert total(await reward(task, GOLDS[0], ())) == 0.5


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (f"```sql\n{GOLDS[0]}\n```", True),
        (f"The query is:\n```\n{GOLDS[0]};\n```", True),
        (f"The query is: {GOLDS[0]}", False),
        (GOLDS[0].replace(" ", "\u00a0"), False),
    ],
)
@pytest.mark.parametrize("name", ["spider_exec_match", "bird_exec_match"])
async def test_a_fenced_query_is_a_query_and_any_other_text_around_it_is_not(
    pets: str, name: str, answer: str, right: bool
) -> None:
    for strict in (False, True):
        with in_training(strict):
            assert total(await get(name)({"query": GOLDS[0], "db_path": pets}, answer, ())) == right


@pytest.mark.parametrize("name", ["bird_exec_match", "bird_soft_f1", "bird_efficiency"])
async def test_the_rewards_of_bird_are_strict_in_training(name: str, pets: str) -> None:
    task = {"query": GOLDS[0], "db_path": pets}
    rewrite_of_gold = "SELECT p.name FROM pet p WHERE p.kind = 'cat' AND p.age > 4"
    reward = with_time_limit(get(name), 60)
    assert total(await reward(task, MEMORISED[0], ())) >= 1
    with in_training():
        assert total(await reward(task, MEMORISED[0], ())) < 0.5
        assert total(await reward(task, rewrite_of_gold, ())) >= 1


def test_variants_are_made_once_and_found_by_their_content(pets: str, tmp_path: Path, own_cache: Path) -> None:
    found = variants_of(pets, GOLDS[0])
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(Path(pets).read_bytes())
    assert variants_of(str(copy), GOLDS[0]) == found
    with closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("INSERT INTO pet VALUES (9, 'Zoe', 8, 'cat', 1)")
    assert variants_of(str(copy), GOLDS[0]) != found
    shutil.rmtree(own_cache)
    assert variants_of(pets, GOLDS[0]) == found
    assert all(map(os.path.isfile, found))


def test_several_threads_and_processes_make_variants_once(pets: str, own_cache: Path) -> None:
    code = (
        "import pathlib, sys; from groundwire.tools.variants import cache; cache.CACHE = pathlib.Path(sys.argv[1]);"
        "print(*cache.variants_of(*sys.argv[2:]), sep='\\n')"
    )
    command = [sys.executable, "-c", code, str(own_cache), pets, GOLDS[0]]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(lambda _: variants_of(pets, GOLDS[0]), range(8)))
    assert {tuple(each.communicate()[0].split()) for each in started} == found
    assert len(found) == 1
    assert len([path for path in own_cache.glob("??/*") if path.is_dir()]) == 1


def test_where_the_cache_cannot_be_written_variants_are_made_for_the_process(
    pets: str, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_cache.write_text("a file in place of the folder")
    assert all(map(os.path.isfile, variants_of(pets, GOLDS[0])))
    assert paid(MEMORISED[0], GOLDS[0], pets) == 0
    assert "cannot be written" in caplog.text


def test_a_database_that_is_missing_has_no_variants(tmp_path: Path) -> None:
    with pytest.raises(NoVariantsError, match=r"gone\.sqlite"):
        variants_of(str(tmp_path / "gone.sqlite"), GOLDS[0])


async def test_the_audit_counts_fewer_dropped_filters_with_variants(pets: str) -> None:
    tasks = [{"id": str(i), "question": "?", "query": gold, "db_path": pets} for i, gold in enumerate(GOLDS)]
    counts = []
    for strict in (False, True):
        with in_training(strict):
            golds = [task["query"] for task in tasks]
            result = await attack(tasks, get("spider_exec_match"), golds=golds, answers=SQL, audits=True)
        counts.append(result.tasks_by_finding.get("filter dropped and still wins", 0))
    assert counts[0] > counts[1] == 1  # HAVING count(*) >= 1 drops nothing from any database


def test_mutations_change_one_thing_each() -> None:
    columns = {"t": ["a", "b", "c", "d"]}
    found = mutations("SELECT max(a) FROM t WHERE b = 1 AND c LIKE 'x%' ORDER BY d LIMIT 3", columns)
    assert "SELECT MIN(a) FROM t WHERE b = 1 AND c LIKE 'x%' ORDER BY d LIMIT 3" in found
    assert "SELECT MAX(a) FROM t ORDER BY d LIMIT 3" in found
    assert "SELECT MAX(a) FROM t WHERE b = 1 ORDER BY d LIMIT 3" in found
    assert "SELECT MAX(a) FROM t WHERE b = 1 AND c LIKE 'x%' ORDER BY d DESC LIMIT 3" in found
    assert "SELECT MAX(a) FROM t WHERE b = 1 AND c LIKE 'x%' ORDER BY d LIMIT 2" in found
    assert "SELECT MAX(\"b\") FROM t WHERE b = 1 AND c LIKE 'x%' ORDER BY d LIMIT 3" in found
    assert mutations("not a query", {}) == []

"""Neighbours keep a database's structure and separate its golds from near misses."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from benchmarks._rewrites import rewrite
from spider_folder import make_database, make_spider
from typer.testing import CliRunner

from groundwire.domains.spider.loader import BUNDLED, domain
from groundwire.domains.spider.prepare import app, prepare
from groundwire.rewards import RewardError, get
from groundwire.rewards.audit import audit
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.rewards.spider.test_suite import _tokens, suite_match
from groundwire.tools.neighbours import FOLDER, Built, Job, build_all, build_neighbours
from groundwire.tools.neighbours.fuzz import write_database
from groundwire.tools.neighbours.mutations import mutations
from groundwire.tools.neighbours.tables import Schema, Table, read_schema
from groundwire.tools.neighbours.ties import depends_on_ties, tie_probes
from groundwire.train.audit import app as audit_app

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


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("pets"))[0])


def build(folder: Path, script: str = SCRIPT, golds: tuple[str, ...] = GOLDS, count: int = 4) -> tuple[Path, Built]:
    database = folder / "pets.sqlite"
    make_database(database, script)
    job = Job(
        database=str(database),
        golds=golds,
        questions=("Which dogs live in Oslo?",),
        folder=folder / FOLDER,
        count=count,
    )
    return database, build_neighbours(job)


def files(database: str) -> list[Path]:
    return sorted((Path(database).parent / FOLDER).glob("*.sqlite"))


def rows(path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def test_a_neighbour_keeps_tables_types_keys_and_links(pets: str) -> None:
    assert 1 <= len(files(pets)) <= 4
    for file in files(pets):
        assert rows(file, "SELECT sql FROM sqlite_master ORDER BY name") == rows(
            Path(pets), "SELECT sql FROM sqlite_master ORDER BY name"
        )
        assert rows(file, "PRAGMA foreign_key_check") == []
        assert rows(file, "PRAGMA integrity_check") == [("ok",)]
        assert rows(file, "SELECT count(*) - count(DISTINCT name), count(*) - count(name) FROM owner") == [(0, 0)]
        assert rows(file, "SELECT count(*) FROM pet WHERE age IS NULL OR typeof(age) <> 'integer'") == [(0,)]
        assert rows(file, "SELECT count(*) FROM pet") > [(1,)]


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
def test_a_near_miss_that_one_database_accepts_loses_on_a_neighbour(pets: str, gold: str, near_miss: str) -> None:
    assert execution_match(near_miss, gold, pets, keep_distinct=True).score == 1
    result = suite_match(near_miss, gold, pets)
    assert result.score == 0
    if execution_match(near_miss, gold, pets).score:
        assert f"neighbour {Path(pets).parent / FOLDER}" in result.reason


def test_golds_and_rewrites_with_the_same_meaning_win_on_all_neighbours(pets: str) -> None:
    rng = random.Random(0)
    for gold in GOLDS:
        assert suite_match(gold, gold, pets).score == 1
        for _ in range(30):
            other = rewrite(gold, rng)
            assert suite_match(other, gold, pets).score == 1, (gold, other, suite_match(other, gold, pets).reason)


@pytest.mark.parametrize(
    ("other", "skipped"),
    [
        ("select  NAME from pet where age>4 AND kind = 'cat' ;", True),
        ("SELECT name FROM pet WHERE age > 4 AND kind = 'CAT'", False),
        ("SELECT name FROM pet WHERE age > 4 AND kind = 'cat' --", False),
    ],
)
def test_only_the_gold_in_another_layout_is_not_run_on_neighbours(other: str, skipped: bool) -> None:
    assert (_tokens(other) == _tokens(GOLDS[0])) is skipped


def test_in_and_select_distinct_are_equal_on_neighbours(pets: str) -> None:
    other = "SELECT DISTINCT city FROM owner WHERE id IN (SELECT owner_id FROM pet)"
    for file in files(pets):
        assert execution_match(other, GOLDS[6], file, keep_distinct=True).score == 1


def test_no_gold_is_judged_where_its_order_depends_on_ties(pets: str) -> None:
    index = json.loads((Path(pets).parent / FOLDER / "index.json").read_text())
    used = [(gold, Path(pets).parent / FOLDER / name) for gold, names in index["golds"].items() for name in names]
    assert GOLDS[4] in {gold for gold, _ in used}
    assert not any(depends_on_ties(str(file), tie_probes(gold)) for gold, file in used)


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


def test_the_same_data_gives_the_same_neighbours(tmp_path: Path) -> None:
    first, second = build(tmp_path / "a")[0], build(tmp_path / "b")[0]
    for one, other in zip(files(str(first)), files(str(second)), strict=True):
        assert rows(one, "SELECT * FROM pet") == rows(other, "SELECT * FROM pet")


def test_processes_build_what_one_process_builds(tmp_path: Path) -> None:
    one = build(tmp_path / "one", count=1)[1]
    jobs = []
    for name in "abcdef":
        database = tmp_path / name / "pets.sqlite"
        make_database(database, SCRIPT)
        folder = database.parent / FOLDER
        jobs.append(Job(database=str(database), golds=GOLDS[:2], questions=(), folder=folder, count=1))
    ended: list[None] = []
    built = build_all(jobs, on_end=lambda: ended.append(None))
    assert [each.files for each in built] == [one.files] * 6
    assert len(ended) == 6


def test_a_large_table_is_sampled_and_its_neighbours_are_small(tmp_path: Path) -> None:
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 50000)"
    script = f"CREATE TABLE t (a int, b text); INSERT INTO t {many} SELECT i, 'v' || (i % 7) FROM n"
    database, built = build(tmp_path, script, ("SELECT count(*) FROM t WHERE b = 'v3' AND a > 0",))
    assert built.files
    assert all(len(rows(file, "SELECT * FROM t")) < 400 for file in files(str(database)))
    assert len(read_schema(str(database)).tables[0].rows) <= 200


def test_a_virtual_table_is_a_named_problem_and_its_golds_are_judged_on_the_database_alone(tmp_path: Path) -> None:
    gold = "SELECT a FROM docs"
    script = "CREATE VIRTUAL TABLE docs USING fts5(a); INSERT INTO docs VALUES ('x')"
    database, built = build(tmp_path, script, (gold,))
    assert "virtual table docs" in str(built.problem)
    assert suite_match("SELECT docs.a FROM docs", gold, str(database)).score == 1


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


def test_without_neighbours_the_reward_is_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "pets.sqlite"
    make_database(path, SCRIPT)
    with pytest.raises(RewardError, match="has no neighbours; prepare the data with --neighbours"):
        suite_match("SELECT 1", GOLDS[0], str(path))


def test_a_gold_that_is_not_in_the_index_is_an_error(pets: str) -> None:
    with pytest.raises(RewardError, match="does not have the gold query 'SELECT 7'"):
        suite_match("SELECT 1", "SELECT 7", pets)


@pytest.mark.parametrize(
    "content",
    ['{"golds": {"g": ["../../secret.sqlite"]}}', '{"golds": {"g": [".."]}}', '{"golds": {"g": 3}}', "[]", "{"],
)
def test_a_broken_or_hostile_index_is_an_error(content: str, tmp_path: Path) -> None:
    make_database(tmp_path / "pets.sqlite", SCRIPT)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "index.json").write_text(content)
    with pytest.raises(RewardError, match="prepare the data again"):
        suite_match("SELECT 1", "g", str(tmp_path / "pets.sqlite"))


async def test_the_audit_counts_fewer_dropped_filters_with_the_registered_reward(pets: str) -> None:
    tasks = [{"id": str(i), "question": "?", "query": gold, "db_path": pets} for i, gold in enumerate(GOLDS)]
    counts = {}
    for name in ("spider_exec_match", "spider_test_suite"):
        result = await audit(tasks, get(name), database=lambda task: task["db_path"])
        counts[name] = result.tasks_by_finding.get("filter dropped and still wins", 0)
    assert counts["spider_exec_match"] > 0
    # HAVING count(*) >= 1 drops nothing from any database.
    assert counts["spider_test_suite"] == 1


def test_prepare_writes_neighbours_and_keeps_those_of_the_same_data(tmp_path: Path) -> None:
    source, out = make_spider(tmp_path / "source"), tmp_path / "out"
    result = CliRunner().invoke(app, ["--source", str(source), "--out", str(out), "--neighbours", "2"])
    assert result.exit_code == 0, result.output
    assert "neighbours: " in result.output
    audited = CliRunner().invoke(audit_app, ["--data-dir", str(out), "--allow", "1"])
    assert "reward spider_exec_match on" in audited.output
    assert "reward spider_test_suite on" in audited.output
    [gold] = [task for task in domain.load(str(out)).train]
    assert suite_match("SELECT count(name) FROM pet", gold["query"], gold["db_path"]).score in (0, 1)
    index = out / "database/pets" / FOLDER / "index.json"
    before = json.loads(index.read_text())
    index.write_text(json.dumps(before | {"separated": 77}))
    again = prepare(source, out, neighbours=2)
    assert json.loads(index.read_text())["separated"] == 77
    assert again["neighbours"]["separated"] >= 77
    prepare(source, out, neighbours=1)
    assert json.loads(index.read_text())["separated"] != 77


def test_neighbours_that_were_ready_when_prepare_was_interrupted_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = make_spider(tmp_path / "source"), tmp_path / "out"

    def interrupted(jobs: Any, *, on_end: Any) -> Any:
        build_neighbours(jobs[0])
        jobs[1].folder.mkdir(parents=True)
        (jobs[1].folder / "0.sqlite").write_text("half of a file")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("groundwire.domains.text_to_sql.neighbours.build_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(source, out, neighbours=2)
    assert not out.exists()
    [index] = (tmp_path / f".out.{FOLDER}").glob(f"database/*/{FOLDER}/index.json")
    index.write_text(json.dumps(json.loads(index.read_text()) | {"separated": 77}))
    assert prepare(source, out, neighbours=2)["neighbours"]["separated"] >= 77
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert all(file.read_bytes()[:6] == b"SQLite" for file in out.glob(f"database/*/{FOLDER}/*.sqlite"))


def test_the_bundled_golds_win_on_neighbours_and_their_near_misses_are_separated(tmp_path: Path) -> None:
    tasks = [task for task in domain.load(str(BUNDLED)).validation if task["db_id"] == "chess_1"] or [
        task for task in domain.load(str(BUNDLED)).validation[:6]
    ]
    database = tmp_path / "d" / "d.sqlite"
    own = [task for task in tasks if task["db_path"] == tasks[0]["db_path"]]
    database.parent.mkdir()
    database.write_bytes(Path(tasks[0]["db_path"]).read_bytes())
    golds = tuple(dict.fromkeys(task["query"] for task in own))
    job = Job(database=str(database), golds=golds, questions=(), folder=database.parent / FOLDER, count=3)
    built = build_neighbours(job)
    assert built.files
    rng = random.Random(1)
    for gold in golds:
        for _ in range(5):
            assert suite_match(rewrite(gold, rng), gold, str(database)).score == 1


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

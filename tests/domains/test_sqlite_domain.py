"""A folder of SQLite files and questions is a domain: databases by name, splits by database, broken golds by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spider_folder import make_database
from sqlite_folder import PET, ROWS, make_folder
from typer.testing import CliRunner

from groundwire import domains, rewards
from groundwire.domains import DataError
from groundwire.domains.prepare import app
from groundwire.domains.text_to_sql.domain import split_tasks
from groundwire.domains.text_to_sql.golds import FAILS, LARGE, NO_ROWS, check_golds, leave_out

sqlite = domains.get("sqlite")


def refusal(folder: Path, rows: list[dict[str, Any]]) -> str:
    with pytest.raises(DataError) as refused:
        sqlite.load(str(make_folder(folder, rows)))
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
async def test_a_folder_is_read_and_scored_as_spider_is(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = sqlite.load(str(make_folder(tmp_path, suffix=suffix)))
    tasks = [*data.train, *data.validation]
    assert {task["query"]: task["db_id"] for task in tasks} == {
        "SELECT count(*) FROM pet": "shop",
        "SELECT name FROM pet": "farm",
        "SELECT age FROM pet": "zoo",
    }
    assert data.left_out == {NO_ROWS: 1, FAILS: 1}
    assert caplog.messages == [
        f"questions.{suffix}, row 2 (farm): {FAILS}: no such column: nickname. Columns of pet: name, age; correct the "
        "query, or remove the row."
    ]
    names = next(task for task in tasks if task["db_id"] == "farm")
    reward = rewards.get(sqlite.default_reward)
    assert await reward(names, "SELECT name FROM pet WHERE age > 1", []) == 1.0
    assert await reward(names, "SELECT age FROM pet", []) == 0.0
    assert set(domains.visible_columns(sqlite, names)) == {"id", "split", "db_id", "question", "db_path"}
    assert all(
        domains.is_inside(sqlite.database(task), domains.database_folders(sqlite, str(tmp_path))) for task in tasks
    )


def test_a_split_holds_out_whole_databases_and_depends_on_their_names_only() -> None:
    tasks = [{"id": str(i), "db_id": f"db{i % 10}", "query": f"SELECT {i}"} for i in range(40)]
    splits, split_by = split_tasks(tasks, "")
    held_out = {task["db_id"] for task in splits["validation"]}
    assert split_by == "database"
    assert len(held_out) == 2
    assert not held_out & {task["db_id"] for task in splits["train"]}
    again, _ = split_tasks([*tasks[::-1], {"id": "x", "db_id": "db1", "query": "SELECT 'x'"}], "")
    assert {task["db_id"] for task in again["validation"]} == held_out


def test_one_database_is_split_by_gold_and_a_column_split_wins() -> None:
    tasks = [{"id": str(i), "db_id": "one", "query": f"SELECT {i // 2}" + ";" * (i % 2)} for i in range(20)]
    splits, _ = split_tasks(tasks, "")
    golds = [{task["query"].rstrip(";") for task in splits[name]} for name in ("train", "validation")]
    assert not golds[0] & golds[1]
    assert len(golds[1]) == 2
    named = [{**task, "split": "test" if task["id"] == "7" else "train"} for task in tasks]
    splits, split_by = split_tasks(named, "")
    assert (split_by, [task["id"] for task in splits["test"]], splits["validation"]) == ("the column split", ["7"], [])
    with pytest.raises(DataError, match="task 3 has no split"):
        split_tasks([*named[:3], tasks[3]], "")


def test_further_splits_can_be_evaluated(tmp_path: Path) -> None:
    splits = ("train", "train", "train", "test", "dev")
    folder = make_folder(tmp_path, [{**row, "split": split} for row, split in zip(ROWS, splits, strict=True)])
    assert [task["question"] for task in sqlite.load(str(folder)).validation] == ["Ages?"]
    assert [task["question"] for task in domains.load_split(sqlite, "test", str(folder)).validation] == ["Names?"]
    with pytest.raises(DataError, match="no split 'holdout'; it has train, validation, test"):
        domains.load_split(sqlite, "holdout", str(folder))


def test_a_prepared_folder_is_loaded_without_the_source_and_lists_broken_golds_by_row(tmp_path: Path) -> None:
    source, out = make_folder(tmp_path / "source", suffix="csv"), tmp_path / "out"
    command = ["--domain", "sqlite", "--source", str(source), "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "questions.csv, row 2 (farm): gold fails: no such column: nickname" in result.output
    before = sqlite.load(str(source))
    source.rename(tmp_path / "gone")
    after = sqlite.load(str(out))
    assert [task["id"] for task in after.train] == [task["id"] for task in before.train]
    assert [task["id"] for task in after.validation] == [task["id"] for task in before.validation]
    assert after.left_out == before.left_out
    assert json.loads((out / "suspects.json").read_text())[0]["reasons"] == [NO_ROWS]
    refused = CliRunner().invoke(app, [*command[:4], "--out", str(tmp_path / "again")])
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)


def test_the_layout_of_kaggle_dbqa_is_read_with_its_own_split(tmp_path: Path) -> None:
    make_database(tmp_path / "databases/Pets/Pets.sqlite", PET)
    (tmp_path / "KaggleDBQA_tables.json").write_text('[{"db_id": "Pets"}]')
    (tmp_path / "examples").mkdir()
    rows = [
        {
            "db_id": "Pets",
            "question": f"{i}?",
            "query": f"SELECT name, {i} FROM pet",
            "query_toks": ["SELECT"],
            "sql": {},
        }
        for i in range(5)
    ]
    for name, part in {"Pets": rows, "Pets_fewshot": rows[:2], "Pets_test": rows[2:]}.items():
        (tmp_path / f"examples/{name}.json").write_text(json.dumps(part))
    data = sqlite.load(str(tmp_path))
    assert [task["id"] for task in data.train] == ["Pets_fewshot-0", "Pets_fewshot-1"]
    assert [task["question"] for task in data.validation] == ["2?", "3?", "4?"]
    assert set(data.train[0]) == {"id", "split", "db_id", "question", "query", "db_path", "hardness"}
    for part in ("fewshot", "test"):
        (tmp_path / f"examples/Pets_{part}.json").unlink()
    assert sqlite.load(str(tmp_path)).source.endswith("split by gold query, of one database")


def test_a_gold_whose_result_is_too_large_to_be_compared_is_left_out(tmp_path: Path) -> None:
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 300000) SELECT {} FROM n"
    database = str(make_folder(tmp_path) / "shop.sqlite")
    tasks = [{"db_path": database, "query": numbers.format(column)} for column in ("i", "count(i)")]
    problems = check_golds(tasks, timeout_s=600)
    assert [problem.reason for problem in problems.values()] == [LARGE]
    assert leave_out(tasks, tasks, problems) == (tasks[1:], tasks[1:], {LARGE: 1})


# An error about a folder is one line with the folder, the row and the remedy.


def test_a_database_that_the_folder_lacks(tmp_path: Path) -> None:
    message = refusal(tmp_path, [ROWS[0], {**ROWS[0], "database": "/etc/passwd"}])
    assert "questions.jsonl, row 1: " in message
    assert "no database '/etc/passwd'; it has farm, shop, zoo" in message


def test_a_name_that_two_databases_have(tmp_path: Path) -> None:
    make_database(tmp_path / "us/shop.sqlite", PET)
    assert "2 databases are called 'shop' (shop.sqlite and us/shop.sqlite); give its path." in refusal(tmp_path, ROWS)


def test_a_row_without_database_among_several(tmp_path: Path) -> None:
    assert "row 0 names no database, and there are 3" in refusal(tmp_path, [{**ROWS[0], "database": ""}])


def test_no_column_with_sql_no_sql_and_no_question(tmp_path: Path) -> None:
    assert "no column with the gold SQL" in refusal(tmp_path / "a", [{"question": "Who?", "answer": "Tom"}])
    assert "row 1: sql is None, not SQL" in refusal(tmp_path / "b", [ROWS[0], {**ROWS[0], "sql": None}])
    assert "row 0: question is empty" in refusal(tmp_path / "c", [{**ROWS[0], "question": None}])


def test_golds_that_all_fail_end_the_load_with_the_first(tmp_path: Path) -> None:
    rows = [{**row, "sql": "SELECT nothing FROM pet"} for row in ROWS]
    assert "questions.jsonl, row 0 (shop): gold fails" in refusal(tmp_path, rows)


def test_a_file_that_is_no_database_and_one_without_tables(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/text.db").write_text("hello")
    assert "text.db is no readable SQLite file" in refusal(tmp_path, [{**ROWS[0], "database": "text"}])
    make_database(tmp_path / "y/empty.db", "CREATE TABLE t (a); DROP TABLE t")
    assert "empty.db has no tables" in refusal(tmp_path, [{**ROWS[0], "database": "empty"}])


@pytest.mark.parametrize("name", ["shop.SQLITE3", "shop.Sqlite", "shop.DB"])
def test_the_suffix_of_a_database_may_be_in_any_case(tmp_path: Path, name: str) -> None:
    queries = ("SELECT name FROM pet", "SELECT age FROM pet")
    folder = make_folder(tmp_path / "data", [{"question": "?", "sql": query, "database": name} for query in queries])
    (folder / "shop.sqlite").rename(folder / name)
    data = sqlite.load(str(folder))
    assert {Path(task["db_path"]).name for task in [*data.train, *data.validation]} == {name}


def test_a_database_that_no_task_can_name_is_refused(tmp_path: Path) -> None:
    make_database(tmp_path / "x.sqlite", PET)
    try:
        (tmp_path / "x.sqlite").rename(f"{tmp_path}/caf\udce9.sqlite")
    except OSError:
        pytest.skip("the file system refuses the name")
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "How many?", "sql": "SELECT count(*) FROM pet"}))
    with pytest.raises(DataError, match=r"caf\\udce9\.sqlite is no readable SQLite file: its path is no Unicode text"):
        sqlite.load(str(tmp_path))


def test_a_database_whose_tables_cannot_be_used_is_refused_with_the_reasons(tmp_path: Path) -> None:
    make_database(tmp_path / "y/odd.db", "CREATE TABLE t (a); CREATE VIEW v AS SELECT * FROM t; DROP TABLE t")
    refused = refusal(tmp_path, [{**ROWS[0], "database": "odd"}])
    assert "odd.db has no tables that can be used: v (no such table: main.t); is it the right file?" in refused


def test_a_folder_without_questions_or_with_two_files(tmp_path: Path) -> None:
    make_database(tmp_path / "shop.sqlite", PET)
    with pytest.raises(DataError, match=r"has no questions: looked for questions\.jsonl"):
        sqlite.load(str(tmp_path))
    for name in ("a.csv", "b.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(DataError, match=r"has a\.csv and b\.jsonl; keep one"):
        sqlite.load(str(tmp_path))
    with pytest.raises(DataError, match="--domain sqlite has no data of its own"):
        sqlite.load()
    with pytest.raises(DataError, match="does not exist"):
        sqlite.load(str(tmp_path / "nowhere"))

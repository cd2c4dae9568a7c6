"""Golds that are probably wrong: sampled answers that contradict them, and a file by which they weigh less."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from spider_folder import make_database
from typer.testing import CliRunner

from groundwire.domains import DataError, TaskData
from groundwire.domains.text_to_sql.golds import with_gold_trust
from groundwire.domains.text_to_sql.suspects import CONTRADICTED, NUMBERS, OUTER, suspects
from groundwire.train.api.training import make_job
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.audit import app

RIGHT, WRONG = "SELECT name FROM pet WHERE age > 4", "SELECT name FROM pet WHERE age > 8"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in Spider's layout with eight training tasks, whose golds are right, and one for validation."""
    place = tmp_path / "data" / "database" / "pets" / "pets.sqlite"
    make_database(
        place,
        "CREATE TABLE pet (name, age, owner_id); INSERT INTO pet VALUES ('Rex', 3, 1), ('Ada', 5, 2), ('Tom', 9, 2);"
        "CREATE TABLE owner (id, city); INSERT INTO owner VALUES (1, 'Rom'), (2, 'Bonn')",
    )
    tasks = [
        {"id": f"t{number}", "db_id": "pets", "question": f"Question {number}?", "query": RIGHT} for number in range(8)
    ]
    (tmp_path / "data" / "train_spider.json").write_text(json.dumps(tasks))
    (tmp_path / "data" / "dev.json").write_text(json.dumps([{**tasks[0], "id": "d"}]))
    return tmp_path / "data"


def _tasks(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    tasks = json.loads((folder / "train_spider.json").read_text())
    database = str(folder / "database" / "pets" / "pets.sqlite")
    return [{**task, "db_path": database, **changes} for task in tasks]


def test_a_gold_is_suspicious_if_more_answers_agree_on_another_result(folder: Path) -> None:
    answers = {
        "t0": ["SELECT name FROM pet WHERE age > 8", "SELECT name FROM pet WHERE age = 9", "SELECT max(name) FROM pet"],
        "t1": [RIGHT, RIGHT, "SELECT age FROM pet"],
        "t2": ["SELECT age FROM pet", "SELECT name FROM pet", "SELECT owner_id FROM pet"],  # none agrees
        "t3": ["SELECT name FROM pet WHERE age > 90"] * 3,  # nothing
        "t4": ["SELECT nickname FROM pet"] * 3,
        "t5": ["SELECT name FROM pet WHERE 4 < age ORDER BY age DESC"] * 3,
        "t6": ["SELECT age FROM pet"],  # one answer agrees with no other
        "t7": ["DELETE FROM pet", "SELECT city FROM owner", "SELECT city FROM owner ORDER BY id"],
    }
    listed = suspects(_tasks(folder), {}, answers)
    assert {row["id"]: row["reasons"] for row in listed} == {"t0": [CONTRADICTED], "t7": [CONTRADICTED]}
    assert [row["trust"] for row in listed] == [0.2, 0.25]
    assert listed[0]["sampled"] == {
        "answers": 3,
        "agree_with_gold": 0,
        "agree_with_each_other": 3,
        "example": answers["t0"][0],
    }


@pytest.mark.parametrize(
    ("query", "suspicious"),
    [
        ("SELECT name FROM pet WHERE owner_id IN (SELECT owner_id FROM owner)", True),
        ("SELECT name FROM pet WHERE owner_id IN (SELECT id FROM owner)", False),
        ("SELECT name FROM pet AS p WHERE owner_id IN (SELECT id FROM owner WHERE id = p.owner_id)", False),
        ("SELECT name FROM pet WHERE age = (SELECT max(age) FROM pet)", False),
        ("SELECT n FROM (SELECT name AS n FROM pet WHERE age > 4)", False),
        ("SELECT name FROM pet WHERE age IN (SELECT a FROM (SELECT age AS a FROM pet) WHERE a > 4)", False),
    ],
)
def test_a_name_that_a_subquery_takes_from_the_outer_query_is_suspicious(
    folder: Path, query: str, suspicious: bool
) -> None:
    listed = suspects(_tasks(folder, query=query)[:1], {})
    assert [row["reasons"] for row in listed] == ([[OUTER]] if suspicious else [])


@pytest.mark.parametrize(
    ("query", "suspicious"),
    [
        ("SELECT name FROM car ORDER BY power DESC LIMIT 1", True),
        ("SELECT max(power) FROM car", True),
        ("SELECT T1.name FROM car AS T1 WHERE T1.power > 20", True),
        ("SELECT name FROM car WHERE power BETWEEN 8 AND 20", True),
        ("SELECT name FROM car WHERE '20' < power", True),
        ("SELECT name FROM car WHERE id IN (SELECT id FROM car WHERE power >= '50')", True),
        ("SELECT max(id) FROM car WHERE power = '9'", False),
        ("SELECT name FROM car ORDER BY name", False),
        ("SELECT name FROM car ORDER BY doors DESC", False),
        ("SELECT power FROM car ORDER BY id", False),
        ("SELECT max(same) FROM car", False),
    ],
)
def test_a_gold_that_compares_numbers_stored_as_text_is_suspicious_if_a_cast_changes_its_result(
    tmp_path: Path, query: str, suspicious: bool
) -> None:
    script = "CREATE TABLE car (id int, name text, power text, doors int, same text);"
    rows = "(1, 'a', '9', 4, '10'), (2, 'b', '100', 5, '12'), (3, 'c', '20', 3, '15'), (4, 'd', '11', 2, '11')"
    make_database(tmp_path / "car.sqlite", f"{script} INSERT INTO car VALUES {rows}")
    task = {"id": "t", "db_id": "car", "question": "?", "query": query, "db_path": str(tmp_path / "car.sqlite")}
    assert [row["reasons"] for row in suspects([task], {})] == ([[NUMBERS]] if suspicious else [])


def _file(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "trust.json"
    file.write_text(json.dumps([{"query": RIGHT, "trust": 1.0, **row} for row in rows]))
    return file


def test_a_task_stays_with_the_probability_of_its_trust(folder: Path) -> None:
    tasks = [{**_tasks(folder)[0], "id": f"t{number}"} for number in range(400)]
    data = TaskData(train=tasks, validation=tasks[:1], source="test")
    rows = [{"id": f"t{number}", "trust": 0.25 if number < 200 else 0.0} for number in range(300)]
    kept, note = with_gold_trust(data, _file(folder, *rows, {"id": "t399", "query": WRONG, "trust": 0.0}))
    ids = [int(task["id"][1:]) for task in kept.train]
    assert 30 < sum(number < 200 for number in ids) < 70
    assert [number for number in ids if number >= 200] == list(range(300, 400))  # the last row is about another gold
    assert note == f"{400 - len(ids)} of 400 training tasks are left out, 0 golds corrected"
    assert kept.validation == data.validation
    assert with_gold_trust(data, folder / "trust.json")[0].train == kept.train
    assert with_gold_trust(data, folder / "trust.json", seed=1)[0].train != kept.train
    assert with_gold_trust(data, _file(folder))[0].train == tasks  # data without suspicious golds


def test_a_run_trains_on_the_golds_that_the_file_corrects(folder: Path) -> None:
    file = _file(folder, {"id": "t0", "trust": 0.1, "corrected_query": WRONG}, {"id": "t1", "trust": 0.0})
    job = make_job({"data_dir": str(folder), "gold_trust": str(file), "trainer": "local"})
    assert [(task["id"], task["query"]) for task in job.data.train] == [
        ("t0", WRONG),
        *((f"t{number}", RIGHT) for number in range(2, 8)),
    ]
    assert "gold trust: 1 of 8 training tasks are left out, 1 golds corrected" in job.notes


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": "t0", "corrected_query": "SELECT nickname FROM pet"}], "task t0: corrected_query .* gold fails"),
        ([{"id": "t0", "trust": 2}], "0.trust is 2"),
        ([{"id": "d"}], "lists no training task of test"),
        ([{"id": 7}], "0.id is 7"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_row(folder: Path, rows: list[dict[str, Any]], message: str) -> None:
    data = TaskData(train=_tasks(folder), validation=[], source="test")
    with pytest.raises(DataError, match=message):
        with_gold_trust(data, _file(folder, *rows))
    with pytest.raises(DataError, match="cannot be read"):
        with_gold_trust(data, folder / "missing.json")


def test_the_audit_writes_the_suspicious_golds_with_the_answers_of_a_run(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    RunDir(run).write_config({})
    rows = [{"task_id": "t3", "status": "succeeded", "answer": "SELECT city FROM owner"}] * 3
    rows += [{"task_id": "t2", "status": "timeout", "answer": ""}]
    pq.write_table(pa.Table.from_pylist(rows), run / "rollouts.parquet")
    options = ["--data-dir", str(folder), "--rollouts", str(run)]
    result = CliRunner().invoke(app, [*options, "--suspects", str(tmp_path / "suspects.json")])
    assert "suspicious golds: 1 of 9, listed in" in result.output
    [row] = json.loads((tmp_path / "suspects.json").read_text())
    assert (row["id"], row["reasons"], row["sampled"]["agree_with_each_other"]) == ("t3", [CONTRADICTED], 3)
    assert "needs --suspects" in CliRunner().invoke(app, options).output

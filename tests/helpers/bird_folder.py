"""A small BIRD-shaped folder for tests: two databases, questions with evidence, and queries for verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spider_folder import make_database

CLINIC = """
CREATE TABLE patient (id INTEGER PRIMARY KEY, name TEXT, sex TEXT, born TEXT);
INSERT INTO patient VALUES (1, 'Ada', 'F', '1950-01-02'), (2, 'Ben', 'M', '1961-05-09'), (3, 'Cid', 'M', NULL),
    (4, 'Dot', 'F', '1984-11-30'), (5, 'Eve', 'F', '1961-05-09');
CREATE TABLE visit (patient INTEGER, day TEXT, ward TEXT, fee REAL);
INSERT INTO visit VALUES (1, '2020-01-01', 'A', 10.5), (1, '2020-02-01', 'B', 20.0), (2, '2020-02-01', 'A', 20.0),
    (3, '2020-03-05', 'C', NULL), (4, '2020-03-05', 'A', 5.25), (4, '2020-03-06', 'B', 10.5);
"""
TOYS = """
CREATE TABLE toy (id INTEGER PRIMARY KEY, name TEXT, price REAL);
INSERT INTO toy VALUES (1, 'ball', 2.5), (2, 'kite', 8.0), (3, 'drum', 8.0);
"""
QUERIES = [
    "SELECT name FROM patient",
    "SELECT name FROM patient ORDER BY name DESC",
    "SELECT name FROM patient WHERE sex = 'F'",
    "SELECT name, sex FROM patient",
    "SELECT sex, name FROM patient",
    "SELECT sex FROM patient",
    "SELECT DISTINCT sex FROM patient",
    "SELECT name, born FROM patient WHERE born IS NOT NULL",
    "SELECT born FROM patient",
    "SELECT * FROM patient",
    "SELECT name FROM patient WHERE id > 100",
    "SELECT ward FROM visit WHERE fee > 1000",
    "SELECT count(*) FROM patient",
    "SELECT 5",
    "SELECT 5.0",
    "SELECT '5'",
    "SELECT count(*), sum(fee) FROM visit",
    "SELECT sum(fee), count(*) FROM visit",
    "SELECT ward, count(*) FROM visit GROUP BY ward",
    "SELECT ward, count(*) FROM visit GROUP BY ward ORDER BY 2 DESC, 1",
    "SELECT ward, fee FROM visit",
    "SELECT ward, CAST(fee AS INTEGER) FROM visit",
    "SELECT p.name, v.ward FROM patient AS p JOIN visit AS v ON v.patient = p.id",
    "SELECT p.name, v.ward, v.ward FROM patient AS p LEFT JOIN visit AS v ON v.patient = p.id",
    "SELECT NULL FROM visit",
    "SELECT max(fee) FROM visit",
    "SELECT nothing FROM visit",
    "SELEC name FROM patient",
    "SELECT name FROM patient; SELECT 1",
]
"""Each is judged as an answer to each that runs."""

Rows = list[dict[str, Any]]
DEV: Rows = [
    {
        "question_id": 7,
        "db_id": "clinic",
        "question": "Who is female?",
        "evidence": "female refers to sex = 'F'",
        "SQL": "SELECT name FROM patient WHERE sex = 'F'",
        "difficulty": "simple",
    },
    {
        "question_id": 8,
        "db_id": "clinic",
        "question": "How many visits has each ward?",
        "evidence": "",
        "SQL": "SELECT ward, count(*) FROM visit GROUP BY ward",
        "difficulty": "moderate",
    },
    {
        "question_id": 9,
        "db_id": "clinic",
        "question": "Who paid too much?",
        "evidence": "too much refers to fee > 1000",
        "SQL": "SELECT patient FROM visit WHERE fee > 1000",
        "difficulty": "challenging",
    },
]
TRAIN: Rows = [
    {"db_id": "toys", "question": "Name all toys.", "evidence": "", "SQL": "SELECT name FROM toy"},
    {
        "db_id": "toys",
        "question": "Dear toys?",
        "evidence": "dear: price > 5",
        "SQL": "SELECT name FROM toy WHERE cost",
    },
]


def make_bird(folder: Path, *, train: Rows | None = TRAIN, dev: Rows = DEV) -> Path:
    """The official layout, as unpacked: ``train/`` and ``dev/``."""
    make_database(folder / "dev/dev_databases/clinic/clinic.sqlite", CLINIC)
    description = folder / "dev/dev_databases/clinic/database_description"
    description.mkdir()
    (description / "patient.csv").write_text("original_column_name,column_name,column_description\nsex,,F or M\n")
    (folder / "dev/dev.json").write_text(json.dumps(dev))
    if train is not None:
        make_database(folder / "train/train_databases/toys/toys.sqlite", TOYS)
        (folder / "train/train.json").write_text(json.dumps(train))
    return folder

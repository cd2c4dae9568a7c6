"""A small Spider-shaped folder for tests, and the path of the real one."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

REAL = Path(os.environ.get("SPIDER_DATA_DIR") or Path(__file__).parents[3] / "shared" / "spider")
needs_real_spider = pytest.mark.skipif(
    not (REAL / "dev.json").is_file(), reason=f"real Spider is not at {REAL} (SPIDER_DATA_DIR names another place)"
)

TRAIN = [
    {"db_id": "pets", "question": "How many pets?", "query": "SELECT count(*) FROM pet"},
    {"db_id": "pets", "question": "Names of old pets?", "query": "SELECT name FROM pet WHERE age > 90"},
    {"db_id": "pets", "question": "Names of pets?", "query": "SELECT nickname FROM pet"},
]
OTHERS = [{"db_id": "pets", "question": "Oldest?", "query": "SELECT name FROM pet ORDER BY age DESC LIMIT 1"}]
DEV = [
    {"id": "d0", "db_id": "cars", "question": "Makers?", "query": "SELECT maker FROM car"},
    {"id": "d1", "db_id": "cars", "question": "Red cars?", "query": "SELECT maker FROM car WHERE maker = 'Red'"},
]


def make_spider(
    folder: Path,
    *,
    train: Any = TRAIN,
    dev: Any = DEV,
    others: Any = None,
    databases: str = "database",
) -> Path:
    """The published layout: two databases; the train golds pass, return nothing, and fail."""
    make_database(
        folder / databases / "pets" / "pets.sqlite", "CREATE TABLE pet (name, age); INSERT INTO pet VALUES ('Rex', 3)"
    )
    make_database(
        folder / databases / "cars" / "cars.sqlite", "CREATE TABLE car (maker); INSERT INTO car VALUES ('Volvo')"
    )
    for name, rows in (("train_spider", train), ("dev", dev), ("train_others", others)):
        if rows is not None:
            (folder / f"{name}.json").write_text(json.dumps(rows))
    return folder


def make_database(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()

"""A folder of SQLite files with questions, for tests: golds that run, return no rows, and fail."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from spider_folder import make_database

PET = "CREATE TABLE pet (name, age); INSERT INTO pet VALUES ('Rex', 3), ('Tom', 5)"
FILES = ("shop.sqlite", "eu/farm.db", "zoo.sqlite3")
ROWS = [
    {"question": "How many pets?", "sql": "SELECT count(*) FROM pet", "database": "shop"},
    {"question": "Old pets?", "sql": "SELECT name FROM pet WHERE age > 90", "database": "shop.sqlite"},
    {"question": "Nicknames?", "sql": "SELECT nickname FROM pet", "database": "farm"},
    {"question": "Names?", "sql": "SELECT name FROM pet", "database": "eu/farm.db"},
    {"question": "Ages?", "sql": "SELECT age FROM pet", "database": "zoo"},
]


def make_folder(folder: Path, rows: list[dict[str, Any]] = ROWS, *, suffix: str = "jsonl") -> Path:
    for name in FILES:
        if not (folder / name).exists():
            make_database(folder / name, PET)
    file = folder / f"questions.{suffix}"
    if suffix == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == "csv":
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), file)
    return folder

"""What a domain of SQL queries has from its base class."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from groundwire.domains import DataError, as_domain, database_folders, load_split
from groundwire.domains.text_to_sql.domain import Splits, SqlDomain


class Own(SqlDomain):
    name = "own"

    def read(self, folder: Path, split: str = "") -> Splits:
        tasks = [
            {"id": str(n), "db_id": "d", "question": f"{n}?", "query": query, "db_path": str(folder / "d.sqlite")}
            for n, query in enumerate(["SELECT a FROM t", "SELECT nothing FROM t", "SELECT a + 1 FROM t"])
        ]
        return Splits({"train": tasks[:2], "validation": tasks[2:]}, note=", split by hand")


def test_a_domain_of_sql_says_how_its_folder_is_read_and_has_the_rest(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with sqlite3.connect(tmp_path / "data/d.sqlite") as connection:
        connection.execute("CREATE TABLE t AS SELECT 1 AS a")
    domain = as_domain(Own())
    data = load_split(domain, None, str(tmp_path / "data"))
    assert [task["id"] for task in data.train] == ["0"]
    assert data.left_out == {"gold fails": 1}
    assert data.source.endswith("validation 1 tasks (1 databases), split by hand")
    assert database_folders(domain, str(tmp_path / "data")) == [(tmp_path / "data/d.sqlite").resolve()]
    report = domain.prepare(tmp_path / "data", tmp_path / "out")
    assert report["tasks"] == {"train": 1, "validation": 1}
    assert (tmp_path / "out/databases/d/d.sqlite").is_file()
    with pytest.raises(DataError, match="has no split 'test'; it has train, validation"):
        load_split(domain, "test", str(tmp_path / "data"))
    with pytest.raises(DataError, match="--domain own has no data of its own: give --data-dir"):
        domain.load()

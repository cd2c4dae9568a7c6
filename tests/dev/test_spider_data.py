"""The generated data: Spider's layout, distinctive golds, and separate databases for validation."""

from __future__ import annotations

import random
import re
import sqlite3
from collections import Counter

import pyarrow.parquet as pq
import pytest
from dev.spider_data.__main__ import generate
from dev.spider_data.databases import fill, make_database, schema_text
from dev.spider_data.lexicon import CATEGORIES, FAMILIAR_SUBJECTS, NEW_SUBJECTS, NUMBERS, SUBJECTS
from dev.spider_data.questions import TEMPLATES, write_question
from programs import run

from groundwire.domains.spider.hardness import LEVELS, hardness
from groundwire.domains.spider.loader import BUNDLED, SpiderDomain
from groundwire.tools.schema import table_info


@pytest.fixture(scope="module")
def data():
    return SpiderDomain().load(str(BUNDLED))


@pytest.fixture(scope="module")
def tasks(data):
    return [*data.train, *data.validation]


def test_the_bundled_data_is_what_the_generator_writes(tmp_path):
    generate(tmp_path)
    assert (tmp_path / "report.json").read_bytes() == (BUNDLED / "report.json").read_bytes()
    # SQLite and parquet write their versions into a file, so contents are compared, not bytes.
    for name in ("generated_train.parquet", "generated_validation.parquet"):
        assert pq.read_table(tmp_path / name).equals(pq.read_table(BUNDLED / name))
    for path in sorted(BUNDLED.glob("database/*/*.sqlite"))[::10]:
        assert dump(path) == dump(tmp_path / path.relative_to(BUNDLED))


@pytest.mark.parametrize("module", ["dev.spider_data", "dev.medical_data", "dev.pretrain"])
def test_an_unusable_folder_is_a_one_line_error(module, tmp_path):
    (tmp_path / "file").write_text("")
    done = run("-m", module, "--out", str(tmp_path / "file" / "folder"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: Not a directory ({tmp_path / 'file' / 'folder'}")
    assert len(done.stderr.splitlines()) == 1


def dump(path):
    connection = sqlite3.connect(path)
    lines = list(connection.iterdump())
    connection.close()
    return lines


def test_no_validation_database_is_trained_on(data):
    assert not {t["db_id"] for t in data.train} & {t["db_id"] for t in data.validation}


def test_the_new_half_is_about_subjects_that_training_never_sees(data):
    trained = {t["subject"] for t in data.train}
    halves = Counter(t["subject_split"] for t in data.validation)
    assert min(halves["familiar"], halves["new"]) >= 200
    for task in data.validation:
        assert (task["subject"] in trained) == (task["subject_split"] == "familiar")
    assert trained == set(FAMILIAR_SUBJECTS)
    assert not trained & set(NEW_SUBJECTS)


def test_there_are_enough_tasks_of_every_level(data):
    assert len(data.train) >= 1500
    for part in (data.train, data.validation):
        assert set(Counter(t["hardness"] for t in part)) == set(LEVELS)
        assert all(t["hardness"] == hardness(t["query"]) for t in part)


def test_no_question_is_asked_twice(tasks):
    assert max(Counter(t["question"] for t in tasks).values()) == 1


def test_every_gold_returns_something_that_is_not_only_null_or_zero(tasks):
    for task in tasks:
        connection = sqlite3.connect(task["db_path"])
        rows = connection.execute(task["query"]).fetchall()
        connection.close()
        assert any(value not in (None, 0) for row in rows for value in row), task["query"]


def test_tables_of_a_database_differ_in_size():
    for path in BUNDLED.glob("database/*/*.sqlite"):
        connection = sqlite3.connect(path)
        names = [n for (n,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        sizes = [connection.execute(f"SELECT count(*) FROM {n}").fetchone() for n in names]
        connection.close()
        assert len(set(sizes)) == len(names) >= 2


def test_foreign_keys_refer_to_the_id_of_the_table_in_their_name():
    keys = 0
    for path in BUNDLED.glob("database/*/*.sqlite"):
        connection = sqlite3.connect(path)
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            assert [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[5]] == ["id"]
            for _, _, parent, column, parent_column, *_ in connection.execute(f"PRAGMA foreign_key_list({table})"):
                assert (column, parent_column) == (f"{parent}_id", "id")
                keys += 1
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        connection.close()
    assert keys > 100


def test_the_parquet_files_have_the_usual_columns_and_relative_paths():
    rows = pq.read_table(BUNDLED / "generated_validation.parquet").to_pylist()
    assert {"id", "question", "db_id", "query", "db_path", "hardness", "subject", "subject_split"} == set(rows[0])
    assert all((BUNDLED / row["db_path"]).is_file() for row in rows)


def test_the_bundled_data_is_small():
    assert sum(path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file()) < 4_000_000


def test_the_corpus_shows_schemas_as_the_agent_does(tmp_path):
    rng = random.Random(3)
    for i in range(10):
        database = make_database(rng, "music", invented=0.5)
        path = tmp_path / f"{i}.sqlite"
        fill(database, str(path)).close()
        assert table_info(str(path), example_values=0, show_keys=False).text == schema_text(database)


def test_every_template_writes_queries_that_run():
    rng = random.Random(0)
    seen = Counter()
    for _ in range(150):
        database = make_database(rng, rng.choice(sorted(SUBJECTS)), invented=0.3)
        connection = fill(database)
        for _ in range(6):
            question = write_question(rng, database)
            connection.execute(question.sql)
            assert re.fullmatch(r"[A-Z].*[?.]", question.text)
            seen[question.template] += 1
        connection.close()
    assert set(seen) == {template.__name__ for group in TEMPLATES.values() for template in group}


def test_no_name_has_to_be_quoted():
    connection = sqlite3.connect(":memory:")
    entities = [name for group in SUBJECTS.values() for name in group]
    assert max(Counter(entities).values()) == 1
    for name in [*entities, *NUMBERS, *CATEGORIES]:
        connection.execute(f"CREATE TABLE {name} ({name} int, {name}_id int)")
        connection.execute(f"SELECT {name}.{name} FROM {name} GROUP BY {name} ORDER BY {name}")
        connection.execute(f"DROP TABLE {name}")


def test_the_seed_decides():
    def questions(seed):
        rng = random.Random(seed)
        database = make_database(rng, "music")
        return [write_question(rng, database) for _ in range(5)]

    assert questions(1) == questions(1) != questions(2)

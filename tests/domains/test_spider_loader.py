"""The Spider domain reads both layouts, reports its source, and has precise errors for broken data."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from spider_folder import DEV, OTHERS, REAL, TRAIN, make_database, make_spider, needs_real_spider

from groundwire import domains
from groundwire.domains import DataError
from groundwire.domains.spider import loader, schema_files
from groundwire.domains.spider.prepare import prepare
from groundwire.domains.text_to_sql.golds import FAILS, NO_ROWS, SLOW, check_golds
from groundwire.tools.sql import run_query

spider = domains.get("spider")
NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


def ids(tasks: list[domains.Task]) -> list[str]:
    return [task["id"] for task in tasks]


def test_the_domain_is_found_by_name() -> None:
    assert (spider.name, spider.default_reward) == ("spider", "spider_exec_match")


def test_a_task_has_what_the_trainer_and_the_reward_need(tmp_path: Path) -> None:
    task = spider.load(str(make_spider(tmp_path))).train[0]
    assert task == {
        "id": "train_spider-0",
        "db_id": "pets",
        "question": "How many pets?",
        "query": "SELECT count(*) FROM pet",
        "hardness": "easy",
        "db_path": str((tmp_path / "database/pets/pets.sqlite").resolve()),
    }
    assert spider.database(task) == task["db_path"]


def test_a_row_keeps_its_id_hardness_and_other_columns_but_not_the_parsed_gold(tmp_path: Path) -> None:
    row = {
        **TRAIN[0],
        "id": "mine",
        "hardness": "extra",
        "subject": "animals",
        "sql": {"select": []},
        "query_toks": ["SELECT"],
    }
    task = spider.load(str(make_spider(tmp_path, train=[row]))).train[0]
    assert (task["id"], task["hardness"], task["subject"]) == ("mine", "extra", "animals")
    assert not {"sql", "query_toks"} & set(task)


def test_train_others_is_training_data_too(tmp_path: Path) -> None:
    assert "train_others-0" in ids(spider.load(str(make_spider(tmp_path, others=OTHERS))).train)


def test_databases_may_be_in_test_database(tmp_path: Path) -> None:
    task = spider.load(str(make_spider(tmp_path, databases="test_database"))).validation[0]
    assert Path(spider.database(task)).parts[-3:] == ("test_database", "cars", "cars.sqlite")


def test_training_leaves_out_golds_that_fail_or_return_nothing_and_validation_those_that_fail(tmp_path: Path) -> None:
    bad = {"id": "d2", "db_id": "cars", "question": "?", "query": "SELECT colour FROM car"}
    data = spider.load(str(make_spider(tmp_path, dev=[*DEV, bad])))
    assert ids(data.train) == ["train_spider-0"]
    assert ids(data.validation) == ["d0", "d1"]
    assert data.left_out == {NO_ROWS: 1, FAILS: 1}


def test_a_gold_past_its_deadline_is_slow(tmp_path: Path) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    folder = make_spider(tmp_path, dev=[{**DEV[0], "query": endless}])
    problems = check_golds(loader.read_tasks([folder / "dev.json"], folder), timeout_s=0.1)
    assert [problem.reason for problem in problems.values()] == [SLOW]


def test_a_gold_of_one_split_does_not_affect_the_same_id_in_the_other(tmp_path: Path) -> None:
    train = [{**TRAIN[0], "id": 0}, {**TRAIN[1], "id": 1}]
    data = spider.load(str(make_spider(tmp_path, train=train, dev=[{**DEV[1], "id": 0}, {**DEV[0], "id": 1}])))
    assert (ids(data.train), ids(data.validation)) == (["0"], ["0", "1"])


def test_a_folder_with_both_layouts_is_read_as_parquet(tmp_path: Path) -> None:
    folder = tmp_path / "prepared"
    prepare(make_spider(tmp_path / "source"), folder)
    shutil.copy(make_spider(tmp_path / "other", train=OTHERS) / "train_spider.json", folder)
    shutil.copy(tmp_path / "other" / "dev.json", folder)
    data = spider.load(str(folder))
    assert [task["question"] for task in data.train] == ["How many pets?"]
    assert data.left_out == {NO_ROWS: 1, FAILS: 1}


def test_the_parquet_layout_needs_no_id_no_hardness_and_no_report(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = make_spider(tmp_path, train=None, dev=None)
    elsewhere = [{**row, "db_path": f"/somebody/else/{row['db_id']}.sqlite"} for row in TRAIN]
    pq.write_table(pa.Table.from_pylist(elsewhere), folder / "train_spider.parquet")
    relative = [{**row, "db_path": "database/cars/cars.sqlite"} for row in DEV]
    pq.write_table(pa.Table.from_pylist(relative).drop_columns("id"), folder / "test_dev_500.parquet")
    data = spider.load(str(folder))
    assert ids(data.train) == ["train_spider-0"]
    assert ids(data.validation) == ["test_dev_500-0", "test_dev_500-1"]
    assert data.left_out == {NO_ROWS: 1, FAILS: 1}


def test_a_write_ahead_log_beside_a_database_is_ignored(tmp_path: Path) -> None:
    folder = make_spider(tmp_path)
    log = folder / "database/pets/pets.sqlite-wal"
    log.write_bytes(b"left over")
    assert ids(spider.load(str(folder)).train) == ["train_spider-0"]
    assert log.read_bytes() == b"left over"


def test_the_data_dir_has_precedence_over_the_environment_and_the_source_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = make_spider(tmp_path / "ours"), make_spider(tmp_path / "theirs", dev=DEV[:1])
    monkeypatch.setenv("SPIDER_DATA_DIR", str(theirs))
    assert spider.load(str(ours)).source == (
        f"--data-dir {ours}: train 1 tasks (1 databases), validation 2 tasks (1 databases)"
    )
    assert spider.load().source.startswith(f"SPIDER_DATA_DIR {theirs}: ")


def test_without_either_the_bundled_data_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPIDER_DATA_DIR", raising=False)
    if not loader.BUNDLED.is_dir():
        pytest.skip(f"the bundled data has not been generated at {loader.BUNDLED}")
    data = spider.load()
    assert data.source.startswith("bundled data (generated): ")
    assert not {task["db_id"] for task in data.train} & {task["db_id"] for task in data.validation}
    assert {task["hardness"] for task in data.train} == {"easy", "medium", "hard", "extra"}


def test_the_variable_of_the_published_recipe_names_the_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_spider(tmp_path / "one")
    monkeypatch.delenv("SPIDER_DATA_DIR", raising=False)
    monkeypatch.setenv("VERL_SPIDER_DATA_DIR", str(folder))
    assert spider.load().source.startswith(f"VERL_SPIDER_DATA_DIR {folder}: ")
    monkeypatch.setenv("SPIDER_DATA_DIR", str(make_spider(tmp_path / "two")))
    with pytest.raises(DataError, match="name different folders: unset one"):
        spider.load()


def published(folder: Path) -> Path:
    """The three published parquet files, and a test set."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    make_spider(folder, train=None, dev=None)
    parts = {"train_spider": TRAIN[:1], "test_dev": DEV, "test_dev_500": DEV[:1]}
    for name, rows in parts.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "test.json").write_text(json.dumps([{**DEV[0], "id": "t0"}]))
    return folder


def test_training_validates_on_the_published_500_and_an_evaluation_chooses_its_split(tmp_path: Path) -> None:
    folder = published(tmp_path)
    data = spider.load(str(folder))
    assert ids(data.validation) == ["d0"]
    assert data.source.endswith(" of test_dev_500.parquet")
    found = {name: ids(domains.load_split(spider, name, str(folder)).validation) for name in (*SPLITS, "train")}
    assert found == {"test_dev": ["d0", "d1"], "test_dev_500": ["d0"], "test": ["t0"], "train": ["train_spider-0"]}
    with pytest.raises(DataError, match=r"no split 'dev'; it has train, test_dev_500, test_dev, test\."):
        domains.load_split(spider, "dev", str(folder))


SPLITS = ("test_dev", "test_dev_500", "test")


def test_prepare_keeps_the_published_500_and_the_test_set(tmp_path: Path) -> None:
    source = published(tmp_path / "source")
    make_database(
        source / "test_database/cars/cars.sqlite", "CREATE TABLE car (maker, more); INSERT INTO car VALUES ('Saab', 1)"
    )
    report = prepare(source, tmp_path / "out")
    assert report["tasks"] == {"train_spider": 1, "test_dev": 2, "test_dev_500": 1, "test": 1}
    task = domains.load_split(spider, "test", str(tmp_path / "out")).validation[0]
    assert Path(task["db_path"]) == tmp_path / "out/test_database/cars/cars.sqlite"


def test_validation_finds_its_databases_in_test_database_first_and_training_in_database(tmp_path: Path) -> None:
    folder = make_spider(tmp_path, dev=[*DEV, {**DEV[0], "id": "d3", "db_id": "pets", "query": "SELECT name FROM pet"}])
    make_database(folder / "test_database/pets/pets.sqlite", "CREATE TABLE pet (name); INSERT INTO pet VALUES ('Tom')")
    data = spider.load(str(folder))
    assert Path(data.train[0]["db_path"]).parts[-3:] == ("database", "pets", "pets.sqlite")
    assert Path(data.validation[-1]["db_path"]).parts[-3:] == ("test_database", "pets", "pets.sqlite")


def test_a_database_may_be_a_db_file_or_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_files, "CACHE", tmp_path / "cache")
    folder = make_spider(tmp_path / "spider")
    (folder / "database/pets/pets.sqlite").rename(folder / "database/pets/pets.db")
    (folder / "database/cars/cars.sqlite").unlink()
    script = folder / "database/cars/schema.sql"
    modules = {"rtree(id, a, b)": "(1, 2, 3)", "fts4(a)": "('x')", "fts5(a)": "('x')"}
    tables = (f"CREATE VIRTUAL TABLE t{n} USING {module};" for n, module in enumerate(modules))
    rows = (f"INSERT INTO t{n} VALUES {row};" for n, row in enumerate(modules.values()))
    script.write_text("".join(("CREATE TABLE car (maker); INSERT INTO car VALUES ('Volvo');", *tables, *rows)))
    data = spider.load(str(folder))
    assert Path(data.train[0]["db_path"]).name == "pets.db"
    database = data.validation[0]["db_path"]
    assert run_query(database, "SELECT maker FROM car").rows == [("Volvo",)]
    assert run_query(database, "SELECT b, t1.a, t2.a FROM t0, t1, t2").rows == [(3.0, "x", "x")]
    assert domains.is_inside(database, domains.database_folders(spider, str(folder)))


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("ATTACH '{other}' AS o", "ATTACH, DETACH or VACUUM is not allowed in it"),
        ("VACUUM INTO '{other}'", "ATTACH, DETACH or VACUUM is not allowed in it"),
        ("SELECT load_extension('{other}')", "load_extension is not allowed in it"),
        ("CREATE VIRTUAL TABLE t USING dbstat", "dbstat is not allowed in it"),
        (f"{NUMBERS} INSERT INTO car SELECT zeroblob(1000000) FROM n", "it makes more than 256 MB"),
        (f"{NUMBERS} SELECT * FROM (SELECT randomblob(1000) AS b FROM n) ORDER BY b", "more than 256 MB of memory"),
        (f"{NUMBERS} SELECT count(*) FROM n", "it takes more than 0.2 s of CPU time"),
        ("CREATE TABLE '\x1b[2J'(a); CREATE TABLE '\x1b[2J'(a)", r"table '\x1b[2J' already exists"),
        ("BEGIN; INSERT INTO car VALUES ('Volvo')", "its last transaction has no COMMIT"),
        (f"SELECT instr({'hex(zeroblob(9000000))'}, {'hex(zeroblob(4000000))'} || '1')", "0.2 s of CPU time"),
    ],
)
def test_a_script_of_others_runs_within_limits_and_reaches_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, problem: str
) -> None:
    monkeypatch.setattr(schema_files, "CACHE", tmp_path / "cache")
    if "0.2 s" in problem:
        monkeypatch.setattr(schema_files, "_CPU_S", 0.2)
    folder = make_spider(tmp_path / "spider")
    (folder / "database/cars/cars.sqlite").unlink()
    lifted = "PRAGMA hard_heap_limit = 0; PRAGMA max_page_count = 4294967294; PRAGMA temp_store = FILE;"
    (folder / "database/cars/schema.sql").write_text(
        f"{lifted} CREATE TABLE car (maker); {statement.replace('{other}', str(tmp_path / 'other'))};"
    )
    assert problem in refusal(folder)
    assert not (tmp_path / "other").exists()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


# An error about a folder is one line and contains the path.


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as refused:
        spider.load(str(folder))
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)
    return str(refused.value)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "spider.zip").write_bytes(b"PK")
    assert "is not a folder" in refusal(tmp_path / "spider.zip")


def test_the_error_for_an_unknown_layout_lists_the_expected_files(tmp_path: Path) -> None:
    make_spider(tmp_path, dev=None)
    message = refusal(tmp_path)
    assert all(name in message for name in ("dev.json", "train_spider.json", "test_dev.parquet"))


def test_json_that_does_not_parse_gives_the_line(tmp_path: Path) -> None:
    make_spider(tmp_path)
    (tmp_path / "dev.json").write_text('[\n {"db_id": "cars",\n')
    message = refusal(tmp_path)
    assert "dev.json cannot be read (not valid JSON: " in message
    assert "at line 3 column" in message


def test_json_that_is_no_list(tmp_path: Path) -> None:
    make_spider(tmp_path, dev={"data": DEV})
    assert "dev.json holds a dict" in refusal(tmp_path)


@pytest.mark.parametrize(
    "row", [{"db_id": "cars", "query": "SELECT 1"}, {**DEV[0], "query": None}, {**DEV[0], "db_id": 7}]
)
def test_a_row_that_lacks_a_text_gives_the_file_and_the_index(tmp_path: Path, row: dict[str, object]) -> None:
    make_spider(tmp_path, dev=[DEV[0], row])
    assert "dev.json, row 1: " in refusal(tmp_path)


def test_a_database_may_have_any_suffix_in_any_case(tmp_path: Path) -> None:
    folder = make_spider(tmp_path)
    (folder / "database/cars/cars.sqlite").rename(folder / "database/cars/cars.SQLITE3")
    assert spider.load(str(folder)).validation[0]["db_path"].endswith("/cars.SQLITE3")


def test_a_pipe_in_place_of_a_database_is_not_called_missing(tmp_path: Path) -> None:
    folder = make_spider(tmp_path)
    (folder / "database/cars/cars.sqlite").unlink()
    os.mkfifo(folder / "database/cars/cars.sqlite")
    assert "cars.sqlite: it is not a regular file but a pipe" in refusal(folder)


def test_ids_that_stand_for_two_tasks(tmp_path: Path) -> None:
    make_spider(tmp_path, dev=[DEV[0], DEV[0]])
    assert "'d0'" in refusal(tmp_path)


def test_missing_databases_are_counted_and_named_with_the_searched_folders(tmp_path: Path) -> None:
    make_spider(tmp_path, dev=[{**DEV[0], "id": name, "db_id": name} for name in "abcde"])
    message = refusal(tmp_path)
    assert message.startswith("5 of 5 databases are missing (a, b, c, …)")
    assert str(tmp_path / "test_database") in message


@pytest.mark.parametrize("db_id", ["../cars", "/etc/cars", ".."])
def test_a_database_name_that_leaves_the_folder(tmp_path: Path, db_id: str) -> None:
    make_spider(tmp_path, dev=[{**DEV[0], "db_id": db_id}])
    assert repr(db_id) in refusal(tmp_path)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    make_spider(tmp_path)
    (tmp_path / "database/cars/cars.sqlite").write_text("version https://git-lfs.github.com/spec/v1")
    assert "no readable SQLite files" in refusal(tmp_path)


def test_a_damaged_database(tmp_path: Path) -> None:
    make_spider(tmp_path)
    file = tmp_path / "database/cars/cars.sqlite"
    make_database(file, "CREATE TABLE big (x); INSERT INTO big SELECT zeroblob(9000)")
    file.write_bytes(file.read_bytes()[:100] + b"\xff" * 5000)
    assert "cars.sqlite" in refusal(tmp_path)


def test_a_parquet_file_that_cannot_be_read(tmp_path: Path) -> None:
    prepare(make_spider(tmp_path / "source"), tmp_path / "out")
    (tmp_path / "out/test_dev_500.parquet").write_bytes(b"PAR1")
    assert "test_dev_500.parquet is not a readable parquet file" in refusal(tmp_path / "out")


@needs_real_spider
def test_real_spider_is_read_whole() -> None:
    data = spider.load(str(REAL))
    if (len(data.train), len(data.validation)) != (6647, 972):
        pytest.skip(f"the expected counts are for the part of Spider that runs: {data.source}")
    assert data.left_out == {NO_ROWS: 254}
    assert Counter(task["hardness"] for task in data.validation)["easy"] == 232

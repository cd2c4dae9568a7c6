"""Schema text: exactly the bytes that a policy reads, cut after whole tables."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from spider_folder import make_database

from groundwire.tools.schema import TableInfo, describe_table, table_info
from groundwire.tools.sql import DatabaseError, QueryError, run_query

SCRIPT = """
CREATE TABLE singer (id INTEGER PRIMARY KEY, `name` VARCHAR(20), "Birth Date" DATE, fee DECIMAL(9,2), photo BLOB, x);
CREATE TABLE [order] (
    singer_id INT, day TEXT, "group" BOOL, PRIMARY KEY (singer_id, day),
    FOREIGN KEY (singer_id) REFERENCES singer(id), FOREIGN KEY (day, singer_id) REFERENCES "order"
);
INSERT INTO singer VALUES (1, 'Ann O''Hara', '2020-01-01', 1.5, x'00ff', NULL), (2, 'Bo', NULL, 2, NULL, NULL);
"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    make_database(tmp_path / "c.sqlite", SCRIPT)
    return tmp_path / "c.sqlite"


def test_the_compact_line_is_columns_and_types(database: Path) -> None:
    assert table_info(database, example_values=0, show_keys=False) == TableInfo(
        'CREATE TABLE singer ( id int , name text , "Birth Date" text , fee real , photo blob , x text )\n'
        'CREATE TABLE "order" ( singer_id int , day text , "group" int )',
        [],
    )


def test_keys_follow_the_columns(database: Path) -> None:
    order = table_info(database, example_values=0).text.splitlines()[1]
    assert order == (
        'CREATE TABLE "order" ( singer_id int , day text , "group" int , primary key ( singer_id , day ) , '
        "foreign key ( singer_id ) references singer ( id ) , "
        'foreign key ( day , singer_id ) references "order" ( singer_id , day ) )'
    )


def test_example_values_follow_the_table(database: Path) -> None:
    assert table_info(database, example_values=2, show_keys=False).text.splitlines()[1:] == [
        "-- id : 1 , 2",
        "-- name : 'Ann O''Hara' , 'Bo'",
        "-- \"Birth Date\" : '2020-01-01'",
        "-- fee : 1.5 , 2",
        "-- photo : x'00ff'",
        'CREATE TABLE "order" ( singer_id int , day text , "group" int )',
    ]


def test_a_long_example_is_shortened_to_one_line(tmp_path: Path) -> None:
    make_database(tmp_path / "c.sqlite", f"CREATE TABLE t (a TEXT); INSERT INTO t VALUES ('line\n{'x' * 90}')")
    assert table_info(tmp_path / "c.sqlite").text.splitlines()[1] == f"-- a : 'line {'x' * 25}...'"


@pytest.mark.parametrize(
    ("declared", "shown"),
    [
        ("INTEGER", "int"), ("bigint(20)", "int"), ("tinyint unsigned", "int"), ("boolean", "int"), ("YEAR", "int"),
        ("varchar(255)", "text"), ("CLOB", "text"), ("datetime", "text"), ("TIMESTAMP", "text"), ("", "text"),
        ("DOUBLE PRECISION", "real"), ("float", "real"), ("NUMERIC", "real"), ("number(10,2)", "real"),
        ("BLOB", "blob"), ("varbinary(4)", "blob"),
    ],
)  # fmt: skip
def test_types_are_mapped_to_sqlites_few(tmp_path: Path, declared: str, shown: str) -> None:
    make_database(tmp_path / "c.sqlite", f"CREATE TABLE t (a {declared})")
    assert table_info(tmp_path / "c.sqlite", show_keys=False).text == f"CREATE TABLE t ( a {shown} )"


@pytest.mark.parametrize("name", ["order", "Group", "a b", "1st", "naïve", 'say "hi"', "plain_1", "key", "left", "-"])
def test_names_are_quoted_where_a_query_needs_it(tmp_path: Path, name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    make_database(tmp_path / "c.sqlite", f"CREATE TABLE {quoted} ({quoted} INT); INSERT INTO {quoted} VALUES (7)")
    text = table_info(tmp_path / "c.sqlite", example_values=0).text
    written = text.removeprefix("CREATE TABLE ").partition(" ( ")[0]
    assert text == f"CREATE TABLE {written} ( {written} int )"
    assert run_query(tmp_path / "c.sqlite", f"SELECT {written} FROM {written}").rows == [(7,)]


def test_whole_tables_are_cut_and_the_warning_names_them(database: Path) -> None:
    whole = table_info(database, example_values=0).text
    first, second = whole.splitlines()
    with pytest.warns(UserWarning, match=r"leaves out order: .* raise the limit"):
        info = table_info(database, max_chars=len(whole) - 1, example_values=0)
    assert info == TableInfo(first, ["order"])
    assert len(second) > len(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table_info(database, max_chars=len(whole), example_values=0).cut == []


def test_the_schema_text_is_cached_until_the_file_changes(database: Path) -> None:
    first = table_info(database)
    assert table_info(str(database)) is first
    replacement = database.with_name("new.sqlite")
    make_database(replacement, "CREATE TABLE other (a INT)")
    os.replace(replacement, database)
    assert table_info(database).text == "CREATE TABLE other ( a int )"


def test_internal_tables_are_not_shown(tmp_path: Path) -> None:
    make_database(
        tmp_path / "c.sqlite", "CREATE TABLE t (a INTEGER PRIMARY KEY AUTOINCREMENT); INSERT INTO t VALUES (1)"
    )
    assert table_info(tmp_path / "c.sqlite", example_values=0, show_keys=False).text == "CREATE TABLE t ( a int )"


def test_no_error_about_a_database_steers_a_terminal(tmp_path: Path) -> None:
    path, name = tmp_path / "c.sqlite", "v\x1b[2J"
    make_database(
        path,
        f"""
        CREATE TABLE t (a); PRAGMA writable_schema = ON;
        INSERT INTO sqlite_master VALUES ('view', '{name}', '{name}', 0, 'CREATE VIEW v AS SELECT \x1b[31m FROM t');
    """,
    )
    for read in (
        lambda: describe_table(path, name),
        lambda: describe_table(path, "no\x9b31m"),
        lambda: run_query(path, "SELECT \x13"),
        lambda: run_query(path, f'SELECT * FROM "{name}"'),
        lambda: run_query(path, "SELECT [a\x07] FROM t"),
    ):
        with pytest.raises(QueryError) as error:
            read()
        assert str(error.value).isprintable()


def test_a_missing_or_broken_database_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="no database at"):
        table_info(tmp_path / "none.sqlite")
    (tmp_path / "bad.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DatabaseError, match="cannot be read"):
        table_info(tmp_path / "bad.sqlite")

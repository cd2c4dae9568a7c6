"""A part of a schema that cannot be read hides nothing else: it is named, with the reason, in every caller."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
import warnings
from pathlib import Path

import pytest
from spider_folder import make_database

from groundwire.tools.errors import SkippedWarning
from groundwire.tools.schema import describe_table, table_info
from groundwire.tools.sql import DatabaseError, SqlError, read_catalog, run_query
from groundwire.tools.variants.tables import read_schema

TABLES = "CREATE TABLE customers (id INT PRIMARY KEY, name TEXT); INSERT INTO customers VALUES (1, 'Ann');"
FULL_TEXT = "CREATE VIRTUAL TABLE w USING fts5(a)"
LINE = "CREATE TABLE customers ( id int , name text , primary key ( id ) )"


def _entry(path: Path, *values: object) -> None:
    """A database with a row of sqlite_master that SQLite itself would not write."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(f"{TABLES} PRAGMA writable_schema = ON")
        connection.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, CAST(? AS TEXT))", values)


def _script(script: str):
    return lambda path: make_database(path, TABLES + script)


def _row(kind: object, name: object, sql: object, page: int = 0):
    return lambda path: _entry(path, kind, name, name, page, sql)


def _without_its_tables(path: Path) -> None:
    _entry(path, "table", "v", "v", 0, "CREATE VIRTUAL TABLE v USING fts5(a)")


def _many_views(path: Path) -> None:
    views = [f"CREATE VIEW v{n} AS SELECT a FROM v{n - 1} UNION ALL SELECT a FROM v{n - 1};" for n in range(1, 40)]
    make_database(path, f"{TABLES} CREATE VIEW v0 AS SELECT id AS a FROM customers; {''.join(views)}")


def _doubling_view(path: Path) -> None:
    doubled = "".join(f", c{n} AS (SELECT x FROM c{n - 1} UNION SELECT x FROM c{n - 1})" for n in range(1, 30))
    make_database(path, f"{TABLES} CREATE VIEW v AS WITH c0 AS (SELECT 1 AS x){doubled} SELECT x FROM c29")


SKIPPED = {
    "a view that fills the memory": (_doubling_view, "v", "too much memory"),
    "a view on a dropped table": (
        _script("CREATE TABLE gone (x); CREATE VIEW v AS SELECT x FROM gone; DROP TABLE gone"),
        "v", "no such table: main.gone",
    ),
    "a view with an application's function": (
        _row("view", "v", "CREATE VIEW v AS SELECT st_area(name) AS a FROM customers"),
        "v", "no such function: st_area",
    ),
    "a view on a missing column": (
        _row("view", "v", "CREATE VIEW v AS SELECT x.y FROM customers x"), "v", "no such column",
    ),
    "a view on a skipped table": (
        _script("CREATE VIEW v AS SELECT * FROM w; CREATE VIEW w AS SELECT * FROM missing"), "v", "no such table",
    ),
    "a view of itself": (_row("view", "v", "CREATE VIEW v AS SELECT * FROM v"), "v", "circularly defined"),
    "a module that is missing": (
        _row("table", "v", "CREATE VIRTUAL TABLE v USING vec0(x float[4])"), "v", "no such module: vec0",
    ),
    "a module that is missing, in other words": (
        _row("table", "v", "create  virtual\ntable v using SpatiaLite(x)"), "v", "no such module: SpatiaLite",
    ),
    "a module whose name is no UTF-8": (
        _row("table", "v", b"CREATE VIRTUAL TABLE v USING x\xfb(a)"), "v", r"no such module: x\xfb",
    ),
    "a view on a column whose name is no UTF-8": (
        _row("view", "v", b"CREATE VIEW v AS SELECT \xfb FROM customers"), "v", r"no such column: \xfb",
    ),
    "a full-text index without its tables": (_without_its_tables, "v", "vtable constructor failed: v"),
    "nested views": (_many_views, "v39", "to"),
    "damaged SQL": (_row("table", "v", "CREATE TABLE v(((", 2), "v", "syntax error"),
    "no SQL": (_row("table", "v", None, 2), "v", ""),
    "a page that does not exist": (_row("table", "v", "CREATE TABLE v (a)", 10**9), "v", "invalid rootpage"),
    "an index of nothing": (_row("index", "i", "CREATE INDEX i ON missing (a)", 2), "i", ""),
    "a trigger of nothing": (
        _row("trigger", "g", "CREATE TRIGGER g AFTER INSERT ON missing BEGIN SELECT 1; END"),
        "g", "no such table: main.missing",
    ),
    "a damaged type": (_row("tabme", "v", "CREATE TABLE v (a)", 2), "v", "damaged"),
    "a name twice": (_row("table", "customers", FULL_TEXT), "another customers", "damaged"),
    "a name that is a number": (_row("table", 5, FULL_TEXT), "5", "damaged"),
    "a name that is no text": (_row("table", b"\xff\0", FULL_TEXT), r"b'\xff\x00'", "damaged"),
    "no name": (_row("table", None, FULL_TEXT), "None", "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("case", SKIPPED)
def test_what_cannot_be_read_is_named_and_hides_nothing_else(tmp_path: Path, case: str) -> None:
    make, name, reason = SKIPPED[case]
    path = tmp_path / "x.sqlite"
    make(path)
    catalog = read_catalog(path)
    assert catalog.tables["customers"].names == ["id", "name"]
    assert name not in catalog.tables
    assert reason in catalog.skipped[name]
    with pytest.warns(SkippedWarning, match="cannot be used: "):
        info = table_info(path)
    assert info.text.startswith(f"{LINE}\n-- id : 1\n-- name : 'Ann'\n")
    assert info.text.splitlines()[-1].startswith("-- cannot be used: ")
    assert info.skipped == catalog.skipped
    assert describe_table(path, "CUSTOMERS") == f"{LINE}\n-- id : 1\n-- name : 'Ann'"
    with pytest.raises(SqlError, match=r"cannot be used|no such table"):
        describe_table(path, name)
    assert run_query(path, "SELECT * FROM customers").rows == [(1, "Ann")]
    if "v" in catalog.skipped:
        with contextlib.suppress(SqlError):  # and no other error: the agent can do without
            run_query(path, "SELECT * FROM v")
    assert "customers" in [table.name for table in read_schema(str(path)).tables]


def test_an_error_about_a_table_that_is_skipped_says_why(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    SKIPPED["a view on a dropped table"][0](path)
    with pytest.raises(SqlError) as error:
        run_query(path, "SELECT * FROM v")
    assert str(error.value) == (
        "no such table: main.gone. Tables: customers. Cannot be used: v (no such table: main.gone)"
    )


def test_a_note_that_does_not_fit_is_left_out_of_the_text_and_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    SKIPPED["a module that is missing"][0](path)
    with pytest.warns(SkippedWarning, match=r"v \(no such module: vec0\)"):
        assert table_info(path, max_chars=len(LINE) + 5, example_values=0).text == LINE


def test_columns_whose_values_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    _entry(path, "table", "t", "t", 2, "CREATE TABLE t (a INT, b TEXT COLLATE german)")
    with pytest.warns(SkippedWarning, match=r"no example values: t\.b \(no such collation sequence: german\)"):
        assert table_info(path).text.endswith("CREATE TABLE t ( a int , b text )\n-- a : 1")


USED = {
    "generated columns": (
        "CREATE TABLE t (a INT, b INT AS (a + 1), c INT AS (a + 2) STORED); INSERT INTO t VALUES (1)",
        ["a", "b", "c"], (1, 2, 3),
    ),
    "names with quotes": (
        """CREATE TABLE t ("a""b" INT, [c]  INT, `d``e` INT, 'f''g' INT, "h;--" INT); """
        "INSERT INTO t VALUES (1, 2, 3, 4, 5)",
        ['a"b', "c", "d`e", "f'g", "h;--"], (1, 2, 3, 4, 5),
    ),
    "names with lines": ('CREATE TABLE t ("a\nb" INT, "" INT); INSERT INTO t VALUES (1, 2)', ["a\nb", ""], (1, 2)),
    "strict, without rowid": (
        "CREATE TABLE t (a INT PRIMARY KEY, b TEXT) STRICT, WITHOUT ROWID; INSERT INTO t VALUES (1, 'x')",
        ["a", "b"], (1, "x"),
    ),
    "full text": ("CREATE VIRTUAL TABLE t USING fts5(a, b); INSERT INTO t VALUES ('x', 'y')", ["a", "b"], ("x", "y")),
    "r-tree": (
        "CREATE VIRTUAL TABLE t USING rtree(a, b, c); INSERT INTO t VALUES (1, 2, 3)", ["a", "b", "c"], (1, 2.0, 3.0),
    ),
    "an index and a check with functions": (
        "CREATE TABLE t (a CHECK (a IN (1, 2))); CREATE INDEX i ON t (abs(a)); INSERT INTO t VALUES (1)", ["a"], (1,),
    ),
    "a trigger on a dropped table": (
        "CREATE TABLE u (x); CREATE TABLE t (a); CREATE TRIGGER g AFTER UPDATE ON t BEGIN DELETE FROM u; END;"
        "DROP TABLE u; INSERT INTO t VALUES (1)", ["a"], (1,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", USED)
def test_tables_of_all_kinds_are_shown_with_the_columns_that_a_query_can_use(tmp_path: Path, case: str) -> None:
    script, names, row = USED[case]
    path = tmp_path / "x.sqlite"
    try:
        make_database(path, script)
    except sqlite3.OperationalError as error:  # an older SQLite, or one without the module
        pytest.skip(str(error))
    catalog = read_catalog(path)
    assert catalog.tables["t"].names == names
    assert not catalog.skipped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = table_info(path).text.split("\nCREATE")[0]
    assert shown == describe_table(path, "t")
    selected = shown.split("\n--")[0].removeprefix("CREATE TABLE t ( ").removesuffix(" )").split(" , primary key")[0]
    columns = ", ".join(column.rpartition(" ")[0] for column in selected.split(" , "))
    assert run_query(path, f"SELECT {columns} FROM t").rows == [row]


def test_a_lock_is_an_error_and_nothing_is_taken_for_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    make_database(path, TABLES)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DatabaseError, match="locked"):
            read_catalog(path)
        writer.execute("ROLLBACK")
    assert not read_catalog(path).skipped


def test_variants_are_made_of_the_columns_that_can_be_written(tmp_path: Path) -> None:
    make_database(tmp_path / "x.sqlite", USED["generated columns"][0])
    [table] = read_schema(str(tmp_path / "x.sqlite")).tables
    assert [column.name for column in table.columns] == ["a"]
    assert table.rows == ((1,),)


# The MCP server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Databases with parts that cannot be read, beside what is none."""
    SKIPPED["a module that is missing"][0](tmp_path / "odd.SQLITE3")
    make_database(tmp_path / "ok.sqlite", TABLES)
    (tmp_path / "ok.sqlite").rename(f"{tmp_path}/caf\udce9.sqlite")
    (tmp_path / "notes.txt").write_text("no database")
    (tmp_path / "text.db").write_text("no database")
    os.mkfifo(tmp_path / "pipe.sqlite")
    (tmp_path / "out.sqlite").symlink_to(__file__)
    return tmp_path


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_a_server_serves_what_it_can_and_names_the_rest(folder: Path, transport: str) -> None:
    pytest.importorskip("fastmcp")
    from mcp import Client, StdioServerParameters
    from mcp_servers import COMMAND, http_server

    async with contextlib.AsyncExitStack() as stack:
        if transport == "http":
            where = stack.enter_context(http_server(folder))[0]
        else:
            where = StdioServerParameters(command=sys.executable, args=[*COMMAND[1:], "--database", str(folder)])
        client = await stack.enter_async_context(Client(where))

        async def call(tool: str, **arguments: str) -> str:
            result = await client.call_tool(tool, arguments)
            text = result.content[0].text
            assert json.dumps(result.structured_content)
            return f"error: {text}" if result.is_error else text

        names = await call("list_databases")
        assert names.startswith("caf\\udce9, odd\nNot served: ")
        for problem in (
            "pipe.sqlite (it is not a regular file but a pipe)",
            "text.db (it is no SQLite database, or an",
        ):
            assert problem in names
        assert "notes.txt" not in names
        assert await call("list_tables", database="odd") == "customers\nCannot be used: v (no such module: vec0)"
        assert (await call("describe_table", database="odd", table="customers")).startswith(LINE)
        assert "v cannot be used: no such module: vec0" in await call("describe_table", database="odd", table="v")
        assert "no such module: vec0" in await call("query_database_by_sql", database="odd", sql="SELECT * FROM v")
        for database in ("odd", "caf\\udce9", "caf\\udce9.sqlite"):
            rows = await call("query_database_by_sql", database=database, sql="SELECT * FROM customers")
            assert rows == "(id, name)\n[(1, 'Ann')]"
        assert await call("list_tables", database="pipe") == "error: no database 'pipe'. Databases: caf\\udce9, odd"


def test_a_server_of_one_file_of_any_name_has_its_schema_as_a_resource(folder: Path) -> None:
    pytest.importorskip("fastmcp")
    from groundwire.tools.mcp_sql.databases import Databases
    from groundwire.tools.mcp_sql.server import Limits, sql_server

    databases = Databases(f"{folder}/caf\udce9.sqlite")
    assert databases.names() == ["caf\\udce9"]
    sql_server(databases, limits=Limits())
    for name, problem in {
        "pipe.sqlite": "but a pipe",
        "text.db": "no SQLite database",
        "none.db": "no database at",
    }.items():
        with pytest.raises(DatabaseError, match=problem):
            Databases(folder / name)

"""Partial credit grows towards a right query, and a wrong query never earns as much as a right one."""

from __future__ import annotations

import sqlite3

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from groundwire import rewards
from groundwire.rewards import RewardError
from groundwire.rewards.spider.dense import dense
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.rewards.spider.sql_parts import f1, parts_of

GOLD = (
    "SELECT T1.name, count(*) FROM singer AS T1 JOIN song AS T2 ON T1.id = T2.singer "
    "WHERE T2.year > 2010 GROUP BY T1.id"
)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("dense") / "db.sqlite"
    with sqlite3.connect(path) as conn:
        conn.executescript(
            """
            CREATE TABLE singer (id int, name text, age int);
            CREATE TABLE song (id int, singer int, title text, year int);
            INSERT INTO singer VALUES (1, 'Ann', 30), (2, 'Bo', 41), (3, 'Cy', 30);
            INSERT INTO song VALUES (1, 1, 'A', 2012), (2, 1, 'B', 2009), (3, 2, 'C', 2015), (4, 2, 'D', 2016);
            """
        )
    conn.close()
    return str(path)


def score(predicted: str, database: str, gold: str = GOLD) -> float:
    return rewards.total(dense(predicted, gold, database))


def test_a_right_query_gets_1_in_any_form(database: str) -> None:
    other = "SELECT count(title), max(name) FROM song, singer WHERE singer.id = singer AND year > 2011 GROUP BY singer"
    assert score(GOLD, database) == score(other, database) == 1.0


def test_a_closer_query_gets_more(database: str) -> None:
    nearer = [
        "DROP TABLE singer",
        "SELECT 1",
        "SELECT title FROM song",
        "SELECT name FROM singer JOIN song ON singer.id = song.singer",
        "SELECT name, count(*) FROM singer JOIN song ON singer.id = song.singer GROUP BY singer.id",
        "SELECT name, count(*) FROM singer JOIN song ON singer.id = song.singer WHERE year > 2014 GROUP BY singer.id",
    ]
    scores = [score(each, database) for each in nearer]
    assert scores == sorted(scores)
    assert (scores[0], scores[1]) == (0.0, 0.0)
    assert len(set(scores[1:])) == len(scores) - 1
    assert scores[-1] <= 0.5


@pytest.mark.parametrize(
    "predicted",
    ["", ";", "not SQL at all", f"{GOLD}; DROP TABLE singer", "PRAGMA table_info(singer)", "(" * 5000, "VALUES (3)"],
)
def test_a_text_that_is_no_query_gets_0(predicted: str, database: str) -> None:
    assert score(predicted, database) == 0.0


def test_naming_all_columns_of_all_tables_earns_nothing_for_columns(database: str) -> None:
    everything = "SELECT singer.*, song.*, age, title, id, year FROM singer, song"
    assert dense(everything, "SELECT name FROM singer", database)["columns"] == 0.0


async def test_a_broken_gold_is_an_error_not_a_0(database: str) -> None:
    reward = rewards.get("spider_dense")
    with pytest.raises(RewardError, match="the gold query failed"):
        await reward({"query": "SELECT nothing", "db_path": database}, GOLD, [])
    with pytest.raises(RewardError, match="needs 'query' in the task; it has id"):
        await reward({"id": 1}, GOLD, [])


def test_parts_ignore_aliases_and_case() -> None:
    assert parts_of("SELECT T1.Name FROM Singer AS T1 WHERE T1.Age > 3") == parts_of(
        "select name from singer where age > 3"
    )


def test_each_condition_counts_separately() -> None:
    gold = parts_of("SELECT a FROM t WHERE b = 1 AND c = 2")
    one, none = parts_of("SELECT a FROM t WHERE b = 1"), parts_of("SELECT a FROM t WHERE d = 4")
    assert None not in (gold, one, none)
    assert f1(gold.clauses, one.clauses) > f1(gold.clauses, none.clauses)


# -- a wrong query earns at most half of a right one

_COLUMNS = st.sampled_from(["name", "age", "singer.id", "song.id", "title", "year", "*", "count(*)", "max(year)", "1"])
_CONDITIONS = st.sampled_from(
    ["year > 2010", "year > 2011", "age = 30", "singer.id = song.singer", "name = 'Ann'", "1 = 1", "title IS NOT NULL"]
)
_TABLES = st.sampled_from(["singer", "song", "singer, song", "singer JOIN song ON singer.id = song.singer", "nowhere"])


@st.composite
def queries(draw: st.DrawFn) -> str:
    """Queries over the two tables: some right, most wrong, some that do not run."""
    columns = ", ".join(draw(st.lists(_COLUMNS, min_size=1, max_size=3)))
    query = f"SELECT {draw(st.sampled_from(['', 'DISTINCT ']))}{columns} FROM {draw(_TABLES)}"
    conditions = draw(st.lists(_CONDITIONS, max_size=3))
    if conditions:
        query += f" WHERE {draw(st.sampled_from([' AND ', ' OR '])).join(conditions)}"
    query += draw(st.sampled_from(["", " GROUP BY name", " GROUP BY singer.id", " GROUP BY year HAVING count(*) > 1"]))
    query += draw(st.sampled_from(["", " ORDER BY age", " ORDER BY year DESC", " LIMIT 1"]))
    return draw(st.sampled_from([query, f"{query} UNION SELECT name FROM singer", f"{query};", query.lower()]))


# All of them run; of the queries above most do not.
_GOLDS = st.sampled_from(
    [
        GOLD,
        "SELECT * FROM singer",
        "SELECT DISTINCT age FROM singer;",
        "SELECT name, age FROM singer WHERE name = 'Ann' OR age = 30 ORDER BY age",
        "SELECT count(*) FROM song",
        "SELECT max(year), title FROM song WHERE title IS NOT NULL",
        "SELECT song.id, year FROM song WHERE year > 2010 AND year > 2011 ORDER BY year DESC",
        "SELECT year, count(*) FROM song GROUP BY year HAVING count(*) > 1",
        "SELECT title FROM song UNION SELECT name FROM singer",
        "SELECT name, title FROM singer, song",
        "SELECT * FROM singer, song WHERE singer.id = song.singer AND year > 2010 LIMIT 1",
        "select distinct name from singer join song on singer.id = song.singer where 1 = 1 order by year desc",
        "SELECT name, max(year), 1 FROM singer JOIN song ON singer.id = song.singer GROUP BY singer.id",
        "SELECT name FROM singer WHERE age = 30 AND name = 'nobody'",
    ]
)


@settings(max_examples=200, deadline=None)
@given(gold=_GOLDS, predicted=queries() | st.text(max_size=30))
@example(gold=GOLD, predicted=GOLD.replace("2010", "2014"))
@example(gold="SELECT name FROM singer", predicted="SELECT name FROM singer WHERE 1 = 1")
def test_a_wrong_query_earns_at_most_half_and_each_component_at_most_an_eighth(
    gold: str, predicted: str, database: str
) -> None:
    right = execution_match(predicted, gold, database).score == 1.0
    components = dense(predicted, gold, database)
    got = rewards.total(components)
    assert got == 1.0 if right else 0.0 <= got <= 0.5
    match = components.pop("match")
    assert match in (0.0, 0.5)
    assert all(0.0 <= value <= 0.125 for value in components.values())

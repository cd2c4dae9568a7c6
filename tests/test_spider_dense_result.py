"""Partial credit by results grows towards the gold's result, and a wrong result never earns more than half."""

from __future__ import annotations

import itertools
import random
import sqlite3

import pytest

from groundwire import rewards
from groundwire.rewards import RewardError
from groundwire.rewards.spider.assignment import assign
from groundwire.rewards.spider.dense_result import MAX_ROWS, dense_result
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.rewards.spider.result_similarity import MAX_DIFFERENT_ROWS, similarity

GOLD = "SELECT name, age FROM singer WHERE age > 20 ORDER BY age"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("dense") / "db.sqlite"
    conn = sqlite3.connect(path)
    conn.execute("CREATE TABLE singer (id int, name text, age int)")
    conn.executemany("INSERT INTO singer VALUES (?, ?, ?)", [(i, f"singer {i}", 15 + i % 20) for i in range(40)])
    conn.execute("CREATE TABLE big (i int)")
    conn.executemany("INSERT INTO big VALUES (?)", [(i,) for i in range(1, 5001)])
    conn.commit()
    conn.close()
    return str(path)


def score(predicted: str, database: str, gold: str = GOLD) -> float:
    return rewards.total(dense_result(predicted, gold, database))


def test_a_result_that_is_nearer_earns_more(database: str) -> None:
    nearer = [
        "SELECT max(id) + 1000 FROM singer",
        "SELECT * FROM singer WHERE age < 21",
        "SELECT name FROM singer WHERE age > 30",
        "SELECT name FROM singer WHERE age > 20",
        "SELECT age, name, id FROM singer WHERE age > 20",
        "SELECT age, name FROM singer WHERE age > 21",
        "SELECT age, name FROM singer WHERE age > 20 ORDER BY age",
    ]
    scores = [score(each, database) for each in nearer]
    assert scores == sorted(set(scores))
    assert (scores[0], scores[-1]) == (0.0, 1.0)
    assert scores[-2] <= 0.5


def test_the_order_of_rows_alone_costs_half(database: str) -> None:
    assert score(GOLD.replace("BY age", "BY age DESC"), database) == 0.5


@pytest.mark.parametrize(
    "predicted",
    ["", "not SQL", "DROP TABLE singer", f"{GOLD}; DROP TABLE singer", "SELECT 'singer 6', 21", "VALUES ('x', 21)"],
)
def test_a_text_that_is_no_query_and_a_constant_earn_nothing(predicted: str, database: str) -> None:
    assert score(predicted, database) == 0.0


def test_a_guess_of_everything_earns_little(database: str) -> None:
    assert score("SELECT * FROM singer, singer AS other", database, "SELECT name FROM singer WHERE id = 7") < 0.05


def test_long_results_are_compared_by_their_first_rows(database: str) -> None:
    assert score("SELECT i FROM big WHERE i <= 4000", database, "SELECT i FROM big") == 0.5
    assert score(f"SELECT i FROM big WHERE i > {MAX_ROWS}", database, "SELECT i FROM big") == 0.0


async def test_it_is_registered_and_a_broken_gold_is_an_error(database: str) -> None:
    reward = rewards.get("spider_dense_result")
    assert await reward({"query": GOLD, "db_path": database}, GOLD, []) == {"match": 0.5, "columns": 0.25, "rows": 0.25}
    with pytest.raises(RewardError, match="the gold query failed"):
        await reward({"query": "SELECT nothing", "db_path": database}, GOLD, [])


def test_queries_at_random_earn_1_if_right_and_at_most_half_if_not(database: str) -> None:
    rng = random.Random(0)
    columns = ["name", "age", "id", "age, name", "name, age", "count(*)", "max(age)", "DISTINCT age", "*", "1", "NULL"]
    tails = ["", " WHERE age > 20", " WHERE id = 3", " ORDER BY age LIMIT 3", " WHERE 0", " GROUP BY age"]

    def query() -> str:
        return f"SELECT {rng.choice(columns)} FROM singer{rng.choice(tails)}"

    seen = set()
    for _ in range(250):
        gold, predicted = query(), query()
        right = execution_match(predicted, gold, database).score == 1.0
        got = score(predicted, database, gold)
        assert got == 1.0 if right else 0.0 <= got <= 0.5, (gold, predicted)
        seen.add((right, got > 0))
    assert seen == {(True, True), (False, True), (False, False)}


# -- similarity


def random_rows(rng: random.Random, width: int) -> list[tuple[int, ...]]:
    return [tuple(rng.randrange(3) for _ in range(width)) for _ in range(rng.randrange(1, 6))]


def test_columns_and_rows_may_be_in_any_order() -> None:
    rng = random.Random(1)
    for _ in range(100):
        width = rng.randrange(1, 4)
        gold, predicted = random_rows(rng, width), random_rows(rng, rng.randrange(1, 4))
        columns, rows = similarity(gold, predicted)
        assert 0.0 <= columns <= 1.0
        assert 0.0 <= rows <= 1.0
        assert similarity(gold, rng.sample(predicted, len(predicted))) == pytest.approx((columns, rows))
        assert similarity(gold, gold[::-1]) == (1.0, 1.0)
        order = rng.sample(range(width), width)
        moved = [tuple(row[index] for index in order) for row in gold]
        assert similarity(gold, moved)[0] == 1.0


def test_rows_are_paired_so_that_the_most_values_agree() -> None:
    rng = random.Random(2)
    for _ in range(100):
        # The columns have no values in common, so only those of the same position are paired.
        gold, predicted = (
            [tuple(10 * column + value for column, value in enumerate(row)) for row in random_rows(rng, 3)]
            for _ in range(2)
        )
        size = min(len(gold), len(predicted))
        best = max(
            sum(sum(map(int.__eq__, one, other)) for one, other in zip(ours, theirs, strict=True))
            for ours in itertools.combinations(gold, size)
            for theirs in itertools.permutations(predicted, size)
        )
        assert similarity(gold, predicted)[1] == pytest.approx(2 * best / 3 / (len(gold) + len(predicted)))


def test_a_missing_and_a_surplus_row_cost_the_same() -> None:
    rows = [(i, f"x{i}") for i in range(4)]
    assert similarity(rows, rows[:3]) == similarity(rows[:3], rows) == pytest.approx((6 / 7, 6 / 7))
    assert similarity(rows, []) == similarity([], rows) == (0.0, 0.0)
    assert similarity([], []) == (1.0, 1.0)


def test_values_of_other_types_are_compared_as_execution_match_compares_them() -> None:
    assert similarity([(1,), (None,), (b"x",), ("1",)], [(1.0,), (None,), (b"x",), ("1",)]) == (1.0, 1.0)
    assert similarity([(1,)], [("1",)]) == (0.0, 0.0)


def test_many_rows_without_an_equal_one_are_bounded() -> None:
    gold, predicted = [(i, i) for i in range(1000)], [(i, (i + 1) % 1000) for i in range(1000)]
    columns, rows = similarity(gold, predicted)
    assert columns == 1.0
    assert rows == MAX_DIFFERENT_ROWS / 2 / 1000


def test_the_assignment_is_the_best_of_all() -> None:
    rng = random.Random(3)
    for _ in range(200):
        rows, columns = rng.randrange(1, 5), rng.randrange(1, 5)
        gains = [[rng.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(columns)] for _ in range(rows)]
        pairs = assign(gains)
        size = min(rows, columns)
        assert len({row for row, _ in pairs}) == len({column for _, column in pairs}) == len(pairs) == size
        best = max(
            sum(gains[row][column] for row, column in zip(chosen, order, strict=True))
            for chosen in itertools.combinations(range(rows), size)
            for order in itertools.permutations(range(columns), size)
        )
        assert sum(gains[row][column] for row, column in pairs) == pytest.approx(best)
    assert assign([]) == assign([[]]) == []

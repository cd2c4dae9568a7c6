"""The gold query never reaches the agent: neither the question nor the database contains it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import pytest
from spider_folder import REAL, make_spider

from groundwire import domains
from groundwire.adapters import Endpoint, Question
from groundwire.domains.spider import loader

SPIDER = domains.get("spider")


def folders(tmp_path: Path) -> dict[str, Path]:
    return {"small": make_spider(tmp_path / "small"), "bundled": loader.BUNDLED, "real": REAL}


@pytest.fixture(params=["small", "bundled", "real"])
def tasks(request: pytest.FixtureRequest, tmp_path: Path) -> list[domains.Task]:
    folder = folders(tmp_path)[request.param]
    if not folder.is_dir():
        pytest.skip(f"the {request.param} data is not at {folder}")
    data = SPIDER.load(str(folder))
    return [*data.train, *data.validation]


def squeezed(text: str) -> str:
    return "".join(text.split()).lower()


def test_a_question_has_no_field_for_the_gold_and_accepts_no_other() -> None:
    assert {field.name for field in dataclasses.fields(Question)} == {"id", "text", "database", "answers", "columns"}
    with pytest.raises(TypeError):
        Question(id="1", text="How many?", database="", query="SELECT 1")  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Question(id="1", text="How many?", database="").text = "SELECT 1"  # type: ignore[misc]


def test_an_endpoint_has_no_field_for_the_gold() -> None:
    names = {field.name for field in dataclasses.fields(Endpoint)}
    assert names == {"base_url", "model", "api_key", "sampling", "prompts"}


def test_no_question_of_the_data_holds_its_gold(tasks: list[domains.Task]) -> None:
    for task in tasks:
        columns = domains.visible_columns(SPIDER, task)
        question = Question(id=task["id"], text=task["question"], database=SPIDER.database(task), columns=columns)
        given = squeezed(repr(dataclasses.asdict(question)))
        assert squeezed(task["query"]) not in given, task["id"]


def test_no_database_holds_the_gold_of_its_tasks_nor_their_questions(tasks: list[domains.Task]) -> None:
    by_database = defaultdict(list)
    for task in tasks:
        by_database[SPIDER.database(task)].append(task)
    for database, asked in by_database.items():
        content = Path(database).read_bytes()
        for task in asked:
            assert task["query"].encode() not in content, task["id"]
            assert task["question"].encode() not in content, task["id"]


def test_the_id_is_a_name_and_does_not_depend_on_the_gold(tmp_path: Path) -> None:
    rows = [{"db_id": "cars", "question": "Makers?", "query": f"SELECT maker FROM car LIMIT {n}"} for n in (1, 2)]
    one, two = (
        SPIDER.load(str(make_spider(tmp_path / row["query"][-1], dev=[row]))).validation[0]["id"] for row in rows
    )
    assert one == two == "dev-0"

"""What is held out shares no question, database, document or group with training, and what is shared is said."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groundwire import domains
from groundwire.domains import DataError, TaskData, shared_notes, task_list
from groundwire.tools.errors import UserError
from groundwire.train.config.resolve import resolve
from groundwire.train.job.job import parse_arguments
from groundwire.train.job.prepare import prepare


def _rows(count: int, **columns: Callable[[int], Any]) -> list[dict[str, Any]]:
    rows = [{"question": f"Question {n}?", **{name: make(n) for name, make in columns.items()}} for n in range(count)]
    return random.Random(0).sample(rows, count)


def _values(data: TaskData, column: str) -> tuple[set[Any], set[Any]]:
    return {task[column] for task in data.train}, {task[column] for task in data.validation}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=2, max_size=60))
def test_what_is_held_out_depends_on_the_texts_and_is_never_empty(pairs: list[tuple[int, int]]) -> None:
    rows = [{"id": str(n), "question": f"{question}?", "doc": doc} for n, (question, doc) in enumerate(pairs)]
    data, again = (task_list(each).load() for each in (rows, rows[::-1]))
    assert {task["id"] for task in data.validation} == {task["id"] for task in again.validation}
    assert sorted(int(task["id"]) for task in (*data.train, *data.validation)) == list(range(len(rows)))
    assert data.train
    assert data.validation
    if "held out by question and doc" in data.source:
        assert shared_notes(data) == []
    if data.source.endswith("held out by question"):
        assert not set.intersection(*_values(data, "question"))


def test_a_question_that_repeats_is_on_one_side() -> None:
    data = task_list([{"question": f"What is {n % 50} + 1?"} for n in range(200)]).load()
    assert (len(data.train), len(data.validation)) == (160, 40)
    assert not set.intersection(*_values(data, "question"))


def test_questions_are_the_same_without_case_spaces_final_punctuation_and_width() -> None:
    same = ["What is  it?", "what is it", "WHAT IS IT ?!", "\uff37hat is it\uff1f", " What\nis\u00a0it..."]
    for seed in range(20):
        rows = [{"question": text} for text in [*same, *(f"Other {seed} {n}" for n in range(20))]]
        data = task_list(rows).load()
        assert len({text in _values(data, "question")[1] for text in same}) == 1


@pytest.mark.parametrize(
    "column", ["db_id", "DB ID", "database", "db_path", "Document", "doc_id", "documentId", "database_name", "group"]
)
def test_a_database_document_or_group_is_on_one_side(column: str) -> None:
    data = task_list(_rows(200, **{column: lambda n: f"g{n // 10}"})).load()
    assert (len(data.train), len(data.validation)) == (160, 40)
    assert not set.intersection(*_values(data, column))
    assert data.source.endswith(f"held out by question and {column}")
    assert shared_notes(data) == []


@pytest.mark.parametrize(
    ("rows", "said", "shared"),
    [
        (_rows(50, db_id=lambda n: "one"), "held out by question alone: db_id has 1 value", ["1 of 1 db_id"]),
        (_rows(50, db_id=lambda n: n % 2), "held out by question alone: db_id has 2 values", ["2 of 2 db_id"]),
        (
            [{"question": f"Question {n}?", "db": max(n, 47)} for n in range(50)],  # one database with most tasks
            "held out by question alone: db has 3 values",
            ["1 of 1 db"],
        ),
        (
            [{"question": "Summarise.", "document": n // 2} for n in range(50)],
            "held out by document alone: several of them have the same questions",
            ["10 of 10 questions"],
        ),
        (
            [{"question": "Summarise.", "text": n} for n in range(50)],
            "held out by id alone: too few different questions",
            ["10 of 10 questions"],
        ),
    ],
)
def test_what_cannot_be_kept_apart_is_said_and_counted(rows: Any, said: str, shared: list[str]) -> None:
    data = task_list(rows).load()
    assert (len(data.train), len(data.validation)) == (40, 10)
    assert data.source.endswith(said)
    assert shared_notes(data) == [f"validation shares with training: {', '.join(shared)}"]


def test_most_tasks_stay_on_their_side_when_others_are_added() -> None:
    rows = _rows(1100)
    before, after = (_values(task_list(part).load(), "question")[1] for part in (rows[:1000], rows))
    assert len(before - after) < 20


def _prepared(tasks: Any, validation: Any = None, **settings: Any) -> Any:
    async def agent(task: Any) -> str:
        return ""

    given, objects = parse_arguments(agent, tasks, lambda task, answer: 1.0, settings, validation=validation)
    return prepare(resolve("fast", **{"backend": "custom", **given}), objects=objects)


def test_validation_tasks_with_questions_of_training_are_refused_unless_a_setting_allows_them(tmp_path: Path) -> None:
    tasks, others = _rows(20), [{"question": f"Another {n}?"} for n in range(9)]
    leaked = [*others, {"question": "question  3"}]
    for validation, count in ((tasks, "20 of the 20"), (leaked, "1 of the 10")):
        with pytest.raises(UserError, match=f"{count} validation tasks have questions of training tasks, such as"):
            _prepared(tasks, validation)
        with pytest.raises(DataError, match="or set allow_shared"):
            task_list(tasks, validation=validation)
        notes = _prepared(tasks, validation, allow_shared=True).notes
        assert f"      validation shares with training: {count.replace('the ', '')} questions" in notes
    assert not any("shares" in note for note in _prepared(tasks, others).notes)
    on_another = [{**task, "db_id": "b"} for task in tasks]
    for other in ([{**task, "group": "held out"} for task in tasks], on_another):
        with pytest.raises(UserError, match="20 of the 20 validation tasks have questions of training tasks"):
            _prepared([{**task, "group": "training"} for task in tasks], other)
    notes = _prepared([{**task, "db_id": "a"} for task in tasks], on_another).notes
    assert "      validation shares with training: 20 of 20 questions" in notes


def test_a_column_is_named_by_a_setting() -> None:
    tasks = _rows(200, patient=lambda n: n // 10, db_id=lambda n: n % 100)
    data = _prepared(tasks, group_column="patient").data
    assert not set.intersection(*_values(data, "patient"))
    assert "held out by question and patient" in data.source
    judged = task_list([], validation=[{"question": "?"}])  # by the settings of the run that trained the model
    judged = judged.split_as(group_column="patient", allow_shared=False)
    assert shared_notes(judged.load(), "patient") == []
    with pytest.raises(
        DataError, match="group_column is 'doctor'; the tasks have the columns question, patient, db_id"
    ):
        _prepared(tasks, group_column="doctor")
    with pytest.raises(UserError, match="group_column is 'x', but domain 'spider' has its own split: leave it out"):
        _prepared("spider", group_column="x", reward=None)


def test_a_domain_with_its_own_split_says_what_both_parts_have() -> None:
    class Own:
        name, default_reward = "own", ""

        def load(self, data_dir: str | None = None) -> TaskData:
            rows = [{"id": str(n), "question": f"Q{n % 3}?", "db_id": f"d{n % 4}"} for n in range(8)]
            return TaskData(train=rows[:6], validation=rows[6:], source="own")

        def database(self, task: Any) -> str:
            return ""

    data = domains.load_split(Own(), None)
    assert shared_notes(data) == ["validation shares with training: 2 of 2 questions, 2 of 2 db_id"]

"""The medical domain: generated fiction in two languages, or a folder of yours in the same shape."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from dev.medical_data.__main__ import generate
from dev.medical_data.facts import DISEASE_FIELDS, DRUG_FIELDS
from programs import run
from spider_folder import make_database

from groundwire import adapters, domains, rewards
from groundwire.domains import DataError, Task
from groundwire.domains.medical import BUNDLED
from groundwire.tools.schema import table_info
from groundwire.tools.sql import run_query
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.rollouts.agent_view import answers_of

medical = domains.get("medical")


@pytest.fixture(scope="module")
def data() -> domains.TaskData:
    return medical.load()


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    connection = sqlite3.connect(BUNDLED / "medical.sqlite")
    connection.row_factory = sqlite3.Row
    tables = {name: [dict(row) for row in connection.execute(f"SELECT * FROM {name}")] for name in TABLES}
    connection.close()
    return tables


TABLES = ("drugs_info", "disease")


def dump(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    lines = list(connection.iterdump())
    connection.close()
    return lines


# The bundled data.


def test_the_bundled_data_is_what_the_generator_writes_and_is_small(tmp_path: Path) -> None:
    generate(tmp_path)
    # SQLite and parquet write their versions into a file, so contents are compared, not bytes.
    assert dump(tmp_path / "medical.sqlite") == dump(BUNDLED / "medical.sqlite")
    assert pq.read_table(tmp_path / "questions.parquet").equals(pq.read_table(BUNDLED / "questions.parquet"))
    assert (tmp_path / "NOTICE.md").read_text() == (BUNDLED / "NOTICE.md").read_text()
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) < 500_000


def test_the_questions_of_one_language_are_the_same_as_among_those_of_both(tmp_path: Path) -> None:
    command = ["dev.medical_data", "--language", "en", "--out", str(tmp_path)]
    done = run("-m", *command)
    assert done.stdout == f"{tmp_path}: train 414, validation 138\n", done.stderr
    table = pq.read_table(BUNDLED / "questions.parquet")
    assert pq.read_table(tmp_path / "questions.parquet").equals(table.filter(pc.equal(table["language"], "en")))
    assert dump(tmp_path / "medical.sqlite") == dump(BUNDLED / "medical.sqlite")


def test_the_data_is_marked_as_fiction_and_no_advice(data: domains.TaskData) -> None:
    assert "fiction, no medical advice" in data.source
    assert "nothing in it is medical advice" in " ".join((BUNDLED / "NOTICE.md").read_text().split())


def test_questions_are_about_both_tables_in_both_languages_at_three_levels(data: domains.TaskData) -> None:
    for part in (data.train, data.validation):
        assert min(Counter((task["language"], task["hardness"]) for task in part).values()) >= 40
    assert (len(data.train), len(data.validation)) == (828, 276)
    for task in (*data.train, *data.validation):
        chinese = bool(re.search("[\u4e00-\u9fff]", task["question"] + task["answer"]))
        assert chinese == (task["language"] == "zh")


def test_no_drug_or_disease_of_a_validation_question_is_in_any_training_question_or_answer(
    data: domains.TaskData, rows: dict[str, list[dict[str, Any]]]
) -> None:
    names = {row["name"].lower() for table in rows.values() for row in table}
    printed = {
        split: " ".join(f"{task['question']} {task['answer']}" for task in tasks).lower()
        for split, tasks in (("train", data.train), ("validation", data.validation))
    }
    asked = {split: {name for name in names if name in text} for split, text in printed.items()}
    assert asked["train"] | asked["validation"] == names
    assert not asked["train"] & asked["validation"]


def test_the_tables_have_their_fields_and_the_facts_of_every_answer(
    data: domains.TaskData, rows: dict[str, list[dict[str, Any]]]
) -> None:
    assert set(DRUG_FIELDS) < set(rows["drugs_info"][0])
    assert set(DISEASE_FIELDS) < set(rows["disease"][0])
    for task in data.validation:
        if task["hardness"] != "easy":
            continue
        about = [row for table in rows.values() for row in table if row["name"].lower() in task["question"].lower()]
        listed = [re.split(", |、", value) for row in about for value in map(str, row.values())]
        # One column of the row contains all items of the answer.
        assert any(all(item.lower() in task["answer"].lower() for item in items) for items in listed[3:]), task


def test_the_query_of_a_question_reads_what_its_answer_states(data: domains.TaskData) -> None:
    for task in (*data.train, *data.validation):
        rows = run_query(task["db_path"], task["sql"]).rows
        items = [item for row in rows for value in row for item in re.split(", |、", value)]
        stated = [item for item in items if item.lower() in task["answer"].lower()]
        # Of two drugs' reactions only the common ones are stated.
        assert stated == items or "adverse_reactions" in task["sql"], task
        assert bool(rows) == ("No drug is" not in task["answer"] and "没有药物" not in task["answer"]), task


def test_no_name_contains_another(rows: dict[str, list[dict[str, Any]]]) -> None:
    for table in rows.values():
        assert max(Counter(row["name"] for row in table).values()) == 1
        names = [row["name"] for row in table]
        assert not [name for name in names for other in names if name != other and name in other]


# No agent can reach the gold.


def test_a_backends_question_has_no_gold_and_asks_for_prose(data: domains.TaskData) -> None:
    for task in (*data.train, *data.validation):
        question = adapters.Question(
            id=task["id"],
            text=task["question"],
            database=medical.database(task),
            answers=answers_of(medical, rewards.get(medical.default_reward)),
        )
        assert question.form == "prose"
        assert task["answer"] not in repr(question)
        assert "sql" not in domains.visible_columns(medical, task)


def test_the_database_has_no_answer_and_no_question(data: domains.TaskData) -> None:
    content = (BUNDLED / "medical.sqlite").read_bytes()
    for task in (*data.train, *data.validation):
        assert task["answer"].encode() not in content
        assert task["question"].encode() not in content
    assert "CREATE TABLE" in table_info(BUNDLED / "medical.sqlite").text
    assert "answer" not in table_info(BUNDLED / "medical.sqlite", example_values=0).text


# Training.


async def test_the_reward_prefers_the_gold_to_the_gold_of_another_question(data: domains.TaskData) -> None:
    reward = rewards.get(medical.default_reward)
    for task, other in zip(data.validation[:40], data.validation[40:80], strict=True):
        right, wrong = [rewards.total(await reward(task, answer, [])) for answer in (task["answer"], other["answer"])]
        assert right > wrong, task["question"]


def test_a_run_completes_with_the_local_grader_and_a_note_on_the_starter(tmp_path: Path) -> None:
    few = {"steps": 1, "tasks_per_step": 2, "group_size": 4, "val_tasks": 2, "n_runners": 16, "max_tokens": 16}
    config = resolve("fast", backend="openai-agents", domain="medical", **few).to_dict()
    begun = RunDir.create(tmp_path, backend="openai-agents", domain="medical", config=config)
    done = run("-m", "train.run", "--resume", str(begun.path))
    assert done.returncode == int("nothing was trained" in done.stdout), done.stderr
    assert "no medical advice" in done.stdout
    assert "graded by the local grader" in done.stdout
    assert "knows nothing but SQL" in done.stdout
    assert "databases never trained on" not in done.stdout
    rollouts, _ = begun.rollouts(["mode", "status", "reward", "reward_components"])
    scored = [rollout.outcome.reward_components for rollout in rollouts if rollout.succeeded]
    assert len(scored) >= 0.9 * len(rollouts)
    assert all({"rows", "judge"} <= set(parts) for parts in scored)


# Your own folder.

QUESTIONS = [{"id": f"q{i}", "question": f"What is drug {i}?", "answer": f"Drug {i} is blue."} for i in range(20)]


def folder_of(folder: Path, questions: list[dict[str, Any]] | None = None, suffix: str = ".jsonl") -> Path:
    make_database(folder / "mine.db", "CREATE TABLE drugs_info (name text); INSERT INTO drugs_info VALUES ('Drug 1')")
    questions = QUESTIONS if questions is None else questions
    file = folder / f"questions{suffix}"
    if suffix == ".jsonl":
        file.write_text("\n".join(map(json.dumps, questions)))
    elif suffix == ".json":
        file.write_text(json.dumps(questions))
    elif suffix == ".csv":
        lines = [",".join(f'"{value}"' for value in row.values()) for row in questions]
        file.write_text("\n".join([",".join(questions[0]), *lines]), encoding="utf-8-sig")
    else:
        pq.write_table(pa.Table.from_pylist(questions), file)
    return folder


def ids(tasks: list[Task]) -> list[str]:
    return [task["id"] for task in tasks]


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".json"])
def test_your_questions_are_read_from_any_file_format(tmp_path: Path, suffix: str) -> None:
    data = medical.load(str(folder_of(tmp_path, suffix=suffix)))
    assert sorted(ids([*data.train, *data.validation])) == sorted(row["id"] for row in QUESTIONS)
    assert data.source == f"--data-dir {tmp_path}: train {len(data.train)} questions, validation " + (
        f"{len(data.validation)} questions"
    )
    task = data.train[0]
    assert {key: task[key] for key in ("question", "answer")}.items() <= QUESTIONS[int(task["id"][1:])].items()
    assert medical.database(task) == str(tmp_path / "mine.db")


def test_without_a_split_column_added_questions_do_not_change_the_split_of_others(tmp_path: Path) -> None:
    few = medical.load(str(folder_of(tmp_path / "few", QUESTIONS[::-1][:15])))
    many = medical.load(str(folder_of(tmp_path / "many")))
    assert set(ids(few.train)) < set(ids(many.train))
    assert set(ids(few.validation)) <= set(ids(many.validation))


def test_your_split_is_kept_and_a_missing_id_is_generated(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "answer": "Yes.", "split": "validation" if i else "train"} for i in range(3)]
    data = medical.load(str(folder_of(tmp_path, rows)))
    assert (ids(data.train), ids(data.validation)) == (["questions-0"], ["questions-1", "questions-2"])


def test_the_published_files_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "parts", [], ".json")
    (folder / "questions.json").unlink()
    for name, rows in (("train", QUESTIONS[:2]), ("val", QUESTIONS[2:3])):
        pq.write_table(
            pa.Table.from_pylist([{**row, "id": i} for i, row in enumerate(rows)]), folder / f"{name}.parquet"
        )
    data = medical.load(str(folder))
    assert (ids(data.train), ids(data.validation)) == (["train-0", "train-1"], ["val-0"])
    (folder / "qa_dataset.jsonl").write_text(json.dumps(QUESTIONS[0]))  # of which the two were made
    with_whole = medical.load(str(folder))
    assert (ids(with_whole.train), ids(with_whole.validation)) == (ids(data.train), ids(data.validation))
    assert "qa_dataset.jsonl is not read" in with_whole.source
    (folder / "qa_dataset.jsonl").unlink()
    (folder / "val.parquet").unlink()
    assert "has train.parquet without val.parquet; add it" in refusal(folder)
    one = folder_of(tmp_path / "one")
    (one / "questions.jsonl").rename(one / "qa_dataset.jsonl")
    assert sorted(ids([*medical.load(str(one)).train, *medical.load(str(one)).validation])) == sorted(
        row["id"] for row in QUESTIONS
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "x", "question": "Who?", "answer": 3}, "row 20: answer is 3, not text"),
        ({"id": "x", "question": " ", "answer": "Me."}, "row 20: question is ' ', not text"),
        ({"id": "q3", "question": "Who?", "answer": "Me."}, "'q3' among them"),
        ({"id": "x", "question": "Who?", "answer": "Me.", "split": "test"}, "split is 'test'"),
    ],
)
def test_the_error_names_the_wrong_row(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    assert message in refusal(folder_of(tmp_path, [*QUESTIONS, row]))


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as refused:
        medical.load(str(folder))
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)
    return str(refused.value)


def test_a_missing_or_broken_file_has_a_one_line_error(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    (tmp_path / "a").mkdir()
    assert "needs one SQLite file (.sqlite, .sqlite3, .db), and has none" in refusal(tmp_path / "a")
    folder = folder_of(tmp_path / "b")
    (folder / "questions.jsonl").unlink()
    assert "qa_dataset.jsonl, train.parquet with val.parquet), and has none" in refusal(folder)
    folder = folder_of(tmp_path / "c")
    (folder / "questions.csv").write_text("question,answer")
    assert "has questions.csv and questions.jsonl" in refusal(folder)
    make_database(folder / "more.sqlite", "CREATE TABLE t (x)")
    assert "has mine.db and more.sqlite" in refusal(folder)


def test_an_invalid_empty_or_damaged_database_has_a_one_line_error(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "mine.db").write_text("no database")
    assert "is no readable SQLite file" in refusal(folder)
    (folder / "mine.db").unlink()
    make_database(folder / "mine.db", "CREATE TABLE t (x); DROP TABLE t")
    assert "has no tables" in refusal(folder)
    (folder / "mine.db").write_bytes((folder / "mine.db").read_bytes()[:100] + b"\xff" * 5000)
    assert "mine.db" in refusal(folder)


def test_an_unreadable_file_of_questions_has_a_one_line_error(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a")
    (folder / "questions.jsonl").write_text('{"question": "Who?", "answer": "Me."}\n{"question":')
    assert "questions.jsonl, line 2: not valid JSON" in refusal(folder)
    (folder / "questions.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "questions.jsonl cannot be read" in refusal(folder)
    folder = folder_of(tmp_path / "b", suffix=".parquet")
    (folder / "questions.parquet").write_bytes(b"PAR1")
    assert "questions.parquet is not a readable parquet file" in refusal(folder)
    folder = folder_of(tmp_path / "c", suffix=".csv")
    (folder / "questions.csv").write_text("id,question,answer\n1,Who?,Me.,and,more\n")
    assert "questions.csv, row 0: it does not fit the columns" in refusal(folder)
    (folder / "questions.csv").write_text(f"id,question,answer\n1,Who?,{'x' * 200_000}\n")
    assert "questions.csv is not valid CSV (field larger than field limit" in refusal(folder)


def test_questions_of_only_one_split_are_refused(tmp_path: Path) -> None:
    rows = [{**row, "split": "train"} for row in QUESTIONS]
    assert "has no validation questions" in refusal(folder_of(tmp_path, rows))

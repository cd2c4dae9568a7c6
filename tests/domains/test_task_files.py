"""A file or a list of tasks is read whole, or refused in a sentence that names the row, the columns and the remedy."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from groundwire.domains import DataError, load_split, task_list

NAMES = ["prompt", "messages", "input", "instruction", "Question", "QUESTION", "\ufeffquestion", " question", "problem"]


@pytest.mark.parametrize("name", NAMES)
def test_a_column_in_place_of_the_question_is_named_with_what_to_do(name: str) -> None:
    rows = [{"expected": "1", name: "How many?"}] * 2
    with pytest.raises(DataError) as caught:
        task_list(rows)
    assert str(caught.value) == (
        f"tasks, row 0: there is no column 'question'; its columns are expected, {name}. Rename {name!r} to 'question'."
    )


def test_messages_and_unknown_columns_are_named_too() -> None:
    for rows, message in (
        (
            [{"prompt": [{"role": "user", "content": "?"}]}] * 2,
            "Add one, with the text in 'prompt'",
        ),
        (
            [{"question": "?"}, {"foo": 1}],
            "row 1: there is no column 'question'; its columns are foo. Give",
        ),
        (
            [{"traceId": "t", "spanId": "s"}],
            "If these are traces of an agent: groundwire traces FILE --write DIR makes",
        ),
        ([{"messages": [{"role": "user", "content": "?"}]}], "If these are traces of an agent"),
        ([{}], "row 0: there is no column 'question'; it is empty. Give each row one"),
        ([{"question": None}], "row 0: question is empty; remove or repair the row."),
    ):
        with pytest.raises(DataError, match=message):
            task_list(rows)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.tsv", b"question\texpected\na?\t1\nb, c?\t2\n", 2),
        ("a.CSV", b"question,expected\r\na?,1\r\n\"b\nc\",2\r\n", 2),
        ("a.NDJSON", b'{"question": "a?"}\n{"question": "b?"}', 2),
        ("a.jsonl.gz", gzip.compress(b'{"question": "a?"}'), "a file of the kind '.gz' cannot be read; decompress it"),
        ("a.xlsx", b"PK\x03\x04", r"a file of the kind '.xlsx' cannot be read; .*save it as .jsonl, .json, .csv, .tsv"),
        ("a.json", b'{"train": [], "test": []}', "holds a dict with test, train, not a list of tasks"),
        ("a.json", b'{"schema_version": "ATIF-v1.7", "steps": []}', "file of its own. If these are traces"),
        ("a.json", b'[{"question": "a?", "expected": 1, "expected": 2}]', "'expected' is given twice: keep one"),
        ("a.jsonl", b'{"question": "a?"}\n{"question": "b?", "n": {"x": 1, "x": 1}}', "line 2: .*'x' is given twice"),
        ("a.csv", b"question,expected,expected\na?,1,2\n", "several columns 'expected'; rename them"),
        ("a.jsonl", b'{"question": "a", "id": 1}\n{"question": "b", "id": "1"}\n{"question": "c"}', "'1' among them"),
    ],
)  # fmt: skip
def test_a_file_is_read_by_its_kind_or_refused(tmp_path: Path, name: str, content: bytes, found: int | str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    if isinstance(found, str):
        with pytest.raises(DataError, match=found):
            task_list(file)
    else:
        data = task_list(str(file)).load()
        assert len(data.train) + len(data.validation) == found


@pytest.mark.parametrize("value", [b"\xff", pd.NaT, float("nan"), {1, 2}, object(), {"a": [b"\x00"]}])
def test_columns_may_hold_what_json_cannot(value: Any) -> None:
    data = load_split(task_list([{"question": f"{n}?", "extra": value} for n in range(2)]), None)
    assert data.train[0]["extra"] is value
    assert data.notes == ()


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([["a?", "b?"], [1, 2], [3, 4]], names=["question", "n", "n"])
    pq.write_table(table, tmp_path / "a.parquet")
    for tasks in (table, tmp_path / "a.parquet"):
        with pytest.raises(DataError, match="several columns 'n'; rename them"):
            task_list(tasks).load()


def test_a_data_frame_may_have_half_of_a_character() -> None:
    frame = pd.DataFrame({"question": pd.Series(["a \ud83d", "b"], dtype=object)})
    data = load_split(task_list(frame), None)
    assert {task["question"] for task in (*data.train, *data.validation)} == {"a \ufffd", "b"}

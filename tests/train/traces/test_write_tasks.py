"""Tasks and a reward from traces: later tasks validate, and answers are worth what the traces say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from groundwire.domains import task_list
from groundwire.tools.errors import CommandError
from groundwire.train.cli.app import app
from groundwire.train.traces.read import read_traces
from groundwire.train.traces.tasks import write_tasks

CITIES = ("Paris", "Rome", "Madrid", "Lima", "Tokyo", "Oslo", "Cairo", "Accra", "Quito", "Berne", "Vienna", "Prague")


def write_chats(file: Path, chats: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    return file


def chat(question: str, answer: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    return {"messages": [*messages, {"role": "assistant", "content": answer}], **fields}


def scored_chats() -> list[dict[str, Any]]:
    asked = [f"Which river flows through {city}, case {place * 7919}?" for place, city in enumerate(CITIES)]
    right = [chat(text, f"River {text[26:29]}", score=1, created=1e9 + place) for place, text in enumerate(asked)]
    wrong = [chat(text, "The Nile", score=0, created=2e9) for text in asked[:6]]
    return [*reversed(right), *wrong]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tasks.jsonl").read_text(encoding="utf-8").splitlines()]


def test_scores_decide_which_answers_are_right(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "t.jsonl", scored_chats())
    written = write_tasks(tmp_path / "task", read_traces(file))
    assert not written.is_draft
    reward = runpy.run_path(str(tmp_path / "task" / "reward.py"))["reward"]
    for row in rows_of(tmp_path / "task"):
        [expected] = row["expected"]
        assert (reward(row, expected), reward(row, f"It is the {expected.lower()}."), reward(row, "Nile")) == (1, 1, 0)
        assert all(reward(row, answer) == 0 for answer in row["rejected"])


def test_validation_is_later_than_training_and_near_duplicates_stay_together(tmp_path: Path) -> None:
    chats = scored_chats()[:12]
    long = "Please tell me in one word, and without any explanation at all, which one is the capital city of Kenya"
    chats += [chat(f"{long}{end}", "Nairobi", score=1, created=1e9 + 50) for end in ("?", " now?")]
    chats += [chat("Name a fruit.", answer, score=score, created=1e9) for answer, score in (("Stone", 0), ("Apple", 1))]
    write_tasks(tmp_path / "task", read_traces(write_chats(tmp_path / "t.jsonl", chats)))
    rows = rows_of(tmp_path / "task")
    splits = [row["split"] for row in rows]
    assert splits == sorted(splits)
    assert {"train", "validation"} == set(splits)
    kenya = [row for row in rows if "Kenya" in row["question"]]
    assert len({row["group"] for row in kenya}) == len({row["split"] for row in kenya}) == 1
    data = task_list(tmp_path / "task" / "tasks.jsonl").load()
    assert [task["id"] for task in data.validation] == [row["id"] for row in rows if row["split"] == "validation"]
    assert not any("split" in task for task in (*data.train, *data.validation))


def test_tasks_without_a_time_beside_others_are_said(tmp_path: Path) -> None:
    dated, undated = (
        scored_chats()[:12],
        [chat(f"Undated {word}?", "x", score=1, created="soon") for word in CITIES[:2]],
    )
    written = write_tasks(tmp_path / "task", read_traces(write_chats(tmp_path / "t.jsonl", dated + undated)))
    assert "of later traces (2 without a time count as the earliest) to validate" in written.lines[0]
    assert {row["split"] for row in rows_of(tmp_path / "task") if "Undated" in row["question"]} == {"train"}


def test_without_scores_what_happened_afterwards_decides(tmp_path: Path) -> None:
    good = [chat(f"What is {n} plus {n * 31}?", str(n * 32)) for n in range(1, 9)]
    bad = chat("What is 1 plus 31?", "33")
    bad["messages"].append({"role": "user", "content": "That's wrong."})
    bad["messages"].append({"role": "assistant", "content": "Sorry."})
    write_tasks(tmp_path / "task", read_traces(write_chats(tmp_path / "t.jsonl", [*good, bad])))
    row = next(row for row in rows_of(tmp_path / "task") if row["question"] == "What is 1 plus 31?")
    assert (row["expected"], row["rejected"]) == (["32"], ["33"])


def test_without_any_outcome_the_reward_is_a_draft_that_says_so(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "t.jsonl", [chat("Say hello.", 'Hello """ \\ you'), chat("Say bye.", "Bye")])
    written = write_tasks(tmp_path / "task", read_traces(file))
    assert written.is_draft
    text = (tmp_path / "task" / "reward.py").read_text(encoding="utf-8")
    assert text.startswith('"""DRAFT')
    assert "Be brief." in text
    reward = runpy.run_path(str(tmp_path / "task" / "reward.py"))["reward"]
    with pytest.raises(KeyError, match="JUDGE_MODEL"):
        reward({"question": "Say hello."}, "Hello")


@pytest.mark.parametrize(
    ("accepted", "answer", "value"),
    [
        ("Zürich", "In Zurich.", 1.0), ("की", "कि", 0.0), ("☔", "", 0.0), ("☔", "☔", 1.0),
        ("北京 天气", "北京天气。", 1.0),
        ("서울", "서울입니다", 0.0), ("서울", "서울!", 1.0), ("Нет", "нет", 1.0), ("مشمس", "غائم", 0.0),
    ],
)  # fmt: skip
def test_answers_of_any_language_are_compared(tmp_path: Path, accepted: str, answer: str, value: float) -> None:
    chats = [chat(f"Question {number}", accepted, score=number) for number in range(2)]
    written = write_tasks(tmp_path, read_traces(write_chats(tmp_path / "t.jsonl", chats)))
    module = runpy.run_path(str(tmp_path / "reward.py"))
    assert "by the score" in written.rule
    assert module["reward"]({"expected": [accepted], "rejected": []}, answer) == value


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "t.jsonl", scored_chats())
    (tmp_path / "reward.py").write_text("mine")
    with pytest.raises(CommandError, match="nothing is overwritten"):
        write_tasks(tmp_path, read_traces(file))
    assert not (tmp_path / "tasks.jsonl").exists()


def test_the_command_shows_the_traces_and_audits_the_reward(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "t.jsonl", scored_chats())
    result = CliRunner().invoke(app, ["traces", str(file), "--write", str(tmp_path / "task")])
    assert result.exit_code == 0, result.output
    for text in ("18 traces (OpenAI chats 18)", "score: 18 scores of 0 to 1", "12 tasks in", "fit to train on"):
        assert text in result.output

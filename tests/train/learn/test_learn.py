"""What is learned of traces is what a native run of the same conversations trains; the walk ends in a verdict."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from groundwire.adapters.tracing import LLMCall
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.adapters.tracing.trajectories import trajectories
from groundwire.train import evaluate, learn, read_traces
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.app import app
from groundwire.train.evaluation.run_reader import final_rollouts
from groundwire.train.learn.chats import Choice, prompt_changes, read_lines, write_chats
from groundwire.train.policy import STARTER
from groundwire.train.policy.pretrained.locate import read_tokenizer
from groundwire.train.sft.data.examples import encode
from groundwire.train.sft.data.load import turns_of
from groundwire.train.traces.tasks import write_tasks


def rows(calls: list[LLMCall]) -> set[tuple[Any, ...]]:
    """Ids and masks of the trajectories of calls."""
    return {(*row.prompt_ids, -1, *row.response_ids, -2, *row.loss_mask) for row in trajectories(calls)}


@pytest.fixture(scope="module", params=["langgraph", "openai-agents"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("native")
    result = evaluate(domain="spider", backend=request.param, val_tasks=16, output_dir=str(folder), quiet=True)
    return RunDir.open(result.run_dir)


@pytest.mark.parametrize("form", ["atif", "openai", "otlp"])
def test_ids_and_masks_are_those_of_a_native_run(native: RunDir, form: str, tmp_path: Path) -> None:
    exported, chats = tmp_path / "t.jsonl", tmp_path / "chats.jsonl"
    ran = CliRunner().invoke(app, ["export", str(native.path), "--format", form, "--output", str(exported)])
    assert ran.exit_code == 0, ran.output
    traces, tokenizer = read_traces(exported, mask=False), read_tokenizer(STARTER)
    tasks = write_tasks(tmp_path / "task", traces)
    choice = Choice(tasks.accepts, lambda _: "train")
    write_chats(chats, traces, choice, tokenizer, max_model_len=2048)
    learned = set()
    for chat in read_lines(chats):
        examples = encode(tokenizer, turns_of(chat))
        calls = [
            LLMCall(
                rollout_id="", attempt_id="", sequence=place, prompt_ids=one.prompt_ids, response_ids=one.response_ids,
                logprobs=[0.0] * len(one.response_ids),
            )
            for place, one in enumerate(examples)
        ]  # fmt: skip
        learned |= rows(calls)
    accepted = [rollout for rollout in final_rollouts(native) if (rollout.outcome.reward or 0) >= 0.5]
    trained = set().union(*(rows(rollout.trainable_calls) for rollout in accepted))
    assert len(trained) > 4
    assert learned == trained


SYSTEM = "You are a SQLite expert.\nAnswer with a query."
AGENT = """
import openai

def agent(question):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    reply = openai.OpenAI().chat.completions.create(model="gpt-5-mini", messages=messages, max_tokens=8)
    return reply.choices[0].message.content

def reward(task, answer):
    return float(answer == task["expected"][0])
"""


def chat(number: int, *, system: str = SYSTEM, score: float = 1.0, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": f"How many rows has the table {chr(97 + number % 26) * 3}{number}?"},
            {"role": "assistant", "content": f"SELECT {number}"},
        ],
        "created": 1_760_000_000 + number,
        "metadata": {"score": score, "agent": "counter"},
        "model": "strong",
        **fields,
    }


def write_traces(file: Path, chats: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in chats))
    return file


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["learn", *arguments])


def test_without_an_agent_the_replies_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chats = [chat(number, score=float(number % 5 > 0)) for number in range(40)]
    chats += [chat(50, model="router"), chat(51)]
    chats[-1]["messages"][-1]["content"] = "SELECT 1, " * 400
    write_traces(tmp_path / "t.jsonl", chats)
    result = run("t.jsonl", "--model", "starter", "--trained-model", "strong", "--max-model-len", "256", "sft.epochs=1")
    state = json.loads(next(tmp_path.glob("learned/*/learn.json")).read_text())
    assert result.exit_code == {"better": 0, "equal": 3, "worse": 3}.get(state["verdict"], 4), result.output
    assert "rule: by the score 'score', 0 to 1: accepted from 0.5 on" in result.output
    for line in (
        "8 of 42 calls (19%): traces that the rule does not accept, or says nothing of",
        "1 of 42 calls (2%): other agents or models than the trained ones",
        "1 of 42 calls (2%): longer than max_model_len, 256 tokens",
    ):
        assert f"left out: {line}" in result.output
    assert state["sft"]["logprob"] > state["before"]["logprob"]
    [folder] = tmp_path.glob("learned/*")
    assert (folder / state["model"] / "config.json").is_file()
    splits = [line["split"] for line in read_lines(folder / "chats.jsonl")]
    assert splits.count("validation") == state["sft"]["replies"] > 0


def test_with_an_agent_the_held_out_tasks_decide_and_a_stopped_walk_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_app.py").write_text(f"SYSTEM = {SYSTEM!r}\n{AGENT}")
    old = "You are a SQLite expert.\nBe brief."
    chats = [chat(number, system=old if number < 6 else SYSTEM) for number in range(24)]
    write_traces(tmp_path / "t.jsonl", [*chats, chat(60, score=0)])
    options = ("--agent", "my_app.py:agent", "--reward", "my_app.py:reward", "--model", "starter", "sft.epochs=1")
    options += ("--tasks-per-step", "19", "--group-size", "2", "--max-model-len", "512")
    result = run("t.jsonl", *options)
    [folder] = tmp_path.glob("learned/*")
    state = json.loads((folder / "learn.json").read_text())
    assert result.exit_code == 4, result.output
    assert state["verdict"] == "not enough data"
    assert set(state["comparisons"]) == {"sft - before", "grpo - sft", "grpo - before"}
    assert "6 of 24 conversations (25%) of counter have another prompt than the agent sends now" in state["prompts"][0]
    assert "checkpoints" in state["model"]
    settings = RunDir.open(folder / state["run"]).config()
    assert state["data"]["tasks"] == 19  # which two steps of 19 see twice
    assert [settings[name] for name in ("config", "steps", "learning_rate")] == ["tuned", 2, 1e-4]
    for name in ("verdict", "grpo"):
        del state[name]
    (folder / "learn.json").write_text(json.dumps(state))
    shutil.rmtree(folder / "evaluations/grpo")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("model/model.safetensors")}
    again = run("--resume", str(folder))
    assert again.exit_code == 4, again.output
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert json.loads((folder / "learn.json").read_text())["verdict"] == "not enough data"


@pytest.mark.parametrize(
    ("conversations", "now", "said"),
    [
        (1, 8, "were not compared with those that the agent sends now: 1 conversation and 8 calls now, it takes 4"),
        (8, 1, "were not compared with those that the agent sends now: 8 conversations and 1 call now, it takes 4"),
        (8, 8, ""),
    ],
)
def test_what_a_few_prompts_have_in_common_is_not_taken_for_the_prompt(
    tmp_path: Path, conversations: int, now: int, said: str
) -> None:
    tokenizer, file = read_tokenizer(str(STARTER)), tmp_path / "chats.jsonl"

    def prompt(number: int, table: str) -> list[dict[str, Any]]:
        asked = f"Schema:\nCREATE TABLE {table}_{number}\nQuestion {number}?"
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]

    lines = [
        {"messages": [*prompt(number, "then"), {"role": "assistant", "content": "1"}], "metadata": {"agent": "counter"}}
        for number in range(conversations)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ids = [
        encode(tokenizer, turns_of({"messages": [*prompt(number, "now"), {"role": "assistant", "content": "2"}]}))[0]
        for number in range(now)
    ]
    [*changes] = prompt_changes(file, tokenizer, [("counter", example.prompt_ids) for example in ids])
    assert len(changes) == bool(said)
    assert said in "".join(changes)


def test_calls_of_no_trained_agent_are_an_error_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_traces(tmp_path / "t.jsonl", [chat(number, score=number % 2) for number in range(6)])
    result = run("t.jsonl", "--model", "starter", "--trained-agent", "writer")
    assert result.exit_code == 2
    assert "no call of the traces is left to learn" in result.output
    assert "3 other agents or models than the trained ones" in result.output


@pytest.mark.parametrize(
    ("text", "reason"), [("# My notes\n", "1 files that are neither JSON nor OTLP"), ("", "1 files that are empty")]
)
def test_a_file_without_traces_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text(text)
    result = run("notes.md", "--model", "starter")
    assert result.exit_code == 2
    assert f"error: the traces have no task: {reason}" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"notes.md"}


@pytest.mark.parametrize(
    "options",
    [
        ("--agent", "my_agent.py:agnt"), ("--reward", "my_reward.py:rewrd"), ("--reward", "no_such"),
        ("--model", "no/such/folder"), ("--tasks", "missing.jsonl"), ("--trained-agent", "(")
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_said_before_the_traces_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text("def agent(question):\n    return ''\n")
    (tmp_path / "my_reward.py").write_text("def reward(task, answer):\n    return 0.0\n")
    (tmp_path / "notes.md").write_text("# They cannot be read\n")
    before = set(tmp_path.iterdir())
    result = run("notes.md", "--model", "starter", *options)
    assert result.exit_code == 2
    assert options[1].split(":")[-1] in result.output
    assert "no task" not in result.output
    assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before


def test_objects_of_a_script_and_tasks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_traces(tmp_path / "t.jsonl", [chat(number, score=float(number != 3)) for number in range(12)])

    def answer(question: str) -> str:
        messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        reply = openai.OpenAI().chat.completions.create(model="any", messages=messages, max_tokens=8)
        return str(reply.choices[0].message.content)

    questions = [chat(number)["messages"][1]["content"] for number in range(8)]
    tasks = [{"question": text, "split": "validation" if text in questions[4:] else "train"} for text in questions]
    result = learn(
        tmp_path / "t.jsonl", agent=answer, tasks=tasks, reward=lambda answer: float("SELECT" in answer), rl=False,
        model="starter", max_model_len=512, sft={"epochs": 1.0}, quiet=True,
    )  # fmt: skip
    assert result.verdict in ("better", "worse", "equal", "not enough data")
    assert result.figures["comparisons"]["sft - before"]["questions"] == 4
    splits = [line["split"] for line in read_lines(result.folder / "chats.jsonl")]
    assert splits == ["train"] * 3 + ["validation"] * 4 + ["train"] * 4  # the fourth was not accepted


async def test_the_right_answers_of_a_teacher_without_log_probabilities_are_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_app.py").write_text(f"SYSTEM = {SYSTEM!r}\n{AGENT}")
    write_traces(tmp_path / "t.jsonl", [*(chat(number) for number in range(24)), chat(60, score=0)])

    def reply(request: dict[str, Any]) -> str:
        number = re.search(r"(\d+)\?$", request["messages"][-1]["content"])
        return f"SELECT {number[1]}" if number and int(number[1]) % 3 else "nothing"

    async with ScriptedPolicyServer(reply, model="strong") as server:
        result = await asyncio.to_thread(
            learn, "t.jsonl", agent="my_app.py:agent", reward="my_app.py:reward", rl=False, model="starter",
            teacher=server.base_url, teacher_model="strong", max_model_len=512, sft={"epochs": 1.0}, quiet=True,
        )  # fmt: skip
        asked = Counter(request["messages"][-1]["content"] for request in server.requests if "messages" in request)
    assert result.figures["teacher"] == "best of 4"
    tasks = [line for line in read_lines(result.folder / "task/tasks.jsonl") if line["split"] == "train"]
    learned = [line["messages"] for line in read_lines(result.folder / "teacher/best.jsonl")]
    right = [task["question"] for task in tasks if int(task["expected"][0].removeprefix("SELECT ")) % 3]
    assert sorted(messages[1]["content"] for messages in learned) == sorted(right)
    assert all(messages[-1]["content"] == reply({"messages": messages[:2]}) for messages in learned)
    assert result.figures["best_of_n"] == {"answered": len(right), "tasks": len(tasks)}
    assert {asked[question] for question in right} == {1}
    assert {asked[task["question"]] for task in tasks if task["question"] not in right} == {4}
    assert set(result.figures["comparisons"]) == {"sft - before", "best - sft", "best - before"}
    assert "teacher/sft" in result.figures["model"]

"""``fit`` and ``evaluate`` from a script: the run of the command line, with objects in place of names."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agents
import own_agents
import pandas as pd
import pytest
from programs import run as run_program

from groundwire import domains, rewards
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.domains import DataError
from groundwire.rewards import UnusableRewardError, judges_sql, reward_function
from groundwire.tools.errors import UserError
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import TEXT
from groundwire.train import evaluate, fit
from groundwire.train.api.results import training_result
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.rollouts.agent_view import answers_of
from groundwire.train.store.rows import COLUMNS

# What an author writes: no line of the agent is about training. The loop that is running is that of a notebook.
SCRIPT = """
import asyncio, json, sys
import openai
from groundwire.train import evaluate, fit
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import TEXT

client = openai.AsyncOpenAI(api_key="sk-of-the-author")
seen = set()

async def agent(task):
    seen.update(task)
    message = {"role": "user", "content": f"{task.question} {task['hint']}"}
    reply = await client.chat.completions.create(model="gpt-5-mini", temperature=0.2, messages=[message])
    return reply.choices[0].message.content

def reward(task, answer):
    return {"short": 0.5 * (len(answer) < 40), "metric/gold": task["gold"]}

async def graded(task, answer, steps):
    return float(isinstance(steps, list))

async def notebook():
    data = {"tasks": "tasks.jsonl", "validation": "held_out.jsonl", "quiet": True}
    settings = {"model": "starter", "steps": 1, "tasks_per_step": 2, "group_size": 2, "n_runners": 8, "max_tokens": 12}
    result = fit(agent, reward=reward, **data, **settings)
    print(result)
    again = fit(agent, reward=reward, **data, resume=result.run_dir)
    assert again == result
    evaluation = evaluate(agent, "held_out.jsonl", graded, model=result.run_dir, samples=2, quiet=True)
    json.dump({
        "seen": sorted(seen), "frame": result.rollouts.shape, "components": result.rollouts.reward_components[0],
        "model": evaluation.run_dir.joinpath("config.json").read_text(), "evaluated": evaluation.accuracy.n,
        "accuracy": evaluation.accuracy.value, "difference": result.compare()["difference"],
    }, open("written.json", "w"))

asyncio.run(notebook())
"""


@pytest.fixture(scope="module")
def fitted(shared_folder: Callable[..., Path]) -> Path:
    """The folder in which the script has run."""

    def fill(folder: Path) -> None:
        rows = [{"question": f"How many are older than {n}?", "hint": "Be brief.", "gold": n} for n in range(4)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        held_out = [{**row, "question": f"How many are younger than {row['gold']}?"} for row in rows[:3]]
        (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
        (folder / "script.py").write_text(SCRIPT)
        environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
        done = run_program("script.py", folder=folder, environment=environment)
        assert done.returncode == 0, done.stderr
        (folder / "printed.txt").write_text(done.stdout)
        (folder / "errors.txt").write_text(done.stderr)

    return shared_folder("fitted", fill)


def test_an_agent_of_a_script_is_trained_while_an_event_loop_runs(fitted: Path) -> None:
    result = training_result(RunDir.open(fitted / "runs" / "latest"))
    assert result.before is not None
    assert (result.before.n, result.after.n) == (3, 3)
    assert result.checkpoint == result.run_dir / "checkpoints" / "step-00001"
    assert str(result) == next(iter((fitted / "printed.txt").read_text().splitlines()))
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert result.change is not None
    assert summary["validation"]["difference_ci95"] == list(result.change.ci95)
    assert summary["validation_sampled"]["paired_questions"] == 3
    low, high = result.after.ci95
    assert low <= (result.after.value or 0.0) <= high
    assert {path.name for path in result.run_dir.iterdir()} >= {"summary.json", "curve.png", "rollouts.parquet"}
    errors = (fitted / "errors.txt").read_text().splitlines()
    assert [line for line in errors if not re.match("note: |an agent asks for temperature=", line)] == []


def test_a_run_in_which_no_rewards_differed_says_that_nothing_was_trained(fitted: Path, tmp_path: Path) -> None:
    found = RunDir.open(fitted / "runs" / "latest")
    assert training_result(found).untrained == ""
    shutil.copytree(found.path, tmp_path / "run")
    run = RunDir.open(tmp_path / "run")
    line = {name: value for name, value in run.metrics()[-1].items() if name != "learning_rate"}
    run.write_metrics([*run.metrics()[:-1], {**line, "groups_used": 0}])
    assert str(training_result(run)).startswith("nothing was trained: in no group of 1 step(s) did the rewards")


def test_the_rollouts_are_a_data_frame_and_an_agent_sees_no_gold(fitted: Path) -> None:
    written = json.loads((fitted / "written.json").read_text())
    assert written["seen"] == ["database", "hint", "id", "question"]
    rollouts, _ = RunDir.open(fitted / "runs" / "latest").rollouts()
    assert written["frame"] == [len(rollouts), len(COLUMNS)]
    assert written["components"].keys() == {"short", "metric/gold"}


def test_the_model_of_a_script_is_evaluated_with_its_settings(fitted: Path) -> None:
    written = json.loads((fitted / "written.json").read_text())
    config = json.loads(written["model"])
    assert config["model"].endswith("checkpoints/step-00001")
    assert (config["max_tokens"], config["n_runners"], config["reward"]) == (12, 8, "__main__:graded")
    assert (written["evaluated"], written["accuracy"]) == (6, 1.0)


def test_a_run_with_objects_needs_them_again(fitted: Path) -> None:
    run = str(fitted / "runs" / "latest")
    with pytest.raises(UserError, match="started by a script, with its own agent, reward, tasks: give --agent"):
        evaluate(model=run)
    with pytest.raises(UserError, match=re.escape("continue it there, with fit(..., resume=")):
        fit(resume=run)


def test_the_command_says_how_to_continue_a_scripts_run(fitted: Path) -> None:
    done = run_program("-m", "train.run", "--resume", str(fitted / "runs" / "latest"), timeout=600)
    assert done.returncode == 2
    assert "continue it there, with fit(..., resume=" in done.stderr


def test_ctrl_c_is_a_keyboard_interrupt_that_says_how_to_continue(tmp_path: Path) -> None:
    def stops(task: Any) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
        return ""

    settings: dict[str, Any] = {"model": "starter", "quiet": True, "output_dir": tmp_path, "n_runners": 1}
    with pytest.raises(KeyboardInterrupt, match="stopped; no step is complete, so nothing was written"):
        fit(stops, TASKS, always, **settings)
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        evaluate(stops, TASKS, always, **settings)
    assert not list(tmp_path.iterdir())


async def test_graphs_and_sdk_agents_are_given_as_objects(tmp_path: Path) -> None:
    sdk_agent = agents.Agent(name="helper", instructions="Answer.", model="gpt-5-mini")
    async with ScriptedPolicyServer(replies=lambda _: "yes") as policy:
        given = {"model": policy.model, "base_url": policy.base_url, "output_dir": tmp_path, "quiet": True}
        for agent, settings, answer in (
            (own_agents.graph, {"agent_output": lambda state: state["query"]}, "yes"),
            (own_agents.graph, {"agent_output": lambda state: state["critique"] + "!"}, "yes!"),
            (sdk_agent, {"agent_input": lambda task: f"{task.question} Why?"}, "yes"),
        ):
            result = await asyncio.to_thread(evaluate, agent, TASKS[:2], always, **given, **settings)
            assert list(result.rollouts["answer"]) == [answer] * 2
            assert result.accuracy.value == 1.0
    assert policy.requests[-1]["messages"][-1]["content"].endswith("? Why?")


# -- arguments

TASKS = [{"question": f"Question {number}?", "answer": "yes"} for number in range(10)]


def always(task: Any, answer: str) -> float:
    return 1.0


def test_wrong_arguments_are_one_sentence(tmp_path: Path) -> None:
    async def agent(task: Any) -> str:
        return "yes"

    for arguments, settings, message in (
        ((agent, TASKS), {}, "the tasks have no reward"),
        ((agent, TASKS, "exact"), {}, "unknown reward 'exact'"),
        ((agent, TASKS, lambda task: 1.0), {}, "none gets answer or steps: write def reward(task, answer)"),
        ((agent, "spidre"), {}, "unknown domain 'spidre'"),
        ((agent, "no/tasks.jsonl", always), {}, "no/tasks.jsonl does not exist"),
        ((agent, 7, always), {}, "tasks is 7: give a list of dicts"),
        ((agent, TASKS[:1], always), {}, "1 tasks, of which validation=0.2 is held out"),
        ((agent, [{"text": "?"}] * 4, always), {}, "tasks, row 0: there is no column 'question'; its columns are text"),
        ((7, TASKS, always), {}, "give an agent of a framework"),
        (("no_such:agent", TASKS, always), {}, "there is no module 'no_such'"),
        ((agent, "spider"), {"validation": TASKS}, "a domain has its own validation tasks"),
        ((agent, TASKS, always), {"domain": "spider"}, "tasks are given, and domain 'spider': give one of them"),
        ((agent, TASKS, always), {"backend": "mcp"}, "backend 'mcp' runs its own agent"),
        ((agent, TASKS, always), {"backend": "langgraph"}, "is no agent of langgraph but of function"),
        ((agent, TASKS, always), {"stepz": 1}, "unknown setting 'stepz'; did you mean steps"),
        ((agent, TASKS, always), {"steps": "many"}, "steps is 'many'; it must be a whole number"),
        ((agent, TASKS, always), {"trainer": "verl", "config": "qwen"}, "trainer is verl, so agents run in other"),
        ((agent, TASKS, always), {"runner_processes": 2}, "runner_processes is 2, so agents run in other processes"),
        ((agent, TASKS, always), {"model": tmp_path}, "it has no config.json"),
    ):
        with pytest.raises(UserError) as raised:
            fit(*arguments, output_dir=tmp_path, quiet=True, **settings)
        assert message in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_the_same_share_of_the_tasks_is_held_out_each_time() -> None:
    first, second = (domains.task_list(TASKS, validation=0.3).load() for _ in range(2))
    assert first == second
    assert (len(first.train), len(first.validation)) == (7, 3)
    assert {task["id"] for task in (*first.train, *first.validation)} == {f"tasks-{number}" for number in range(10)}
    both = domains.task_list(TASKS, validation=TASKS, allow_shared=True).load()
    assert (len(both.train), len(both.validation)) == (10, 10)
    with pytest.raises(DataError, match="1 ids stand for more than one task"):
        domains.task_list([{"id": 1, "question": "?"}] * 4, validation=TASKS)


def test_tasks_come_from_data_frames_and_files(tmp_path: Path) -> None:
    frame = pd.DataFrame([{"question": "a?", "n": 1, "note": None}, {"question": "b?", "n": 2, "note": "x"}])
    frame.to_parquet(tmp_path / "tasks.parquet")
    frame.to_json(tmp_path / "tasks.jsonl", orient="records", lines=True)
    for tasks in (frame, tmp_path / "tasks.parquet", str(tmp_path / "tasks.jsonl")):
        rows = domains.task_list(tasks, validation=TASKS).load().train
        assert [{**row, "id": ""} for row in rows] == [
            {"id": "", "question": "a?", "n": 1, "note": None},
            {"id": "", "question": "b?", "n": 2, "note": "x"},
        ]
    assert len(domains.task_list({"question": f"{n}?"} for n in range(3)).load().train) == 2
    with pytest.raises(DataError, match=r"Conversion failed for column n with type object.; make each column one type"):
        domains.task_list(pd.DataFrame({"question": ["a?", "b?"], "n": [1, "two"]}))


def test_a_column_does_not_make_answers_sql_and_a_reward_of_queries_does(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "shop.sqlite").close()
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"question": "?", "db_path": "shop.sqlite", "query": "SELECT 1"}) + "\n")
    domain = domains.task_list(file, validation=file, allow_shared=True)
    [task] = domain.load().train
    assert domain.database(task) == str(tmp_path / "shop.sqlite")
    own = reward_function(lambda task, answer: float(answer in task["query"]))
    assert answers_of(domain, own) is answers_of(domain, rewards.get("executes")) is TEXT
    sums = ("spider_exec_match", "0.9*bird_soft_f1+0.1*executes")
    assert {answers_of(domain, reward) for reward in (*map(rewards.get, sums), judges_sql(own))} == {SQL}
    assert domain.database(TASKS[0]) == ""


def test_a_reward_may_be_sync_or_async_with_two_or_three_parameters() -> None:
    async def waits(task: Any, answer: str) -> float:
        return float(answer == task["answer"])

    def steps(task: Any, answer: str, steps: Any = ()) -> dict[str, float]:
        return {"steps": len(steps)}

    class Grader:
        def __call__(self, task: Any, answer: str) -> Any:
            return waits(task, answer)

    async def scores() -> list[Any]:
        given = {"answer": "a"}, "a", [{"kind": "tool"}]
        return [await reward_function(each)(*given) for each in (waits, steps, Grader(), lambda task, answer: 3)]

    assert asyncio.run(scores()) == [1.0, {"steps": 1}, 1.0, 3]
    for wrong in (int, "always"):
        with pytest.raises(UnusableRewardError, match="is no function"):
            reward_function(wrong)  # type: ignore[arg-type]

    def ends(task: Any, answer: str) -> float:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(reward_function(ends)({}, "", []))


def test_the_functions_are_imported_at_once_and_keep_their_names() -> None:
    code = (
        "import sys, groundwire.train; from groundwire.train import evaluate, fit, look, report, serve, sft, why\n"
        "heavy = {'torch', 'typer', 'pydantic', 'agentlightning', 'pandas'} & sys.modules.keys()\n"
        "import groundwire.train.evaluate\n"
        "import groundwire.train.report.build, groundwire.train.sft.run, groundwire.train.why\n"
        "functions = [groundwire.train.evaluate, groundwire.train.report, groundwire.train.sft, groundwire.train.why]\n"
        "print(heavy, functions == [evaluate, report, sft, why], sys.modules['groundwire.train.why'].app is not None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "set() True True\n", done.stderr

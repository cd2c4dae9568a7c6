"""An agent sees the columns of its task that are no gold answer: neither named like one, nor read by the reward."""

from __future__ import annotations

import asyncio
import json
import logging
import operator
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from groundwire import rewards
from groundwire.adapters import Question
from groundwire.adapters.agents.drivers import agent_task
from groundwire.adapters.tracing import LLMCall
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.domains import DataError, gold_answer, task_list, visible_columns
from groundwire.rewards import JudgeSettings, names_read, reward_function, with_time_limit
from groundwire.train import evaluate
from groundwire.train.config.run_config import AgentSettings, RunConfig
from groundwire.train.evaluation.notes import gold_in_prompts
from groundwire.train.job.job import ModelEndpoint, Objects
from groundwire.train.job.prepare import prepare
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.store.rollout import Rollout

LEVEL, WEIGHTS = "level", {"zone": 1.0}


def _visible(**columns: Any) -> dict[str, Any]:
    domain = task_list([{"question": "one", **columns}, {"question": "two", **columns}])
    seen = visible_columns(domain, domain.load().train[0])
    return {name: value for name, value in seen.items() if name not in ("id", "question")}


@pytest.mark.parametrize(
    "name",
    [
        "ground_truth",
        "Answer",
        "Expected Output",
        "goldSQL",
        "correct-answer",
        "labels",
        "final_answer",
        "target_text",
        "SOLUTION",
        "reference",
        "sql_query",
        "reward_model",
        "completion",
        "response",
        "outputs",
    ],
)
def test_a_column_with_a_word_for_a_gold_is_hidden(name: str) -> None:
    assert _visible(**{name: "42", "city": "Bonn"}) == {"city": "Bonn"}


def test_a_column_that_only_resembles_such_a_word_is_shown() -> None:
    columns = {
        "preference": 1,
        "resolution": 2,
        "sqlite_version": 3,
        "output_format": 4,
        "query": 5,
        "database": "a.db",
    }
    assert _visible(**columns) == columns


def test_a_nested_column_loses_its_gold_or_is_hidden_where_nothing_is_left() -> None:
    nested = {"answer": "42", "index": 3, "choices": [{"text": "a", "label": 1}, {"text": "b", "label": 0}]}
    left = {"index": 3, "choices": [{"text": "a"}, {"text": "b"}]}
    assert _visible(info=nested, only={"gold": 1}, many=[{"target": 1}]) == {"info": left}
    assert json.loads(_visible(info=json.dumps(nested))["info"]) == left  # as a CSV file has it


def _helped(task: Any, answer: str) -> float:
    return float(operator.itemgetter("zone")(task) in answer)


class _Grader:
    def __init__(self, column: str) -> None:
        self.column = column

    def __call__(self, task: Any, answer: str) -> float:
        return float(task[self.column] in answer)


def _named(answer: str, zone: str) -> float:
    return float(zone in answer)


def _with_constant(task: Any, answer: str) -> float:
    return float(answer == task.get(LEVEL, ""))


async def _asks(task: Any, answer: str, steps: Any) -> float:
    messages = [{"role": "user", "content": f"{task['zone']}, {answer}"}]
    return float(len(json.dumps(messages, indent=1)))


@pytest.mark.parametrize(
    ("reward", "column"),
    [
        (lambda task, answer: 2 * _helped(task, answer), "zone"),
        (lambda task, answer, key="zone": float(task[key] == answer), "zone"),
        (lambda task, answer: float(float(answer) == task["info"]["zone"]), "zone"),
        (_Grader("zone"), "zone"),
        (partial(_Grader.__call__, _Grader("zone")), "zone"),
        (reward_function(_with_constant), "level"),
        (lambda task, answer: sum(weight * (task[name] in answer) for name, weight in WEIGHTS.items()), "zone"),
        (reward_function(lru_cache(_with_constant)), "level"),
        (lambda task, answer: float(SimpleNamespace(**task).zone == answer), "zone"),
        (lambda task, answer: float("as {zone}".format(**task) == answer), "zone"),
        (_asks, "zone"),
        (_named, "zone"),
        (reward_function(lambda completions, zones: [float(zones[0] in completions[0])]), "zone"),
        (reward_function(lambda completions, **columns: [float(columns["zone"][0] in completions[0])]), "zone"),
    ],
)
def test_a_column_that_the_rewards_code_names_is_read_by_it(reward: Any, column: str) -> None:
    names = names_read(reward)
    assert column in names
    assert not {"role", "content", "indent", "answer", "steps", "completions"} & names  # what it writes, arguments


ROWS = [{"zone": "a", "city": "Bonn"}]


def test_rows_of_data_that_a_reward_holds_name_no_columns() -> None:
    held = {"one": {"zone": "a", "city": "Bonn"}}
    names = names_read(lambda task, answer: float(ROWS[int(task["number"])]["zone"] == held["one"]["zone"] == answer))
    assert {"number", "zone"} <= names
    assert "city" not in names


def test_a_registered_reward_and_a_sum_read_what_their_code_names() -> None:
    assert {"query", "db_path"} <= names_read(rewards.get("0.9*spider_exec_match+0.1*executes"))
    judged = names_read(rewards.get("rule_judge_hybrid", judge=JudgeSettings(model="paid")))
    assert {"question", "answer"} <= judged
    assert not {"paid", "input", "kind"} & judged  # of its settings and of an agent's steps
    own = reward_function(lambda task, answer: float(answer == task["zone"]))
    assert names_read(with_time_limit(own, 5.0)) == {"zone"}  # nothing of what it is wrapped in


def test_a_column_that_the_reward_reads_is_hidden_from_the_first_rollout_on(tmp_path: Any) -> None:
    tasks = [{"question": f"{n}?", "zone": str(n), "city": "Bonn", "info": {"deep": "7", "page": n}} for n in range(4)]
    seen = list[dict[str, Any]]()

    def agent(task: Any) -> str:

        seen.append(dict(task))
        message: Any = {"role": "user", "content": task["question"]}
        return str(openai.OpenAI(api_key="none").chat.completions.create(model="m", messages=[message]))

    def reward(task: Any, answer: str) -> float:
        return float(task["zone"] in answer and task["info"]["deep"] in answer)

    async def run() -> None:
        async with ScriptedPolicyServer(replies=lambda _: "fine") as server:
            settings: dict[str, Any] = {"model": "m", "base_url": server.base_url, "output_dir": tmp_path}
            await asyncio.to_thread(partial(evaluate, agent, tasks, reward, quiet=True, **settings))

    asyncio.run(run())
    assert [sorted(task) for task in seen] == [["city", "database", "id", "info", "question"]] * 4
    assert sorted(task["info"]["page"] for task in seen) == [0, 1, 2, 3]
    assert all("deep" not in task["info"] for task in seen)


def test_a_column_whose_name_is_computed_is_hidden_once_it_was_read_and_said(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [{"id": "1", "question": "one", "zone": {"inner": "a", "page": 1}}]

    async def reward(task: Any, answer: str, steps: Any) -> float:
        return float(task["zo" + answer]["in" + answer + "r"] == "a")

    view = AgentView.of(task_list(tasks * 1, validation=[{"question": "two"}]), reward)
    assert view.question(tasks[0], "").columns["zone"] == {"inner": "a", "page": 1}
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(view.score(reward, tasks[0], "ne", [])) == 1.0
        assert asyncio.run(view.score(reward, tasks[0], "ne", [])) == 1.0
    assert view.question(tasks[0], "").columns["zone"] == {"page": 1}
    [record] = caplog.records
    assert "the reward has read inner and zone, which agents saw until now" in record.getMessage()


def test_a_setting_shows_what_the_agent_needs_and_a_name_that_no_task_has_is_refused() -> None:
    tasks = [{"question": q, "label": "a", "info": {"target": 1, "gold": 2}, "answer": "x"} for q in "ab"]
    domain = task_list(tasks)

    def line(agent_columns: Any) -> str:
        config = RunConfig(backend="custom", agent="app:agent", agent_columns=agent_columns)
        objects = Objects(
            agent={"agent": lambda task: ""}, domain=domain, reward=reward_function(lambda task, answer: 1.0)
        )
        notes = prepare(config, objects=objects, endpoint=ModelEndpoint("http://h/v1")).notes
        [found] = [note for note in notes if note.startswith("the agent sees: ")]
        return found

    assert line("") == "the agent sees: question; hidden: label, info, answer"
    assert line(["label", "info.target"]) == "the agent sees: question, label, info; hidden: info.gold, answer"
    with pytest.raises(DataError, match="agent_columns names 'labels', and no task has it; they have answer, id, "):
        line("labels")
    assert AgentSettings(agent_columns=["a", "b"]) == AgentSettings(agent_columns="a, b")


def test_a_reward_that_reads_the_question_hides_no_nested_question() -> None:
    task = {"id": "1", "question": "one", "info": {"id": 7, "question": "the first of two", "zone": "a"}}
    domain = task_list([task], validation=[{"question": "two"}])
    assert visible_columns(domain, task, read={"id", "question", "zone"})["info"] == {
        "id": 7,
        "question": "the first of two",
    }


def test_the_gold_answer_for_people_is_what_the_reward_reads_else_the_likeliest_name() -> None:
    assert (
        gold_answer({"question": "?", "label": "easy", "reward_model": {"style": "rule", "ground_truth": "7"}}) == "7"
    )
    assert gold_answer({"question": "?", "label": "easy", "zone": "7"}, read={"zone"}) == "7"
    assert gold_answer({"question": "?", "sql": "SELECT 1", "answer": ["one", "two"]}) == "one"
    assert gold_answer({"question": "?", "city": "Bonn"}) == ""


def _leaks(golds: list[str], prompt: Any, *, copies: int = 1, **columns: Any) -> str:
    """The warning about rollouts whose first prompts are ``prompt`` of the task; the second prompts have each gold."""
    tasks = [{"id": str(n), "question": f"Number {n}?", "expected": gold, **columns} for n, gold in enumerate(golds)]
    view = AgentView.of(task_list(tasks, validation=[{"question": "another"}]), _asks)

    def result(task: Any) -> Rollout:
        texts = [prompt(task), f"tool: {task['expected']}"]
        calls = [
            LLMCall(rollout_id="r", attempt_id="a", sequence=n, messages_json=json.dumps([{"content": text}]))
            for n, text in enumerate(texts)
        ]
        return Rollout(task=task, calls=calls[::-1])

    return gold_in_prompts([result(task) for task in tasks for _ in range(copies)], view)


def test_a_gold_in_first_prompts_is_a_warning_with_its_share() -> None:
    warning = _leaks(["Paris", "Rome", "Oslo", "Bern"], lambda task: f"Hint: {task['expected'].upper()}!")
    assert warning.startswith(
        "the gold answer is in the first prompt of 4 of 4 rollouts (100%; that of another task in 0)"
    )
    half = _leaks(["SELECT count(*)\nFROM t", "SELECT a"], lambda t: "Use SELECT count(*) FROM t")
    assert half == ""  # of one gold as often as of another
    page = _leaks(["Lima, in Peru", "La Paz"], lambda task: f"{task['id']} {task['page']}", page="Lima, in Peru")
    assert page == ""
    own = _leaks(["the capital city"], lambda task: task["page"], page="It is the capital city.")
    assert "It is in page, which the agent is given." in own


@pytest.mark.parametrize(
    ("golds", "prompt"),
    [
        (["yes", "no"] * 8, "Answer yes or no."),
        (["positive", "negative", "neutral"] * 8, "Is it positive, negative or neutral?"),
        ([str(n) for n in range(10)], "1 + 1 = 2"),
        (["1"] * 50, "Step 1"),
        (["Paris", "Rome"], "no gold"),
        (["art"] * 20, "party start"),
    ],
)
def test_golds_that_are_found_by_chance_are_no_warning(golds: list[str], prompt: str) -> None:
    assert _leaks(golds, lambda task: prompt) == ""


def test_a_gold_that_is_in_its_question_is_no_warning() -> None:
    assert _leaks(["number 0", "number 1", "number 2"], lambda task: task["question"]) == ""
    assert _leaks(["secret one", "secret two"], lambda task: task["expected"]) != ""


def test_an_agent_that_asks_for_a_hidden_column_reads_what_to_do() -> None:
    question = Question(id="1", text="one", database="", columns={"city": "Bonn"})
    message = "the agent sees no 'label' but city, id, question, database; agent_columns names what it needs"
    with pytest.raises(KeyError, match=message):
        agent_task(question)["label"]
    assert agent_task(question).get("label") is None


def test_an_evaluation_says_once_what_agents_see_and_that_prompts_have_golds(
    tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = [{"question": f"{n}?", "expected": f"code {n}{n}{n}", "page": f"It is code {n}{n}{n}."} for n in range(4)]

    async def agent(task: Any) -> str:
        async with openai.AsyncOpenAI(api_key="none") as client:
            message: Any = {"role": "user", "content": f"{task['question']} {task['page']}"}
            return str(await client.chat.completions.create(model="m", messages=[message]))

    async def run() -> None:
        async with ScriptedPolicyServer(replies=lambda _: "fine") as server:
            settings: dict[str, Any] = {"model": "m", "base_url": server.base_url, "output_dir": tmp_path}
            reward = lambda task, answer: float(task["expected"] in answer)  # noqa: E731
            await asyncio.to_thread(partial(evaluate, agent, tasks, reward, **settings))

    asyncio.run(run())
    shown = " ".join("".join(capfd.readouterr()).split())
    assert shown.count("the agent sees: question, page; hidden: expected") == shown.count("the agent sees") == 1
    assert "the gold answer is in the first prompt of 4 of 4 rollouts (100%; that of another task in 0)" in shown
    assert "It is in page, which the agent is given." in shown

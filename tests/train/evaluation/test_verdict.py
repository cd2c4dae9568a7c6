"""The verdict on an agent's first rollouts: what keeps training from working is said before it, with exit code 1."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted_policy import scripted_policy
from typer.testing import CliRunner

from groundwire.adapters.tracing.scripted_server import Reply
from groundwire.tools.errors import UserError
from groundwire.train import fit, run
from groundwire.train.api.evaluation import run_dev
from groundwire.train.api.training import make_job
from groundwire.train.evaluation.verdict import equal_answers
from groundwire.train.job.job import ModelEndpoint, parse_arguments
from groundwire.train.store.rollout import Outcome, Rollout

AGENTS = """
import openai

client = openai.OpenAI(api_key="sk-of-the-author", base_url="http://127.0.0.1:9/v1", max_retries=0)
history = []

def call(*messages, **more):
    return client.chat.completions.create(model="gpt-5-mini", messages=list(messages), **more).choices[0].message

def asked(text):
    return {"role": "user", "content": text}

def good(question: str):
    return call({"role": "system", "content": "Be brief."}, asked(f"The question: {question}")).content

def silent(question: str):
    return question

def mostly_silent(question: str):
    return good(question) if "2" in question else question

def silent_or_fails(question: str):
    return fails_first(question) if "2" in question else question

def fails_first(question: str):
    raise KeyError("state")

def fails_sometimes(question: str):
    if "2" in question:
        raise KeyError("state")
    return good(question)

def own_question(question: str):
    return call(asked("How is the weather?")).content + question

def other_words(question: str):
    return call(asked(str(sum(map(ord, question))))).content

def report(question: str):
    call(asked(question))
    return "The report."

def remembers(question: str):
    history.append(asked(question))
    reply = call(*history)
    history.append({"role": "assistant", "content": reply.content})
    return reply.content

def searches(question: str):
    try:
        call(asked(question), tools=[{"type": "function", "function": {"name": "search"}}])
    except openai.BadRequestError:
        pass
    return good(question)

def uses_tool(question: str, error="Error: SEARCH_KEY is not set"):
    messages = [asked(question)]
    reply = call(*messages, tools=[{"type": "function", "function": {"name": "search"}}])
    for tool_call in reply.tool_calls:
        arguments = tool_call.function.arguments
        result = {"role": "tool", "tool_call_id": tool_call.id, "content": error.replace("ARGUMENTS", arguments)}
        messages += [reply.model_dump(exclude_none=True), result]
    return call(*messages).content

def uses_tool_wrongly(question: str):
    return uses_tool(question, "Error: no such table in ARGUMENTS")

def loops(question: str):
    class UsageLimitExceeded(Exception): ...
    call(asked(question))
    raise UsageLimitExceeded("the next request would exceed the request_limit of 50")

def by_number(task, answer):
    return float("2" in task["question"])
"""
NAMES: dict[str, Any] = {}
exec(AGENTS, NAMES)


def echo(body: dict[str, Any]) -> Reply | str:
    """Another reply to each question; a tool is called first."""
    text = str(body["messages"][-1]["content"])
    if body.get("tools") and body["messages"][-1]["role"] == "user":
        function = {"name": "search", "arguments": json.dumps({"q": text})}
        return Reply(tool_calls=[{"id": f"call_{abs(hash(text))}", "type": "function", "function": function}])
    return f"This is the long answer to {text}"


def refuses_tools(body: dict[str, Any]) -> Reply | str:
    return Reply(text="tools of the type 12 are not served", status=400) if body.get("tools") else echo(body)


HELD_OUT = [{"question": f"Which singer is number {number} of all singers?", "gold": "x"} for number in range(6)]
TASKS = [{"question": f"Which song is number {number} of all songs?", "gold": "x"} for number in range(4)]


def length(task: Any, answer: str) -> float:
    return float(len(answer) % 7 + ("3" in answer))


def zero(task: Any, answer: str) -> float:
    return 0.0


@pytest.fixture(params=["object", "name"])
def agent_named(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Any]:
    """Gives an agent as an object, or by its name."""
    (tmp_path / "wild_agents.py").write_text(AGENTS)
    return NAMES.__getitem__ if request.param == "object" else lambda name: f"{tmp_path}/wild_agents.py:{name}"


def dev(agent: Any, replies: Any = echo, reward: Any = length, **settings: Any) -> tuple[bool, str]:
    """Whether training can work, and what ``--dev`` prints."""
    out = io.StringIO()
    with scripted_policy(replies, model="big") as url:
        given, objects = parse_arguments(agent, TASKS, reward, {"model": "big", **settings}, validation=HELD_OUT)
        job = make_job(given, objects=objects, dev=True, endpoint=ModelEndpoint(url, None))
        return not run_dev(job, Console(file=out, width=200))[1].problems, out.getvalue()


def test_nothing_is_in_the_way_of_an_agent_that_asks_its_question(agent_named: Any) -> None:
    works, printed = dev(agent_named("good"))
    assert works
    assert "6 rollouts, 6 calls, mean reward 4.167\n" in printed
    assert printed.endswith("\nverdict: nothing is in the way of training\n")
    assert "not trained" not in printed  # nothing is trained at an endpoint


@pytest.mark.parametrize(
    ("name", "replies", "problem"),
    [
        ("silent", echo, "none of 6 validation rollouts made an LLM call: "),
        ("mostly_silent", echo, "5 of 6 validation rollouts made no LLM call: they are judged, and train nothing. "),
        ("silent_or_fails", echo, "none of 6 validation rollouts made an LLM call: "),
        ("fails_first", echo, "none of 6 validation rollouts could be judged; the first failed of setup: KeyError: "),
        ("own_question", echo, "is in no prompt of 6 of 6 validation rollouts, and all begin with the same prompt: "),
        (
            "searches",
            refuses_tools,
            "6 of 12 LLM calls were refused: 6 with 400: tools of the type 12 are not served. ",
        ),
        (
            "uses_tool",
            echo,
            "every result of the tool search is an error, 6 of 6: Error: SEARCH_KEY is not set. Repair",
        ),
    ],
)
def test_what_keeps_training_from_working_is_said_once(name: str, replies: Any, problem: str) -> None:
    works, printed = dev(NAMES[name], replies)
    assert not works
    end = printed.partition("verdict: training cannot work\n")[2]
    assert problem in end
    assert len(end.splitlines()) == 1
    assert printed.count(problem) == 1


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("fails_sometimes", "note: 1 of 6 validation rollouts failed (left out); the first failed of setup: KeyError"),
        ("other_words", "is in no prompt of 6 of 6 validation rollouts: right only where the agent puts it into other"),
        ("uses_tool_wrongly", "every result of the tool search is an error, 6 of 6: Error: no such table in "),
        ("report", "note: the answers to all 6 tasks are the same: 'The report.'. If the agent answers in another"),
    ],
)
def test_what_training_may_repair_is_a_note(name: str, note: str) -> None:
    works, printed = dev(NAMES[name], reward=length if name != "report" else NAMES["by_number"])
    assert works
    assert note in printed
    assert "verdict: nothing is in the way of training" in printed


def test_equal_answers_with_equal_rewards_teach_nothing() -> None:
    works, printed = dev(NAMES["report"], reward=zero)
    assert not works
    assert "the same: 'The report.', and all rewards are 0: there is nothing to learn. If the agent ans" in printed
    works, printed = dev(NAMES["good"], reward=zero)
    assert works  # rollouts of one task may differ
    assert "note: all rewards are 0: there is nothing to learn until rollouts of one task differ" in printed


def test_a_few_equal_answers_or_those_of_failed_rollouts_say_nothing() -> None:
    def said(*answers: str, failure: str = "") -> str:
        ended = [Outcome(answer=answer, reward=0.0, failure=failure) for answer in answers]
        tasks = [{"id": number, "question": f"{number}?"} for number in range(len(ended))]
        return equal_answers([Rollout(task=task, outcome=ending) for task, ending in zip(tasks, ended, strict=True)])[0]

    assert "the answers to all 6 tasks are empty, and all rewards are 0" in said(*[" "] * 6)
    assert "the answers to all 5 tasks are the same: 'DONE'" in said(*["DONE"] * 5)
    assert not said(*["DONE"] * 4)
    assert "answers" not in said(*["DONE"] * 9, "SELECT 1")
    assert not said(*[""] * 9, failure="timeout")


def test_an_agent_that_remembers_other_rollouts_is_found() -> None:
    works, printed = dev(NAMES["remembers"], n_runners=1)
    assert not works
    assert "the first prompt of 5 of 6 rollouts holds what the policy replied in another one (that of task" in printed


def test_each_rollout_is_printed_as_it_ends_first_its_input() -> None:
    seen: list[str] = []

    def reply(body: dict[str, Any]) -> str:
        seen.append(out.getvalue())
        return str(echo(body))

    out = io.StringIO()
    with scripted_policy(reply, model="big") as url:
        given, objects = parse_arguments(
            NAMES["good"], TASKS, length, {"model": "big", "n_runners": 1}, validation=HELD_OUT
        )
        job = make_job(given, objects=objects, dev=True, endpoint=ModelEndpoint(url, None))
        run_dev(job, Console(file=out, width=200))
    assert seen[-1].count(": succeeded, reward ") >= 4
    assert seen[-1].splitlines()[1].startswith("input       good(question='Which singer is number ")


@pytest.mark.parametrize(("name", "code"), [("good", 0), ("silent", 1)])
def test_the_exit_code_is_the_verdict(name: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "wild_agents.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TASKS + HELD_OUT))
    with scripted_policy(echo, model="big") as url:
        arguments = ["--dev", "--base-url", url, "--model", "big", "--domain", str(tmp_path / "tasks.jsonl")]
        arguments += [
            "--agent",
            f"{tmp_path}/wild_agents.py:{name}",
            "--reward",
            f"{tmp_path}/wild_agents.py:by_number",
        ]
        done = CliRunner().invoke(run.app, arguments)
    assert done.exit_code == code, done.output
    assert "verdict: " in done.output


SMALL = {
    "model": "starter",
    "steps": 1,
    "tasks_per_step": 2,
    "group_size": 2,
    "max_tokens": 4,
    "val_tasks": 6,
    "quiet": True,
}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "own_question",
            "the question of its task is in no prompt of 12 of 12 validation rollouts, and all begin with",
        ),
        ("fails_first", "none of 6 validation rollouts could be judged; the first failed of setup: KeyError: 'state'"),
        ("silent", "no rollout gave anything to train on: none of 6 validation rollouts made an LLM call"),
    ],
)
def test_training_refuses_in_the_same_words(name: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        fit(NAMES[name], TASKS, length, validation=HELD_OUT, output_dir=tmp_path, **SMALL)


def test_training_begins_where_the_policy_itself_fails_in_every_validation_rollout(tmp_path: Path) -> None:
    result = fit(NAMES["loops"], TASKS, length, validation=HELD_OUT, output_dir=tmp_path, **SMALL)
    assert [line["step"] for line in result.metrics] == [0, 1]
    assert result.metrics[1]["failures"] == {"turn_limit": 4}
    assert str(result).startswith("nothing was trained: in no group of 1 step(s) did the rewards of rollouts differ")

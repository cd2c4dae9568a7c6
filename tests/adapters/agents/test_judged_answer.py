"""What of an agent's result is judged: a field that is known to be the answer, and never all of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypedDict

import openai
import pytest
from agents import Agent, function_tool
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt
from pydantic import BaseModel
from rich.console import Console
from test_agents import traced

from groundwire.adapters import AgentSetupError, Endpoint, Question, agent_backend
from groundwire.adapters.tracing import LLMCall
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import TEXT
from groundwire.train import evaluate, fit
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.progress import ProgressDisplay
from groundwire.train.evaluation.diagnosis import diagnose
from groundwire.train.evaluation.notes import RolloutNotes
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.store.rollout import Outcome, Rollout

PROSE = Question(id="1", text="How many?", database="", answers=TEXT)
SQL = dataclasses.replace(PROSE, answers=SQL)
ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
client = openai.AsyncOpenAI(api_key="none", max_retries=0)


async def ask(text: str, system: str = "Answer.") -> str:
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    reply = await client.chat.completions.create(model="gpt-5-mini", messages=messages)
    return reply.choices[0].message.content or ""


def judged(result: Any, question: Question = PROSE) -> tuple[str, str]:
    async def agent(task: Any) -> Any:
        return result

    answer = asyncio.run(agent_backend(agent).run(question, ENDPOINT))
    return answer.text, answer.judged_field


class Pair(NamedTuple):
    answer: str
    score: float


GOLD = {"documents": ["gold"], "question": "How many?"}


@pytest.mark.parametrize(
    ("result", "text", "field"),
    [
        ({**GOLD, "generation": "I do not know"}, "I do not know", "generation"),
        ({**GOLD, "answer": "4", "messages": [AIMessage("four")]}, "four", "the last message"),
        ({**GOLD, "answer": "4", "messages": [HumanMessage("How many?")]}, "4", "answer"),
        ({**GOLD, "final_report": "R", "structured_response": {"answer": "4", "why": "w"}}, "4", "answer"),
        ({**GOLD, "answer": None}, "", "answer"),
        ({"answer": {"a": 1, "b": 2}, "documents": ["gold"]}, '{"a": 1, "b": 2}', "answer"),
        ({"draft": "4"}, "4", "draft"),
        (SimpleNamespace(final_output="4", raw_responses=["gold"]), "4", "final_output"),
        (SimpleNamespace(choices=[SimpleNamespace(message={"role": "assistant", "content": "4"})]), "4", "content"),
        (SimpleNamespace(raw="4", pydantic=None, tasks_output=["gold"]), "4", "raw"),
        (Pair("4", 0.5), "4", "answer"),
        ([{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "4"}], "4", "the last message"),
        ([{"type": "thinking", "thinking": "?"}, {"type": "text", "text": "4"}], "4", "what it returned"),
        ({"messages": [("user", "How many?"), ("assistant", "4")], "documents": ["gold"]}, "4", "the last message"),
        ({"answer": ["4", "5"], "documents": ["gold"]}, "4\n5", "answer"),
        ([("Ann", 1)], '[["Ann", 1]]', "what it returned"),
    ],
)
def test_the_answer_is_a_field_that_is_known_to_be_it(result: Any, text: str, field: str) -> None:
    assert judged(result) == (text, field)


def test_a_query_is_found_in_the_fields_of_an_answer_in_sql() -> None:
    state = {**GOLD, "query": "SELECT 1", "result": "[(1,)]", "answer": "One."}
    assert judged(state, SQL) == ("SELECT 1", "query")
    assert judged(state) == ("One.", "answer")
    assert judged({**GOLD, "generation": "```sql\nSELECT 2\n```"}, SQL) == ("SELECT 2", "generation")


@pytest.mark.parametrize(
    "result", [GOLD, {"a": 1, "b": 2}, {"documents": ["gold"]}, [{"name": "Ann"}, {"name": "Bob"}], object(), print]
)
def test_anything_else_asks_for_a_function_that_returns_the_answer(result: Any) -> None:
    with pytest.raises(AgentSetupError, match=r"which of it is the answer is not known: .*--agent-output"):
        judged(result)


class State(TypedDict, total=False):
    """Its field ``draft`` may be anything."""

    question: str
    documents: list[str]
    draft: str
    output: str


class Other(TypedDict):
    """Its fields say nothing of the answer."""

    question: str
    draft: str


class Draft(TypedDict):
    """The output of a graph, which says what the answer is."""

    draft: str


class Asked(MessagesState):
    """A graph with its own prompt if it gets no messages."""

    question: str


class Person(BaseModel):
    """An output in which no field is the answer."""

    name: str
    age: int


def build(node: Any, state: Any = State, *, output: Any = None, **options: Any) -> Any:
    builder: Any = StateGraph(state, output_schema=output or state)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return builder.compile(**options)


async def draft(state: Any) -> Any:
    return {"draft": await ask(state["question"])}


async def own_prompt(state: Any) -> Any:
    return {"messages": [AIMessage(await ask(state["question"], "" if state["messages"] else "My own prompt."))]}


async def test_a_graph_gets_the_question_once() -> None:
    async with traced(lambda _: "fine") as policy:
        answer, [call] = await policy.run(agent_backend(build(own_prompt, Asked)))
    assert call.messages[0]["content"] == "My own prompt."
    assert answer.input == "LangGraph.ainvoke({'question': 'Which singers?'})"


async def test_the_agent_s_input_is_no_answer() -> None:
    async def fills_in(task: Any) -> Any:
        task["answer"], task["context"] = "4", "gold"
        return task

    assert (await agent_backend(fills_in).run(PROSE, ENDPOINT)).text == "4"
    async with traced(lambda _: "I do not know") as policy:
        with pytest.raises(AgentSetupError, match=r"returned the fields question, draft, output, and which"):
            await policy.run(agent_backend(build(draft)), output="gold")


def describe(agent: Any) -> str:
    return str(agent_backend(agent).describe_call(PROSE))  # type: ignore[attr-defined]


async def _person(question: str) -> Person:
    raise AssertionError


def test_a_declared_result_without_an_answer_is_refused_before_the_first_rollout() -> None:
    for agent in (
        build(draft, Other),
        _person,
        Agent(name="a", output_type=Person),
        Agent(name="a", handoffs=[Agent(name="b", output_type=Person)]),
    ):
        with pytest.raises(ValueError, match=r"and which is the answer is not known: .*--agent-output"):
            describe(agent)
    assert describe(build(draft, Other, output=Draft)) == "LangGraph.ainvoke(question)"
    assert agent_backend(build(draft, Other), agent_output=lambda state: state["draft"]).describe_call(PROSE)  # type: ignore[attr-defined]


@function_tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return "paid"


async def test_an_agent_that_asks_a_person_is_a_failure_that_says_so() -> None:
    def asks(state: Any) -> Any:
        return {"output": interrupt("Send?")}

    call = {"id": "1", "type": "function", "function": {"name": "pay", "arguments": '{"amount": 1}'}}
    for agent in (
        build(asks),
        build(asks, checkpointer=InMemorySaver()),
        build(draft, checkpointer=InMemorySaver(), interrupt_before=["node"]),
        build(draft, interrupt_after=["node"]),
        Agent(name="a", tools=[pay]),
    ):
        async with traced(lambda _: Reply(tool_calls=[call])) as policy:
            with pytest.raises(AgentSetupError, match=r"was interrupted .*nobody (answers|continues it) in a rollout"):
                await policy.run(agent_backend(agent))


async def test_a_rollout_has_a_conversation_of_its_own_in_the_memory_of_a_graph() -> None:
    async def chat(state: Any) -> Any:
        return {"messages": [AIMessage(await ask(" ".join(each.content for each in state["messages"])))]}

    backend = agent_backend(build(chat, MessagesState, checkpointer=InMemorySaver()))
    async with traced(lambda _: "fine") as policy:
        runs = [await policy.run(backend) for _ in range(3)]
    assert [call.messages[1]["content"] for _, [call] in runs] == ["Which singers?"] * 3


# -- functions that yield, and that make the agent


async def test_what_an_agent_yields_is_read_to_the_end() -> None:
    async def pieces(question: str) -> AsyncIterator[str]:
        for each in ("fi", "ne"):
            yield each

    def updates(question: str) -> Iterator[Any]:
        yield {"retrieve": {"documents": ["gold"]}}
        yield {"write": {"generation": "fine"}}

    def chunks(question: str) -> Iterator[Any]:
        for each in ("fi", None, "ne"):
            yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=each))])

    async def returns_one(question: str) -> Any:
        return pieces(question)

    for agent in (pieces, updates, chunks, returns_one, lambda question: (each for each in ["fi", "ne"])):
        assert (await agent_backend(agent).run(PROSE, ENDPOINT)).text == "fine"


async def test_a_function_without_a_task_makes_the_agent_once() -> None:
    made = []

    async def agent(question: str) -> str:
        return question

    def make() -> Any:
        made.append("")
        return agent

    async def make_later(config: Any) -> Any:
        made.append(config["configurable"])
        return build(draft, output=Draft)

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        yield agent
        made.append("closed")

    for factory in (make, make_later, opened):
        made.clear()
        backend: Any = agent_backend(factory)
        async with traced(lambda _: "Which singers?") as policy:
            answers = await asyncio.gather(*(policy.run(backend) for _ in range(3)))
        assert {answer.text for answer, _ in answers} == {"Which singers?"}
        await backend.stop()
        assert len(made) == 1
    with pytest.raises(
        ValueError, match=r"agent 'text' is run to make the agent, as it takes no task, and returned 'hi'"
    ):
        agent_backend(text)


def text() -> str:
    return "hi"


# -- rollouts without a call

TASKS = [{"question": f"Question {number}?", "expected": "fine"} for number in range(4)]


def reward(answer: str, expected: str) -> float:
    return float(answer == expected)


def evaluated(agent: Any, folder: Path) -> tuple[Any, str]:
    async def run() -> tuple[Any, str]:
        async with ScriptedPolicyServer(replies=lambda _: "fine") as server:
            given = {"model": server.model, "base_url": server.base_url, "output_dir": folder}
            out = io.StringIO()
            with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
                result = await asyncio.to_thread(evaluate, agent, TASKS, reward, **given)
            return result, out.getvalue()

    return asyncio.run(run())


async def by_rule(question: str) -> Any:
    return {"answer": "fine", "documents": []} if "0" in question else await ask(question)


def test_a_rollout_without_a_call_is_judged_and_counted_apart(tmp_path: Path) -> None:
    result, shown = evaluated(by_rule, tmp_path)
    lines = shown.splitlines()
    assert lines[0] == "agent: called as by_rule(question=the question)"
    assert lines[1] == "reward: called as reward(answer=the answer, expected=the column expected)"
    assert len([line for line in lines if line.startswith("note: 1 of 4 validation rollouts made no LLM call: ")]) == 1
    assert (result.accuracy.value, result.accuracy.n) == (1.0, 4)
    assert (result.figures["without_calls"], result.figures["failures"]) == (1, {})
    ended = sorted(RunDir.open(result.run_dir).rollouts()[0], key=lambda rollout: str(rollout.task["id"]))
    outcomes = [rollout.outcome for rollout in ended]
    assert [outcome.judged_field for outcome in outcomes] == ["answer", *["what it returned"] * 3]
    assert outcomes[0].input == "by_rule(question='Question 0?')"
    assert "made no LLM call that can be traced" in outcomes[0].message


def test_training_leaves_out_and_counts_rollouts_without_a_call(tmp_path: Path) -> None:
    steps = {"model": "starter", "steps": 1, "tasks_per_step": 3, "group_size": 2, "max_tokens": 4, "val_tasks": 1}
    trained = fit(
        by_rule, TASKS, reward, validation=[{**TASKS[1], "question": "?"}], output_dir=tmp_path, quiet=True, **steps
    )
    run = RunDir.open(trained.run_dir)
    assert trained.metrics[-1]["without_calls"] == 2
    assert json.loads((run.path / "summary.json").read_text())["without_calls"] == 2
    sampled = [rollout for rollout in run.rollouts()[0] if rollout.mode == "train"]
    reasons = zip(sampled, diagnose(sampled), strict=True)
    kinds = [reason.kind for rollout, reason in reasons if "0" in str(rollout.task)]
    assert kinds == ["no_calls"] * 2
    shown = io.StringIO()
    ProgressDisplay(Console(file=shown, width=200), 1).on_step_end(trained.metrics[-1])
    assert "without an LLM call: 2" in shown.getvalue()


def test_an_agent_that_never_calls_the_model_ends_the_evaluation(tmp_path: Path) -> None:
    with pytest.raises(RolloutsFailedError, match=r"none of 4 validation rollouts made an LLM call: .* a cache"):
        evaluated(lambda question: "fine", tmp_path)


def test_that_a_cache_answers_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    notes = RolloutNotes(told.append)

    def ended(task: str, calls: int) -> Rollout:
        call = LLMCall(rollout_id="", attempt_id="", sequence=0)
        return Rollout(task={"id": task}, outcome=Outcome(reward=1.0), calls=[call] * calls)

    notes.show([ended("a", 1), ended("b", 0)])
    assert caplog.messages == []
    for _ in range(2):
        notes.show([ended("a", 0), ended("a", 0), ended("b", 0)])
    [silent], [cached] = told, caplog.messages
    assert silent.startswith("1 of 2 rollouts made no LLM call: they are judged, and train nothing.")
    assert cached.startswith("2 of 3 rollouts made no LLM call, though others of their questions did: a cache")

"""The LangGraph agent writes, executes, checks and rewrites queries, and its failures have types."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI

from groundwire import adapters
from groundwire.adapters import Endpoint, EndpointError, Question, ToolError
from groundwire.adapters.sql_agents import prompts
from groundwire.adapters.sql_agents.langgraph import build_sql_graph
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import TEXT

WRONG, RIGHT = "```sql\nSELECT nam FROM singer\n```", "```sql\nSELECT name FROM singer\n```"


@pytest.fixture
def database(tmp_path: Path) -> str:
    path = tmp_path / "concerts.sqlite"
    with sqlite3.connect(path) as conn:
        conn.executescript("CREATE TABLE singer (id int, name text); INSERT INTO singer VALUES (1, 'Ann'), (2, 'Bob');")
    conn.close()
    return str(path)


def _endpoint(server: ScriptedPolicyServer) -> Endpoint:
    return Endpoint(base_url=server.base_url, model=server.model)


async def _run(
    replies: list[str | Reply], database: str, max_turns: int = 3, **options: Any
) -> tuple[adapters.Answer, list[dict]]:
    async with ScriptedPolicyServer(replies=replies) as server:
        backend = adapters.get("langgraph")(max_turns=max_turns, **options)
        try:
            answer = await backend.run(
                Question(id="1", text="Which singers?", database=database, answers=SQL), _endpoint(server)
            )
        finally:
            await backend.stop()
        return answer, server.requests


async def test_a_query_that_the_check_accepts_is_the_answer(database: str) -> None:
    answer, requests = await _run([RIGHT, "CORRECT"], database)
    assert answer.text == "SELECT name FROM singer"
    assert [step["agent"] for step in answer.steps] == ["write_query", "execute_query", "check_query"]
    assert "('Ann',)" in requests[1]["messages"][-1]["content"]


async def test_a_rejected_query_is_rewritten_with_its_error(database: str) -> None:
    answer, requests = await _run([WRONG, "INCORRECT", RIGHT, "CORRECT"], database)
    assert answer.text == "SELECT name FROM singer"
    assert [step["agent"] for step in answer.steps if step["kind"] == "llm"] == [
        "write_query",
        "check_query",
        "rewrite_query",
        "check_query",
    ]
    assert "no such column: nam" in requests[2]["messages"][-1]["content"]
    assert [step["ok"] for step in answer.steps if step["kind"] == "tool"] == [False, True]


async def test_the_last_query_allowed_is_run_but_not_checked(database: str) -> None:
    answer, requests = await _run([WRONG, "INCORRECT", WRONG, "INCORRECT", RIGHT], database, max_turns=3)
    assert answer.text == "SELECT name FROM singer"
    assert len(requests) == 5
    answer, requests = await _run([RIGHT], database, max_turns=1)
    assert len(requests) == 1


async def test_a_rewrite_without_a_code_block_keeps_the_query(database: str) -> None:
    answer, _ = await _run([RIGHT, "INCORRECT", "The query is fine as it is.", "INCORRECT", "```sql\n```"], database)
    assert answer.text == "SELECT name FROM singer"
    assert [step["input"] for step in answer.steps if step["kind"] == "tool"] == ["SELECT name FROM singer"] * 3


async def test_the_last_query_is_checked_on_request(database: str) -> None:
    answer, requests = await _run([WRONG, "INCORRECT", RIGHT, "INCORRECT"], database, max_turns=2, check_last=True)
    assert answer.text == "SELECT name FROM singer"
    assert len(requests) == 4


@pytest.mark.parametrize("language", ["postgres", "PostgreSQL", "sql", "SQLite", "mysql", "tsql", "", "c++"])
def test_the_fence_of_any_language_is_removed(language: str) -> None:
    assert prompts.extract_sql(f"So:\n```{language}\nSELECT 1\nFROM t\n```\nDone.") == "SELECT 1\nFROM t"


@pytest.mark.parametrize(
    "block", ["```sql SELECT 1```", "```SELECT 1```", "```SELECT\n1```", "```mysql SELECT 1", "```sqlSELECT 1"]
)
def test_a_query_after_its_fence_stays_whole(block: str) -> None:
    assert prompts.extract_sql(block).split() == ["SELECT", "1"]


async def test_the_full_prompts_name_the_dialect_and_the_mistakes_and_the_feedback_reaches_the_rewrite(
    database: str,
) -> None:
    feedback = "The column does not exist.\nVERDICT: INCORRECT"
    answer, requests = await _run([WRONG, feedback, RIGHT, "VERDICT: CORRECT"], database, prompt_profile="full")
    assert answer.text == "SELECT name FROM singer"
    system, check, rewrite = (requests[n]["messages"][m]["content"] for n, m in ((0, 0), (1, 1), (2, 1)))
    assert "SQLite" in system
    assert "CREATE TABLE singer" in system
    for mistake in (
        "NOT IN",
        "UNION ALL",
        "BETWEEN",
        "types",
        "quotes",
        "arguments",
        "cast",
        "join",
        "error",
        "implausible",
    ):
        assert mistake in check
    assert "Do not write a corrected query" in check
    assert "VERDICT: CORRECT, or VERDICT: INCORRECT" in check
    assert feedback in rewrite


@pytest.mark.parametrize("turns", [1, 2])
async def test_a_prose_question_is_answered_from_the_rows_of_the_last_query(database: str, turns: int) -> None:
    replies = [RIGHT, *["CORRECT"] * (turns - 1), "\nAnn and Bob sing."]
    async with ScriptedPolicyServer(replies=replies) as server:
        backend = adapters.get("langgraph")(max_turns=turns)
        question = Question(id="1", text="谁唱歌？", database=database, answers=TEXT)
        answer = await backend.run(question, _endpoint(server))
        await backend.stop()
    assert answer.text == "Ann and Bob sing."
    assert answer.steps[-1]["agent"] == "answer_question"
    assert server.requests[-1]["messages"][-1]["content"] == prompts.write(
        "answer", "谁唱歌？", "SELECT name FROM singer", "[('Ann',), ('Bob',)]"
    )


async def test_the_schema_reaches_the_model(database: str) -> None:
    _, requests = await _run([RIGHT, "CORRECT"], database)
    assert all("singer" in request["messages"][0]["content"] for request in requests)


async def test_a_refused_call_is_an_endpoint_error_with_its_status_and_cause(database: str) -> None:
    with pytest.raises(EndpointError, match="out of cards") as caught:
        await _run([Reply(status=503, text="out of cards")], database)
    assert caught.value.status == 503


async def test_an_unreachable_endpoint_is_an_endpoint_error(database: str) -> None:
    endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
    backend = adapters.get("langgraph")()
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:9"):
        await backend.run(Question(id="1", text="?", database=database, answers=SQL), endpoint)
    await backend.stop()


async def test_a_missing_database_is_a_tool_error(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"gone\.sqlite"):
        await _run([RIGHT], str(tmp_path / "gone.sqlite"))


async def test_the_graph_works_without_training(database: str) -> None:
    async with ScriptedPolicyServer(replies=[RIGHT, "CORRECT"]) as server:
        model = ChatOpenAI(model="scripted", base_url=server.base_url, api_key="none")
        state = await build_sql_graph(model).ainvoke({"question": "Which singers?", "database": database})
    assert state["sql"] == "SELECT name FROM singer"


def test_a_wrong_option_is_refused() -> None:
    make = adapters.get("langgraph")
    for options, message in (
        ({"max_turns": 0}, "max_turns is 0, but an agent needs at least one turn"),
        ({"table_info_truncate": -5}, "table_info_truncate is -5; it must be at least 1"),
        ({"execution_truncate": -1}, "execution_truncate is -1; it must be at least 0"),
        (
            {"prompt_profile": "long"},
            "prompt_profile of agent 'langgraph' is 'long'; it must be 'short' or 'full'",
        ),
        ({"turns": 1}, "agent 'langgraph' has no option 'turns'; it has max_turns, prompt_profile, table_info_"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)

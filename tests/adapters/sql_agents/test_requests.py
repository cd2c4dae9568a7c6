"""The requests of the SQL agents are what they always were, to the letter: the starter was trained on this text."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from groundwire import adapters
from groundwire.adapters import Endpoint, Question
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.tools.sql.answers import KINDS

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("requests.json").read_text())
QUESTION = "Which singers have a song called {question}?"
TEXTS = [
    "```sql\nSELECT nam FROM singer\n```",
    "VERDICT: INCORRECT: no column",
    "```sql\nSELECT title FROM song\n```",
    "VERDICT: CORRECT",
    "Ann sings.",
]
TABLES = """
CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE song (id INTEGER, singer INTEGER REFERENCES singer(id), title TEXT);
INSERT INTO singer VALUES (1, 'Ann'), (2, 'Bob');
INSERT INTO song VALUES (1, 1, 'One {sql}');
"""


def _call(arguments: str, number: int) -> Reply:
    function = {"name": "query_database_by_sql", "arguments": arguments}
    return Reply(tool_calls=[{"id": f"c{number}", "type": "function", "function": function}])


def _calls() -> list[Reply]:
    queries = ['{"sql": "SELECT nam FROM singer"}', "{nonsense", '{"sql": "SELECT title FROM song"}']
    return [*(_call(query, number) for number, query in enumerate(queries)), Reply(text="DONE")]


@pytest.mark.parametrize("case", GOLDEN)
async def test_the_messages_are_the_same_to_the_letter(case: str, tmp_path: Path) -> None:
    backend, profile, form = case.split()
    options: dict[str, Any] = {"max_turns": 3, "prompt_profile": profile}
    if profile == "full":
        options |= {"example_values": 3, "show_keys": True, "execution_truncate": 2048}
    with closing(sqlite3.connect(tmp_path / "singers.sqlite")) as connection:
        connection.executescript(TABLES)
    question = Question(id="1", text=QUESTION, database=str(tmp_path / "singers.sqlite"), answers=KINDS[form])
    agent, golden = adapters.get(backend)(**options), GOLDEN[case]
    async with ScriptedPolicyServer(replies=list(TEXTS) if backend == "langgraph" else _calls()) as server:
        answer = await agent.run(question, Endpoint(base_url=server.base_url, model="scripted"))
        await agent.stop()
    requests = server.requests if backend == "langgraph" else server.requests[-1:]
    assert [{name: request[name] for name in ("messages", "tools") if name in request} for request in requests] == (
        golden["requests"]
    )
    assert answer.text == golden["answer"]
    assert [step for step in answer.steps if step["kind"] == "tool"] == golden["steps"]

"""``--dev`` shows what happened: tools, calls, results, the gold answer, the answer and the reward."""

from __future__ import annotations

import io
import json
import sqlite3
from pathlib import Path

from rich.console import Console

from groundwire import domains
from groundwire.adapters.tracing import LLMCall
from groundwire.rewards.spider.execution_match import spider_exec_match
from groundwire.train.cli.progress import show_rollout
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.store.rollout import Outcome, Rollout


def test_a_rollout_with_a_tool_call(tmp_path: Path) -> None:
    database = tmp_path / "x.sqlite"
    with sqlite3.connect(database) as conn:
        conn.executescript("CREATE TABLE singer (name text); INSERT INTO singer VALUES ('Ann'), ('Bob');")
    conn.close()
    function = {"name": "run_query", "arguments": '{"sql": "SELECT 2"}'}
    asked = [{"role": "user", "content": "Who sings?"}]
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    answered = [*asked, called, {"role": "tool", "tool_call_id": "1", "content": "[(2,)]"}]
    tools = json.dumps([{"type": "function", "function": {"name": "run_query"}}])
    calls = [
        LLMCall(
            rollout_id="r", attempt_id="a", sequence=number, agent="sql", model="gpt-5-mini", tools_json=tools,
            wire_api="responses",
            prompt_ids=list(range(40)), response_ids=[7, 8], logprobs=[-1.0, -1.0], finish_reason="stop",
            messages_json=json.dumps(messages), reply_json=json.dumps(reply),
        )
        for number, messages, reply in [(1, asked, called), (2, answered, {"role": "assistant", "content": "DONE"})]
    ]  # fmt: skip
    task = {"id": "t1", "question": "Who sings?", "query": "SELECT name FROM singer", "db_path": str(database)}
    outcome = Outcome(
        reward=0.25,
        reward_components={"rows": 0.25},
        answer="SELECT nme FROM singer",
        input="agent(question='Who?')",
        judged_field="generation",
    )
    result = Rollout(task=task, group="t1", mode="val", outcome=outcome, calls=calls)
    out = io.StringIO()
    view = AgentView.of(domains.get("spider"), spider_exec_match)
    show_rollout(Console(file=out, width=200), result, view, agent_match=None)
    shown = out.getvalue()
    for text in (
        "call 1: sql, model gpt-5-mini, responses API, 0.000 s",
        "tools     run_query",
        'assistant calls run_query({"sql": "SELECT 2"})',
        "tool      [(2,)]",
        "prompt ids   [0, 1, 2, 3, 4, 5, 6, 7, ... 32, 33, 34, 35, 36, 37, 38, 39] (40)",
        "judged      generation",
        "gold        SELECT name FROM singer",
        "rows [('Ann',), ('Bob',)]",
        "answer      SELECT nme FROM singer",
        "rows none: no such column: nme",
        "reward      0.25 (rows 0.25)",
    ):
        assert text in shown, text
    assert shown.splitlines()[1] == "input       agent(question='Who?')"
    assert shown.count("Who sings?") == 1  # the message once

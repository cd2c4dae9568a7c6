"""The OpenAI Agents SDK agent queries, answers and hands over; mistakes of the model are no failures."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import agents
import pytest
from agents import Agent
from agents.tracing import TracingProcessor, get_trace_provider
from open_rollouts import OpenRollouts

from groundwire import adapters
from groundwire.adapters import (
    AgentError,
    Answer,
    Endpoint,
    EndpointError,
    PromptTooLongError,
    Question,
    ToolError,
    agent_backend,
)
from groundwire.adapters.sql_agents import prompts
from groundwire.adapters.tracing import LLMCall, calls_of_agents, trajectories
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import TEXT

NAMES, FENCED = "SELECT name FROM singer", "```sql\nSELECT name FROM singer\n```"
_ids = itertools.count()
Script = Sequence[str | Reply] | Callable[[dict[str, Any]], str | Reply]


def _calls(*queries: str, arguments: str | None = None, name: str = "query_database_by_sql") -> Reply:
    """A reply with one tool call per query."""
    texts = [arguments] if arguments is not None else [json.dumps({"sql": sql}) for sql in queries]
    return Reply(
        tool_calls=[
            {"id": f"call_{next(_ids)}", "type": "function", "function": {"name": name, "arguments": text}}
            for text in texts
        ]
    )


@pytest.fixture
def database(tmp_path: Path) -> str:
    path = tmp_path / "concerts.sqlite"
    with sqlite3.connect(path) as conn:
        conn.executescript("CREATE TABLE singer (id int, name text); INSERT INTO singer VALUES (1, 'Ann'), (2, 'Bob');")
    conn.close()
    return str(path)


def _streamed(**options: Any) -> adapters.Backend:
    return agent_backend("streamed_sql_agent:streamed", options=options)


async def _run(replies: Script, database: str, backend: Any = None) -> tuple[Answer, list[dict[str, Any]]]:
    async with ScriptedPolicyServer(replies=replies) as server:
        endpoint = Endpoint(base_url=server.base_url, model=server.model)
        backend = backend or adapters.get("openai-agents")()
        try:
            answer = await backend.run(
                Question(id="1", text="Which singers?", database=database, answers=SQL), endpoint
            )
        finally:
            await backend.stop()
        return answer, server.requests


async def _traced(replies: Script, database: str, backend: adapters.Backend) -> tuple[Answer, list[LLMCall]]:
    store = OpenRollouts()
    rollout = await store.start()
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    async with (
        ScriptedPolicyServer(replies=replies) as server,
        LLMProxy(upstreams=[server.base_url], sink=store) as proxy,
    ):
        endpoint = Endpoint(base_url=proxy.base_url(*ids), model=server.model)
        answer = await backend.run(Question(id="1", text="Which singers?", database=database, answers=SQL), endpoint)
        await backend.stop()
        await proxy.flush()
    return answer, await store.calls(ids[0])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_query_is_run_and_the_last_block_of_the_reply_is_the_answer(database: str, stream: bool) -> None:
    backend = _streamed() if stream else adapters.get("openai-agents")()
    replies = [_calls("SELECT id FROM singer"), f"```sql\nSELECT 1\n```\n{FENCED}"]
    answer, requests = await _run(replies, database, backend)
    assert answer.text == NAMES
    assert [bool(request.get("stream")) for request in requests] == [stream, stream]
    assert requests[1]["messages"][-1]["content"] == "[(1,), (2,)]"
    assert [(step["kind"], step["ok"]) for step in answer.steps] == [("tool", True)]


async def test_the_messages_are_those_of_the_prompts_module(database: str) -> None:
    backend = adapters.get("openai-agents")(example_values=0, show_keys=False)
    _, [request, _] = await _run([_calls(NAMES), FENCED], database, backend)
    system, user = request["messages"]
    assert system["content"] == prompts.write("tool_system", "CREATE TABLE singer ( id int , name text )")
    assert user["content"] == prompts.write("write", "Which singers?")
    assert request["tools"] == [{"type": "function", "function": prompts.QUERY_TOOL}]


async def test_a_prose_question_is_answered_with_the_final_reply(database: str) -> None:
    async with ScriptedPolicyServer(replies=[_calls(NAMES), "\nAnn and Bob sing."]) as server:
        backend = adapters.get("openai-agents")(example_values=0, show_keys=False)
        endpoint = Endpoint(base_url=server.base_url, model=server.model)
        answer = await backend.run(Question(id="1", text="谁唱歌？", database=database, answers=TEXT), endpoint)
        await backend.stop()
    assert answer.text == "Ann and Bob sing."
    assert [(step["kind"], step["ok"]) for step in answer.steps] == [("tool", True)]
    system, user = server.requests[0]["messages"]
    assert system["content"] == prompts.write("prose_system", "CREATE TABLE singer ( id int , name text )")
    assert user["content"] == prompts.write("ask", "谁唱歌？")


async def test_a_prose_question_has_no_answer_when_the_turns_run_out(database: str) -> None:
    async with ScriptedPolicyServer(replies=[_calls(NAMES)] * 2) as server:
        backend = adapters.get("openai-agents")(max_turns=1)
        endpoint = Endpoint(base_url=server.base_url, model=server.model)
        answer = await backend.run(Question(id="1", text="Who sings?", database=database, answers=TEXT), endpoint)
        await backend.stop()
    assert answer.text == ""


async def test_the_model_reads_a_query_error_and_may_repair_it(database: str) -> None:
    answer, requests = await _run([_calls("SELECT nam FROM singer"), _calls(NAMES), FENCED], database)
    assert answer.text == NAMES
    assert requests[1]["messages"][-1]["content"].startswith("Error: no such column: nam")
    assert [step["ok"] for step in answer.steps if step["kind"] == "tool"] == [False, True]


async def test_a_reply_without_a_block_answers_with_the_last_successful_query(database: str) -> None:
    answer, _ = await _run([_calls(NAMES), _calls("SELECT nam FROM singer"), "Ann and Bob."], database)
    assert answer.text == NAMES
    answer, _ = await _run(["<tool_call>\n{broken"], database)
    assert answer.text == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_running_out_of_turns_is_no_failure(database: str, stream: bool) -> None:
    backend = _streamed(max_turns=2) if stream else adapters.get("openai-agents")(max_turns=2)
    answer, requests = await _run([_calls(NAMES), *[_calls("SELECT nope")] * 2], database, backend)
    assert answer.text == NAMES
    assert len(requests) == 3
    answer, _ = await _run([_calls("SELECT nope")] * 2, database, adapters.get("openai-agents")(max_turns=1))
    assert answer.text == ""


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (_calls(arguments='{"query": "SELECT 1"}'), "the arguments are not"),
        (_calls(arguments='{"sql": 5}'), "the arguments are not"),
        (_calls(arguments="not JSON"), "the arguments are not"),
        (_calls(arguments="[]"), "the arguments are not"),
        (_calls("SELECT 1", name="drop_database"), "drop_database"),
    ],
)
async def test_a_malformed_tool_call_is_answered_with_an_error_message(database: str, reply: Reply, words: str) -> None:
    answer, requests = await _run([reply, FENCED], database)
    assert words in requests[1]["messages"][-1]["content"]
    assert answer.text == NAMES


async def test_several_calls_in_one_reply_are_all_answered(database: str) -> None:
    _, requests = await _run([_calls("SELECT 1", "SELECT 2"), FENCED], database)
    assert [message["content"] for message in requests[1]["messages"][-2:]] == ["[(1,)]", "[(2,)]"]


async def test_a_refused_call_is_an_endpoint_error_and_is_not_retried(database: str) -> None:
    async with ScriptedPolicyServer(replies=lambda _: Reply(status=503, text="out of cards")) as server:
        endpoint, backend = Endpoint(base_url=server.base_url, model="m"), adapters.get("openai-agents")()
        with pytest.raises(EndpointError, match="out of cards") as caught:
            await backend.run(Question(id="1", text="?", database=database, answers=SQL), endpoint)
        await backend.stop()
        assert caught.value.status == 503
        assert len(server.requests) == 1


async def test_an_unreachable_endpoint_is_an_endpoint_error(database: str) -> None:
    endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:9"):
        await adapters.get("openai-agents")().run(Question(id="1", text="?", database=database, answers=SQL), endpoint)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_database_is_a_tool_error(database: str, stream: bool) -> None:
    def reply(_: Any) -> Reply:
        Path(database).unlink()
        return _calls(NAMES)

    with pytest.raises(ToolError, match=r"concerts\.sqlite"):
        await _run(reply, database, _streamed() if stream else None)
    with pytest.raises(ToolError, match=r"concerts\.sqlite"):
        await _run([FENCED], database)


async def test_an_exception_in_the_agents_code_is_an_agent_error(database: str) -> None:
    def instructions(context: Any, agent: Any) -> str:
        raise KeyError("a bug")

    backend = agent_backend(Agent(name="broken", instructions=instructions))
    with pytest.raises(AgentError, match="KeyError: 'a bug'"):
        await _run([FENCED], database, backend)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_call_has_the_name_of_its_agent_also_after_a_handoff(database: str, stream: bool) -> None:
    replies = [_calls(arguments="{}", name="transfer_to_sql_agent"), _calls(NAMES), FENCED]
    answer, calls = await _traced(replies, database, _streamed(stream=stream, triage=True))
    assert answer.text == NAMES
    assert [call.agent for call in calls] == ["triage", "sql_agent", "sql_agent"]
    assert [call.agent for call in calls_of_agents(calls, "^sql")] == ["sql_agent", "sql_agent"]


async def test_concurrent_rollouts_do_not_mix_their_answers(database: str) -> None:
    def reply(body: dict[str, Any]) -> str:
        return f"```sql\nSELECT {body['messages'][-1]['content'].split()[1]}\n```"

    async with ScriptedPolicyServer(replies=reply) as server:
        backend = adapters.get("openai-agents")()
        endpoint = Endpoint(base_url=server.base_url, model="m")
        questions = [Question(id=str(i), text=str(i), database=database, answers=SQL) for i in range(16)]
        answers = await asyncio.gather(*(backend.run(question, endpoint) for question in questions))
        await backend.stop()
    assert [answer.text for answer in answers] == [f"SELECT {i}" for i in range(16)]


async def test_the_turns_of_a_rollout_are_one_trajectory(database: str) -> None:
    replies = [_calls("SELECT nam FROM singer"), _calls(NAMES), FENCED]
    _, calls = await _traced(replies, database, adapters.get("openai-agents")())
    [trajectory] = trajectories(calls)
    assert [len(call.response_ids) for call in calls] == [len(call.response_ids) for call in trajectory.calls]
    assert sum(trajectory.loss_mask) == sum(len(call.response_ids) for call in calls)


async def test_no_traces_are_exported_and_the_process_keeps_its_own_tracing(database: str) -> None:
    disabled = get_trace_provider()._disabled  # as in a process that loaded an agent by its name
    agents.set_tracing_disabled(False)
    seen: list[str] = []

    class Recorder(TracingProcessor):
        def on_trace_start(self, trace: Any) -> None:
            seen.append(trace.name)

        def on_trace_end(self, trace: Any) -> None:
            pass

        def on_span_start(self, span: Any) -> None:
            seen.append(type(span.span_data).__name__)

        def on_span_end(self, span: Any) -> None:
            pass

        def shutdown(self) -> None:
            pass

        def force_flush(self) -> None:
            pass

    processors = get_trace_provider()._multi_processor._processors
    agents.set_trace_processors([Recorder()])
    try:
        await _run([_calls(NAMES), FENCED], database)
        assert seen == []
        with agents.trace("the user's own"):
            pass
        assert seen == ["the user's own"]
    finally:
        agents.set_trace_processors(list(processors))
        agents.set_tracing_disabled(disabled)


async def test_a_too_long_prompt_has_its_own_error_type(database: str) -> None:
    with pytest.raises(PromptTooLongError, match="9 tokens too many"):
        await _run([Reply(status=400, text="9 tokens too many", code="context_length_exceeded")], database)


def test_a_turn_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_turns is 0"):
        adapters.get("openai-agents")(max_turns=0)

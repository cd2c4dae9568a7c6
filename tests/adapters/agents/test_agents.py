"""Agents as their authors wrote them run, are traced and are judged, without a changed line."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import own_agents
import pytest
from open_rollouts import OpenRollouts
from opentelemetry import context, trace
from programs import ROOT

from groundwire.adapters import (
    AgentError,
    Answer,
    Endpoint,
    EndpointError,
    MalformedOutputError,
    PromptTooLongError,
    Question,
    TurnLimitError,
    agent_backend,
)
from groundwire.adapters.agents import redirection
from groundwire.adapters.agents.answers import ToolCalls
from groundwire.adapters.agents.command import CommandBackend
from groundwire.adapters.tracing import LLMCall
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.adapters.tracing.wire.call import ChatCall
from groundwire.adapters.tracing.wire.generate_content import GenerateContentCall
from groundwire.adapters.tracing.wire.messages import MessagesCall
from groundwire.adapters.tracing.wire.responses import ResponsesCall
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import TEXT, AgentResult

Script = Sequence[str | Reply] | Callable[[dict[str, Any]], str | Reply]
FENCED = "```sql\nSELECT name FROM singer\n```"


class Traced:
    """A scripted policy behind the proxy; :meth:`run` is one rollout."""

    def __init__(self, server: ScriptedPolicyServer, proxy: LLMProxy, store: Any) -> None:
        self.server, self.proxy, self._store = server, proxy, store

    async def run(
        self, backend: Any, question: str = "Which singers?", database: str = "x.sqlite", **columns: Any
    ) -> tuple[Answer, list[LLMCall]]:
        rollout = await self._store.start()
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        endpoint = Endpoint(base_url=self.proxy.base_url(*ids), model="policy", api_key="of-the-run")
        asked = Question(id="1", text=question, database=database, answers=SQL, columns=columns)
        answer = await backend.run(asked, endpoint)
        await self.proxy.flush()
        return answer, await self._store.calls(ids[0])


@asynccontextmanager
async def traced(replies: Script) -> AsyncIterator[Traced]:
    store = OpenRollouts()
    async with (
        ScriptedPolicyServer(replies=replies) as server,
        LLMProxy(upstreams=[server.base_url], sink=store) as proxy,
    ):
        yield Traced(server, proxy, store)


def backend_of(name: str, **options: Any) -> Any:
    return agent_backend(f"own_agents:{name}", **options)


async def test_calls_of_a_graph_with_its_own_model_belong_to_their_rollout_and_node() -> None:
    backend = backend_of("graph")
    async with traced(lambda _: FENCED) as policy:
        results = await asyncio.gather(*(policy.run(backend, f"question {i}") for i in range(8)))
    for i, (answer, calls) in enumerate(results):
        assert answer.text == "SELECT name FROM singer"
        assert [call.agent for call in calls] == ["writer", "checker"]
        assert [call.messages[0]["content"] for call in calls] == [f"write question {i}", f"check question {i}"]
        assert {call.model for call in calls} == {"gpt-5-mini"}


async def test_calls_of_any_client_task_and_thread_belong_to_their_rollout() -> None:
    backend = backend_of("many_clients")
    async with traced(lambda _: FENCED) as policy:
        results = await asyncio.gather(*(policy.run(backend, f"question {i}") for i in range(6)))
    for i, (_, calls) in enumerate(results):
        asked = sorted(call.messages[0]["content"] for call in calls)
        assert asked == [f"first question {i}", *[f"other question {i}"] * 3, f"second question {i}"]


def test_a_client_of_the_agent_s_module_works_in_run_after_run() -> None:
    async def run() -> str:
        async with traced(lambda _: FENCED) as policy:
            return (await policy.run(backend_of("many_clients")))[0].text

    assert [asyncio.run(run()) for _ in range(3)] == ["SELECT name FROM singer"] * 3


async def test_a_plain_function_gets_the_task_and_may_block() -> None:
    async with traced(lambda _: FENCED) as policy:
        answer, [call] = await policy.run(backend_of("blocking"))
    assert (answer.text, call.messages[0]["content"]) == ("SELECT name FROM singer", "Which singers?")


async def test_a_client_of_several_event_loops_uses_no_connection_of_another_loop() -> None:
    client = openai.AsyncOpenAI(api_key="none", max_retries=0)

    async def ask() -> str:
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        return reply.choices[0].message.content or ""

    def agent(task: Any) -> str:
        loops = [asyncio.new_event_loop() for _ in range(2)]  # as in two threads: both are open
        answers = [loop.run_until_complete(ask()) for loop in loops]
        for loop in loops:
            loop.close()
        return answers[-1]

    async with traced(lambda _: "fine") as policy:
        answer, _ = await policy.run(agent_backend(agent))
    assert answer.text == "fine"


async def test_the_author_s_key_is_not_sent_to_the_policy() -> None:
    seen: list[Any] = []

    class Recording(ScriptedPolicyServer):
        async def _answer(self, api: Any, request: Any) -> Any:
            seen.append(dict(request.headers))
            return await super()._answer(api, request)

    store = OpenRollouts()
    async with (
        Recording(replies=lambda _: FENCED) as server,
        LLMProxy(upstreams=[server.base_url], sink=store) as proxy,
    ):
        await Traced(server, proxy, store).run(backend_of("many_clients"))
    assert len(seen) == 5
    assert all(headers["Authorization"] == "Bearer of-the-run" for headers in seen)


@pytest.mark.parametrize("client", ["requests", "httpx", "aiohttp", "boto3", "boto3 stream"])
async def test_calls_to_other_providers_go_to_the_attempt_without_their_keys(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Recording(LLMProxy):
        async def _post(self, request: Any) -> Any:
            seen.append((request.raw_path, {name.lower(): value for name, value in request.headers.items()}))
            return await super()._post(request)

    for name, value in own_agents.PROVIDER_KEYS.items():
        monkeypatch.setenv(name, value)
    store = OpenRollouts()
    async with (
        ScriptedPolicyServer(replies=lambda _: "fine") as server,
        Recording(upstreams=[server.base_url], sink=store) as proxy,
    ):
        answer, [call] = await Traced(server, proxy, store).run(backend_of("asks_providers"), client=client)
    assert answer.text == "fine"
    [(path, headers)] = seen
    assert not any(secret in f"{path} {headers}" for secret in own_agents.PROVIDER_KEYS.values())
    assert headers["authorization"] == "Bearer of-the-run"
    assert call.wire_api == ("converse" if "boto3" in client else "generate_content")


async def test_a_call_of_aiohttp_to_the_address_of_the_attempt_has_its_agents_name() -> None:
    async def analyst(question: str) -> str:
        calls: Any = context.get_value(redirection._KEY)  # its address, which clients find in the environment
        body = {"model": "m", "messages": [{"role": "user", "content": question}]}
        tracer = trace.get_tracer("framework")
        with tracer.start_as_current_span("invoke_agent", attributes={"gen_ai.agent.name": "analyst"}):
            async with aiohttp.ClientSession() as session:
                await session.post(f"{calls.endpoint.base_url}/chat/completions", json=body)
        return "SELECT 1"

    async with traced(lambda _: "fine") as policy:
        _, [call] = await policy.run(agent_backend(analyst))
    assert call.agent == "analyst"


async def test_a_prompt_that_is_too_long_is_one_in_every_api(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in own_agents.PROVIDER_KEYS.items():
        monkeypatch.setenv(name, value)
    too_long = Reply(text="too long", status=400, code="context_length_exceeded")
    async with traced(lambda _: too_long) as policy:
        for client in ("requests", "aiohttp", "boto3"):
            with pytest.raises(PromptTooLongError, match="the model's endpoint answered 400: too long"):
                await policy.run(backend_of("asks_providers"), client=client)


async def test_models_that_are_not_trained_keep_their_provider() -> None:
    backend = backend_of("two_models", train_model="^writer")
    async with ScriptedPolicyServer(replies=["fine"]) as provider, traced([FENCED]) as policy:
        _, calls = await policy.run(backend, provider=provider.base_url)
        assert [call.model for call in calls] == ["writer-1"]
        assert [body["model"] for body in provider.requests] == ["judge-1"]
    backend = backend_of("two_models", train_model="^nothing")
    async with ScriptedPolicyServer(replies=["fine"] * 2) as provider, traced([]) as policy:
        answer, calls = await policy.run(backend, provider=provider.base_url)
    assert (answer.text, calls) == ("fine", [])
    assert "none of its models (judge-1, writer-1) matches --train-model" in answer.no_call


async def test_an_agent_without_a_call_names_the_hosts_that_it_called() -> None:
    async with ScriptedPolicyServer(replies=[]) as other, traced([]) as policy:
        for name, told in (
            ("calls_nobody", "no LLM call that can be traced; it called 127.0.0.1: the policy serves"),
            ("counts_tokens", "no LLM call that can be traced; it called api.anthropic.com: the"),
            (
                "silent",
                "and no HTTP request at all: a cache of the agent may answer in place",
            ),
        ):
            answer, _ = await policy.run(backend_of(name), provider=other.base_url)
            assert answer.text == "SELECT 1"
            assert told in answer.no_call
        with pytest.raises(
            AgentError, match=r"AttributeError: the agent sees no 'typo' but .* \(before any LLM call\)"
        ):
            await policy.run(backend_of("mistyped"))


async def test_a_refusal_of_the_policy_is_an_endpoint_error() -> None:
    too_long = Reply(text="too long", status=400, code="context_length_exceeded")
    async with traced([Reply(text="down", status=404)] * 2 + [too_long]) as policy:
        for name in ("blocking", "raises_for_status"):
            with pytest.raises(EndpointError, match="the model's endpoint answered 404: down"):
                await policy.run(backend_of(name))
        with pytest.raises(PromptTooLongError):
            await policy.run(backend_of("blocking"))
    nobody = Endpoint(base_url="http://127.0.0.1:9/v1", model="policy")
    for name in ("blocking", "graph"):
        with pytest.raises(EndpointError, match="the model's endpoint gave no answer: ConnectError"):
            await backend_of(name).run(Question(id="1", text="", database=""), nobody)


async def test_a_reply_that_the_agent_cannot_use_is_a_failure_that_the_policy_caused() -> None:
    async with traced(lambda body: '{"sql": "SELECT 1"}' if "good" in str(body) else "I do not know") as policy:
        for name in ("typed_agent", "parses"):
            assert (await policy.run(backend_of(name), "good"))[0].text == "SELECT 1"
            with pytest.raises(MalformedOutputError):
                await policy.run(backend_of(name), "bad")
    cut = Reply(text='{"sql": "SELECT', finish_reason="length")
    async with traced(lambda _: cut) as policy:
        with pytest.raises(MalformedOutputError):
            await policy.run(backend_of("parses_typed"))
    looping = _tool_call("run_query", {"query": "SELECT 1"})
    async with traced(lambda _: looping) as policy:
        with pytest.raises(TurnLimitError, match=r"Max turns .10. exceeded") as caught:
            await policy.run(backend_of("sql_agent"))
    assert {step["input"] for step in caught.value.steps} == {"SELECT 1"}


async def test_input_and_output_can_be_set() -> None:
    module = Path(own_agents.__file__)
    own = {"agent_input": "test_agents:shout", "agent_output": "test_agents:short"}
    async with traced(lambda _: FENCED) as policy:
        answer, [call] = await policy.run(agent_backend(f"{module}:blocking", **own))
    assert (answer.text, call.messages[0]["content"]) == ("```sql", "WHICH SINGERS?")


def shout(task: Any) -> Any:
    return type(task)({**task, "question": task["question"].upper()})


def short(result: str) -> str:
    return result.splitlines()[0]


def test_what_is_no_agent_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="is no agent of openai-agents but of langgraph: leave --backend out"):
        backend_of("graph", framework="openai-agents")
    with pytest.raises(ValueError, match=r"has no 'grph'; it has graph, typed_agent, sql_agent, triage_agent$"):
        backend_of("grph")
    with pytest.raises(ValueError, match=r"makes its own calls: leave out agent_input$"):
        backend_of("of_two", agent_input="nowhere:f", train_model="x")
    with pytest.raises(ValueError, match="agent_output 'nowhere:f': there is no module 'nowhere'"):
        backend_of("graph", agent_output="nowhere:f")


async def test_a_program_is_an_agent(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, os, sys, urllib.request\n"
        "task = json.load(sys.stdin)\n"
        "body = {'model': 'm', 'messages': [{'role': 'user', 'content': task['question']}]}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "request = urllib.request.Request(url, json.dumps(body).encode(), {'Content-Type': 'application/json'})\n"
        "print(json.load(urllib.request.urlopen(request))['choices'][0]['message']['content'])\n"
        "sys.exit(task['id'] != '1' and 'no such task')\n"
    )
    backend = CommandBackend(agent=f"{sys.executable} {program}")
    async with traced(lambda _: FENCED) as policy:
        answer, [call] = await policy.run(backend)
    assert (answer.text, call.messages[0]["content"]) == ("SELECT name FROM singer", "Which singers?")
    with pytest.raises(ValueError, match="there is no program 'no-such-program'"):
        CommandBackend(agent="no-such-program x")
    with pytest.raises(AgentError, match=r"the agent ended with status 1: urllib\.error\.URLError: "):
        await backend.run(Question(id="2", text="", database=""), Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))


async def test_a_program_ends_when_it_exits_whatever_it_leaves_running(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text("import subprocess\nsubprocess.Popen(['sleep', '600'])\nprint(input()[:13])\n")
    question = Question(id="1", text="Who?", database="", answers=TEXT)
    answer = await CommandBackend(agent=f"{sys.executable} {program}").run(question, Endpoint(base_url="", model="m"))
    assert (answer.text, answer.judged_field) == ('{"id": "1", "', "standard output")
    assert answer.input.endswith('with {"id": "1", "question": "Who?", "database": ""} as standard input')


async def test_an_agent_of_the_agents_sdk_keeps_context_handoffs_and_tools() -> None:
    def reply(body: dict[str, Any]) -> Reply | str:
        tools = [tool["function"]["name"] for tool in body.get("tools") or ()]
        last = body["messages"][-1]
        if "transfer_to_sql" in tools:
            return _tool_call("transfer_to_sql", {})
        if last["role"] == "tool" and last["content"] == "rows of x.sqlite":
            return "There are two singers."
        return _tool_call("run_query", {"query": "SELECT name FROM singer"})

    async with traced(reply) as policy:
        answer, calls = await policy.run(backend_of("triage_agent"))
    assert answer.text == "SELECT name FROM singer"
    assert [call.agent for call in calls] == ["triage", "sql", "sql"]
    assert [(step["agent"], step["output"]) for step in answer.steps][-1] == ("run_query", "rows of x.sqlite")


def _tool_call(name: str, arguments: dict[str, Any]) -> Reply:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return Reply(tool_calls=[{"id": f"call_{name}", "type": "function", "function": function}])


async def test_the_agent_s_name_is_that_of_the_span_around_the_call() -> None:
    async with traced(lambda _: FENCED) as policy:
        _, calls = await policy.run(backend_of("speaks_opentelemetry"))
    assert [call.agent for call in calls] == ["analyst", "analyst", ""]


async def test_the_first_program_of_the_page_is_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "your-agent.md").read_text()
    program, _, call = page.split("```python\n")[1].split("```")[0].rpartition("print(fit(answer, ")
    assert len([line for line in (program + call).splitlines() if line]) <= 10
    names: dict[str, Any] = {}
    exec(program, names)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-author")
    sqlite3.connect(tmp_path / "x.sqlite").executescript("CREATE TABLE singer (name text)").close()
    async with traced(lambda _: FENCED) as policy:
        answer, [call] = await policy.run(agent_backend(names["answer"]), database=str(tmp_path / "x.sqlite"))
    assert answer.text == "SELECT name FROM singer"
    assert "CREATE TABLE singer (name text)" in call.messages[0]["content"]


async def test_the_tool_loop_of_the_examples_runs_its_query(tmp_path: Path) -> None:
    database = str(tmp_path / "x.sqlite")
    sqlite3.connect(database).executescript(
        "CREATE TABLE singer (name text); INSERT INTO singer VALUES ('Ann')"
    ).close()
    example = ROOT / "examples" / "tool_loop" / "agent.py"
    replies = [_tool_call("query_db", {"sql": "SELECT name FROM singer"}), "Ann sings."]
    async with traced(replies) as policy:
        answer, calls = await policy.run(agent_backend(f"{example}:graph"), database=database, db_path=database)
    assert answer.text == "SELECT name FROM singer"
    assert [call.agent for call in calls] == ["analyst", "analyst"]
    assert calls[1].messages[-1]["content"] == "[('Ann',)]"


_CALL = {"name": "find", "arguments": '{"sql": "SELECT 1"}'}
_CUSTOM = {"type": "custom_tool_call", "call_id": "1", "name": "find", "input": "SELECT 1"}


@pytest.mark.parametrize(
    ("api", "request_"),
    [
        (
            ChatCall,
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": _CALL}, "odd"]},
                    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "1 row"}]},
                    None,
                ]
            },
        ),
        (
            MessagesCall,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "1", "name": "find", "input": {"sql": "SELECT 1"}}],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "1 row"}]},
                ]
            },
        ),
        (
            GenerateContentCall,
            {
                "contents": [
                    {"role": "model", "parts": [{"functionCall": {"name": "find", "args": {"sql": "SELECT 1"}}}]},
                    {"parts": [{"functionResponse": {"name": "find", "response": {"result": "1 row"}}}]},
                ]
            },
        ),
        *(
            (ResponsesCall, {"input": [call, {"type": f"{call['type']}_output", "call_id": "1", "output": "1 row"}]})
            for call in ({"type": "function_call", "call_id": "1", **_CALL}, _CUSTOM)
        ),
    ],
)
def test_the_steps_of_an_agent_are_the_tool_calls_of_its_requests_in_any_api(api: Any, request_: Any) -> None:
    conversation = ToolCalls()
    for request in (request_, request_, {"messages": "odd", "input": 3}):
        conversation.add(api, request)
    assert conversation.steps() == [
        {"agent": "find", "kind": "tool", "input": "SELECT 1", "output": "1 row", "ok": True},
    ]
    assert SQL.read(AgentResult([], conversation.steps())) == ("SELECT 1", "the last query of a tool call")

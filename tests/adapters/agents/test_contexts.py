"""What an agent of a framework gets besides its input: a context, a thread, a store, connections."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import openai
import pytest
from agents import Agent, RunContextWrapper, function_tool, handoff, responses_websocket_session
from agents.mcp import MCPServerStdio
from agents.models.openai_responses import OpenAIResponsesWSModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from langgraph.store.memory import InMemoryStore
from pydantic import BaseModel
from test_agents import traced

from groundwire.adapters import AgentSetupError, Endpoint, Question, agent_backend
from groundwire.adapters.agents.drivers import AgentTask, driver_of
from groundwire.adapters.tracing.scripted_server import Reply

ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")


def _question(**columns: Any) -> Question:
    return Question(id="1", text="How many?", database="x.sqlite", columns=columns)


def _tool_call(name: str, **arguments: Any) -> Reply:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return Reply(tool_calls=[{"id": f"call_{name}", "type": "function", "function": function}])


# -- LangGraph


@dataclass(kw_only=True)
class Settings:
    user: str = "nobody"
    words: int = 10


class Needs(BaseModel):
    user: str
    tenant: str


class Typed(TypedDict, total=False):
    user: str


THREADS = list[str]()
"""Of each attempt of a graph, the last one last."""


def _graph(context: Any = None, **compiled: Any) -> Any:
    llm = ChatOpenAI(model="gpt-5-mini", api_key="none")  # type: ignore[arg-type]

    async def chat(state: MessagesState, runtime: Runtime[Any], config: RunnableConfig) -> Any:
        THREADS.append(config["configurable"]["thread_id"])
        assert runtime.store is not None
        seen = [item.value for item in await runtime.store.asearch(("notes",))]
        await runtime.store.aput(("notes",), "one", {"context": str(runtime.context)})
        asked = [("system", f"{runtime.context} {seen}"), *state["messages"]]
        return {"messages": [await llm.ainvoke(asked)]}

    return StateGraph(MessagesState, context_schema=context).add_node(chat).add_edge(START, "chat").compile(**compiled)


@pytest.mark.parametrize(
    ("context", "columns", "text"),
    [
        (None, {"user": "ann"}, "None []"),
        (Settings, {}, "Settings(user='nobody', words=10) []"),
        (Settings, {"user": "ann", "other": 1}, "Settings(user='ann', words=10) []"),
        (Needs, {"user": "ann", "tenant": "x"}, "user='ann' tenant='x' []"),
        (Typed, {"user": "ann", "other": 1}, "{'user': 'ann'} []"),
    ],
)
async def test_a_graph_gets_its_context_of_defaults_and_columns_and_a_store(
    context: Any, columns: dict[str, Any], text: str
) -> None:
    backend = agent_backend(_graph(context))
    async with traced(lambda _: "fine") as policy:
        for _ in range(2):  # the second attempt reads nothing of the first
            _, [call] = await policy.run(backend, **columns)
            assert call.messages[0]["content"] == text


async def test_a_context_that_cannot_be_made_is_refused_with_the_way_to_make_it() -> None:
    message = r"the agent's context, Needs, cannot be made .* \(it needs tenant\): .* --agent-context module:function"
    backend = agent_backend(_graph(Needs))
    with pytest.raises(ValueError, match=message):
        backend.describe_call(_question(user="ann"))
    with pytest.raises(AgentSetupError, match=message):
        await backend.run(_question(user="ann"), ENDPOINT)

    async def needs(task: Any) -> Needs:
        return Needs(user=task["user"], tenant=task.id)

    for make in (needs, lambda: Needs(user="ann", tenant="1")):
        own = agent_backend(_graph(Needs), agent_context=make)
        assert own.describe_call(_question(user="ann")) == "LangGraph.ainvoke(messages)"
        async with traced(lambda _: "fine") as policy:
            _, [call] = await policy.run(own, user="ann")
        assert call.messages[0]["content"] == "user='ann' tenant='1' []"
    with pytest.raises(AgentSetupError, match="agent_context raised ZeroDivisionError: division by zero"):
        await agent_backend(_graph(Needs), agent_context=lambda: 1 / 0).run(_question(), ENDPOINT)


async def test_what_a_graph_does_not_find_in_its_context_is_a_failure_of_the_setup() -> None:
    async def chat(state: MessagesState, runtime: Runtime[Any]) -> Any:
        return {"messages": [("assistant", runtime.context.tenant)]}

    graph = StateGraph(MessagesState, context_schema=Settings).add_node(chat).add_edge(START, "chat").compile()
    with pytest.raises(AgentSetupError, match=r"the agent's context lacks something .*'tenant'.*--agent-context"):
        await agent_backend(graph).run(_question(), ENDPOINT)


async def test_agent_config_is_the_configuration_of_a_graph() -> None:
    async def chat(state: MessagesState, config: RunnableConfig) -> Any:
        configurable = config["configurable"]
        return {"messages": [("assistant", f"{configurable['tone']} {configurable.get('user')} {config['tags']}")]}

    graph = StateGraph(MessagesState, context_schema=Settings).add_node(chat).add_edge(START, "chat").compile()
    backend = agent_backend(graph, agent_config=lambda task: {"configurable": {"tone": task["tone"]}, "tags": ["x"]})
    answer = await backend.run(_question(tone="dry", user="ann"), ENDPOINT)
    assert answer.text == "dry ann ['x']"
    with pytest.raises(AgentSetupError, match="agent_config returned 3: it returns a dict"):
        await agent_backend(graph, agent_config=lambda: 3).run(_question(), ENDPOINT)


class OfADatabase(BaseCheckpointSaver[str]):
    """For ``invoke`` only, as the saver of SQLite: its other half raises."""


@pytest.mark.parametrize("saver", [InMemorySaver, OfADatabase])
async def test_each_attempt_of_a_graph_has_a_thread_and_a_memory_of_its_own(saver: Any) -> None:
    store = InMemoryStore()
    store.put(("notes",), "zero", {"by": "the author"})
    graph = _graph(checkpointer=saver(), store=store).with_config(configurable={"thread_id": "fixed"})
    backend = agent_backend(graph)
    async with traced(lambda _: "fine") as policy:
        for _ in range(2):
            _, [call] = await policy.run(backend)
            assert [message["role"] for message in call.messages] == ["system", "user"]
            assert call.messages[0]["content"] == "None [{'by': 'the author'}]"
    assert len(store.search(("notes",))) == 1
    assert THREADS[-2] != THREADS[-1] != "fixed"


def test_a_graph_whose_input_needs_more_than_the_task_has_is_refused() -> None:
    @dataclass
    class Input:
        topic: str
        extraction_schema: dict[str, Any]

    graph = StateGraph(Input).add_node("one", lambda state: state).add_edge(START, "one").compile()  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"the graph's input has the fields extraction_schema, and the task has topic"):
        agent_backend(graph, agent_output=str).describe_call(_question(topic="x"))


def test_a_folder_with_a_langgraph_json_is_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "own_project"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "words.py").write_text("PLAIN = 'plain'")
    (package / "graph.py").write_text(
        "import os\nfrom .words import PLAIN\nKEY = os.environ['OWN_PROJECT']\n"
        "def plain(task): return f'{PLAIN} {KEY}'\ndef other(task): return 'other'\n"
    )
    (tmp_path / "own.env").write_text("OWN_PROJECT=of-the-file\nOPENAI_API_KEY=sk-own\n")
    project = {"dependencies": ["."], "graphs": {"plain": "./src/own_project/graph.py:plain"}, "env": "own.env"}
    (tmp_path / "langgraph.json").write_text(json.dumps(project))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.delenv("OWN_PROJECT", raising=False)
    monkeypatch.chdir(tmp_path)
    call = "own_project.graph:plain(task=the task)"
    for name in (".", ".:plain", "langgraph.json", str(tmp_path), "own_project.graph:plain"):
        assert agent_backend(name).describe_call(_question()) == call
    import os

    assert (os.environ["OWN_PROJECT"], os.environ["OPENAI_API_KEY"]) == ("of-the-file", "sk-own")
    project["graphs"]["other"] = {"path": "./src/own_project/graph.py:other"}  # type: ignore[index]
    (tmp_path / "langgraph.json").write_text(json.dumps(project))
    assert agent_backend(".:other").describe_call(_question()) == "own_project.graph:other(task=the task)"
    for name, sentence in {
        ".": "langgraph.json has 2 graphs: write .:NAME with one of plain, other",
        ".:third": "langgraph.json has no graph 'third': write .:NAME with one of plain, other",
        "src": "agent 'src': the folder seems to have no agent; write the one to run as module:name",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            agent_backend(name)
    (tmp_path / "langgraph.json").write_text("{}")
    with pytest.raises(ValueError, match=r"langgraph.json has no graphs that can be read: KeyError: 'graphs'"):
        agent_backend(".")


# -- OpenAI Agents SDK


class Booking(BaseModel):
    seat: str = "unassigned"
    customer: str | None = None


def _speaks(kind: Any) -> Any:
    def instructions(context: RunContextWrapper[Any], agent: Any) -> str:
        context.context.seat = "12A" if not isinstance(context.context, Mapping) else None
        return f"{context.context}"

    instructions.__annotations__ = {"context": RunContextWrapper[kind]}
    return instructions


@function_tool
def book(context: RunContextWrapper[Booking], seat: str) -> str:
    """Book a seat."""
    context.context.seat = seat
    return f"{context.context}"


def _says_context(context: RunContextWrapper[Any], agent: Any) -> str:
    return f"{type(context.context).__name__} {context.context}"


_BOOKS = Agent(name="books", tools=[book])
COLUMNS = {"customer": "ann", "id": "1", "question": "Which singers?", "database": "x.sqlite"}


@pytest.mark.parametrize(
    ("agent", "system"),
    [
        (Agent[Booking](name="a", instructions=_says_context), "Booking seat='unassigned' customer='ann'"),
        (Agent(name="a", instructions=_says_context, tools=[book]), "Booking seat='unassigned' customer='ann'"),
        (
            Agent(name="a", instructions=_says_context, handoffs=[handoff(_BOOKS)]),
            "Booking seat='unassigned' customer='ann'",
        ),
        (
            Agent(name="a", instructions=_says_context, tools=[_BOOKS.as_tool("t", "x")]),
            "Booking seat='unassigned' customer='ann'",
        ),
        (Agent[Booking | None](name="a", instructions=_says_context), "Booking seat='unassigned' customer='ann'"),
        (Agent[dict[str, Any]](name="a", instructions=_says_context), COLUMNS),
        (Agent[Typed](name="a", instructions=_says_context), {}),
        (Agent(name="a", instructions=_says_context), COLUMNS),
        (Agent[None](name="a", instructions=_says_context), COLUMNS),
    ],
)
async def test_the_context_is_of_the_class_that_the_agent_declares_else_the_columns(agent: Any, system: Any) -> None:
    async with traced(lambda _: "fine") as policy:
        _, [call] = await policy.run(agent_backend(agent), customer="ann")
    text = call.messages[0]["content"]
    assert text == system if isinstance(system, str) else json.loads(text.partition(" ")[2].replace("'", '"')) == system


async def test_each_attempt_has_a_context_of_its_own_which_the_agent_may_change() -> None:
    def replies(body: dict[str, Any]) -> Any:
        return "fine" if body["messages"][-1]["role"] == "tool" else _tool_call("book", seat="12A")

    backend = agent_backend(Agent[Booking](name="a", instructions=_says_context, tools=[book]))
    async with traced(replies) as policy:
        for _ in range(2):
            answer, [first, _] = await policy.run(backend)
            assert first.messages[0]["content"] == "Booking seat='unassigned' customer=None"
            assert answer.steps[-1]["output"] == "seat='12A' customer=None"


@function_tool
def reads_tenant(context: RunContextWrapper[Any]) -> str:
    """Read the tenant."""
    return str(context.context.tenant)


@function_tool
def reads_item(context: RunContextWrapper[dict]) -> str:  # type: ignore[type-arg]
    """Read the tenant."""
    return str(context.context["tenant"])


def _asks_tenant(context: RunContextWrapper[Any], agent: Any) -> str:
    return str(context.context.tenant)


@pytest.mark.parametrize(
    "agent",
    [
        Agent(name="a", instructions=_asks_tenant),
        Agent[Booking](name="a", instructions=_asks_tenant),
        Agent(name="a", tools=[reads_tenant]),  # the SDK tells the model of it
        Agent(name="a", tools=[reads_item]),
    ],
)
async def test_what_an_agent_does_not_find_in_its_context_is_a_failure_of_the_setup(agent: Any) -> None:
    def replies(body: dict[str, Any]) -> Any:
        name = body["tools"][0]["function"]["name"]
        return "fine" if body["messages"][-1]["role"] == "tool" else _tool_call(name)

    async with traced(replies) as policy:
        with pytest.raises(AgentSetupError, match=r"the agent's context .*'tenant'.*--agent-context"):
            await policy.run(agent_backend(agent))
        if agent.instructions is None:
            answer, _ = await policy.run(agent_backend(agent), tenant="x")
            assert answer.steps[-1]["output"] == "x"


async def test_agent_context_and_agent_config_are_arguments_of_the_run() -> None:
    needs = Agent[Needs](name="a", instructions=_says_context)
    with pytest.raises(ValueError, match=r"Needs, cannot be made .* \(it needs tenant, user\): .*--agent-context"):
        agent_backend(needs).describe_call(_question())
    backend = agent_backend(needs, agent_context=lambda task: Needs(user=task.id, tenant="x"))
    assert backend.describe_call(_question()) == "Runner.run(a, the question, context=what agent_context returns)"
    async with traced(lambda _: "fine") as policy:
        _, [call] = await policy.run(backend)
    assert call.messages[0]["content"] == "Needs user='1' tenant='x'"
    turns = agent_backend(Agent(name="a", tools=[reads_tenant]), agent_config=lambda: {"max_turns": 1})
    async with traced(lambda _: _tool_call("reads_tenant")) as policy:
        with pytest.raises(Exception, match=r"Max turns \(1\) exceeded"):
            await policy.run(turns, tenant="x")
    with pytest.raises(ValueError, match="is a function, which makes its own context: leave out agent_context"):
        agent_backend(lambda task: "x", agent_context=Booking)


_SERVER = """
import os, sys
from mcp.server import MCPServer
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
server = MCPServer("own")
@server.tool()
def add(a: int, b: int) -> str:
    return str(a + b)
server.run()
"""


async def test_mcp_servers_of_an_agent_its_handoffs_and_its_tools_are_connected_once(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(_SERVER)
    starts = tmp_path / "starts"

    def server() -> MCPServerStdio:
        command = {"command": sys.executable, "args": [str(tmp_path / "server.py"), str(starts)]}
        return MCPServerStdio(params=command, client_session_timeout_seconds=60)  # type: ignore[arg-type]

    other = Agent(name="other", mcp_servers=[server()])
    tool = Agent(name="tool", mcp_servers=[server()])
    agent = Agent(name="a", mcp_servers=[server()], handoffs=[handoff(other)], tools=[tool.as_tool("tool", "x")])
    other.handoffs = [agent]
    backend = agent_backend(agent)
    backend.describe_call(_question())

    def replies(body: dict[str, Any]) -> Any:
        if body["messages"][-1]["role"] == "user":
            return _tool_call("transfer_to_other")
        return _tool_call("add", a=1, b=2) if "transfer" in str(body["messages"][-1]) else "fine"

    async with traced(replies) as policy:
        for _ in range(2):
            answer, _ = await policy.run(backend)
            assert answer.steps[-1]["agent"] == "add"
            assert "3" in answer.steps[-1]["output"]
    await backend.stop()
    assert len(starts.read_text().split()) == 3
    assert all(server.session is None for server in (*agent.mcp_servers, *other.mcp_servers, *tool.mcp_servers))  # type: ignore[attr-defined]


async def test_an_mcp_server_that_cannot_be_connected_is_a_failure_of_the_setup() -> None:
    server: Any = MCPServerStdio(params={"command": "/no/such/program"})
    with pytest.raises(AgentSetupError, match=r"an MCP server of agent 'a' cannot be connected: .*no/such/program"):
        await agent_backend(Agent(name="a", mcp_servers=[server])).run(_question(), ENDPOINT)


async def test_an_mcp_server_that_does_not_answer_in_time_is_named_by_the_error_in_the_group() -> None:
    class Server(MCPServerStdio):
        async def connect(self) -> None:
            group = Exception("unhandled errors in a TaskGroup (1 sub-exception)")
            group.exceptions = (TimeoutError("no answer within 5 s"),)  # type: ignore[attr-defined]
            raise group

    server: Any = Server(params={"command": "none"})
    with pytest.raises(AgentSetupError, match="cannot be connected: TimeoutError: no answer within 5 s"):
        await agent_backend(Agent(name="a", mcp_servers=[server])).run(_question(), ENDPOINT)


async def test_responses_over_a_websocket_go_over_http_in_an_attempt() -> None:
    agent = Agent(name="a", instructions="Help.")

    async def in_a_session(task: Any) -> str:
        async with responses_websocket_session() as session:
            return str((await session.run(agent, task["question"])).final_output)

    async def streamed(task: Any) -> str:
        async with responses_websocket_session() as session:
            result = session.run_streamed(agent, task["question"])
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    client = openai.AsyncOpenAI(api_key="none")
    of_a_model = Agent(name="a", model=OpenAIResponsesWSModel("gpt-5-mini", client))
    for own in (in_a_session, streamed, of_a_model):
        async with traced(lambda _: "fine") as policy:
            answer, [call] = await policy.run(agent_backend(own))
        assert (answer.text, call.messages[-1]["content"]) == ("fine", "Which singers?")


async def test_the_input_of_an_entrypoint_is_what_it_declares() -> None:
    @entrypoint()
    async def essay(topic: str) -> str:
        return f"about {topic}"

    @entrypoint()
    async def of_columns(inputs: dict[str, Any]) -> str:
        return f"about {inputs['city']}"

    question = Question(id="1", text="heat pumps", database="", columns={"city": "Bern"})
    for agent, answer in ((essay, "about heat pumps"), (of_columns, "about Bern")):
        assert (await agent_backend(agent).run(question, Endpoint(base_url="", model="m"))).text == answer
    assert agent_backend(essay).describe_call(question).endswith(".ainvoke(the question)")


async def test_a_graph_that_is_not_compiled_is_an_agent() -> None:
    graph = (
        StateGraph(MessagesState).add_node("chat", lambda _: {"messages": [("ai", "hello")]}).add_edge(START, "chat")
    )
    answer = await agent_backend(graph).run(Question(id="1", text="Hi", database=""), Endpoint(base_url="", model="m"))
    assert answer.text == "hello"


def test_a_chain_gets_the_variables_of_its_prompt() -> None:
    chain: Any = ChatPromptTemplate.from_template("Answer {input}") | RunnableLambda(lambda prompt: prompt.to_string())
    driver = driver_of(chain, "chain")
    assert driver.describe(AgentTask(question="Who?", id="1", database="")) == "chain.ainvoke(input)"
    with pytest.raises(ValueError, match="the graph's input has the fields city, and the task has question"):
        driver_of(ChatPromptTemplate.from_template("{question} {city}"), "x").describe(AgentTask(question="Who?"))

"""What an author changes for the other way of replies: streamed, or whole where the example streams.

Each is the code of a module beside ``agent``, the example's own, with the name of the agent in it: a model's option,
the framework's method, or the client's.
"""

from __future__ import annotations

__all__ = ["OTHER_WAY"]

_RUN_STREAMED = """
from agents import Runner

async def answer(task):
    result = Runner.run_streamed(agent.{name}, task["question"], context=dict(task))
    async for _ in result.stream_events():
        pass
    return result.final_output
"""
OTHER_WAY = {
    "langgraph": ("graph", "agent.llm.streaming = True\ngraph = agent.graph\n"),
    "langchain": (
        "answer",
        """
async def answer(task):
    asked, context = {"messages": [("user", task["question"])]}, agent.Context(task["db_path"])
    async for kind, chunk in agent.agent.astream(asked, context=context, stream_mode=["messages", "values"]):
        state = chunk if kind == "values" else None
    return state["messages"][-1].text
""",
    ),
    "openai_agents": ("answer", _RUN_STREAMED.format(name="triage_agent")),
    "mcp_tools": (
        "answer",
        """
import asyncio
from weakref import WeakKeyDictionary
from agents import Runner
servers = WeakKeyDictionary()  # by event loop

async def connected():
    server = agent.MCPServerStdio(
        name="sqlite", params=agent.server.params.model_dump(exclude_none=True), cache_tools_list=True,
        client_session_timeout_seconds=60, tool_meta_resolver=agent.server.tool_meta_resolver,
    )
    await server.connect()
    return server

async def answer(task):
    loop = asyncio.get_running_loop()
    if loop not in servers:
        servers[loop] = asyncio.ensure_future(connected())
    own = agent.agent.clone(mcp_servers=[await servers[loop]])
    result = Runner.run_streamed(own, task["question"], context=dict(task))
    async for _ in result.stream_events():
        pass
    return result.final_output
""",
    ),
    "autogen": (
        "answer",
        """
from functools import partial
agent.AssistantAgent = partial(agent.AssistantAgent, model_client_stream=True)
answer = agent.answer
""",
    ),
    "crewai": (
        "answer",
        """
from crewai import LLM
made = agent.Agent
agent.Agent = lambda **options: made(**{**options, "llm": LLM(model="gpt-5-mini", stream=True)})
answer = agent.answer
""",
    ),
    "agent_framework": (
        "answer",
        """
class Streaming(agent.Agent):
    async def run(self, *messages, **options):
        stream = super().run(*messages, **options, stream=True)
        async for _ in stream:
            pass
        return await stream.get_final_response()

agent.Agent = Streaming
answer = agent.answer
""",
    ),
    "pydantic_ai": (
        "answer",
        """
async def events(context, stream):
    async for _ in stream:
        pass

async def answer(task):
    deps = agent.Deps(task["db_path"])
    return (await agent.agent.run(task["question"], deps=deps, event_stream_handler=events)).output
""",
    ),
    "smolagents": (
        "answer",
        """
from functools import partial
agent.ToolCallingAgent = partial(agent.ToolCallingAgent, stream_outputs=True)
answer = agent.answer
""",
    ),
    "google_adk": (
        "answer",
        """
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part

async def answer(task):
    runner, text = InMemoryRunner(agent.root_agent), ""
    own = {"app_name": runner.app_name, "user_id": "user", "state": {"db_path": task["db_path"]}}
    session = await runner.session_service.create_session(**own)
    async for event in runner.run_async(
        user_id="user",
        session_id=session.id,
        new_message=Content(role="user", parts=[Part(text=task["question"])]),
        run_config=RunConfig(streaming_mode=StreamingMode.SSE),
    ):
        if event.is_final_response() and event.content:
            text = "".join(part.text or "" for part in event.content.parts or ())
    return text
""",
    ),
    "strands": ("agent", "agent.agent.model.update_config(streaming=False)\nagent = agent.agent\n"),
    "agno": (
        "answer",
        """
from agno.run.agent import RunCompletedEvent

async def answer(task):
    own = {"dependencies": dict(task), "session_id": task["id"]}
    async for event in agent.agent.deep_copy().arun(task["question"], stream=True, stream_events=True, **own):
        if isinstance(event, RunCompletedEvent):
            return event.content
""",
    ),
    "haystack": ("pipeline", "agent.agent.streaming_callback = lambda chunk: None\npipeline = agent.pipeline\n"),
    "dspy": (
        "answer",
        """
import dspy
dspy.configure(lm=dspy.LM("openai/gpt-5-mini", engine="litellm", cache=False))

async def answer(task):
    async for value in dspy.streamify(agent.program)(question=task["question"], db_path=task["db_path"]):
        last = value
    return last.sql
""",
    ),
    "llama_index": (
        "workflow",
        """
class Streaming(agent.OpenAI):
    async def achat(self, messages, **options):
        async for reply in await self.astream_chat(messages, **options):
            pass
        return reply

agent.TextToSQL.llm = Streaming(model="gpt-5-mini")
workflow = agent.workflow
""",
    ),
    "camel": ("answer", 'agent.model.model_config_dict["stream"] = True\nanswer = agent.answer\n'),
    "openai_client": (
        "answer",
        """
from openai.lib.streaming.chat import ChatCompletionStreamState
create = agent.client.chat.completions.create

async def streamed(**options):
    state = ChatCompletionStreamState()
    async for chunk in await create(**options, stream=True):
        state.handle_chunk(chunk)
    return state.get_final_completion()

agent.client.chat.completions.create = streamed
answer = agent.answer
""",
    ),
    "anthropic_client": (
        "answer",
        """
from contextlib import asynccontextmanager

@asynccontextmanager
async def whole(**options):
    message = await agent.client.messages.create(**options)

    class Stream:
        async def get_final_message(self):
            return message

    yield Stream()

agent.client.messages.stream = whole
answer = agent.answer
""",
    ),
}

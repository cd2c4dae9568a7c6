"""Traces of the example agents with a policy that is mostly right, exported as a production system does it.

The reference agents, and two of examples/frameworks, run without a trainer: their calls go to a server that
answers with the gold query, in one of ten tasks with another one. OpenInference's instrumentation and OpenTelemetry's
exporter write what a collector gets. ``groundwire learn`` begins with that file::

    python -m benchmarks.traced_agents langgraph --output traces.jsonl
    groundwire learn traces.jsonl --backend langgraph --model starter --reward benchmarks/traced_agents.py:reward

It needs openinference-instrumentation-langchain and openinference-instrumentation-openai-agents.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib.util
import json
import os
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from groundwire import adapters, domains, rewards
from groundwire.adapters import Endpoint, Question
from groundwire.adapters.sql_agents.prompts import CORRECT, INCORRECT, extract_sql
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer, text_of
from groundwire.adapters.tracing.wire.responses import ResponsesCall
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.tools.sql.answers import SQL
from groundwire.train.config.resolve import resolve

EXAMPLES = Path(__file__).resolve().parents[1] / "examples/frameworks"


@rewards.judges_sql
def reward(task: dict[str, Any], answer: str) -> float:
    """Whether a query has the rows of one of the accepted ones."""
    return max((execution_match(answer, gold, task["db_path"]).score for gold in task["expected"]), default=0.0)


def policy(tasks: list[Any], known: list[Any], right: float) -> Callable[[dict[str, Any]], Reply]:
    """Replies to the prompts of both agents: a handoff, the query as a tool call, the query in a code block."""
    by_question = {task["question"]: task for task in tasks}
    queries = {}
    for task in tasks:
        others = [other["query"] for other in known if other["db_id"] == task["db_id"] and other is not task]
        chosen = random.Random(task["id"])
        queries[task["question"]] = task["query"] if chosen.random() < right or not others else chosen.choice(others)

    def reply(body: dict[str, Any]) -> Reply:
        text = json.dumps([message for message in body["messages"] if message["role"] == "user"], ensure_ascii=False)
        question = max((one for one in by_question if json.dumps(one)[1:-1] in text), key=len)
        offered = [tool["function"]["name"] for tool in body.get("tools") or ()]
        called = [message for message in body["messages"] if message["role"] == "tool"]
        query = {"query": queries[question]}
        for name, arguments in (("transfer_to_sql_analyst", {}), ("run_sql", query), ("run_query", query)):
            if name in offered and (name == "transfer_to_sql_analyst" or not _was_called(name, body)):
                function = {"name": name, "arguments": json.dumps(arguments)}
                return Reply(tool_calls=[{"id": f"call_{len(called)}", "type": "function", "function": function}])
        if text_of(body["messages"][-1]).endswith(f"{CORRECT} or {INCORRECT}?"):
            return Reply(text=CORRECT)
        return Reply(text=f"```sql\n{queries[question]}\n```")

    return reply


def _was_called(name: str, body: dict[str, Any]) -> bool:
    calls = (call for message in body["messages"] for call in message.get("tool_calls") or ())
    return any(call["function"]["name"] == name for call in calls)


class PolicyServer(ScriptedPolicyServer):
    """Also serves the API that the Agents SDK uses by default."""

    def application(self) -> web.Application:
        """The routes of the server."""
        app = super().application()
        app.router.add_post("/v1/responses", partial(self._answer, ResponsesCall))
        return app


def load(folder: str) -> Any:
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(folder, EXAMPLES / folder / "agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example_graph(server: PolicyServer) -> Callable[[Any], Awaitable[str]]:
    """The graph of examples/frameworks/langgraph."""
    graph = load("langgraph").graph

    async def run(task: Any) -> str:
        state = await graph.ainvoke({"question": task["question"], "db_path": task["db_path"]})
        return str(state["sql"])

    return run


def example_agents(server: PolicyServer) -> Callable[[Any], Awaitable[str]]:
    """The agents of examples/frameworks/openai_agents."""
    from agents import Runner

    triage = load("openai_agents").triage_agent

    async def run(task: Any) -> str:
        result = await Runner.run(triage, task["question"], context={"db_path": task["db_path"]})
        return extract_sql(str(result.final_output))

    return run


def reference_graph(server: PolicyServer) -> Callable[[Any], Awaitable[str]]:
    """The reference LangGraph agent with the options of ``groundwire run``."""
    backend = adapters.get("langgraph")(**resolve("fast").agent_options)

    async def run(task: Any) -> str:
        question = Question(id=task["id"], text=task["question"], database=task["db_path"], answers=SQL)
        answer = await backend.run(question, Endpoint(base_url=server.base_url, model=server.model))
        return answer.text

    return run


def create_agent(server: PolicyServer) -> Callable[[Any], Awaitable[str]]:
    """The tool-calling graph of examples/frameworks/langchain."""
    module = load("langchain")

    async def run(task: Any) -> str:
        asked = {"messages": [{"role": "user", "content": task["question"]}]}
        state = await module.agent.ainvoke(asked, context=module.Context(db_path=task["db_path"]))
        return extract_sql(str(state["messages"][-1].text))

    return run


AGENTS: dict[str, Callable[[PolicyServer], Callable[[Any], Awaitable[str]]]] = {
    "langgraph": reference_graph,
    "example-graph": example_graph,
    "create-agent": create_agent,
    "openai-agents": example_agents,
}


def writer(output: Path) -> Any:
    """An exporter of the SDK that writes what it would send, a line of OTLP's JSON for each batch."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Writer(SpanExporter):
        def export(self, spans: Any) -> Any:
            value = MessageToDict(encode_spans(spans))
            for part in (scope for resource in value["resourceSpans"] for scope in resource["scopeSpans"]):
                for span in part["spans"]:
                    ids = (name for name in ("traceId", "spanId", "parentSpanId") if name in span)
                    span.update({name: base64.b64decode(span[name]).hex() for name in ids})
            with open(output, "a", encoding="utf-8") as file:
                file.write(json.dumps(value) + "\n")
            return SpanExportResult.SUCCESS

    return Writer()


async def main() -> None:
    """Run an agent on tasks, and write its traces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agent", choices=AGENTS)
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--right", type=float, default=0.9, help="share of tasks with the gold query")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.output.exists():
        parser.error(f"{arguments.output} exists: spans would be added to it; give another file")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    from openinference.instrumentation.langchain import LangChainInstrumentor
    from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    known = list(domains.get("spider").load().train)
    tasks = random.Random(0).sample(known, arguments.tasks)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(writer(arguments.output)))
    tracer = provider.get_tracer("application")
    LangChainInstrumentor().instrument(tracer_provider=provider)
    OpenAIAgentsInstrumentor().instrument(tracer_provider=provider)
    async with PolicyServer(policy(tasks, known, arguments.right), model="strong") as server:
        os.environ.update(OPENAI_BASE_URL=server.base_url, OPENAI_API_KEY="none")
        run = AGENTS[arguments.agent](server)
        for task in tasks:
            inputs = {"question": task["question"], "db_path": task["db_path"]}
            kind = {"openinference.span.kind": "AGENT", "input.value": json.dumps(inputs)}
            with tracer.start_as_current_span("answer", attributes=kind) as span:
                answer = await run(task)
                score = execution_match(answer, task["query"], task["db_path"]).score
                span.set_attribute("output.value", answer)
                name = "gen_ai.evaluation"
                span.add_event(f"{name}.result", {f"{name}.name": "correct", f"{name}.score.value": float(score)})
    provider.shutdown()


if __name__ == "__main__":
    asyncio.run(main())

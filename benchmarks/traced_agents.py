"""Traces of the example agents with a policy that is mostly right, exported as a production system does it.

The agents of examples/frameworks run as their users run them, without groundwire: their calls go to a server that
answers with the gold query, in one of ten tasks with another one. OpenInference's instrumentation and OpenTelemetry's
exporter write what a collector gets. ``groundwire learn`` begins with that file::

    python -m benchmarks.traced_agents langgraph --output langgraph.jsonl
    groundwire learn langgraph.jsonl --agent examples/frameworks/langgraph/agent.py:graph --model starter \\
        --reward benchmarks/traced_agents.py:reward

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
from pathlib import Path
from typing import Any

from groundwire import domains, rewards
from groundwire.adapters.sql_agents.prompts import extract_sql
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.rewards.spider.execution_match import execution_match

_TOOL_RESULTS = 2
"""Of the handoff and of the query, before the answer."""
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
        for name, arguments in (("transfer_to_sql_analyst", {}), ("run_sql", {"query": queries[question]})):
            if name in offered and (name != "run_sql" or len(called) < _TOOL_RESULTS):
                function = {"name": name, "arguments": json.dumps(arguments)}
                return Reply(tool_calls=[{"id": f"call_{len(called)}", "type": "function", "function": function}])
        return Reply(text=f"```sql\n{queries[question]}\n```")

    return reply


def load(folder: str) -> Any:
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(folder, EXAMPLES / folder / "agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def langgraph(provider: Any) -> Callable[[Any], Awaitable[str]]:
    """The graph, instrumented."""
    from openinference.instrumentation.langchain import LangChainInstrumentor

    LangChainInstrumentor().instrument(tracer_provider=provider)
    graph = load("langgraph").graph

    async def run(task: Any) -> str:
        state = await graph.ainvoke({"question": task["question"], "db_path": task["db_path"]})
        return str(state["sql"])

    return run


def openai_agents(provider: Any) -> Callable[[Any], Awaitable[str]]:
    """The agents, instrumented."""
    from agents import Runner, set_default_openai_api
    from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

    OpenAIAgentsInstrumentor().instrument(tracer_provider=provider)
    set_default_openai_api("chat_completions")
    triage = load("openai_agents").triage_agent

    async def run(task: Any) -> str:
        result = await Runner.run(triage, task["question"], context={"db_path": task["db_path"]})
        return extract_sql(str(result.final_output))

    return run


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
    parser.add_argument("agent", choices=["langgraph", "openai_agents"])
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--right", type=float, default=0.9, help="share of tasks with the gold query")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    known = list(domains.get("spider").load().train)
    tasks = random.Random(0).sample(known, arguments.tasks)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(writer(arguments.output)))
    tracer = provider.get_tracer("application")
    async with ScriptedPolicyServer(policy(tasks, known, arguments.right), model="strong") as server:
        os.environ.update(OPENAI_BASE_URL=server.base_url, OPENAI_API_KEY="none")
        run = {"langgraph": langgraph, "openai_agents": openai_agents}[arguments.agent](provider)
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

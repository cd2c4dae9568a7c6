"""What a process for each rollout costs, by the number of parallel rollouts: CPU, memory, and rollouts in one process.

Each agent makes one call, to a server in another process. The CPU is that of this process and of all below it, after a
few rollouts, so that imports do not count. Frameworks that are not installed are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from benchmarks._processes import free_port, running
from benchmarks._results import record
from groundwire.adapters import Backend, Endpoint, Question, agent_backend
from groundwire.adapters.agents.process.backend import ProcessBackend

FEW, MANY = 8, 64
PARALLEL = (1, 4, 16, 64)
AGENTS = {
    "langgraph": """
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
def lookup(city: str) -> str:
    '''Look a city up.'''
    return city
graph = create_agent(ChatOpenAI(model="gpt-4o-mini", max_retries=1), tools=[lookup], checkpointer=InMemorySaver())
def agent(question, id):
    result = graph.invoke({"messages": [("user", question)]}, {"configurable": {"thread_id": id}})
    return result["messages"][-1].content
""",
    "agents": """
from agents import Agent, Runner, function_tool
@function_tool
def lookup(city: str) -> str:
    '''Look a city up.'''
    return city
helper = Agent(name="a", instructions="Answer.", tools=[lookup], model="gpt-4o-mini")
async def agent(question):
    return str((await Runner.run(helper, question)).final_output)
""",
    "strands": """
from strands import Agent, tool
from strands.models.openai import OpenAIModel
@tool
def lookup(city: str) -> str:
    '''Look a city up.'''
    return city
model = OpenAIModel(model_id="gpt-4o-mini")
def agent(question):
    return str(Agent(model=model, tools=[lookup], callback_handler=None)(question)).strip()
""",
    "dspy": """
import dspy
dspy.configure(lm=dspy.LM("openai/gpt-4o-mini", cache=False))
program = dspy.Predict("question -> answer")
def agent(question):
    return program(question=question).answer
""",
}
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
_TEXT = "[[ ## answer ## ]]\n42\n\n[[ ## completed ## ]]"


async def _serve(port: int, delay_s: float) -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await asyncio.sleep(delay_s)
        if request.path.endswith("/responses"):
            content = {"type": "output_text", "text": _TEXT, "annotations": []}
            message = {"type": "message", "id": "1", "role": "assistant", "status": "completed", "content": [content]}
            usage: dict[str, Any] = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
            usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
            answer = {"id": "1", "object": "response", "created_at": 1, "model": "m", "status": "completed"}
            answer |= {"tools": [], "parallel_tool_calls": False, "tool_choice": "auto"}
            return web.json_response({**answer, "output": [message], "usage": usage})
        answer = {"id": "1", "created": 1, "model": "m"}
        message = {"role": "assistant", "content": _TEXT}
        if not body.get("stream"):
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "message": message}
            return web.json_response({**answer, "object": "chat.completion", "choices": [choice], "usage": _USAGE})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for choice in ({"index": 0, "delta": message}, {"index": 0, "delta": {}, "finish_reason": "stop"}):
            chunk = {**answer, "object": "chat.completion.chunk", "choices": [choice]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/{path:.*}", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def _answer(backend: Backend, port: int, number: int) -> None:
    endpoint = Endpoint(base_url=f"http://127.0.0.1:{port}/rollout/r{number}/attempt/a/v1", model="m")
    answer = await backend.run(Question(id=str(number), text=f"What is {number} * 7?", database=""), endpoint)
    assert "42" in answer.text, answer


async def _measure(mode: str, file: str, port: int, parallel: int) -> None:
    """Print the ms of CPU of a rollout and the rollouts per second; or the MB of one of ``parallel`` that are alive."""
    spec = {"agent": f"{file}:agent"}
    os.environ["OPENAI_BASE_URL"] = f"http://127.0.0.1:{port}/v1"  # DSPy has a client of its own
    backend = agent_backend(**spec) if mode == "off" else ProcessBackend(spec)
    memory, count = 0.0, parallel if mode == "alive" else MANY
    for number in range(1 if mode == "alive" else FEW):
        await _answer(backend, port, number)
    began, started = _cpu_s(), time.perf_counter()
    for first in range(0, count, parallel):
        runs = [asyncio.create_task(_answer(backend, port, first + number)) for number in range(parallel)]
        if mode == "alive":
            await asyncio.sleep(8)
            processes = psutil.Process().children(recursive=True)
            memory = sum(process.memory_full_info().pss for process in processes) / count / 1e6
        await asyncio.gather(*runs)
    used, per_s = _cpu_s() - began, count / (time.perf_counter() - started)
    await backend.stop()
    print(memory if mode == "alive" else used / count * 1e3, per_s)


def _cpu_s() -> float:
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in (this, *this.children(recursive=True)))


def _measured(mode: str, file: Path, port: int, parallel: int) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.processes", "--measure", mode, str(file), str(port), str(parallel)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figure, per_s = map(float, done.stdout.split()[-2:])
    return figure, per_s


def main() -> None:
    """Print rows for each framework that is installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frameworks", nargs="*", help=f"of {', '.join(AGENTS)}; default: all")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(_serve(int(options.serve[0]), float(options.serve[1])))
    if options.measure:
        mode, file, port, parallel = options.measure
        asyncio.run(_measure(mode, file, int(port), int(parallel)))
        return
    fast, slow = free_port(), free_port()
    serve = [sys.executable, "-m", "benchmarks.processes", "--serve"]
    print("| framework | parallel | CPU ms in one process | in a process each | more | rollouts/s | PSS MB of one |")
    print("|---|---|---|---|---|---|---|")
    with running([*serve, str(fast), "0"], [*serve, str(slow), "15"]), tempfile.TemporaryDirectory() as folder:
        for name, source in AGENTS.items():
            needs = re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)
            if not all(map(importlib.util.find_spec, needs)) or name not in (options.frameworks or AGENTS):
                continue
            file = Path(folder) / f"{name}_agent.py"
            file.write_text(source, encoding="utf-8")
            for parallel in PARALLEL:
                one, one_per_s = _measured("off", file, fast, parallel)
                each, each_per_s = _measured("fork", file, fast, parallel)
                memory, _ = _measured("alive", file, slow, parallel)
                speed = f"{one_per_s:.0f} / {each_per_s:.0f}"
                cells = (name, parallel, f"{one:.0f}", f"{each:.0f}", f"{each - one:.0f}", speed, f"{memory:.0f}")
                print("|", *(f"{cell} |" for cell in cells), flush=True)
                figure = f"process per rollout, {name}, {parallel} parallel"
                record(figure, each, unit="ms of CPU", against="one process", theirs=one, less_is_better=True)
                record(figure, memory, unit="MB of PSS")


if __name__ == "__main__":
    main()

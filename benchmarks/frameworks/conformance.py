"""Runs one agent against the scripted policy, behind the real proxy, and prints what reached the trainer, as JSON.

    python -m benchmarks.frameworks.conformance FOLDER

It runs in the agent's environment. One rollout, then eight at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.frameworks._agents import AGENTS, Agent
from benchmarks.frameworks._policy import GOLD, SQLPolicy
from groundwire.adapters import Answer, Backend, BackendError, Endpoint, Question, agent_backend
from groundwire.adapters.agents.command import CommandBackend
from groundwire.adapters.tracing import LLMCall, trajectories
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.tools.sql.answers import SQL
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.rollout import Rollout

_AT_ONCE = 8
_ERROR = 400


async def check(agent: Agent) -> dict[str, Any]:
    """The result; its ``problems`` are empty if nothing was lost, changed or added between policy and trainer."""
    backend = _backend(agent)
    with tempfile.TemporaryDirectory() as folder:
        database = str(Path(folder) / "films.sqlite")
        with contextlib.closing(sqlite3.connect(database)) as db:
            db.executescript(
                "CREATE TABLE film (title TEXT, year INT); INSERT INTO film VALUES ('Heat', 1995), ('Alien', 1979);"
            )
        policy, store = SQLPolicy(database), MemoryStore()
        async with (
            ScriptedPolicyServer(replies=policy.reply) as server,
            LLMProxy(upstreams=[server.base_url], sink=store) as proxy,
        ):

            async def rollout(number: int) -> tuple[Answer | BackendError, list[LLMCall]]:
                await store.enqueue([Rollout(task={})])
                [started] = await store.dequeue(1)
                ids = started.rollout_id, started.attempts[-1].attempt_id
                question = Question(
                    id=str(number),
                    text=f"Which films came out after 1990? This is request {number}.",
                    database=database,
                    answers=SQL,
                    columns={"db_path": database},
                )
                try:
                    answer: Any = await backend.run(question, Endpoint(base_url=proxy.base_url(*ids), model="scripted"))
                except BackendError as error:
                    answer = error
                await proxy.flush()
                await store.get(started.rollout_id)
                return answer, started.calls

            results = [await rollout(0), *await asyncio.gather(*(rollout(n + 1) for n in range(_AT_ONCE)))]
            await backend.stop()  # such as the MCP servers that it has connected
    return {**_result(policy, results), "problems": list(_problems(agent, policy, results))}


def _backend(agent: Agent) -> Backend:
    if agent.command:
        return CommandBackend(agent=agent.command)
    return agent_backend(f"{agent.path / 'agent.py'}:{agent.name}")


def _result(policy: SQLPolicy, results: list[Any]) -> dict[str, Any]:
    bodies = [served.body for served in policy.served]
    formats = {"json_schema" for body in bodies if body.get("response_format")}
    formats |= {
        f"tool_choice {body['tool_choice']}" for body in bodies if body.get("tool_choice") not in (None, "auto")
    }
    traced = [call for _, calls in results for call in calls if call.status < _ERROR]
    return {
        "calls": len(results[0][1]),
        "traced": len(traced),
        "served": len(policy.served),
        "stream": any(body.get("stream") for body in bodies),
        "tools_called": sorted(
            {each["function"]["name"] for call in traced for each in call.reply.get("tool_calls") or ()}
        ),
        "tools_offered": len({tool["function"]["name"] for each in bodies for tool in each.get("tools") or ()}),
        "structured": sorted(formats),
        "wire_apis": sorted({call.wire_api for _, calls in results for call in calls}),
        "agents": sorted({call.agent for call in traced}),
        "models": sorted({call.model for call in traced}),
        "merged": sum(len(trajectories(_trained(calls))) for _, calls in results),
    }


def _problems(agent: Agent, policy: SQLPolicy, results: list[Any]) -> Any:
    """What is not as it was served, one sentence each."""
    known = {tuple(served.response_ids): served for served in policy.served}
    seen = Counter(tuple(call.response_ids) for _, calls in results for call in _trained(calls))
    if lost := known.keys() - seen.keys():
        yield f"{len(lost)} of {len(known)} replies reached no trainer"
    if twice := [ids for ids, count in seen.items() if count > 1]:
        yield f"{len(twice)} replies were recorded twice"
    if (names := {call.agent for _, calls in results for call in calls}) != set(agent.names):
        yield f"the calls have the names {', '.join(sorted(names))}"
    for number, (answer, calls) in enumerate(results):
        if isinstance(answer, BackendError):
            yield f"rollout {number} failed: {answer}"
        elif answer.text.strip().rstrip(";") != GOLD:
            yield f"rollout {number} answered {answer.text!r:.200}"
        for call in calls:
            served = known.get(tuple(call.response_ids))
            if served is None:
                yield f"call {call.sequence} of rollout {number} failed with status {call.status}: {call.error:.300}"
            elif call.prompt_ids != served.prompt_ids or call.logprobs != [-0.5] * len(call.response_ids):
                yield f"call {call.sequence} of rollout {number} has other prompt ids or logprobs than were served"
            elif "This is request" in call.messages_json and f"request {number}." not in call.messages_json:
                yield f"call {call.sequence} of rollout {number} belongs to another rollout"
        trained = [
            token
            for each in trajectories(_trained(calls))
            for token, mask in zip(each.response_ids, each.loss_mask, strict=True)
            if mask
        ]
        if sorted(trained) != sorted(token for call in _trained(calls) for token in call.response_ids):
            yield f"the masks of rollout {number} select other tokens than were sampled"


def _trained(calls: list[LLMCall]) -> list[LLMCall]:
    return [call for call in calls if not call.untrainable_reason]


def main() -> None:
    """Print the result of the agent that the command line names."""
    [agent] = [each for each in AGENTS if each.folder == sys.argv[1]]
    result = asyncio.run(check(agent))
    print(json.dumps(result), flush=True)
    os._exit(0)  # frameworks leave threads and processes behind that would be waited for


if __name__ == "__main__":
    main()

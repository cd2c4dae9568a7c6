"""Runs an agent, and again from the record of its calls, with whole and with streamed replies; prints what differs, as
JSON.

    python -m benchmarks.frameworks.replays FOLDER [ROLLOUTS]

It runs in the agent's environment. The policy calls the tools that it is offered, now and then wrongly or several at
once, so that rollouts go many ways.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.frameworks._agents import AGENTS, ROOT, Agent
from benchmarks.frameworks._streams import OTHER_WAY
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.train.api.evaluation import make_evaluation_job
from groundwire.train.api.replay import replay, replay_job
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.evaluation.validation import choose_tasks, validation_deadline_s, validation_requests
from groundwire.train.policy import STARTER
from groundwire.train.policy.pretrained.locate import read_tokenizer
from groundwire.train.policy.types import Completion, Sampling
from groundwire.train.step_timer import StepTimer

__all__ = ["CallingEngine", "recorded_and_replayed"]

_COUNT = 20
_CONTEXT = 1 << 17
_QUERIES = ("SELECT count(*) FROM sqlite_master", "SELECT name FROM sqlite_master", "SELEC 1", "SELECT 1, 'é'")
_body: ContextVar[bytearray] = ContextVar("body")


class CallingEngine:
    """Calls the tools that a prompt offers, now and then wrongly or several at once, by the seed of the request."""

    max_model_len, weights_version = _CONTEXT, 0

    def __init__(self) -> None:
        self.tokenizer = read_tokenizer(STARTER)

    def submit(self, prompt: tuple[int, ...], sampling: Sampling, *, on_token: Any = None) -> Future[Completion]:
        """A reply that depends on the seed alone."""
        chance, grammar = random.Random(sampling.seed), json.loads(sampling.grammar or "{}")
        asked = self.tokenizer.decode(prompt)
        offered = grammar.get("calls", {}).get("tools") or _tools(asked)
        text = f"```sql\n{chance.choice(_QUERIES)}\n```"
        if "[[ ## sql ## ]]" in asked:  # DSPy's fields
            text = f"[[ ## sql ## ]]\n{chance.choice(_QUERIES)}\n\n[[ ## completed ## ]]"
        if "schema" in grammar:
            text = json.dumps(dict.fromkeys(grammar["schema"].get("properties", ()), chance.choice(_QUERIES)))
        elif offered and (grammar or chance.random() < 0.75):
            text = "\n".join(_call(chance.choice(offered), chance) for _ in range(chance.choice((1, 1, 2))))
            text = text if grammar or chance.random() < 0.8 else text[:-25]
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        logprobs = [-chance.random() for _ in ids]
        for token, logprob in zip(ids, logprobs, strict=True) if on_token else ():
            on_token(token, logprob)
        future: Future[Completion] = Future()
        future.set_result(Completion(prompt, ids, logprobs, text, "stop"))
        return future

    def close(self) -> None:
        """There is nothing to end."""


def _tools(prompt: str) -> list[dict[str, Any]]:
    """The tools in a prompt of the starter, which also has replies that were cut off."""
    tools = []
    for line in prompt.splitlines():
        with suppress(ValueError):
            tools += [json.loads(line)] if line.startswith('{"name": "') else []
    return [tool for tool in tools if "parameters" in tool or "description" in tool]


def _call(tool: dict[str, Any], chance: random.Random) -> str:
    properties = (tool.get("parameters") or {}).get("properties") or {}
    written = {"command": "echo é", "cmd": "echo é"}
    arguments = {
        name: written.get(name, chance.choice(_QUERIES))
        for name, kind in properties.items()
        if name in (tool["parameters"].get("required") or properties) and kind.get("type", "string") == "string"
    }
    return f"<tool_call>\n{json.dumps({'name': tool['name'], 'arguments': arguments})}\n</tool_call>"


@contextmanager
def _bodies() -> Iterator[dict[str, dict[str, list[bytes]]]]:
    """The bodies of all replies, by rollout and attempt."""
    bodies, post, write = dict[str, dict[str, list[bytes]]](), LLMProxy._post, web.StreamResponse.write

    async def posted(proxy: LLMProxy, request: web.Request) -> web.StreamResponse:
        written = bytearray()
        _body.set(written)
        response: Any = None
        try:
            response = await post(proxy, request)
            return response
        except Exception as error:
            written += repr(error).encode()
            raise
        finally:
            body = response.body if isinstance(response, web.Response) else written
            attempts = bodies.setdefault(request.match_info["rollout_id"], {})
            attempts.setdefault(request.match_info["attempt_id"], []).append(bytes(body))

    async def kept(response: web.StreamResponse, data: bytes) -> None:
        if (written := _body.get(None)) is not None:
            written += data
        await write(response, data)

    LLMProxy._post, web.StreamResponse.write = posted, kept  # type: ignore[method-assign]
    try:
        yield bodies
    finally:
        LLMProxy._post, web.StreamResponse.write = post, write  # type: ignore[method-assign]


def recorded_and_replayed(agent: Agent, *, other_way: bool, count: int, folder: Path) -> dict[str, Any]:
    """How many of ``count`` rollouts went otherwise, or got other bytes, when their calls came from the record."""
    settings = {"model": "starter", "max_tokens": 256, "max_model_len": _CONTEXT, "output_dir": str(folder)}
    # The agents keep no state; without processes of their own an MCP server is started once.
    settings |= {"rollout_process": "off", "rollout_timeout_s": 600}
    job = make_evaluation_job({**settings, **_agent(agent, other_way, folder)})
    run = RunDir.create(folder, backend="custom", domain="spider", config=job.config.to_dict())
    requests = validation_requests(choose_tasks(job.data.validation, count), job.config, 1.0)
    with _bodies() as bodies:
        with job.runtime(CallingEngine(), run=run, timer=StepTimer()) as runtime:
            run.write_rollouts(0, runtime.run(requests, deadline_s=validation_deadline_s(job.config, count)))
        rollouts, _ = run.rollouts()
        [ended] = replay(replay_job(run, {}), run, [rollout.rollout_id for rollout in rollouts])
    # The record has the last attempt of a rollout.
    last = {rollout_id: [*attempts.values()][-1] for rollout_id, attempts in bodies.items()}
    pairs = [(sorted(last.get(part.rollout_id, [])) for part in (each.recorded, each.again)) for each in ended]
    differences = [each.difference for each in ended if each.difference is not None]
    return {
        "rollouts": len(ended),
        "failed": sum(bool(rollout.outcome.failure) for rollout in rollouts),
        "calls": sum(len(rollout.calls) for rollout in rollouts),
        "streamed": any(b"}\n{" in body or not body.startswith(b"{") for each in last.values() for body in each),
        "diverged": len(differences),
        "difference": differences[0].sentence if differences else "",
        "other_bytes": sum(then != now for then, now in pairs),
    }


def _agent(agent: Agent, other_way: bool, folder: Path) -> dict[str, str]:
    """The settings of the agent, as it is or with the other way of replies."""
    if agent.command:
        return {"backend": "command", "agent": _other_program(agent, folder) if other_way else agent.command}
    file, name = ROOT / agent.path / "agent.py", agent.name
    if other_way:
        name, code = OTHER_WAY[agent.folder]
        load = f"import importlib.util\nspec = importlib.util.spec_from_file_location('example', {str(file)!r})\n"
        load += "agent = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(agent)\n"
        file = folder / "other_way.py"
        file.write_text(load + code)
    return {"agent": f"{file}:{name}"}


def _other_program(agent: Agent, folder: Path) -> str:
    """The program for Node with streamed replies."""
    source = ROOT / agent.path / "agent.mjs"
    (folder / "node_modules").symlink_to(source.parent / "node_modules")
    text = source.read_text().replace("completions.create(", "completions.stream(")
    (folder / "agent.mjs").write_text(text.replace("messages, tools });", "messages, tools }).finalChatCompletion();"))
    return f"node {folder / 'agent.mjs'}"


def main() -> None:
    """Print the results of the agent that the command line names: as it is, and the other way if there is one."""
    [agent] = [each for each in AGENTS if each.folder == sys.argv[1]]
    count = int(sys.argv[2]) if sys.argv[2:] else _COUNT
    results = []
    for other_way in (False, *([True] if agent.trained else [])):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            results.append(recorded_and_replayed(agent, other_way=other_way, count=count, folder=Path(folder)))
    print(f"\n{json.dumps(results)}", flush=True)  # after what an agent has printed without an end of line
    os._exit(0)  # frameworks leave threads and processes behind that would be waited for


if __name__ == "__main__":
    main()

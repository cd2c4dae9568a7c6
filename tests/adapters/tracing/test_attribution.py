"""A failure of the network, the operating system or a server is a tool's; what the policy made up is its own."""

from __future__ import annotations

import errno
import queue
import shlex
import sqlite3
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import agents
import httpx
import openai
import pytest
import requests
from no_data import NoData

from groundwire.adapters import agent_backend
from groundwire.adapters.agents.command import CommandBackend
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.tools.infrastructure import infrastructure_errors, named_resources
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.rollouts.outcome import FailureScores
from groundwire.train.rollouts.runner.agent import RolloutAgent
from groundwire.train.rollouts.runner.pool import RunnerPool
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.rollout import Rollout

Tool = Callable[[str], Any]


@asynccontextmanager
async def _rollouts(
    backend: Any, reply: Any, *, timeout_s: float = 20.0, max_calls: int = 0, n_runners: int = 8
) -> AsyncIterator[Callable[[int], Any]]:
    async def reward(task: Any, answer: str, steps: Any) -> float:
        return 1.0

    store = MemoryStore()
    agent = RolloutAgent(backend=backend, domain=NoData(), reward=reward, timeout_s=timeout_s)
    async with (
        ScriptedPolicyServer(replies=lambda _: reply) as server,
        LLMProxy(upstreams=[server.base_url], sink=store, max_calls=max_calls, drain_timeout_s=0.1) as proxy,
    ):
        runners = RunnerPool(store=store, agent=agent, n_runners=n_runners)
        collector = RolloutCollector(
            store=store, proxy=proxy, model=server.model, notify_runners=runners.notify, scores=FailureScores()
        )
        await runners.start()

        async def run(count: int) -> list[Rollout]:
            task = {"id": "t", "question": "What is on http://given.invalid?", "query": "", "db_path": ""}
            return await collector.run([Rollout(task=task, group="t") for _ in range(count)], deadline_s=60)

        try:
            yield run
        finally:
            await runners.stop()


def _ask(question: str) -> str:
    with openai.OpenAI(api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])
        return reply.choices[0].message.content or ""


async def _outcome(tool: Tool, reply: str) -> Rollout:
    def agent(task: Any) -> str:
        return str(tool(_ask(task["question"])))

    async with _rollouts(agent_backend(agent), reply) as run:
        [result] = await run(1)
        return result


def _raise(error: BaseException) -> Tool:
    def tool(reply: str) -> None:
        try:
            raise error
        except Exception as caught:
            raise RuntimeError("the tool failed") from caught

    return tool


@contextmanager
def _server(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/search"
    finally:
        server.shutdown()
        server.server_close()


def _get(client: Any, url: str, reply: str) -> None:
    client.get(url, timeout=600).raise_for_status()


@pytest.mark.parametrize("client", [requests, httpx])
@pytest.mark.parametrize(("status", "kind"), [(503, "tool"), (429, "tool"), (404, "agent")])
async def test_a_server_that_fails_is_no_failure_of_the_policy(client: Any, status: int, kind: str) -> None:
    with _server(status) as url:
        result = await _outcome(partial(_get, client, url), "search")
    assert (result.outcome.status, result.attempt.number) == (kind, 2 if kind == "tool" else 1)
    assert result.outcome.reward == (None if kind == "tool" else 0.0)


@pytest.mark.parametrize(
    "error",
    [
        *(
            TimeoutError("no answer"),
            OSError(errno.ENOSPC, "No space left"),
            OSError(errno.EMFILE, "Too many open files"),
            RuntimeError("can't start new thread"),
        ),
        *(
            MemoryError(),
            requests.ReadTimeout("read timed out"),
            httpx.ReadTimeout("timed out"),
            ConnectionResetError(),
        ),
        *(sqlite3.OperationalError("database is locked"), sqlite3.OperationalError("disk I/O error")),
    ],
    ids=repr,
)
async def test_a_failure_of_what_a_tool_runs_on_is_retried_and_never_a_reward(error: Exception) -> None:
    result = await _outcome(_raise(error), "go")
    assert (result.outcome.status, result.outcome.reward, result.attempt.number) == ("tool", None, 2)
    assert "the tool failed" in result.outcome.message
    assert str(error) in result.outcome.message


def test_a_failure_is_found_wherever_a_library_keeps_it() -> None:
    class WrappedError(Exception):
        original_exception = ConnectionRefusedError("refused")

    class RetryError(Exception):
        last_attempt: Future[None] = Future()

    RetryError.last_attempt.set_exception(TimeoutError("late"))

    class GroupError(Exception):
        exceptions = (ValueError("no"), TimeoutError("late"))

    class OddError(TimeoutError):
        @property
        def response(self) -> None:
            raise RuntimeError("not yet")

        reason = url = response

    assert named_resources([OddError(), FileNotFoundError(2, "no file", "http://[")]) == set()
    of_arguments = RuntimeError(OSError(errno.ENOSPC, "full")), OSError("x", OddError())
    for error in (WrappedError(), RetryError(), GroupError(), *of_arguments):
        assert infrastructure_errors(error)
    for harmless in (ValueError("no JSON"), sqlite3.OperationalError("no such column: x"), requests.HTTPError("404")):
        assert not infrastructure_errors(harmless)


def _fetch(url: str) -> bytes:
    return urllib.request.urlopen(url, timeout=600).read()


def _answers_badly(url: str) -> None:
    with _server(503) as own:
        requests.get(url.format(port=urlsplit(own).port), timeout=600).raise_for_status()


def _connect(path: str) -> Any:
    return sqlite3.connect(":memory:").execute(f"SELECT {path}")


@pytest.mark.parametrize(
    ("tool", "reply", "kind"),
    [
        (_fetch, "http://made-up.invalid/x", "agent"),
        (_fetch, "http://given.invalid", "tool"),
        (lambda reply: _fetch("http://of-the-tool.invalid"), "http://made-up.invalid/x", "tool"),
        (_answers_badly, "http://127.0.0.1:{port}/of-the-policy", "tool"),
        (open, "/tmp/no-such-folder/made-up.csv", "agent"),
        (lambda reply: Path("/no/such/settings.toml").read_text(), "made-up.csv", "tool"),
        (_connect, "no_such_column", "agent"),
    ],
)
async def test_what_the_policy_made_up_is_its_own_failure(tool: Tool, reply: str, kind: str) -> None:
    result = await _outcome(tool, reply)
    assert (result.outcome.status, result.outcome.reward) == (kind, 0.0 if kind == "agent" else None)


COMMAND = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"model": "m", "messages": [{"role": "user", "content": task["question"]}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Content-Type": "application/json"}
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
text = reply["choices"][0]["message"]["content"]
exec(sys.argv[1], {"text": text, "urllib": urllib})
"""


@pytest.mark.parametrize(
    ("tool", "reply", "kind"),
    [
        ("raise ConnectionRefusedError(111, 'Connection refused')", "go", "tool"),
        ("raise SystemExit('Error: connect ECONNREFUSED given.invalid:80')", "given.invalid", "tool"),
        ("raise SystemExit(f'Error: getaddrinfo ENOTFOUND {text}')", "made-up.invalid", "agent"),
        ("raise ValueError(f'no number in {text}')", "go", "agent"),
    ],
)
async def test_the_output_of_a_program_that_failed_tells_who_caused_it(
    tool: str, reply: str, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(COMMAND)
    command = shlex.join([sys.executable, str(tmp_path / "agent.py"), tool])
    async with _rollouts(CommandBackend(agent=command), reply) as run:
        [result] = await run(1)
    assert (result.outcome.status, result.outcome.reward) == (kind, 0.0 if kind == "agent" else None)


async def test_an_agent_that_calls_until_its_time_is_over_is_a_failure_of_the_policy() -> None:
    def loops(task: Any) -> str:
        while True:
            _ask(task["question"])

    async with _rollouts(agent_backend(loops), "again", timeout_s=2.0) as run:
        [result] = await run(1)
    assert (result.outcome.status, result.outcome.reward, result.attempt.number) == ("turn_limit", 0.0, 1)
    assert "the agent went on calling" in result.outcome.message


def _needs_the_end(task: Any) -> str:
    reply = _ask(task["question"])
    raise RuntimeError(f"incomplete: {reply}")


@pytest.mark.parametrize("agent", [_needs_the_end, agents.Agent(name="a", model="gpt-5-mini")])
async def test_what_a_framework_raises_for_a_reply_that_was_cut_off_is_about_the_policy_s_reply(agent: Any) -> None:
    async with _rollouts(agent_backend(agent), Reply(text="SELECT na", finish_reason="length")) as run:
        [cut] = await run(1)
    assert (cut.outcome.status, cut.outcome.reward) == ("malformed_output", 0.0)
    assert cut.outcome.message.endswith("; max_tokens cut off its last reply")
    assert [call.truncated for call in cut.trainable_calls] == [True]  # so the setting truncated decides
    async with _rollouts(agent_backend(_needs_the_end), "SELECT 1") as run:
        [whole] = await run(1)
    assert whole.outcome.status == "agent"


@pytest.mark.parametrize(
    ("reply", "tool_s", "message"),
    [
        (Reply(text="x", delay_s=60), 0.0, "the endpoint has not answered a call"),
        ("x", 60.0, "the agent or a tool of it did not end in the"),
    ],
)
async def test_an_endpoint_or_a_tool_that_does_not_answer_is_not(reply: Any, tool_s: float, message: str) -> None:
    released = threading.Event()

    def waits(task: Any) -> str:
        answer = _ask(task["question"])
        released.wait(tool_s)
        return answer

    async with _rollouts(agent_backend(waits), reply, timeout_s=3) as run:  # in which a slow machine makes a call
        [result] = await run(1)
    released.set()
    assert (result.outcome.status, result.outcome.reward) == ("timeout", None)
    assert message in result.outcome.message


async def test_a_rollout_makes_as_many_calls_as_max_calls_allows() -> None:
    def loops(task: Any) -> str:
        while True:
            _ask(task["question"])

    async with _rollouts(agent_backend(loops), "again", max_calls=3) as run:
        [result] = await run(1)
    assert (result.outcome.status, result.outcome.reward, len(result.calls)) == ("turn_limit", 0.0, 3)
    assert "the rollout has made 3 calls, as many as max_calls allows" in result.outcome.message


async def test_a_thread_of_a_rollout_that_has_ended_makes_no_call_for_another() -> None:
    jobs: queue.Queue[Any] = queue.Queue()
    workers = list[threading.Thread]()

    def work() -> None:
        while (job := jobs.get()) is not None:
            question, done = job
            try:
                done.put(_ask(question))
            except Exception as error:
                done.put(error)

    def agent(task: Any) -> str:
        if not workers:
            workers.append(threading.Thread(target=work, daemon=True))
            workers[0].start()
        done: queue.Queue[Any] = queue.Queue()
        jobs.put((task["question"], done))
        if isinstance(answer := done.get(), Exception):
            raise answer
        return f"{answer} {_ask('and I ask myself')}"

    async with _rollouts(agent_backend(agent), "fine", n_runners=1) as run:
        results = await run(4)
    jobs.put(None)
    assert sorted((each.outcome.status, len(each.calls)) for each in results) == [("succeeded", 2), *[("tool", 0)] * 3]
    failed = [each for each in results if not each.succeeded]
    assert {each.outcome.reward for each in failed} == {None}
    assert "comes from a thread or task of a rollout that has ended" in failed[0].outcome.message

# ruff: noqa: D102 - the name of a test is its rule
"""The conformance kit: does a backend lose, change or add anything between the policy and the trainer?

    python -m pytest -p groundwire.adapters.conformance --pyargs groundwire.adapters.conformance --backend-under-test
    my_module:MyBackend

The option names a backend, a class or function without arguments that makes one, an agent as for ``--agent``, or a
registered backend. In your own test file, subclass :class:`BackendConformance` instead.

One scripted conversation is served over HTTP and traced by the real proxy. The policy's token ids depend on the place
of a reply and not on its text: the n-th reply always has the same ids. They stand for a tool call if the agent offers a
tool for queries, and for a query in a fenced block otherwise. So all backends with equally many calls must end with the
same response ids, loss masks and reward, for any prompts of their frameworks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from groundwire import adapters
from groundwire.adapters import Answer, Backend, Endpoint, EndpointError, PromptTooLongError, Question
from groundwire.adapters.tracing import LLMCall, trajectories
from groundwire.adapters.tracing.calls import order_calls
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import Reply, ReplyIds, ScriptedPolicyServer, message_key
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.tools.sql import QueryError, run_query
from groundwire.tools.sql.answers import SQL

__all__ = ["BackendConformance", "Recording", "load_backend", "play", "sampled_ids"]

T = TypeVar("T")
_CONCURRENT = 16
_FIRST_LIMIT = 100
"""The ``max_tokens`` of the first rollout; the next has one more. It identifies a rollout, and changes no prompt."""
GOLD = "SELECT title FROM film WHERE year > 1990"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A rollout as the trainer receives it, and the requests of its agent."""

    answer: Answer
    calls: list[LLMCall]
    requests: list[dict[str, Any]]
    reward: float

    @property
    def response_ids(self) -> list[list[int]]:
        """The sampled token ids of each call."""
        return [call.response_ids for call in self.calls]

    @property
    def trained_ids(self) -> list[int]:
        """The token ids that the loss masks select, over all trajectories."""
        merged = trajectories(self.calls)
        return [i for t in merged for i, mask in zip(t.response_ids, t.loss_mask, strict=True) if mask]


def sampled_ids(n: int) -> list[int]:
    """The token ids of a rollout's ``n``-th reply, from 0. No text has these ids."""
    return [1000 + 10 * n + i for i in range(5)]


async def play(backend: Backend, database: str, *, rollouts: int = 1) -> list[Recording]:
    """Run the conversation through ``backend``, ``rollouts`` times at once, traced by the proxy."""
    policy, sink = _Policy(), _Calls()

    async def one(number: int, base_url: str) -> Answer:
        endpoint = Endpoint(base_url=base_url, model="scripted", sampling=_sampling(f"r{number}"))
        return await backend.run(_question(database), endpoint)

    async with (
        ScriptedPolicyServer(replies=policy.reply) as server,
        LLMProxy(upstreams=[server.base_url], sink=sink) as proxy,
    ):
        answers = await asyncio.gather(*(one(n, proxy.base_url(f"r{n}", "a")) for n in range(rollouts)))
        await proxy.flush()
    return [
        Recording(
            answer=answer,
            calls=order_calls([call for call in sink.of[f"r{number}"] if not call.untrainable_reason], ()),
            requests=policy.requests[number],
            reward=_reward(database, answer.text),
        )
        for number, answer in enumerate(answers)
    ]


class BackendConformance:
    """The rules. A subclass may override the fixture ``backend_under_test``, which is built once for the class."""

    @pytest.fixture(scope="class")
    @classmethod
    def backend_under_test(cls, request: pytest.FixtureRequest) -> Backend:
        """The backend that ``--backend-under-test`` names."""
        name = request.config.getoption("--backend-under-test", default=None)
        if name is None:
            raise pytest.UsageError("no backend to test: add --backend-under-test my_module:MyBackend")
        return load_backend(name)

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, backend_under_test: Backend) -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
        """Runs a coroutine on the backend's event loop, which is the same for all tests."""
        loop = asyncio.new_event_loop()
        try:
            yield loop.run_until_complete
            loop.run_until_complete(backend_under_test.stop())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    @pytest.fixture(scope="class")
    @classmethod
    def films(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        """The path of a database."""
        path: Path = tmp_path_factory.mktemp("films") / "films.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as conn:
            conn.executescript(
                "CREATE TABLE film (title TEXT, year INT); INSERT INTO film VALUES ('Heat', 1995), ('Alien', 1979);"
            )
        return str(path)

    @pytest.fixture(scope="class")
    @classmethod
    def recording(cls, run: Any, backend_under_test: Backend, films: str) -> Recording:
        """The conversation, run once."""
        [recording] = run(play(backend_under_test, films))
        return recording

    def test_the_policys_query_is_the_answer_and_is_rewarded(self, recording: Recording) -> None:
        assert recording.reward == 1.0, f"the answer is {recording.answer.text!r}; the policy wrote {GOLD!r}"

    def test_every_call_is_recorded_with_the_ids_and_logprobs_that_were_sampled(self, recording: Recording) -> None:
        assert recording.calls, "no call was traced: the agent must use the endpoint's base_url"
        assert recording.response_ids == [sampled_ids(n) for n in range(len(recording.requests))]
        assert [call.logprobs for call in recording.calls] == [[-0.5] * 5] * len(recording.calls)

    def test_each_sampled_token_is_trained_once_and_nothing_else_is(self, recording: Recording) -> None:
        sampled = [i for n in range(len(recording.requests)) for i in sampled_ids(n)]
        assert sorted(recording.trained_ids) == sampled

    def test_a_prompt_that_continues_a_conversation_begins_as_recorded(self, recording: Recording) -> None:
        for n, (call, request) in enumerate(zip(recording.calls, recording.requests, strict=True)):
            if all(message["role"] != "assistant" for message in request["messages"]):
                continue  # the start of a conversation
            earlier = [before.prompt_ids + before.response_ids for before in recording.calls[:n]]
            assert any(call.prompt_ids[: len(prefix)] == prefix for prefix in earlier), (
                f"call {n} continues a conversation, but the agent changed the messages before its last one. "
                f"They are now: {json.dumps(request['messages'])}"
            )

    def test_each_call_is_named_by_one_of_the_backends_agents(
        self, recording: Recording, backend_under_test: Backend
    ) -> None:
        if backend_under_test.agents:
            names = [call.agent for call in recording.calls]
            assert set(names) <= set(backend_under_test.agents), "send endpoint.agent_headers(name) with each call"

    def test_sampling_parameters_reach_every_call(self, recording: Recording) -> None:
        for request in recording.requests:
            limit = request.get("max_tokens") or request.get("max_completion_tokens")
            sampling = {"temperature": request["temperature"], "top_p": request["top_p"], "max_tokens": limit}
            assert sampling == _sampling("r0")

    def test_concurrent_rollouts_equal_a_single_one(self, run: Any, backend_under_test: Backend, films: str) -> None:
        first, *others = run(play(backend_under_test, films, rollouts=1 + _CONCURRENT))
        for other in others:
            assert (other.reward, other.response_ids) == (first.reward, first.response_ids)
            assert [call.prompt_ids for call in other.calls] == [call.prompt_ids for call in first.calls]

    @pytest.mark.parametrize(
        ("reply", "failure"),
        [
            (Reply(status=503, text="out of cards"), EndpointError),
            (Reply(status=400, text="too long", code="context_length_exceeded"), PromptTooLongError),
        ],
    )
    def test_a_refused_call_is_a_typed_failure_and_is_not_sent_again(
        self, run: Any, backend_under_test: Backend, films: str, reply: Reply, failure: type[EndpointError]
    ) -> None:
        async def refused() -> int:
            async with ScriptedPolicyServer(replies=lambda _: reply) as server:
                with pytest.raises(failure) as caught:
                    await backend_under_test.run(_question(films), Endpoint(base_url=server.base_url, model="scripted"))
                assert caught.value.status == reply.status
                return len(server.requests)

        assert run(refused()) == 1, "a retry by the agent's client is a sample without a reward: set max_retries=0"

    def test_an_unreachable_endpoint_is_an_endpoint_error(
        self, run: Any, backend_under_test: Backend, films: str
    ) -> None:
        with pytest.raises(EndpointError):
            run(backend_under_test.run(_question(films), Endpoint(base_url="http://127.0.0.1:9/v1", model="scripted")))

    def test_a_cancelled_rollout_leaves_no_call_running(
        self, run: Any, backend_under_test: Backend, films: str
    ) -> None:
        if backend_under_test.threaded:
            pytest.skip("the backend runs in threads, which cannot be interrupted")

        async def cancelled() -> int:
            async with ScriptedPolicyServer(replies=lambda _: Reply(text="too late", delay_s=60)) as server:
                endpoint = Endpoint(base_url=server.base_url, model="scripted")
                rollout = asyncio.create_task(backend_under_test.run(_question(films), endpoint))
                while not server.requests:  # noqa: ASYNC110 - the server has no event for it
                    await asyncio.sleep(0.01)
                rollout.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await rollout
                for _ in range(200):
                    if not server.cancelled:
                        await asyncio.sleep(0.02)
                return server.cancelled

        assert run(cancelled()) == 1


class TestBackendUnderTest(BackendConformance):
    """The tests that the command line runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the backend."""
    parser.addoption(
        "--backend-under-test", metavar="MODULE:NAME", help="the backend that groundwire.adapters.conformance tests"
    )


def load_backend(name: str) -> Backend:
    """The backend called ``name``: ``module:attribute`` (see the module's docstring), or a registered name."""
    return adapters.agent_backend(name) if ":" in name else adapters.as_backend(adapters.get(name)())


def _question(database: str) -> Question:
    return Question(id="0", text="Which films came out after 1990?", database=database, answers=SQL)


def _sampling(rollout_id: str) -> dict[str, Any]:
    return {"temperature": 0.75, "top_p": 0.5, "max_tokens": _FIRST_LIMIT + int(rollout_id[1:])}


def _reward(database: str, sql: str) -> float:
    try:
        return float(run_query(database, sql).rows == run_query(database, GOLD).rows)
    except QueryError:
        return 0.0


class _Calls:
    """A sink of calls in memory."""

    def __init__(self) -> None:
        self.of: dict[str, list[LLMCall]] = defaultdict(list)
        self._numbers = itertools.count(1)

    async def sampling_of(self, rollout_id: str, attempt_id: str) -> Mapping[str, Any]:
        return _sampling(rollout_id)

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        return [next(self._numbers) for _ in attempts]

    async def add_calls(self, calls: Sequence[LLMCall]) -> None:
        for call in calls:
            self.of[call.rollout_id].append(call)

    async def add_annotations(self, spans: Sequence[SpanRecord]) -> None:
        """No agent of the conversation emits any."""


class _Policy:
    """Answers the requests of several rollouts, which it identifies by their ``max_tokens``.

    Its tokenizer maps every reply that it finds unchanged in a prompt to the ids that were sampled for it.
    """

    def __init__(self) -> None:
        self.requests: dict[int, list[dict[str, Any]]] = defaultdict(list)
        """The bodies of each rollout's requests."""
        self._sampled: dict[int, ReplyIds] = defaultdict(ReplyIds)

    def reply(self, body: dict[str, Any]) -> Reply:
        """The next reply: a call of the tool for queries if there is one, else a query in a fenced block."""
        rollout = int(body.get("max_tokens") or body["max_completion_tokens"]) - _FIRST_LIMIT
        n, sampled = len(self.requests[rollout]), self._sampled[rollout]
        calls = _query_calls(body, n)
        reply = Reply(
            text="" if calls else f"```sql\n{GOLD} -- {n}\n```\nCORRECT",
            tool_calls=calls,
            prompt_ids=sampled.prompt_ids(body["messages"]),
            token_ids=sampled_ids(n),
            logprobs=[-0.5] * 5,
        )
        self.requests[rollout].append(body)
        sampled[message_key({"role": "assistant", "content": reply.text, "tool_calls": calls})] = sampled_ids(n)
        return reply


def _query_calls(body: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """A call of the tool that runs queries, unless there is none or it has run already."""
    if any(message["role"] == "tool" for message in body["messages"]):
        return []
    for tool in body.get("tools") or ():
        function = tool["function"]
        properties = function.get("parameters", {}).get("properties", {})
        name = next((name for name in ("sql", "query") if name in properties), None)
        if name is not None:
            call = {"name": function["name"], "arguments": json.dumps({name: GOLD})}
            return [{"id": f"call_{n}", "type": "function", "function": call}]
    return []

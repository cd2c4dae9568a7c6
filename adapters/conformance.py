# ruff: noqa: D102 - the names of the rules say what they are
"""The conformance kit: does a backend lose, change or invent anything between the policy and the trainer?

    python -m pytest -p groundwire.adapters.conformance --pyargs groundwire.adapters.conformance --backend-under-test
    my_module:MyBackend

names a class (built without arguments), a function without arguments that returns a backend, a backend, a function of
(question, endpoint) as for ``--backend custom``, or a registered name. In a test file of your own, subclass
:class:`BackendConformance` instead.

One scripted conversation is served over HTTP and traced by the real proxy. What the policy samples is fixed by its
place in the conversation and not by its text: the n-th reply always has the same token ids, which stand for a tool call
where the agent offers a tool for queries, and for a query in a fenced block where it does not. So every backend that
makes as many calls must end with the same response ids, loss masks and reward, however its framework words its prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from groundwire import adapters
from groundwire.adapters import Answer, Backend, Endpoint, EndpointError, PromptTooLongError, Question
from groundwire.adapters.tracing import LLMCall, calls_from_spans, trajectories, triplets
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import END, Reply, ScriptedPolicyServer, encode, text_of
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.tools.sql import QueryError, run_query

__all__ = ["BackendConformance", "Recording", "load_backend", "play", "sampled_ids"]

T = TypeVar("T")
GOLD = "SELECT title FROM film WHERE year > 1990"
_ANSWER = f"```sql\n{GOLD}\n```\nCORRECT"
_FIRST_SAMPLED = 1000
_MARKS = {"system": 257, "developer": 257, "user": 258, "assistant": 259, "tool": 260}
_AT_ONCE = 16


def sampled_ids(n: int) -> list[int]:
    """What the policy samples in its ``n``-th reply of a rollout, from 0. No text has these ids."""
    return [_FIRST_SAMPLED + 10 * n + i for i in range(5)]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A rollout as the trainer would get it."""

    answer: Answer
    calls: list[LLMCall]
    requests: list[dict[str, Any]]
    reward: float

    @property
    def response_ids(self) -> list[list[int]]:
        """Of each call."""
        return [call.response_ids for call in self.calls]

    @property
    def trained_ids(self) -> list[int]:
        """The tokens that the loss masks let through, over all trajectories."""
        merged = trajectories(triplets(self.calls, self.reward))
        return [i for t in merged for i, mask in zip(t.response_ids, t.loss_mask, strict=True) if mask]


async def play(backend: Backend, database: str, *, rollouts: int = 1) -> list[Recording]:
    """Run the conversation through ``backend``, ``rollouts`` times at once, traced by the proxy."""
    policy, spans = _Policy(), _Spans()

    async def one(number: int, base_url: str) -> Answer:
        question = Question(id=str(number), text="Which films came out after 1990?", database=database)
        return await backend.run(question, Endpoint(base_url=base_url, model="scripted", sampling=_sampling(number)))

    async with (
        ScriptedPolicyServer(replies=policy.reply) as server,
        LLMProxy(upstreams=[server.base_url], sink=spans) as proxy,
    ):
        answers = await asyncio.gather(*(one(n, proxy.base_url(f"r{n}", "a")) for n in range(rollouts)))
        await proxy.flush()
    return [
        Recording(
            answer=answer,
            calls=calls_from_spans(spans.of[f"r{number}"]),
            requests=policy.requests[number],
            reward=_reward(database, answer.text),
        )
        for number, answer in enumerate(answers)
    ]


class BackendConformance:
    """The rules. A subclass overrides the fixture ``backend_under_test``, which is built once for the class."""

    @pytest.fixture(scope="class")
    @classmethod
    def backend_under_test(cls, request: pytest.FixtureRequest) -> Backend:
        """The backend that ``--backend-under-test`` names."""
        name = request.config.getoption("--backend-under-test", default=None)
        if name is None:
            raise pytest.UsageError("say which backend: --backend-under-test my_module:MyBackend")
        return load_backend(name)

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, backend_under_test: Backend) -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
        """Runs a coroutine on the one event loop that the backend lives on."""
        loop = asyncio.new_event_loop()
        try:
            yield loop.run_until_complete
            if isinstance(backend_under_test, adapters.Stoppable):
                loop.run_until_complete(backend_under_test.stop())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    @pytest.fixture(scope="class")
    @classmethod
    def films(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        """Path of a database."""
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

    def test_the_policys_query_is_the_answer_and_earns_the_reward(self, recording: Recording) -> None:
        assert recording.reward == 1.0, f"the answer is {recording.answer.text!r}; the policy wrote {GOLD!r}"

    def test_every_call_is_recorded_with_the_ids_and_logprobs_that_were_sampled(self, recording: Recording) -> None:
        assert recording.calls, "no call was traced: the agent must use the endpoint's base_url"
        assert recording.response_ids == [sampled_ids(n) for n in range(len(recording.requests))]
        assert [call.logprobs for call in recording.calls] == [[-0.5] * 5] * len(recording.calls)

    def test_each_sampled_token_is_trained_once_and_nothing_else_is(self, recording: Recording) -> None:
        sampled = [i for n in range(len(recording.requests)) for i in sampled_ids(n)]
        assert sorted(recording.trained_ids) == sampled

    def test_a_prompt_that_goes_on_contains_the_recorded_prefix(self, recording: Recording) -> None:
        for n, (call, request) in enumerate(zip(recording.calls, recording.requests, strict=True)):
            if all(message["role"] != "assistant" for message in request["messages"]):
                continue  # it starts a conversation
            earlier = [before.prompt_ids + before.response_ids for before in recording.calls[:n]]
            assert any(call.prompt_ids[: len(prefix)] == prefix for prefix in earlier), (
                f"call {n} goes on with a conversation but does not begin as it was recorded: the agent changed the "
                f"messages before its last. They are now: {json.dumps(request['messages'])}"
            )

    def test_each_call_is_named_by_one_of_the_backends_agents(
        self, recording: Recording, backend_under_test: Backend
    ) -> None:
        if backend_under_test.agents:
            names = [call.agent for call in recording.calls]
            assert set(names) <= set(backend_under_test.agents), "send endpoint.agent_headers(name) with each call"

    def test_sampling_parameters_reach_every_call(self, recording: Recording) -> None:
        for request in recording.requests:
            given = {**request, "max_tokens": request.get("max_tokens") or request.get("max_completion_tokens")}
            assert {name: given.get(name) for name in _sampling(0)} == _sampling(0)

    def test_rollouts_at_once_are_as_alone(self, run: Any, backend_under_test: Backend, films: str) -> None:
        alone, *others = run(play(backend_under_test, films, rollouts=1 + _AT_ONCE))
        for other in others:
            assert (other.reward, other.response_ids) == (alone.reward, alone.response_ids)
            assert [call.prompt_ids for call in other.calls] == [call.prompt_ids for call in alone.calls]

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

        assert run(refused()) == 1, "a retry by the agent's client is a sample that nobody judged: max_retries=0"

    def test_an_endpoint_that_is_not_there_is_an_endpoint_error(
        self, run: Any, backend_under_test: Backend, films: str
    ) -> None:
        with pytest.raises(EndpointError):
            run(backend_under_test.run(_question(films), Endpoint(base_url="http://127.0.0.1:9/v1", model="scripted")))

    def test_a_rollout_that_is_cancelled_leaves_no_call_running(
        self, run: Any, backend_under_test: Backend, films: str
    ) -> None:
        if getattr(backend_under_test, "threaded", False):
            pytest.skip("it runs in threads, which cannot be interrupted")

        async def cancelled() -> int:
            async with ScriptedPolicyServer(replies=lambda _: Reply(text=_ANSWER, delay_s=60)) as server:
                endpoint = Endpoint(base_url=server.base_url, model="scripted")
                rollout = asyncio.create_task(backend_under_test.run(_question(films), endpoint))
                while not server.requests:  # noqa: ASYNC110 - the server has no event for it
                    await asyncio.sleep(0.01)
                rollout.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await rollout
                for _ in range(200):
                    if server.cancelled:
                        break
                    await asyncio.sleep(0.02)
                return server.cancelled

        assert run(cancelled()) == 1


class TestBackendUnderTest(BackendConformance):
    """What the command line runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that names the backend."""
    parser.addoption(
        "--backend-under-test", metavar="MODULE:NAME", help="the backend that groundwire.adapters.conformance tests"
    )


def load_backend(name: str) -> Backend:
    """The backend called ``name``: ``module:attribute`` (see the module's docstring), or a registered name."""
    module, _, attribute = name.partition(":")
    found: Any = getattr(importlib.import_module(module), attribute) if attribute else adapters.get(name)
    if inspect.isroutine(found) and not _takes_nothing(found):
        from groundwire.adapters.custom import CustomBackend

        return CustomBackend(agent=found)
    return found if isinstance(found, Backend) and not isinstance(found, type) else found()


def _takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether it can be called without arguments."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def _question(database: str) -> Question:
    return Question(id="0", text="Which films came out after 1990?", database=database)


def _sampling(rollout: int) -> dict[str, Any]:
    """The seed tells rollouts apart: it is the one parameter that changes no prompt."""
    return {"temperature": 0.75, "top_p": 0.5, "max_tokens": 99, "seed": rollout}


def _reward(database: str, sql: str) -> float:
    try:
        return float(run_query(database, sql).rows == run_query(database, GOLD).rows)
    except QueryError:
        return 0.0


@dataclass
class _Spans:
    """A span sink in memory."""

    of: dict[str, list[SpanRecord]] = field(default_factory=lambda: defaultdict(list))
    last: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        numbers = []
        for pair in attempts:
            self.last[pair] += 1
            numbers.append(self.last[pair])
        return numbers

    async def add_spans(self, spans: Sequence[SpanRecord]) -> None:
        for span in spans:
            self.of[span.rollout_id].append(span)


@dataclass
class _Policy:
    """The script. Its tokenizer gives back the ids that it sampled for every reply that it finds in a prompt."""

    requests: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    given: dict[int, list[Reply]] = field(default_factory=lambda: defaultdict(list))

    def reply(self, body: dict[str, Any]) -> Reply:
        if not isinstance(rollout := body.get("seed"), int):
            return Reply(status=400, text="the request has no seed: the endpoint's sampling parameters were left out")
        requests, given = self.requests[rollout], self.given[rollout]
        calls, n = _query_call(body, len(given)), len(given)
        reply = Reply(
            text="" if calls else _ANSWER,
            tool_calls=calls,
            prompt_ids=_prompt_ids(body["messages"], given),
            token_ids=sampled_ids(n),
            logprobs=[-0.5] * 5,
        )
        requests.append(body)
        given.append(reply)
        return reply


def _query_call(body: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """A call of the tool that runs queries, where there is one that has not run yet."""
    if any(message["role"] == "tool" for message in body["messages"]):
        return []
    for tool in body.get("tools") or ():
        function = tool["function"]
        properties = function.get("parameters", {}).get("properties", {})
        name = next((name for name in ("sql", "query") if name in properties), None)
        if name is not None:
            call = {"name": function["name"], "arguments": json.dumps({name: GOLD})}
            return [{"id": f"call_{body['seed']}_{n}", "type": "function", "function": call}]
    return []


def _prompt_ids(messages: Sequence[dict[str, Any]], given: Sequence[Reply]) -> list[int]:
    ids: list[int] = []
    left = list(given)
    for message in messages:
        ids.append(_MARKS[message["role"]])
        same = next((reply for reply in left if message["role"] == "assistant" and _is_reply(message, reply)), None)
        if same is None:
            ids += [*encode(text_of(message)), END]
        else:
            left.remove(same)
            ids += same.token_ids or ()
    return [*ids, _MARKS["assistant"]]


def _is_reply(message: dict[str, Any], reply: Reply) -> bool:
    def functions(calls: Any) -> list[tuple[str, Any]]:
        return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls or ()]

    return text_of(message) == reply.text and functions(message.get("tool_calls")) == functions(reply.tool_calls)

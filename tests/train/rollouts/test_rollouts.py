"""A batch of rollouts returns completely and in time, each with a reward or the type of its failure."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from no_data import NoData

from groundwire import adapters
from groundwire.adapters import (
    AgentError,
    Answer,
    Endpoint,
    EndpointError,
    MalformedOutputError,
    PromptTooLongError,
    Question,
    ToolError,
    TurnLimitError,
)
from groundwire.adapters.tracing import trajectories
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.domains import Task
from groundwire.rewards import JudgeAbstainedError, RewardError, get
from groundwire.tools.types import AgentStep
from groundwire.tools.variants import cache
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.rollouts.outcome import FailureScores
from groundwire.train.rollouts.runner.agent import RolloutAgent
from groundwire.train.rollouts.runner.pool import RunnerPool
from groundwire.train.store.errors import StoreFailedError
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.rollout import Mode, Rollout

GOLD = "SELECT name FROM singer WHERE 'gold' = 'gold'"


class _Backend:
    """An agent of one call, and of what it does before and after."""

    agents = ("solo",)

    def __init__(self, act: Callable[[], Any] = lambda: None, after: Callable[[], Any] = lambda: None) -> None:
        self.act, self.after = act, after

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        result = self.act()
        if asyncio.iscoroutine(result):
            await result
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0)
        reply = await client.chat.completions.create(
            model=endpoint.model,
            messages=[{"role": "user", "content": question.text}],
            extra_headers=endpoint.agent_headers("solo"),
            **endpoint.sampling,
        )
        await client.close()
        self.after()
        return Answer(text=reply.choices[0].message.content or "")


async def _exact(task: Any, answer: str, steps: Any) -> float:
    return float(answer == task["query"])


@pytest.fixture
def task(tmp_path: Path) -> Task:
    path = tmp_path / "db.sqlite"
    with sqlite3.connect(path) as conn:
        conn.executescript("CREATE TABLE singer (id int, name text); INSERT INTO singer VALUES (1, 'Ann');")
    conn.close()
    return {"id": "t1", "question": "Which singers?", "query": GOLD, "db_path": str(path)}


@asynccontextmanager
async def _collector(
    server: ScriptedPolicyServer,
    backend: Any,
    reward: Any = _exact,
    *,
    timeout_s: float = 10.0,
    n_runners: int = 4,
    retries: int = 1,
    poll_s: float = 0.5,
    store: MemoryStore | None = None,
    failures: str = "",
) -> AsyncIterator[RolloutCollector]:
    store = store or MemoryStore()
    agent = RolloutAgent(backend=backend, domain=NoData(), reward=reward, timeout_s=timeout_s, failures=failures)
    async with LLMProxy(upstreams=[server.base_url], sink=store) as proxy:
        runners = RunnerPool(store=store, agent=agent, n_runners=n_runners, poll_s=10 * poll_s)
        collector = RolloutCollector(
            store=store,
            proxy=proxy,
            model=server.model,
            notify_runners=runners.notify,
            retries=retries,
            scores=FailureScores(failures),
            poll_s=poll_s,
        )
        await runners.start()
        try:
            yield collector
        finally:
            await runners.stop()


def _jobs(task: Task, count: int, mode: Mode = "train") -> list[Rollout]:
    return [Rollout(task=task, group="t1", mode=mode, sampling={"temperature": 1.0}) for _ in range(count)]


async def _outcome(backend: Any, task: Task, reward: Any = _exact, *, mode: Mode = "train", **options: Any) -> Rollout:
    async with (
        ScriptedPolicyServer(replies=lambda _: GOLD) as server,
        _collector(server, backend, reward, **options) as collector,
    ):
        [ended] = await collector.run(_jobs(task, 1, mode), deadline_s=30)
        return ended


async def test_each_result_has_its_reward_and_all_calls(task: Task) -> None:
    replies = iter([GOLD, "SELECT 1", GOLD, "SELECT 2", GOLD])
    async with (
        ScriptedPolicyServer(replies=lambda _: next(replies)) as server,
        _collector(server, _Backend(), n_runners=2) as collector,
    ):
        ended = []
        outcomes = await collector.run(_jobs(task, 5), deadline_s=30, on_end=lambda: ended.append(1))
    assert len(ended) == 5
    assert sorted(o.outcome.reward for o in outcomes) == [0.0, 0.0, 1.0, 1.0, 1.0]
    for ended in outcomes:
        assert ended.outcome.status == "succeeded"
        [call] = ended.calls
        assert call.agent == "solo"
        [trajectory] = trajectories(ended.calls)
        assert bytes(trajectory.response_ids[:-1]).decode() == ended.outcome.answer


async def test_training_pays_for_variants_of_the_database_and_validation_counts_the_database_alone(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")
    memorised = "SELECT 'Ann' FROM singer LIMIT 1"
    async with (
        ScriptedPolicyServer(replies=lambda _: memorised) as server,
        _collector(server, _Backend(), get("spider_exec_match")) as collector,
    ):
        jobs = _jobs(task, 1)
        results = await collector.run([*jobs, *_jobs(task, 1, "val")], deadline_s=30)
    assert [each.outcome.reward for each in results] == [0.0, 1.0]
    assert results[0].outcome.reward_components == {"match": 0.0, "metric/official": 1.0, "metric/unchecked": 0.0}


async def test_the_store_in_memory_keeps_no_spans_of_rollouts_that_were_read(task: Task) -> None:
    store = MemoryStore()
    ended = await _outcome(_Backend(), task, store=store)
    assert ended.calls
    assert await store.get(ended.rollout_id) is None
    assert not store._items


async def test_two_batches_use_the_same_runners(task: Task) -> None:
    async with (
        ScriptedPolicyServer(replies=lambda _: GOLD) as server,
        _collector(server, _Backend()) as collector,
    ):
        for _ in range(2):
            outcomes = await collector.run(_jobs(task, 6), deadline_s=30)
            assert [o.outcome.reward for o in outcomes] == [1.0] * 6


def _raise(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "status", "reward", "changes"),
    [
        (AgentError("a bug"), "agent", 0.0, "agent=drop"),
        (MalformedOutputError("no JSON"), "malformed_output", 0.0, "malformed_output=drop"),
        (TurnLimitError("10 turns"), "turn_limit", 0.0, "turn_limit=drop"),
        (PromptTooLongError("9 tokens too many", status=400), "prompt_too_long", 0.0, "prompt_too_long=drop"),
        (ToolError("the disk is gone"), "tool", None, "tool=zero"),
        (EndpointError("refused", status=500), "endpoint", None, "endpoint=zero"),
    ],
)
async def test_what_the_policy_caused_scores_0_and_other_failures_are_retried_and_dropped(
    task: Task, error: Exception, status: str, reward: float | None, changes: str
) -> None:
    other = None if reward == 0.0 else 0.0
    for failures, expected in (("", reward), (changes, other)):
        ended = await _outcome(_Backend(after=_raise(error)), task, failures=failures)
        attempts = 1 if expected == 0.0 or status == "prompt_too_long" else 2
        assert (ended.outcome.status, ended.outcome.reward, ended.attempt.number) == (status, expected, attempts)
        assert str(error) in ended.outcome.message
        assert not ended.succeeded


async def test_the_steps_before_a_failure_are_kept(task: Task) -> None:
    error = TurnLimitError("10 turns")
    error.steps = [AgentStep(agent="solo", kind="llm", input="?", output="SELECT 1", ok=True)]
    ended = await _outcome(_Backend(after=_raise(error)), task)
    assert (ended.outcome.status, ended.outcome.answer, ended.outcome.steps) == ("turn_limit", "", error.steps)


class _Queries(_Backend):
    """An SQL agent that calls one more tool, writes a right query, and then a wrong one."""

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        await super().run(question, endpoint)
        inputs = ['{"table": "singer"}', GOLD, "SELECT 1"]
        steps = [AgentStep(agent="solo", kind="tool", input=text, output="", ok=True) for text in inputs]
        if self.act is _stop:
            error = TurnLimitError("2 turns")
            error.steps = steps
            raise error
        return Answer(text="SELECT 1", steps=steps)


def _stop() -> None: ...


async def test_a_validation_scores_the_queries_before_the_answer_and_training_does_not(task: Task) -> None:
    assert (await _outcome(_Queries(), task, mode="val")).turn_scores() == [1.0, 0.0]
    assert (await _outcome(_Queries(_stop), task, mode="val")).turn_scores() == [1.0, 0.0, 0.0]
    assert (await _outcome(_Queries(), task)).turn_scores() == []
    assert (await _outcome(_Backend(), task, mode="val")).turn_scores() == []


class _FailsAfterItsCall(_Backend):
    """Like an agent that reads the reply itself, whatever its status."""

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        with suppress(openai.APIError):
            await super().run(question, endpoint)
        raise AgentError("KeyError: 'choices'")


@pytest.mark.parametrize(
    ("reply", "status", "reward"),
    [
        (GOLD, "agent", 0.0),
        (Reply(status=503, text="out of cards"), "endpoint", None),
        (Reply(status=400, text="messages must be a list"), "agent", 0.0),
    ],
)
async def test_an_agent_that_failed_because_its_last_call_did_is_no_failure_of_the_policy(
    task: Task, reply: Any, status: str, reward: float | None
) -> None:
    async with (
        ScriptedPolicyServer(replies=lambda _: reply) as server,
        _collector(server, _FailsAfterItsCall(), retries=0) as collector,
    ):
        [ended] = await collector.run(_jobs(task, 1), deadline_s=30)
    assert (ended.outcome.status, ended.outcome.reward) == (status, reward)
    assert "KeyError: 'choices'" in ended.outcome.message
    assert status == "agent" or "failed with status 503: out of cards" in ended.outcome.message


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ZeroDivisionError("a bug")])
async def test_any_other_exception_of_an_agent_is_an_agent_error_and_the_runners_continue(
    task: Task, error: BaseException
) -> None:
    errors = iter([error])

    def act() -> None:
        for each in errors:
            raise each

    async with (
        ScriptedPolicyServer(replies=lambda _: GOLD) as server,
        _collector(server, _Backend(after=act), n_runners=1, retries=0) as collector,
    ):
        failed, succeeded = await collector.run(_jobs(task, 2), deadline_s=30)
    assert (failed.outcome.status, failed.outcome.message) == ("agent", f"{type(error).__name__}: {error}")
    assert succeeded.outcome.status == "succeeded"


async def test_an_exception_before_the_first_llm_call_is_never_a_reward(task: Task) -> None:
    ended = await _outcome(_Backend(_raise(KeyError("OPENAI_BASE_URL"))), task)
    assert (ended.outcome.status, ended.outcome.reward, ended.attempt.number) == ("setup", None, 1)
    assert ended.outcome.message == "KeyError: 'OPENAI_BASE_URL'"


async def test_a_transient_failure_is_retried(task: Task) -> None:
    errors = iter([EndpointError("once")])

    def act() -> None:
        for error in errors:
            raise error

    ended = await _outcome(_Backend(act), task)
    assert (ended.outcome.status, ended.outcome.reward, ended.attempt.number) == ("succeeded", 1.0, 2)


async def test_an_agent_that_takes_too_long_is_a_timeout(task: Task) -> None:
    ended = await _outcome(_Backend(lambda: asyncio.sleep(60)), task, timeout_s=0.1)
    assert (ended.outcome.status, ended.outcome.reward) == ("timeout", None)


async def test_a_step_never_waits_past_its_deadline(task: Task) -> None:
    async with (
        ScriptedPolicyServer(replies=lambda _: Reply(text=GOLD, delay_s=60)) as server,
        _collector(server, _Backend(), timeout_s=600) as collector,
    ):
        outcomes = await asyncio.wait_for(collector.run(_jobs(task, 3), deadline_s=0.5), 600)
    assert [(o.outcome.status, o.outcome.reward) for o in outcomes] == [("timeout", None)] * 3


async def test_calls_of_a_rollout_that_was_cancelled_at_the_deadline_are_refused(task: Task) -> None:
    late = asyncio.get_running_loop().create_future()

    class Late:
        agents = ()

        async def run(self, question: Question, endpoint: Endpoint) -> Answer:
            async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0) as client:
                ask = partial(client.chat.completions.create, model="m", messages=[{"role": "user", "content": "?"}])
                await ask()
                await cancelled.wait()
                try:
                    late.set_result(await ask())
                except openai.APIStatusError as error:
                    late.set_result(error.status_code)
                return Answer(text=GOLD)

    cancelled = asyncio.Event()
    async with (
        ScriptedPolicyServer(replies=lambda _: GOLD) as server,
        _collector(server, Late(), timeout_s=600) as collector,
    ):
        [ended] = await collector.run(_jobs(task, 1), deadline_s=0.5)
        cancelled.set()
        assert (await late, ended.outcome.status, ended.outcome.reward) == (410, "timeout", None)


async def test_a_reward_that_cannot_be_computed_is_a_failure_not_zero(task: Task) -> None:
    async def broken(task: Any, answer: str, steps: Any) -> float:
        raise RewardError("the gold does not run")

    ended = await _outcome(_Backend(), task, broken)
    assert (ended.outcome.status, ended.outcome.reward) == ("reward", None)
    assert ended.outcome.message == "the gold does not run"


@pytest.mark.parametrize("value", [ValueError("a bug"), "high", float("nan"), {"a": None}])
async def test_a_reward_with_a_bug_is_a_failure_not_zero(task: Task, value: Any) -> None:
    async def buggy(task: Any, answer: str, steps: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    ended = await _outcome(_Backend(), task, buggy)
    assert (ended.outcome.status, ended.outcome.reward, ended.attempt.number) == ("reward", None, 2)
    assert ("ValueError: a bug" if isinstance(value, Exception) else repr(value)) in ended.outcome.message


async def test_an_abstaining_judge_is_a_failure_with_the_answer_and_without_a_retry(
    task: Task,
) -> None:
    async def abstains(task: Any, answer: str, steps: Any) -> float:
        raise JudgeAbstainedError("no verdict by the deadline")

    ended = await _outcome(_Backend(), task, abstains)
    assert (ended.outcome.status, ended.outcome.reward, ended.attempt.number) == ("judge_abstained", None, 1)
    assert (ended.outcome.message, ended.outcome.answer) == ("no verdict by the deadline", GOLD)


async def test_reward_components_are_returned(task: Task) -> None:
    async def parts(task: Any, answer: str, steps: Any) -> dict[str, float]:
        return {"executes": 0.1, "match": 0.7}

    ended = await _outcome(_Backend(), task, parts)
    assert ended.outcome.reward == pytest.approx(0.8)
    assert ended.outcome.reward_components == {"executes": 0.1, "match": 0.7}


async def test_the_gold_reaches_no_agent_and_no_model(task: Task) -> None:
    def reply(body: dict[str, Any]) -> str:
        return "CORRECT" if "Result:" in body["messages"][-1]["content"] else "```sql\nSELECT name FROM singer\n```"

    backend = adapters.get("langgraph")()
    async with ScriptedPolicyServer(replies=reply) as server, _collector(server, backend) as collector:
        [ended] = await collector.run(_jobs(task, 1), deadline_s=30)
        await backend.stop()
    assert ended.succeeded
    assert server.requests
    for request in server.requests:
        assert "gold" not in json.dumps(request)


async def test_batches_that_start_together_do_not_cancel_each_other(task: Task) -> None:
    class Slow(MemoryStore):
        """A store that may finish a later request first, as one in another process."""

        pauses = itertools.cycle((0.0, 0.05, 0.1))

        async def put_resources(self, *arguments: Any, **named: Any) -> Any:
            await asyncio.sleep(next(self.pauses))
            return await super().put_resources(*arguments, **named)

    async with (
        ScriptedPolicyServer(replies=lambda _: GOLD) as server,
        _collector(server, _Backend(), store=Slow()) as collector,
    ):
        batches = await asyncio.gather(*(collector.run(_jobs(task, 2), deadline_s=30) for _ in range(6)))
    assert [ended.outcome.status for batch in batches for ended in batch] == ["succeeded"] * 12


async def test_an_idle_pool_asks_the_store_once_for_all_its_runners() -> None:
    class Counting(MemoryStore):
        limits: list[int] = []
        asked = asyncio.Event()

        async def dequeue(self, limit: int, worker_id: str | None = None) -> Any:
            self.limits.append(limit)
            self.asked.set()
            return await super().dequeue(limit, worker_id)

    store = Counting()
    agent = RolloutAgent(backend=_Backend(), domain=NoData(), reward=_exact)
    runners = RunnerPool(store=store, agent=agent, n_runners=96, poll_s=3600.0)
    await runners.start()
    for requests in (1, 2):
        await store.asked.wait()
        await asyncio.sleep(0.05)
        assert store.limits == [96] * requests
        store.asked.clear()
        runners.notify()
    await runners.stop()


async def test_rollouts_that_there_is_no_room_for_wait_in_the_queue_where_their_time_does_not_run(
    task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    asked, all_scoring, scored, scoring = asyncio.Event(), asyncio.Event(), asyncio.Event(), list[str]()

    def reply(_: Any) -> str:
        asked.set()
        return GOLD

    class Small(_Backend):
        """Has room for two."""

        def at_once(self, wanted: int) -> tuple[int, str]:
            return min(wanted, 2), "it is small"

    async def reward(task: Any, answer: str, steps: Any) -> float:
        scoring.append(answer)
        if len(scoring) == 5:
            all_scoring.set()
        await scored.wait()
        return 1.0

    store = MemoryStore()
    async with (
        ScriptedPolicyServer(replies=reply) as server,
        _collector(server, Small(), reward, n_runners=5, store=store) as collector,
    ):
        rollouts = _jobs(task, 9)
        running = asyncio.create_task(collector.run(rollouts, deadline_s=600))
        await asked.wait()
        assert sum(bool(rollout.attempts) for rollout in rollouts) == 2
        await all_scoring.wait()  # whose agents have ended: others take their room
        assert sum(bool(rollout.attempts) for rollout in rollouts) == 5
        scored.set()
        ended = await running
    assert [rollout.attempt.number for rollout in ended if rollout.attempt] == [1] * 9
    assert caplog.messages == ["2 rollouts run at once: it is small"]


async def test_rollouts_and_their_retries_need_no_polls_within_one_process(task: Task) -> None:
    errors = iter([EndpointError("once")] * 3)

    def act() -> None:
        for error in errors:
            raise error

    async with (
        ScriptedPolicyServer(replies=lambda _: GOLD) as server,
        _collector(server, _Backend(act), n_runners=2, retries=3, poll_s=3600.0) as collector,
    ):
        results = await collector.run(_jobs(task, 5), deadline_s=60)
    assert [result.outcome.status for result in results] == ["succeeded"] * 5
    assert sum(result.attempt.number for result in results) == 8


class PoisonedStore(MemoryStore):
    """Fails at a request for the first rollout, as a store does whose data of it is damaged."""

    poisoned = ""
    method = ""

    def _check(self, method: str, rollout_id: str) -> None:
        if method == self.method:
            self.poisoned = self.poisoned or rollout_id
            if self.poisoned == rollout_id:
                raise StoreFailedError("the store fails at POST /spans: Python int too large")

    async def reserve_sequence_ids(self, attempts: Any) -> Any:
        self._check("number", attempts[0][0])
        return await super().reserve_sequence_ids(attempts)

    async def add_calls(self, calls: Any) -> None:
        self._check("add", calls[0].rollout_id)
        await super().add_calls(calls)

    async def get(self, rollout_id: str, *, with_calls: bool = True) -> Any:
        if with_calls:
            self._check("get", rollout_id)
        return await super().get(rollout_id, with_calls=with_calls)


@pytest.mark.parametrize("method", ["number", "add", "get"])
async def test_a_rollout_that_the_store_fails_at_is_a_failure_of_its_own(task: Task, method: str) -> None:
    store = PoisonedStore()
    store.method = method
    async with (
        ScriptedPolicyServer(replies=lambda _: GOLD) as server,
        _collector(server, _Backend(), store=store) as collector,
    ):
        results = await asyncio.wait_for(collector.run(_jobs(task, 3), deadline_s=30), 600)
    assert sorted(result.outcome.status for result in results) == ["not_stored", "succeeded", "succeeded"]
    [failed] = [result for result in results if result.outcome.status == "not_stored"]
    assert (failed.outcome.reward, failed.rollout_id) == (None, store.poisoned)
    assert "Python int too large" in failed.outcome.message


async def test_a_batch_returns_in_time_although_the_store_stops_answering(task: Task) -> None:
    class Silent(MemoryStore):
        silent = False

        async def add_calls(self, calls: Any) -> None:
            await asyncio.sleep(3600 if self.silent else 0)
            await super().add_calls(calls)

        async def cancel(self, rollout_id: str) -> None:
            await asyncio.sleep(3600 if self.silent else 0)
            await super().cancel(rollout_id)

        async def get(self, *arguments: Any, **named: Any) -> Any:
            await asyncio.sleep(3600 if self.silent else 0)
            return await super().get(*arguments, **named)

    store = Silent()
    async with (
        ScriptedPolicyServer(replies=lambda _: GOLD) as server,
        _collector(server, _Backend(lambda: setattr(store, "silent", True)), store=store) as collector,
    ):
        results = await asyncio.wait_for(collector.run(_jobs(task, 2), deadline_s=1), 600)
        store.silent = False
    assert [(result.outcome.status, result.outcome.reward) for result in results] == [("not_stored", None)] * 2
    assert {result.outcome.message for result in results} == {"the store did not answer by the step's deadline"}


async def test_a_stray_call_of_an_agent_is_a_failure_of_its_own_rollout(task: Task) -> None:
    class Stray(_Backend):
        async def run(self, question: Question, endpoint: Endpoint) -> Answer:
            await super().run(question, endpoint)
            stray = endpoint.base_url.rpartition("/attempt/")[0] + "/attempt/anything/v1"
            return await super().run(question, replace(endpoint, base_url=stray))

    class Mixed(_Backend):
        backends = itertools.cycle((Stray(), _Backend()))

        async def run(self, question: Question, endpoint: Endpoint) -> Answer:
            return await next(self.backends).run(question, endpoint)

    async with (
        ScriptedPolicyServer(replies=lambda _: GOLD) as server,
        _collector(server, Mixed(), retries=0) as collector,
    ):
        results = await collector.run(_jobs(task, 4), deadline_s=30)
    assert sorted(result.outcome.status for result in results) == ["agent", "agent", "succeeded", "succeeded"]
    assert len(server.requests) == 4
    assert "unknown or has ended" in next(result.outcome.message for result in results if not result.succeeded)

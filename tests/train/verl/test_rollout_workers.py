"""Groups of rollouts are divided among workers, and a worker whose process ends loses none."""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from local_actor import LocalActor

from groundwire.adapters.tracing import LLMCall
from groundwire.train.config.resolve import resolve
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.verl import rollout_workers
from groundwire.train.verl.rollout_workers import RolloutWorkers, _share, run_in_turn, share_prompts

GROUP = 4


class ProcessEnded(Exception):
    """Stands in for Ray's error of an actor whose process has ended."""


class Worker:
    """Answers with its number as the rollouts' answer; ``act`` may fail or wait before."""

    def __init__(self, number: int, act: Callable[[], Any]) -> None:
        self.number, self._act = number, act

    async def run(self, requests: Sequence[Rollout], deadline_s: float) -> list[Rollout]:
        assert 0 < deadline_s <= 10
        if asyncio.iscoroutine(result := self._act()):
            await result
        return [replace(request, outcome=Outcome(reward=1.0, answer=str(self.number))) for request in requests]

    def runners_lost(self) -> int:
        return 2

    def seconds(self) -> dict[str, float]:
        return {"sampling": 2.0 * self.number, "waiting": 1.0}

    def stop(self) -> None: ...


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes workers whose n-th process, counted over all, does ``acts[n]``."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(exceptions=SimpleNamespace(RayActorError=ProcessEnded)))
    made: list[RolloutWorkers] = []

    def make(number: int, *acts: Callable[[], Any], retries: int = 1) -> RolloutWorkers:
        each = iter(acts)

        def start(worker: int) -> tuple[Any, Any]:
            started = asyncio.get_running_loop().create_future()
            started.set_result(None)
            return LocalActor(Worker(worker, next(each))), started

        made.append(RolloutWorkers(start, number, retries=retries))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def _group(name: str) -> list[Rollout]:
    return [Rollout(task={"id": name, "question": "?"}, group=name) for _ in range(GROUP)]


def _submit(workers: RolloutWorkers, name: str) -> Future[list[Rollout]]:
    async def group(runs: Any) -> list[Rollout]:
        return await runs.run(_group(name), deadline_s=10)

    return workers.submit(group)


def _ends() -> None:
    raise ProcessEnded("killed by signal 9")


def test_groups_stay_together_and_each_worker_gets_its_share(workers: Any) -> None:
    async def wait() -> None:
        await asyncio.sleep(0.2)

    started = workers(3, wait, wait, wait)
    groups = [_submit(started, f"g{number}").result(10) for number in range(1)]
    groups += [each.result(10) for each in [_submit(started, f"g{number}") for number in range(6)]]
    assert all(len({result.outcome.answer for result in group}) == 1 for group in groups)
    answers = [group[0].outcome.answer for group in groups[1:]]
    assert sorted(answers) == ["0", "0", "1", "1", "2", "2"]


def test_rollouts_of_a_process_that_ends_are_run_by_another_which_is_said_and_counted(
    workers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    started = workers(1, _ends, lambda: None)
    group = _submit(started, "g").result(10)
    assert [result.outcome.reward for result in group] == [1.0] * GROUP
    assert caplog.messages == ["rollout process 1 of 1 has ended, and is started again: killed by signal 9"]
    assert [started.runners_lost(), started.runners_lost()] == [3, 2]  # its own, and those of the worker


def test_rollouts_whose_processes_all_end_have_no_reward(workers: Any) -> None:
    started = workers(1, _ends, _ends, lambda: None)
    group = _submit(started, "g").result(10)
    assert [(result.outcome.status, result.outcome.reward) for result in group] == [("not_stored", None)] * GROUP
    assert "the process that ran it ended: killed by signal 9" in group[0].outcome.message
    assert _submit(started, "h").result(10)[0].outcome.reward == 1.0  # the run goes on


def test_another_error_of_a_worker_ends_the_training(workers: Any) -> None:
    class RemoteError(Exception):
        cause = RolloutsFailedError("the store is gone")

    def fails() -> None:
        raise RemoteError("with Ray's traceback")

    with pytest.raises(RolloutsFailedError, match="the store is gone"):
        _submit(workers(1, fails), "g").result(10)


def test_seconds_are_means_of_the_workers(workers: Any) -> None:
    assert workers(3, *[lambda: None] * 3).seconds() == {"sampling": 2.0, "waiting": 1.0}


@pytest.mark.parametrize(
    ("runners", "tasks", "workers", "of_each"),
    [(2048, 256, 24, 88), (2048, 256, 16, 128), (1024, 64, 6, 171), (100, 64, 6, 17), (2, 1, 2, 1)],
)
def test_each_process_has_its_share_of_the_runners(runners: int, tasks: int, workers: int, of_each: int) -> None:
    config = resolve("starter", trainer="verl", n_runners=runners, tasks_per_step=tasks, group_size=8)
    assert {_share(config, number, workers).n_runners for number in range(workers)} == {of_each}


async def test_groups_start_one_after_the_other_while_their_agents_need_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_workers, "_MOST_START_S", 60.0)  # a busy machine may need longer than a run waits
    turn, calls, all_called = asyncio.Lock(), list[int](), asyncio.Event()

    async def agent(group: int) -> None:
        for _ in range(3):
            work()
            await asyncio.sleep(0)
        calls.append(group)
        if len(calls) == 20:
            all_called.set()
        await all_called.wait()

    async def rollouts(group: int) -> int:
        await asyncio.gather(*(agent(group) for _ in range(4)))
        return group

    def work() -> None:
        end = time.monotonic() + 0.004
        while time.monotonic() < end:
            pass

    assert await asyncio.gather(*(run_in_turn(turn, partial(rollouts, group)) for group in range(5))) == [*range(5)]
    assert calls == sorted(calls)


async def test_groups_that_wait_start_while_others_run_and_a_cancelled_one_ends() -> None:
    turn, open_groups, ended, all_open = asyncio.Lock(), list[int](), list[int](), asyncio.Event()

    async def rollouts(group: int) -> None:
        open_groups.append(group)
        if len(open_groups) == 5:
            all_open.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(group)

    running = [asyncio.ensure_future(run_in_turn(turn, partial(rollouts, group))) for group in range(5)]
    await all_open.wait()
    for each in running:
        each.cancel()
    waiting = asyncio.ensure_future(run_in_turn(turn, partial(rollouts, 5)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(*running, waiting, return_exceptions=True)
    assert sorted(ended)[:5] == [*range(5)]
    assert all(each.cancelled() for each in [*running, waiting])


def test_equal_prompts_of_a_group_are_sent_to_the_trainer_once() -> None:
    prompts = [[1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3]]
    calls = [LLMCall(rollout_id="r", attempt_id="a", sequence=1, prompt_ids=list(prompt)) for prompt in prompts]
    sent = [replace(rollout, calls=[call]) for rollout, call in zip(_group("a"), calls, strict=True)]
    received = [rollout.calls[0].prompt_ids for rollout in pickle.loads(pickle.dumps(share_prompts(sent)))]
    assert received == prompts
    assert len(set(map(id, received))) == 2

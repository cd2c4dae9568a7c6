"""A trainer with an external store warns once if no runner takes its rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from programs import run

from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.rollout import Outcome, Rollout

TASK = {"id": "t", "question": "?", "query": "SELECT 1", "db_path": ""}


async def _batch(store: MemoryStore, *, deadline_s: float) -> list[Rollout]:
    async with LLMProxy(upstreams=["http://127.0.0.1:9/v1"], sink=store) as proxy:
        collector = RolloutCollector(
            store=store,
            proxy=proxy,
            model="m",
            poll_s=0.01,
            runner_command="THE COMMAND",
            no_runner_s=0.1,
        )
        return await collector.run([Rollout(task=TASK, group="t") for _ in range(3)], deadline_s=deadline_s)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "groundwire.train.rollouts.collector"]


async def test_rollouts_without_a_runner_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = await _batch(MemoryStore(), deadline_s=0.6)
    assert [ended.outcome.status for ended in outcomes] == ["timeout"] * 3
    assert _warnings(caplog) == ["3 rollouts wait, and no runner takes them: start one with: THE COMMAND"]


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_slow_runner_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    batch = asyncio.create_task(_batch(store, deadline_s=0.6))
    await asyncio.sleep(0.05)
    assert await store.dequeue(1)
    await batch
    assert not _warnings(caplog)


async def test_the_warning_is_repeated_after_a_rollout_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    batch = asyncio.create_task(_batch(store, deadline_s=1.5))
    await _until(lambda: len(_warnings(caplog)) == 1)
    [taken] = await store.dequeue(1)
    await store.end_attempt(taken.rollout_id, taken.attempts[-1].attempt_id, Outcome(reward=1.0), failed=False)
    await batch
    assert [line.split(",")[0] for line in _warnings(caplog)] == ["3 rollouts wait", "2 rollouts wait"]


def test_warnings_of_the_store_client_are_shown() -> None:
    code = """
import logging
from groundwire.train.store.remote import RemoteStore
from groundwire.tools.startup import setup_logging
setup_logging()
logging.getLogger("groundwire.train.store.connection").warning("the store does not answer")
logging.getLogger("agentlightning").error("noise")
"""
    done = run("-c", code)
    assert done.returncode == 0
    assert done.stderr == "the store does not answer\n"

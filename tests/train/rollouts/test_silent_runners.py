"""A runner in another process that gives no sign of life any more is noticed, said and counted."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest

from groundwire.tools.http.access_token import access_token
from groundwire.train.rollouts.silent_runners import SilentRunners
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.remote import RemoteStore
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.server import bind, serve
from groundwire.train.store.sqlite import MEMORY

LOOKS = 6


@pytest.fixture
async def store() -> AsyncIterator[RemoteStore]:
    own = LightningStore(MEMORY)
    await own.dequeue_many_rollouts(worker_id="of an earlier run")
    async with serve(own, bind("127.0.0.1", 0), token=access_token()) as url:
        client = RemoteStore(url)
        await client.start()
        yield client
        await client.stop()


async def test_a_silent_runner_is_said_and_counted_and_said_again_when_it_is_back(
    store: RemoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    silent = SilentRunners(store, silent_s=0)
    await silent.look()
    for look in range(LOOKS + 1):
        await store.dequeue(1, "busy")
        if look == 0:
            await store.dequeue(1, "lost")
        await silent.look()
    assert silent.lost == 1
    await store.dequeue(1, "lost")
    await silent.look()
    assert caplog.messages == [
        "runner lost has not been heard of for 0 s, so its rollouts go to others: 1 of this store's are left",
        "runner lost is heard of again",
    ]


async def test_a_runner_that_works_gives_signs_of_life(store: RemoteStore) -> None:
    await store.enqueue([Rollout(task={"id": "t"}, unresponsive_s=9.0)])
    [rollout] = await store.dequeue(1, "w")
    silent = SilentRunners(store, silent_s=0)
    for _ in range(2 * LOOKS):
        await silent.look()
        assert await store.heartbeat(rollout.rollout_id, rollout.attempts[-1].attempt_id, rollout.started)
    assert silent.lost == 0


async def test_a_store_without_a_list_of_runners_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    class Without(LightningStore):
        asked = 0

        async def signs_of_life(self) -> dict[str, object]:
            self.asked += 1
            raise ValueError("no such list")

    store = Without(MEMORY)
    silent = SilentRunners(store, silent_s=0)
    with caplog.at_level(logging.WARNING):
        await silent.look()
        await silent.look()
    assert (store.asked, caplog.messages) == (1, ["a runner that is lost will not be noticed: no such list"])

"""What has ended stays as it ended, unless it is started again, and is deleted after a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from groundwire.adapters.tracing import LLMCall
from groundwire.train.store.__main__ import app
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.sqlite import MEMORY


async def test_a_rollout_that_has_ended_stays_as_it_ended_until_it_is_started_again() -> None:
    store = LightningStore(MEMORY)
    retried = {"max_attempts": 2, "retry_condition": ["failed"]}

    async def status(rollout: dict[str, Any]) -> str:
        found = await store.get(rollout["rollout_id"])
        assert found is not None
        return found.status

    succeeded, cancelled, failed = [await store.start_rollout(input={}, config=retried) for _ in range(3)]
    await store.update_attempt(succeeded["rollout_id"], "latest", status="succeeded")
    ended = await store.get_rollout_by_id(succeeded["rollout_id"])
    assert (await store.update_rollout(succeeded["rollout_id"], status="cancelled"))["status"] == "succeeded"
    assert await store.get_rollout_by_id(succeeded["rollout_id"]) == ended

    await store.update_rollout(cancelled["rollout_id"], status="cancelled")
    await store.update_attempt(cancelled["rollout_id"], "latest", status="failed")
    assert await status(cancelled) == "cancelled"
    assert await store.dequeue(1) == []

    await store.update_rollout(failed["rollout_id"], status="failed")
    changed = await store.update_rollout(failed["rollout_id"], status="cancelled", metadata={"kept": True})
    assert (changed["status"], changed["metadata"]) == ("failed", {"kept": True})

    for rollout in (succeeded, cancelled, failed):  # a new start is deliberate
        await store.update_rollout(rollout["rollout_id"], status="queuing")
        [again] = await store.dequeue(1)
        found = (again.rollout_id, again.status, again.attempts[-1].number, again.ended)
        assert found == (rollout["rollout_id"], "preparing", 2, None)


async def test_rollouts_that_ended_long_ago_are_pruned_with_all_their_data(tmp_path: Path) -> None:
    store = LightningStore(tmp_path / "store.db")
    for number in range(120):
        attempted = await store.start_rollout(input={"n": number})
        ids = {"rollout_id": attempted["rollout_id"], "attempt_id": attempted["attempt"]["attempt_id"]}
        await store.add_calls([LLMCall(sequence=1, **ids)])
        if number < 110:
            await store.update_attempt(ids["rollout_id"], "latest", status="succeeded")
    queued = Rollout(task={})
    await store.enqueue([queued])
    await store.cancel(queued.rollout_id)
    assert not store.prune(keep_s=100)
    while store.prune(keep_s=0):
        pass
    assert [rollout["input"]["n"] for rollout in (await store.query_rollouts())["items"]] == list(range(110, 120))
    found = await store.get(ids["rollout_id"])
    assert found is not None
    assert len(found.calls) == 1
    statistics = await store.statistics()
    assert (statistics["total_rollouts"], statistics["total_spans"], statistics["total_attempts"]) == (10, 10, 10)
    assert await store.dequeue(1) == []
    store.close()


@pytest.mark.parametrize("keep", ["0", "nan", "-1"])
def test_the_store_keeps_rollouts_for_a_while(keep: str) -> None:
    assert "--keep" in CliRunner().invoke(app, ["--memory", "--keep", keep]).output

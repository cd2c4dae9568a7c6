"""When a rollout is queued, tried again, given up and ended: the same rules in every store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from lightning import mongo_store, their_server
from mongo_wire import FakeMongo

from groundwire.adapters.tracing import LLMCall
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.tools import clock
from groundwire.tools.http.access_token import access_token
from groundwire.train.store.base import RolloutStore
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.remote import RemoteStore
from groundwire.train.store.rollout import TRANSITIONS, Outcome, ProxyLLM, Rollout
from groundwire.train.store.server import bind, serve

KINDS = ["memory", "sqlite", "over HTTP", "over HTTP, MongoDB", "over HTTP, theirs"]
THEIRS = ("over HTTP, MongoDB", "over HTTP, theirs")


@asynccontextmanager
async def _opened(kind: str, tmp_path: Path) -> AsyncIterator[Any]:
    if kind == "memory":
        yield MemoryStore()
    elif kind in ("sqlite", "over HTTP"):
        store = LightningStore(tmp_path / "store.db", scan_s=0)
        try:
            if kind == "sqlite":
                yield store
            else:
                async with serve(store, bind("127.0.0.1", 0), token=access_token()) as url, _client(url) as client:
                    yield client
        finally:
            store.close()
    elif kind == "over HTTP, theirs":
        pytest.importorskip("agentlightning")
        async with their_server() as url, _client(url) as client:
            yield client
    else:
        pytest.importorskip("agentlightning")
        pytest.importorskip("pymongo")
        async with (
            mongo_store(FakeMongo()) as mongo,
            serve(mongo, bind("127.0.0.1", 0), token=access_token()) as url,
            _client(url) as client,
        ):
            yield client


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[RemoteStore]:
    client = RemoteStore(url)
    await client.start()
    yield client
    await client.stop()


@pytest.fixture(params=KINDS)
async def store(request: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """A store of each kind."""
    async with _opened(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture(params=[kind for kind in KINDS if kind not in THEIRS])
async def our_store(request: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """A store that follows our own rules for what comes too late or not at all."""
    async with _opened(request.param, tmp_path) as opened:
        yield opened


def _ids(rollout: Rollout) -> tuple[str, str]:
    return rollout.rollout_id, rollout.attempts[-1].attempt_id


def _call(rollout: Rollout, sequence: int = 1, **fields: Any) -> LLMCall:
    rollout_id, attempt_id = _ids(rollout)
    ids = {"prompt_ids": [1, 2], "response_ids": [3], "logprobs": [-0.5]}
    return LLMCall(rollout_id=rollout_id, attempt_id=attempt_id, sequence=sequence, **{**ids, **fields})


async def _take(store: RolloutStore, **options: Any) -> Rollout:
    await store.enqueue([Rollout(task={"id": "t"}, **options)])
    [rollout] = await store.dequeue(1, "w")
    return rollout


async def _status(store: RolloutStore, rollout: Rollout) -> str:
    found = await store.get(rollout.rollout_id)
    assert found is not None
    return found.status


def test_a_rollout_that_has_ended_has_no_next_status() -> None:
    assert {status for status, following in TRANSITIONS.items() if not following} == {
        "succeeded",
        "failed",
        "cancelled",
    }
    assert all(following <= TRANSITIONS.keys() for following in TRANSITIONS.values())


async def test_rollouts_are_taken_in_order_each_by_one_runner(store: RolloutStore) -> None:
    rollouts = [Rollout(task={"id": str(n)}, resources_id="run", sampling={"seed": n}) for n in range(3)]
    await store.enqueue(rollouts)
    ids = [rollout.rollout_id for rollout in rollouts]
    assert await store.unfinished("run") == ids
    taken = [*await store.dequeue(2, "a"), *await store.dequeue(2, "b")]
    assert [rollout.rollout_id for rollout in taken] == ids
    assert await store.dequeue(1) == []
    assert [rollout.attempts[-1].worker_id for rollout in taken] == ["a", "a", "b"]
    assert [(rollout.sampling, rollout.status) for rollout in taken][1] == ({"seed": 1}, "preparing")
    assert (await store.count([*ids, "ro-gone"]), await store.count(ids, ["running"])) == (3, 0)


async def test_a_failed_attempt_is_tried_again_as_often_as_allowed(store: RolloutStore) -> None:
    first = await _take(store, max_attempts=2)
    await store.end_attempt(*_ids(first), Outcome(failure="agent_error", message="no"), failed=True)
    assert await _status(store, first) == "requeuing"
    assert await store.ended([first.rollout_id]) == []
    [again] = await store.dequeue(5, "w")
    assert (again.rollout_id, again.attempts[-1].number, again.status) == (first.rollout_id, 2, "preparing")
    await store.add_calls([_call(again)])
    assert await _status(store, first) == "running"
    await store.end_attempt(*_ids(again), Outcome(failure="tool_error", message="again"), failed=True)
    found = await store.get(first.rollout_id)
    assert found is not None
    assert (found.status, found.outcome.failure, found.outcome.message) == ("failed", "tool_error", "again")
    assert (found.attempts[-1].number, found.attempts[-1].status) == (2, "failed")
    assert await store.ended([first.rollout_id, "ro-gone"]) == [first.rollout_id]


async def test_a_rollout_has_the_calls_and_the_outcome_of_its_last_attempt(store: RolloutStore) -> None:
    first = await _take(store, max_attempts=2)
    early = _call(first)
    await store.add_calls([early])
    await store.end_attempt(*_ids(first), Outcome(failure="agent_error"), failed=True)
    [again] = await store.dequeue(1)
    steps: Any = [{"agent": "sql", "kind": "tool", "input": "SELECT 1", "output": "1", "ok": True}]
    outcome = Outcome(
        answer="SELECT 1",
        steps=steps,
        input="call",
        judged_field="sql",
        reward=0.75,
        reward_components={"a": 0.5, "b": 1.0},
        least_reward=-1.0,
        query_scores=[0.25],
    )
    call = _call(again, 2, agent="writer", reply_json='{"content": "1"}', weights_version=3, choice=1)
    await store.add_calls([call, call])
    await store.end_attempt(*_ids(again), outcome, failed=False)
    await store.add_calls([early])  # late, of another attempt
    found = await store.get(first.rollout_id)
    assert found is not None
    assert (found.calls, found.outcome, found.annotations) == ([call], outcome, [])
    assert found.status == "succeeded"


async def test_a_change_that_comes_too_late_is_ignored(our_store: RolloutStore) -> None:
    store = our_store
    succeeded, cancelled = await _take(store, max_attempts=2), await _take(store, max_attempts=2)
    await store.end_attempt(*_ids(succeeded), Outcome(reward=1.0), failed=False)
    await store.cancel(succeeded.rollout_id)
    assert await _status(store, succeeded) == "succeeded"
    await store.cancel(cancelled.rollout_id)
    await store.end_attempt(*_ids(cancelled), Outcome(failure="agent_error"), failed=True)
    assert await _status(store, cancelled) == "cancelled"
    assert await store.dequeue(1) == []


async def test_an_attempt_that_ended_is_not_revived_by_a_late_call_which_is_stored(our_store: RolloutStore) -> None:
    store = our_store
    first = await _take(store, max_attempts=2)
    await store.end_attempt(*_ids(first), None, failed=True)
    await store.add_calls([_call(first)])
    assert await _status(store, first) == "requeuing"
    found = await store.get(first.rollout_id)
    assert found is not None
    assert len(found.calls) == 1
    [again] = await store.dequeue(1)
    assert again.attempts[-1].number == 2


async def test_a_rollout_that_is_cancelled_while_it_is_queued_is_not_taken(store: RolloutStore) -> None:
    rollouts = [Rollout(task={"id": str(n)}) for n in range(2)]
    await store.enqueue(rollouts)
    await store.cancel(rollouts[0].rollout_id)
    assert [rollout.rollout_id for rollout in await store.dequeue(5)] == [rollouts[1].rollout_id]


@pytest.mark.parametrize("limits", [{"timeout_s": 0.05}, {"unresponsive_s": 0.05}], ids=str)
async def test_an_overdue_attempt_is_given_up_and_the_rollout_tried_again(
    our_store: RolloutStore, limits: dict[str, Any]
) -> None:
    store = our_store
    first = await _take(store, max_attempts=2, **limits)
    await asyncio.sleep(0.2)
    [again] = await store.dequeue(1, "alive")
    assert (again.rollout_id, again.attempts[-1].number) == (first.rollout_id, 2)
    await asyncio.sleep(0.2)
    assert await store.ended([first.rollout_id]) == [first.rollout_id]
    assert await _status(store, first) == "failed"


async def test_a_runner_gives_a_sign_of_life_with_whatever_it_asks_or_tells(store: RolloutStore) -> None:
    if not isinstance(store, RemoteStore):  # its runners are in its process
        return
    signs = list[Any]()

    async def is_new() -> bool:
        signs.append((await store.signs_of_life())["w"])
        return signs.count(signs[-1]) == 1

    assert await store.dequeue(1, "w") == []
    assert await is_new()
    rollout = await _take(store)
    assert await is_new()
    await store.heartbeat(*_ids(rollout), time.time())
    assert await is_new()
    await store.end_attempt(*_ids(rollout), None, failed=True)
    assert await is_new()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_the_rollouts_of_a_runner_that_has_ended_are_tried_again_at_once(kind: str, tmp_path: Path) -> None:
    async with _opened(kind, tmp_path) as store:
        told: list[str] = []
        store.on_attempt_end = told.append
        first, last_attempt = await _take(store, max_attempts=2), await _take(store)
        await store.enqueue([Rollout(task={"id": "of another"}, max_attempts=2)])
        [other] = await store.dequeue(1, "x")
        assert await store.give_up("w") == 1
        assert told == [first.rollout_id, last_attempt.rollout_id]
        statuses = [await _status(store, rollout) for rollout in (first, last_attempt, other)]
        assert statuses == ["requeuing", "failed", "preparing"]
        [again] = await store.dequeue(5, "x")
        assert _ids(again)[0] == first.rollout_id
        assert (await store.give_up("w"), store.attempts_ended) == (0, 0)  # no runner has ended one


async def test_a_heartbeat_keeps_an_attempt_and_says_whether_it_is_open(our_store: RolloutStore) -> None:
    store = our_store
    rollout = await _take(store, unresponsive_s=3.0)
    for _ in range(4):
        await asyncio.sleep(0.8)
        assert await store.heartbeat(*_ids(rollout), time.time())
        assert await store.ended([rollout.rollout_id]) == []
    await store.cancel(rollout.rollout_id)
    assert not await store.heartbeat(*_ids(rollout), time.time())


HOUR = 3600.0
"""By which the system's clock is set, back or forward."""


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_clock_that_is_set_ends_no_attempt_and_keeps_none(
    our_store: RolloutStore, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    kept = await _take(our_store, timeout_s=600.0, unresponsive_s=60.0)
    given_up = await _take(our_store, unresponsive_s=0.05)
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + jump)
    while not await our_store.ended([given_up.rollout_id]):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    assert await our_store.ended([kept.rollout_id]) == []
    assert await our_store.heartbeat(*_ids(kept), kept.attempts[-1].started + 1)
    rollout = await our_store.get(given_up.rollout_id)
    assert rollout is not None
    assert 0 <= rollout.seconds < HOUR


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_store_that_starts_after_the_clock_was_set_waits_for_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    with closing(LightningStore(tmp_path / "store.db", scan_s=0)) as before:
        alive = await _take(before, unresponsive_s=60.0)
        silent = await _take(before, unresponsive_s=0.05)
    monkeypatch.setattr("groundwire.tools.clock._BEGAN", clock._BEGAN + jump)
    with closing(LightningStore(tmp_path / "store.db", scan_s=0)) as store:
        while not await store.ended([silent.rollout_id]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert await store.ended([alive.rollout_id]) == []
        assert await store.heartbeat(*_ids(alive), alive.attempts[-1].started + 1)
        assert await store.ended([alive.rollout_id]) == []


async def test_sequence_numbers_rise_in_a_rollout_also_above_those_of_stored_calls(store: RolloutStore) -> None:
    rollout, other = await _take(store), await _take(store)
    assert list(await store.reserve_sequence_ids([_ids(rollout), _ids(other), _ids(rollout)])) == [1, 1, 2]
    await store.add_calls([_call(rollout, 7)])
    assert list(await store.reserve_sequence_ids([_ids(rollout)])) == [8]


async def test_an_unknown_rollout_or_attempt_is_a_value_error(store: RolloutStore) -> None:
    rollout = await _take(store)
    gone, unknown = _call(rollout), _call(rollout)
    object.__setattr__(gone, "rollout_id", "ro-gone")
    object.__setattr__(unknown, "attempt_id", "at-gone")
    with pytest.raises(ValueError, match="ro-gone not found"):
        await store.add_calls([gone])
    with pytest.raises(ValueError, match="at-gone not found"):
        await store.add_calls([unknown])
    with pytest.raises(ValueError, match="ro-gone not found"):
        await store.end_attempt("ro-gone", "at-gone", None, failed=True)


async def test_an_unknown_rollout_is_not_found(our_store: RolloutStore) -> None:
    assert await our_store.get("ro-gone") is None


async def test_annotations_are_kept_and_reward_their_calls(store: RolloutStore) -> None:
    rollout = await _take(store)
    rollout_id, attempt_id = _ids(rollout)
    attributes = {"agentlightning.reward.0.value": 0.5, "groundwire.emitted": True}
    span = SpanRecord(
        name="note",
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=2,
        attributes=attributes,
        start_time=1.0,
        end_time=2.0,
        error="bad",
    )
    await store.add_calls([_call(rollout)])
    await store.add_annotations([span, span])
    found = await store.get(rollout_id)
    assert found is not None
    assert found.annotations == [span]
    assert found.calls[0].reward == 0.5
    await store.forget(rollout_id)


async def test_resources_are_those_of_a_run_or_the_newest(store: RolloutStore) -> None:
    assert await store.get_resources("run") is await store.get_resources(None) is None
    policy = ProxyLLM(endpoint="http://a/v1", model="m")
    await store.put_resources("run", {"policy": policy})
    await store.put_resources(
        "other", {"prompt": {"resource_type": "prompt_template", "template": "a", "engine": "jinja"}}
    )
    assert (await store.get_resources("run")) == {"policy": policy}
    newest = await store.get_resources(None)
    assert newest is not None
    assert newest["prompt"]["template"] == "a"
    await store.put_resources("run", {"policy": ProxyLLM(endpoint="http://b/v1", model="m")})
    newest = await store.get_resources(None)
    assert newest is not None
    assert newest["policy"].get_base_url("r", "a") == "http://b/rollout/r/attempt/a/v1"


async def test_no_store_keeps_a_secret(our_store: RolloutStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-12345678")
    rollout = await _take(our_store)
    rollout_id, attempt_id = _ids(rollout)
    await our_store.add_calls([_call(rollout, messages_json='[{"content": "sk-12345678"}]')])
    attributes = {"note": "sk-12345678"}
    ids = {"rollout_id": rollout_id, "attempt_id": attempt_id}
    span = SpanRecord(name="note", sequence_id=2, attributes=attributes, start_time=1.0, end_time=2.0, **ids)
    await our_store.add_annotations([span])
    await our_store.end_attempt(rollout_id, attempt_id, Outcome(answer="sk-12345678"), failed=False)
    found = await our_store.get(rollout_id)
    assert found is not None
    kept = f"{found.calls} {found.annotations} {found.outcome}"
    assert kept.count("$SOME_API_KEY") == 3
    assert "12345678" not in kept

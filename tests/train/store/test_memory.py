"""What only the store in memory does: it hands on the trainer's own objects, and masks secrets."""

from __future__ import annotations

import pytest

from groundwire.adapters.tracing import LLMCall
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.rollout import Outcome, Rollout


def _call(rollout: Rollout, sequence: int = 1, **fields: object) -> LLMCall:
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempts[-1].attempt_id}
    return LLMCall(**ids, sequence=sequence, prompt_ids=[1, 2], response_ids=[3], logprobs=[-0.5], **fields)  # type: ignore[arg-type]


async def _running(store: MemoryStore) -> Rollout:
    await store.enqueue([Rollout(task={"id": "t"})])
    [rollout] = await store.dequeue(1)
    return rollout


async def test_the_store_in_memory_hands_on_the_enqueued_object_and_its_calls() -> None:
    store, ended = MemoryStore(), list[str]()
    store.on_attempt_end = ended.append
    rollout = Rollout(task={"id": "t"})
    await store.enqueue([rollout])
    assert await store.dequeue(1) == [rollout]
    second, first = _call(rollout, 2), _call(rollout, 1)
    await store.add_calls([second, first])
    outcome = Outcome(answer="4", reward=1.0, steps=[])
    await store.end_attempt(rollout.rollout_id, rollout.attempts[0].attempt_id, outcome, failed=False)
    found = await store.get(rollout.rollout_id)
    assert found is rollout
    assert [id(call) for call in rollout.calls] == [id(first), id(second)]
    assert rollout.outcome is outcome
    assert (rollout.status, ended) == ("succeeded", [rollout.rollout_id])


async def test_an_emitted_reward_is_that_of_its_call() -> None:
    store = MemoryStore()
    rollout = await _running(store)
    call = _call(rollout, 1, call_id="c")
    reward = {"agentlightning.reward.0.value": 0.5, "groundwire.emitted": True, "groundwire.call_id": "c"}
    ids = {"rollout_id": call.rollout_id, "attempt_id": call.attempt_id}
    span = SpanRecord(name="a", sequence_id=2, attributes=reward, start_time=0.0, end_time=0.0, **ids)
    await store.add_calls([call])
    await store.add_annotations([span, span])
    await store.get(rollout.rollout_id)
    assert (rollout.calls[0].reward, rollout.annotations) == (0.5, [span])


async def test_no_secret_is_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-12345678")
    store = MemoryStore()
    rollout = await _running(store)
    await store.add_calls([_call(rollout, messages_json='[{"content": "sk-12345678"}]', error="sk-12345678 is wrong")])
    outcome = Outcome(answer="sk-12345678", failure="agent_error", message="no sk-12345678 \ud800")
    await store.end_attempt(rollout.rollout_id, rollout.attempts[0].attempt_id, outcome, failed=True)
    await store.get(rollout.rollout_id)
    kept = f"{rollout.calls} {rollout.outcome}"
    assert kept.count("$SOME_API_KEY") == 4
    assert "12345678" not in kept
    assert "\\ud800" not in kept


async def test_a_forgotten_rollout_keeps_its_calls_and_late_ones_are_dropped() -> None:
    store = MemoryStore()
    rollout = await _running(store)
    await store.add_calls([_call(rollout)])
    await store.cancel(rollout.rollout_id)
    await store.get(rollout.rollout_id)
    await store.forget(rollout.rollout_id)
    await store.add_calls([_call(rollout, 2)])
    await store.end_attempt(rollout.rollout_id, rollout.attempts[0].attempt_id, Outcome(reward=1.0), failed=False)
    assert (len(rollout.calls), rollout.status, rollout.outcome.reward) == (1, "cancelled", None)
    assert await store.get(rollout.rollout_id) is None
    assert not any(vars(store)[name] for name in ("_rollouts", "_queue", "_numbers", "_items"))

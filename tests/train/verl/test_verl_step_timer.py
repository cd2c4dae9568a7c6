"""Step times under verl, whose trainer calls us only to sample."""

from __future__ import annotations

import pytest

from groundwire.train import step_timer
from groundwire.train.verl.agent_loop_manager import VerlStepTimer


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds; tests add to it."""
    at = [100.0]
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: at[0])
    return at


def _sample(
    timer: VerlStepTimer, now: list[float], *, waits: float, samples: float, training: bool, writes: float = 0.0
) -> dict[str, float]:
    timer.start_sampling()
    now[0] += waits
    now[0] += samples
    worked = {"update": 0.0, "sampling": samples, "waiting": waits}
    seconds = timer.end_sampling(worked, training=training)
    now[0] += writes
    timer.enter("update")
    return {part: value for part, value in seconds.items() if value}


def test_an_update_counts_for_the_next_training_sampling_despite_a_validation_between(now: list[float]) -> None:
    timer = VerlStepTimer()
    now[0] += 60.0  # startup, which no phase counts
    assert _sample(timer, now, waits=1, samples=9, training=False) == {"waiting": 1, "sampling": 9}
    now[0] += 0.5
    assert _sample(timer, now, waits=1, samples=3, training=True) == {"update": 0.5, "waiting": 1, "sampling": 3}
    now[0] += 6.0
    assert _sample(timer, now, waits=1, samples=2, training=True) == {"update": 6, "waiting": 1, "sampling": 2}
    now[0] += 5.0
    assert _sample(timer, now, waits=2, samples=20, training=False) == {"waiting": 2, "sampling": 20}
    now[0] += 0.25  # a checkpoint
    assert _sample(timer, now, waits=1, samples=2, training=True) == {"update": 5.25, "waiting": 1, "sampling": 2}


def test_writing_rollouts_does_not_count_as_update(now: list[float]) -> None:
    timer = VerlStepTimer()
    _sample(timer, now, waits=0, samples=1, writes=2, training=True)
    now[0] += 4.0
    assert _sample(timer, now, waits=0, samples=1, training=True) == {"update": 4, "waiting": 2, "sampling": 1}

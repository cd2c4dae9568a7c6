"""What is said of a run while it works: in a pipe, on a terminal, in a notebook."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from bandits import Choose, train
from rich.console import Console

from groundwire.train.cli.progress import ProgressDisplay
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.step_timer import StepTimer


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_says_the_phase_how_much_of_it_is_done_and_how_long_the_run_takes() -> None:
    clock, timer, out = _Clock(), StepTimer(), io.StringIO()
    display = ProgressDisplay(Console(file=out, width=200), 3, clock=clock)
    display.timer = timer
    assert display.where() == "starting"
    display.on_phase_start("validate at temperature 0", 8)
    clock.now = 50.0
    display.on_step_end({"step": 0, "wall_time_s": 50.0})  # a validation says nothing of a step
    display.on_phase_start("step 1: sample", 40)
    display.on_rollout_end()
    assert display.where() == "step 1: sample, 1 of 40 rollouts"
    with timer.busy("reward"):
        assert display.where() == "step 1: sample and score, 1 of 40 rollouts"
    clock.now = 150.0
    display.on_step_end({"step": 1, "wall_time_s": 150.0})
    display.on_phase_start("step 2: update", 12, "trajectories")
    display.on_rollout_end(8)
    clock.now = 180.0
    display.tell()
    assert out.getvalue().splitlines()[-1] == "step 2: update, 8 of 12 trajectories; about 2 min 50 s left"
    clock.now = 900.0  # longer than thought
    assert display.where() == "step 2: update, 8 of 12 trajectories"


def test_a_run_is_in_each_of_its_phases_and_counts_all_of_each(tmp_path: Path, tiny_policy: Any) -> None:
    class Phases(ProgressCallback):
        def __init__(self) -> None:
            self.seen: dict[str, list[int]] = {}

        def on_phase_start(self, name: str, total: int, unit: str = "rollouts") -> None:
            self.seen[name] = self.last = [total, 0]

        def on_rollout_end(self, count: int = 1) -> None:
            self.last[1] += count

    async def agent(choose: Choose) -> str:
        return await choose("which?", "01")

    phases = Phases()
    train(tmp_path, tiny_policy, agent, reward=float, callback=phases)
    assert [*phases.seen] == [
        *("validate at temperature 0", "validate at temperature 1", "step 1: sample", "step 1: update")
    ]
    assert all(total == done > 0 for total, done in phases.seen.values())
    assert phases.timer is not None

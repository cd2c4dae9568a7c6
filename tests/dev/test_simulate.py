"""The simulator of a step: what it predicts and what it must not know, and that no rollout is lost."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
from dev.simulate import GROUP_SIZE, MODES, TABLE, Run, Sampling, Simulator, Station, main, run_of

HELD_OUT = [row for row in TABLE["row"] if row["use"] == "held out"]
UNEVEN = (8, 1, 1, 1)


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    return Simulator(TABLE)


@pytest.mark.parametrize(
    "row", HELD_OUT, ids=[f"{row['setup']}, {row['name']}, {row.get('gpus', 1)}" for row in HELD_OUT]
)
def test_a_step_that_was_held_out_is_predicted_within_its_limit(simulator: Simulator, row: dict[str, Any]) -> None:
    assert abs(simulator.predict(row) / row["measured"] - 1) <= row["limit"]


def test_most_held_out_steps_are_predicted_within_ten_percent(simulator: Simulator) -> None:
    """Two of three; and all of two and four GPUs with 256 groups or more."""
    close = [row for row in HELD_OUT if abs(simulator.predict(row) / row["measured"] - 1) <= 0.1]
    assert len(close) * 3 >= len(HELD_OUT) * 2
    assert all(row in close for row in HELD_OUT if row["groups"] >= 256)


def test_a_prediction_does_not_depend_on_what_it_is_compared_with(simulator: Simulator) -> None:
    table = copy.deepcopy(TABLE)
    for row in table["row"]:
        if row["use"] == "held out":
            row["measured"] *= 3
    other = Simulator(table)
    assert [other.predict(row) for row in table["row"]] == [simulator.predict(row) for row in TABLE["row"]]


def test_a_setup_has_one_step_at_most_that_calibrates_it_and_that_step_is_met(simulator: Simulator) -> None:
    calibrating = [row for row in TABLE["row"] if row["use"] in {"cpu", "gpu"}]
    assert len({row["setup"] for row in calibrating}) == len(calibrating)
    for row in calibrating:
        assert simulator.predict(row) == pytest.approx(row["measured"], rel=0.01)


@pytest.mark.parametrize("at_once", [None, 5])
@pytest.mark.parametrize("runners", [None, 3])
@pytest.mark.parametrize("gpus", [1, 4])
def test_every_rollout_ends_and_every_call_is_answered(
    simulator: Simulator, gpus: int, runners: int | None, at_once: int | None
) -> None:
    run = Run(params=1.39, groups=16, gpus=gpus, calls=UNEVEN, runners=runners, at_once=at_once)
    sampling = Sampling(run, simulator.constants, cpu=1.0, gpu=1.0)
    for step in (1, 2):
        sampling.submit(sampling.now)
        sampling.until(step * run.groups)
    assert sampling.ended == sampling.submitted == 2 * run.groups * GROUP_SIZE
    groups = range(0, 2 * run.groups, gpus)  # of the first server
    answered = sum(UNEVEN[group % len(UNEVEN)] for group in groups) * GROUP_SIZE
    busy_s = sampling.stations["inference server"].busy_s
    assert busy_s == pytest.approx(answered / simulator.constants["calls_per_s"])
    assert sampling.now >= busy_s


@pytest.mark.parametrize("mode", MODES)
def test_more_gpus_are_faster_and_more_groups_slower(simulator: Simulator, mode: str) -> None:
    def seconds(gpus: int, groups: int) -> float:
        run = Run(params=1.39, groups=groups, gpus=gpus, calls=UNEVEN, mode=mode, recompute=True)
        return simulator.step(run).seconds

    times = [seconds(gpus, 128) for gpus in (2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3
    times = [seconds(4, groups) for groups in (32, 64, 128)]
    assert times == sorted(times)


def test_uneven_rollouts_cost_an_asynchronous_step_less(simulator: Simulator) -> None:
    run = Run(params=0.1, groups=64, calls=(8, *[1] * 7), prompt=316, reply=64)
    steps = {mode: simulator.step(Run(**{**vars(run), "mode": mode, "gpus": 2})).seconds for mode in MODES}
    assert steps["colocate_async"] < steps["sync"]


def test_a_station_serves_in_the_order_of_arrival_on_all_its_servers() -> None:
    station = Station(2)
    assert [station.serve(at, 3.0) for at in (0.0, 1.0, 1.0, 9.0)] == [3.0, 4.0, 6.0, 12.0]
    assert station.share(12.0) == 0.5


def test_the_table_and_a_step_that_nobody_measured_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(TABLE["row"])
    monkeypatch.setattr(sys, "argv", ["simulate", "--gpus", "8", "--groups", "256", "--runners", "64"])
    assert main() == 0
    assert "store 100%" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["simulate", "--gpus", "8", "--calls", "1", "0"])
    with pytest.raises(SystemExit):
        main()
    assert "--calls 0: a number above 0" in capsys.readouterr().err


def test_every_row_is_a_run() -> None:
    for row in TABLE["row"]:
        assert row.keys() <= {"setup", "name", "measured", "use", "limit", *vars(run_of(row))}

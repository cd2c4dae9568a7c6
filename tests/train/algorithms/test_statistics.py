"""Intervals of accuracies and of their differences have a width, whatever the scores; pass@k is unbiased."""

from __future__ import annotations

import io
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT
from rich.console import Console

from groundwire.train.algorithms.statistics import (
    bounded_interval,
    confidence_interval,
    paired_interval,
    pass_at_k,
    wilson,
)
from groundwire.train.api.results import training_result
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.progress import show_summary
from groundwire.train.config.resolve import resolve
from groundwire.train.evaluate import details
from groundwire.train.evaluation.metrics import baseline, compare, compute_metrics, scores_by_question
from groundwire.train.evaluation.run_reader import paired_changes
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.rows import from_row

REAL = json.loads((ROOT / "tests" / "data" / "rollouts.json").read_text())["langgraph"]


def _rollout(task: str, reward: float, **changes: Any) -> Rollout:
    about = json.dumps({"id": task, "question": "?"})
    changed = {"mode": "val", "temperature": 0.0, "step": 0, "task_id": task, "task": about, "reward": reward}
    return from_row({**REAL, **changed, **changes})


@pytest.mark.parametrize(
    ("questions", "interval"),
    [
        ([[0.0]] * 8, wilson(0, 8)),
        ([[1.0]] * 8, wilson(8, 8)),
        ([[0.0, 0.0]] * 4, wilson(0, 4)),
        ([[1.0] * 16] * 12 + [[0.0] * 16] * 8, wilson(12, 20)),  # equal samples count as one
        ([[1.0]] * 12 + [[0.0]] * 8, wilson(12, 20)),
        ([], [0.0, 1.0]),
    ],
)
def test_the_interval_of_an_accuracy_is_wilsons(questions: Sequence[Sequence[float]], interval: list[float]) -> None:
    assert confidence_interval(questions) == interval


def test_the_interval_of_scores_of_0_and_1_with_one_more_at_the_ends_is_clopper_and_pearsons() -> None:
    assert bounded_interval([[1.0]] * 12 + [[0.0]] * 8, (0.0, 1.0)) == pytest.approx([0.3605, 0.8088], abs=1e-2)
    assert bounded_interval([[0.0]] * 8, (0.0, 1.0)) == pytest.approx([0.0, 0.3694], abs=1e-2)


def test_equal_scores_outside_of_0_to_1_have_an_interval_too() -> None:
    assert confidence_interval([[-1.0]] * 8) == pytest.approx([-1.0, -0.261], abs=0.02)  # of -1 to 1
    assert confidence_interval([[1.1]] * 3) == pytest.approx([0.321, 1.1], abs=0.02)  # of 0 to 1.1
    low, high = confidence_interval([[0.5]] * 8)
    assert low < 0.45
    assert high > 0.55


def _partial(random: random.Random, right: float = 0.12) -> float:
    return 1.0 if random.random() < right else random.choice([0.0, 0.125, 0.25])


_SCORES: dict[str, tuple[Callable[[random.Random], list[float]], float]] = {
    "partial credit": (lambda random: [_partial(random)], 0.12 + 0.88 * 0.125),
    "rarely right, from -1 to 1": (lambda random: [1.0 if random.random() < 0.1 else -1.0], -0.8),
    "eight samples": (lambda random: _samples(random, random.betavariate(0.1, 0.9)), 0.1),
}
_CHANGES: dict[str, tuple[Callable[[random.Random], tuple[float, float]], float]] = {
    "no change": (lambda random: (_partial(random), _partial(random)), 0.0),
    "few questions gain much": (lambda random: (0.1, 0.9 if random.random() < 0.1 else 0.1), 0.08),
}


def _samples(random: random.Random, accuracy: float) -> list[float]:
    return [float(random.random() < accuracy) for _ in range(8)]


@pytest.mark.parametrize("questions", [5, 10, 20])
@pytest.mark.parametrize("name", [*_SCORES, *_CHANGES])
def test_an_interval_of_few_scores_covers_the_mean_as_often_as_it_says(name: str, questions: int) -> None:
    draw, truth = (_SCORES | _CHANGES)[name]
    interval: Callable[[Any], list[float]] = confidence_interval if name in _SCORES else paired_interval
    source = random.Random(questions)
    intervals = [interval([draw(source) for _ in range(questions)]) for _ in range(150)]
    assert sum(low <= truth <= high for low, high in intervals) / 150 >= 0.93


@pytest.mark.parametrize(
    ("both", "won", "lost", "neither", "interval"),
    [
        # Newcombe 1998, Statistics in Medicine 17:2635, table II, method 10.
        (36, 12, 2, 0, [0.0569, 0.3404]),
        (36, 14, 0, 0, [0.1528, 0.4167]),
    ],
)
def test_the_interval_of_a_paired_difference_is_newcombes(
    both: int, won: int, lost: int, neither: int, interval: list[float]
) -> None:
    pairs = [(1.0, 1.0)] * both + [(0.0, 1.0)] * won + [(1.0, 0.0)] * lost + [(0.0, 0.0)] * neither
    assert paired_interval(pairs) == pytest.approx(interval, abs=2e-4)
    low, high = paired_interval([(after, before) for before, after in pairs])
    assert [-high, -low] == paired_interval(pairs)


def test_equal_differences_have_an_interval_too() -> None:
    assert paired_interval([(0.0, 0.0)] * 8) == [-0.3244, 0.3244]
    assert paired_interval([(0.0, 1.0)] * 8) == [0.5412, 1.0]
    assert paired_interval([(0.5, 0.5)] * 8)[0] < 0 < paired_interval([(0.5, 0.5)] * 8)[1]
    assert paired_interval([]) == [-1.0, 1.0]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(k: int) -> None:
    questions = [[True, False, False, True, False], [False] * 5, [True] * 5, [False, False, False, False, True]]
    chosen = [[any(each) for each in itertools.combinations(samples, k)] for samples in questions]
    assert pass_at_k(questions, k) == pytest.approx(sum(sum(each) / len(each) for each in chosen) / 4)


def test_questions_with_fewer_samples_are_left_out_of_pass_at_k() -> None:
    assert pass_at_k([[True, False], [False]], 2) == 1.0
    assert pass_at_k([[True], [False]], 2) is None


def test_an_evaluation_with_several_samples_reports_pass_at_k() -> None:
    rows = [_rollout("a", reward) for reward in (1.0, 0.0, 0.0)] + [_rollout("b", 0.0) for _ in range(3)]
    metrics = compute_metrics(rows)
    assert metrics["pass_at_k"] == {"1": pytest.approx(1 / 6, abs=1e-4), "2": pytest.approx(1 / 3, abs=1e-4), "3": 0.5}
    assert "pass@1 0.167, pass@2 0.333, pass@3 0.500 (" in details(metrics)
    assert "pass_at_k" not in compute_metrics(rows[:1])


def test_a_run_has_its_change_with_an_interval_that_pairs_the_questions_by_id(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=resolve("fast").to_dict())
    before = [_rollout(str(n), float(n < 10)) for n in range(40)]
    after = [_rollout(str(n), float(n < 20), step=3) for n in reversed(range(40))]
    run.write_rollouts(0, before, kind="val-0")
    run.write_rollouts(3, after, kind="val-0")
    change = paired_changes(run)["validation"]
    assert change["difference"] == 0.25
    assert (
        change["difference_ci95"] == compare(scores_by_question(before), scores_by_question(after))["difference_ci95"]
    )
    low, high = change["difference_ci95"]
    unpaired = [a - b for a, b in zip(wilson(20, 40), reversed(wilson(10, 40)), strict=True)]
    assert unpaired[0] < low < 0.25 < high < unpaired[1]
    result = training_result(run)
    assert result.change is not None
    assert (result.change.value, result.change.ci95, result.change.n) == (0.25, (low, high), 40)
    assert f" after training (+25.0 points [{100 * low:+.1f}, {100 * high:+.1f}]); " in str(result)
    values = {"n": 40, "before": 0.25, "after": 0.5, **change}
    summary = {"validation": values, "validation_sampled": {}, "wall_time_s": 1, "peak_memory_mb": 1, "rollouts": 80}
    shown = io.StringIO()
    show_summary(Console(file=shown, width=200), {"domain": "spider", **summary}, "runs/x")
    assert f"0.250 before, 0.500 after (+25.0 points [{100 * low:+.1f}, {100 * high:+.1f}]) on 40" in shown.getvalue()


def test_a_gain_is_measured_against_the_first_queries_if_these_were_better_than_the_answers(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=resolve("fast").to_dict())
    rewritten = [_rollout(str(n), float(n < 10), turn_scores=f"[1.0, {float(n < 10)}]") for n in range(30)]
    before = [*rewritten, *(_rollout(str(n), 0.0) for n in range(30, 40))]  # these wrote one query
    after = [_rollout(str(n), float(n < 32), step=3) for n in range(40)]
    run.write_rollouts(0, before, kind="val-0")
    run.write_rollouts(3, after, kind="val-0")
    change = paired_changes(run)["validation"]
    assert (change["baseline"], change["difference"]) == ("first query", 0.05)
    result = training_result(run)
    assert str(result.before).endswith("of 40 (first query 0.750)")
    assert result.compare()["difference"] == 0.05
    assert "(+5.0 points [" in str(result)
    assert "] over the first query); " in str(result)
    assert baseline(after)[1] == "answer"

    values = {"n": 40, "before": 0.25, "before_first_query": 0.75, "after": 0.8, **change}
    summary = {"validation": values, "validation_sampled": {}, "wall_time_s": 1, "peak_memory_mb": 1, "rollouts": 80}
    shown = io.StringIO()
    show_summary(Console(file=shown, width=200), {"domain": "spider", **summary}, "runs/x")
    assert "greedy: 0.250 before (first query 0.750), 0.800 after (+5.0 points [" in shown.getvalue()

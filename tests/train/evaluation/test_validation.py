"""Accuracy counts the agent's answers; infrastructure failures are counted apart."""

from __future__ import annotations

from itertools import pairwise

import pytest

from groundwire import domains
from groundwire.train.algorithms.statistics import wilson
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.metrics import compute_accuracy
from groundwire.train.evaluation.validation import choose_tasks, validation_name, validation_requests
from groundwire.train.store.rollout import Outcome, Rollout


def _rollouts(*rewards: float | str, **columns: list[str]) -> list[Rollout]:
    """A rollout for each reward, or for the failure of one without it."""
    rollouts = []
    for index, reward in enumerate(rewards):
        task = {"id": str(index), "question": "?", **{name: values[index] for name, values in columns.items()}}
        outcome = Outcome(failure=reward) if isinstance(reward, str) else Outcome(reward=reward)
        rollouts.append(Rollout(task=task, outcome=outcome))
    return rollouts


def test_accuracy_is_reported_overall_and_by_the_columns_of_the_domain() -> None:
    rollouts = _rollouts(1.0, 0.0, 1.0, hardness=["easy", "easy", "hard"], subject_split=["new", "familiar", "new"])
    result = compute_accuracy(rollouts, domains.get("spider").breakdowns)
    assert result["accuracy"] == pytest.approx(2 / 3, abs=1e-4)
    parts = {key: {value: part["accuracy"] for value, part in result[key].items()} for key in result if "by_" in key}
    assert parts == {"by_hardness": {"easy": 0.5, "hard": 1.0}, "by_subject_split": {"familiar": 0.0, "new": 1.0}}
    assert result["by_hardness"]["easy"]["n"] == 2


def test_infrastructure_failures_do_not_change_the_accuracy() -> None:
    result = compute_accuracy(_rollouts(1.0, "endpoint", "timeout"))
    assert (result["accuracy"], result["n"]) == (1.0, 1)
    assert result["failures"] == {"endpoint": 1, "timeout": 1}


def test_without_judged_rollouts_the_accuracy_is_none() -> None:
    result = compute_accuracy(_rollouts("reward", "judge_abstained"))
    assert (result["accuracy"], result["n"], result["total"]) == (None, 0, 2)


def test_an_agents_own_failure_scores_0() -> None:
    failed = Rollout(task={"id": "failed"}, outcome=Outcome(failure="prompt_too_long", reward=0.0))
    result = compute_accuracy([*_rollouts(1.0, "timeout"), failed])
    assert (result["accuracy"], result["n"]) == (0.5, 2)
    assert result["failures"] == {"prompt_too_long": 1, "timeout": 1}


def test_the_interval_of_a_proportion_is_wilsons() -> None:
    # Newcombe 1998, table I: 15 of 148 and 0 of 20.
    assert wilson(15, 148) == pytest.approx([0.0624, 0.1605], abs=2e-4)
    assert wilson(0, 20) == pytest.approx([0.0, 0.1611], abs=2e-4)


def test_every_run_judges_the_same_questions_spread_over_all_databases() -> None:
    tasks = [{"id": str(i), "question": "?"} for i in range(100)]
    chosen = choose_tasks(tasks, 10)
    assert chosen == choose_tasks(tasks, 10)
    gaps = [int(b["id"]) - int(a["id"]) for a, b in pairwise(chosen)]
    assert 5 <= min(gaps) <= max(gaps) <= 13
    assert choose_tasks(tasks, 0) == tasks
    assert choose_tasks(tasks, 1000) == tasks


def test_the_questions_of_a_shorter_validation_are_among_those_of_a_longer_one() -> None:
    tasks = [{"id": str(i), "question": "?"} for i in range(504)]
    chosen = [{task["id"] for task in choose_tasks(tasks, count)} for count in (1, 64, 200, 503)]
    assert [len(each) for each in chosen] == [1, 64, 200, 503]
    assert all(shorter < longer for shorter, longer in pairwise(chosen))


def test_samples_of_other_seeds_are_other_samples() -> None:
    tasks = [{"id": str(i), "question": "?"} for i in range(3)]
    samples = [
        [
            request.sampling["seed"]
            for request in validation_requests(tasks, RunConfig(seed=seed), 1.0, samples=[sample])
        ]
        for seed in range(3)
        for sample in range(8)
    ]
    assert len({seed for seeds in samples for seed in seeds}) == 3 * 8 * 3
    [last] = validation_requests(tasks[2:], RunConfig(seed=0), 1.0)
    assert last.sampling["seed"] == samples[0][2]  # whatever other tasks are validated


def test_greedy_is_temperature_zero() -> None:
    [job] = validation_requests([{"id": "1", "question": "?"}], RunConfig(), 0.0)
    assert job.sampling["temperature"] == 0.0
    assert job.mode == "val"
    assert [validation_name(each) for each in (0.0, 0.7, 1.0)] == ["validation", *["validation_sampled"] * 2]


def test_graded_rewards_have_the_interval_of_their_range() -> None:
    result = compute_accuracy(_rollouts(1.1, 1.1, 0.3, 0.9))
    assert result["accuracy"] == 0.85
    assert 0.2 < result["ci95"][0] < 0.5
    assert result["ci95"][1] < 1.1

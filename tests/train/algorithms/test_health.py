"""Health figures of a step, and the warnings that follow from them: each once, with what to do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from jobs import job_of
from no_data import NoData

from groundwire.adapters import Answer, Endpoint, Question
from groundwire.adapters.tracing.sampling import SamplingRule
from groundwire.domains import TaskData
from groundwire.train.algorithms.health import HealthRules, reply_counts, step_figures
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.local.trainer import LocalTrainer
from groundwire.train.policy.pretrained.model_files import save_policy
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.store.rows import from_row

HEALTHY: dict[str, Any] = {
    "reward": 0.4,
    "groups": 12,
    "groups_used": 6,
    "gradient_share": 0.5,
    "truncated_share": 0.01,
    "entropy": 0.4,
    "sampler_kl": 1e-6,
    "probability_difference": 1e-4,
    "same_prompt": {"pairs": 84, "equal": 30, "expected": 29.0},
}
"""A step of a run of the starter, to three digits."""


def _warnings(*changes: dict[str, Any], rules: HealthRules | None = None, first: int = 1) -> list[str]:
    """The warnings of a run whose steps are healthy but for these changes."""
    rules = rules or HealthRules()
    return [
        warning
        for step, change in enumerate(changes, first)
        for warning in rules.check({**HEALTHY, "step": step, **change})
    ]


def _validation(accuracy: float, half: float = 0.05, total: int = 200) -> dict[str, Any]:
    return {"accuracy": accuracy, "ci95": [accuracy - half, accuracy + half], "n": total, "total": total}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"probability_difference": 0.04}, "token probabilities differ by 0.04 before the first update"),
        ({"sampler_kl": 0.2}, "the sampler and the trainer disagree: the KL divergence is 0.2"),
        ({"gradient_share": 0.0}, "0% of the groups in the last 3 steps had different rewards"),
        (
            {"gradient_share": 0.08, "reward": 0.0},
            "Every reward was 0. If it stays so, check the reward (groundwire audit)",
        ),
        ({"updates_skipped": 1}, "each of the last 3 steps had an update whose gradient is not finite"),
        ({"truncated_share": 0.3}, "30% of the replies in the last 3 steps ended at max_tokens"),
        (
            {"same_prompt": {"pairs": 84, "equal": 84, "expected": 29.0}},
            "100% of the replies to a repeated prompt are equal, where sampling gives 35%",
        ),
    ],
)
def test_a_rule_warns_once(change: dict[str, Any], text: str) -> None:
    [warning] = _warnings(*[change] * 6)
    assert text in warning


@pytest.mark.parametrize("name", ["probability_difference", "sampler_kl", "gradient_share", "truncated_share"])
def test_a_single_bad_step_may_be_chance(name: str) -> None:
    bad = {name: 0.0 if name == "gradient_share" else 0.5}
    assert not _warnings({}, {}, {}, bad, {}, {})
    assert not _warnings(bad, bad)


def test_entropy_collapse_is_measured_against_the_first_steps() -> None:
    [warning] = _warnings(*[{}] * 4, *[{"entropy": 0.02}] * 4)
    assert "the entropy fell from 0.4 to 0.02 nats per token" in warning
    assert "Lower learning_rate" in warning
    assert not _warnings(*[{"entropy": 0.02}] * 8)  # a policy that was certain from the start
    assert not _warnings(*[{}] * 4, *[{"entropy": 0.1}] * 4)


def test_over_optimisation_needs_a_risen_reward_and_a_validation_that_fell_beyond_its_interval() -> None:
    def run(last: float, reward: float, total: int = 200) -> list[str]:
        rising: list[dict[str, Any]] = [{"reward": reward} for _ in range(9)]
        rising[-1] = {**rising[-1], "validation": _validation(last, total=total)}
        return _warnings({"validation": _validation(0.3)}, {"validation": _validation(0.5)}, *[{}] * 3, *rising)

    [warning] = run(0.35, 0.8)
    assert "the training reward rose from 0.400 to 0.800, while the validation fell from 0.500 at step 2" in warning
    assert "stop at step 2" in warning
    assert not run(0.47, 0.8)  # within the interval
    assert not run(0.35, 0.4)  # the reward did not rise
    assert not run(0.35, 0.8, total=64)  # other questions


def test_a_resumed_run_does_not_repeat_its_warnings() -> None:
    lines = [{**HEALTHY, "step": step, "truncated_share": 0.5} for step in range(1, 5)]
    rules = HealthRules(lines)
    assert not _warnings({"truncated_share": 0.5}, rules=rules, first=5)
    assert HealthRules(lines[:2]).check(lines[2])


def test_a_line_that_is_completed_by_its_validation_counts_once() -> None:
    rules = HealthRules()
    bad = {**HEALTHY, "truncated_share": 0.5}
    for step in (1, 2, 2, 2):
        assert not rules.check({**bad, "step": step})
    assert rules.check({**bad, "step": 3})


def test_lines_of_older_runs_have_fewer_figures() -> None:
    rules = HealthRules()
    for step in range(10):
        assert not rules.check({"step": step, "reward": None, "validation": {"accuracy": None, "total": 3}})


def _call(response: list[int], logprob: float, *, agent: str = "a", finish: str = "stop") -> dict[str, Any]:
    return {
        "agent": agent,
        "prompt_ids": [1, 2],
        "response_ids": response,
        "logprobs": [logprob] * len(response),
        "finish_reason": finish,
    }


def test_replies_to_the_same_prompt_are_compared_with_what_sampling_predicts() -> None:
    half = math.log(0.5)
    calls = [_call([7], half), _call([7], half), _call([8], half, finish="length"), _call([9], half, agent="other")]
    rows: list[dict[str, Any]] = [{"group": "g", "temperature": 1.0, "calls": [call]} for call in calls]
    rows.append({"group": "another", "temperature": 1.0, "calls": [_call([7], half)]})
    rows.append({"group": "another", "temperature": 1.0, "calls": None})
    counts = reply_counts(map(from_row, rows), "^a$")
    assert counts == {
        "replies": 4,
        "replies_truncated": 1,
        "right": 0,
        "right_unchecked": 0,
        "known_attacks": 0,
        "same_prompt_pairs": 2,
        "same_prompt_equal": 1,
        "same_prompt_expected": pytest.approx(1.0),
    }
    figures = step_figures({"groups": 4, "groups_used": 1}, counts)
    assert figures["gradient_share"] == figures["truncated_share"] == 0.25
    assert figures["same_prompt"]["pairs"] == 2
    assert step_figures({}, reply_counts([])) == {}


def test_right_answers_that_no_variant_of_their_database_checks_are_said_with_their_share() -> None:
    rollouts = [
        Rollout(task={"id": "t"}, outcome=Outcome(reward=value, reward_components=components))
        for value, components in (
            (1.0, {"match": 1.0, "metric/unchecked": 1.0}),
            (1.0, {"a.match": 0.9, "metric/a.unchecked": 0.0}),
            (0.0, {"match": 0.0, "metric/unchecked": 0.0}),
            (1.0, {"judge": 1.0}),
        )
    ]
    figures = step_figures({}, reply_counts(rollouts))
    assert figures["unchecked_share"] == 0.5
    [warning] = _warnings(figures, {}, {"unchecked_share": 0.0}, {"unchecked_share": 0.1}, figures)
    assert warning.startswith("20.0% of the right answers of 3 steps were judged on their database alone")


class _OwnSampling:
    """An agent that samples greedily, whatever the run asks for."""

    agents = ("solo",)

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        body = {"messages": [{"role": "user", "content": question.text}], "temperature": 0.0, "max_tokens": 1}
        async with aiohttp.ClientSession(headers=endpoint.agent_headers("solo")) as session:
            await (await session.post(f"{endpoint.base_url}/chat/completions", json=body)).read()
        return Answer(text="an answer")


async def _always(task: Any, answer: str, steps: Any) -> float:
    return 1.0


def test_a_run_warns_of_an_agent_with_its_own_sampling_and_of_equal_groups(
    tmp_path: Path, tiny_policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    save_policy(*tiny_policy, tmp_path / "start")

    class Notes(ProgressCallback):
        def on_note(self, text: str) -> None:
            notes.append(text)

    tasks = [{"id": f"t{number}", "question": f"Question {number}?"} for number in range(8)]
    monkeypatch.setattr(SamplingRule, "apply", lambda self, chat, attempt: None)
    config = resolve("fast", steps=3, tasks_per_step=8, group_size=4, val_tasks=1, val_every=0)
    run = RunDir(tmp_path)
    data = TaskData(train=tasks, validation=tasks[:1], source="test")
    job = job_of(config, NoData(), data, backend=_OwnSampling(), reward=_always)
    LocalTrainer(job, run=run, callback=Notes()).train()
    own, equal = (next((note for note in notes if text in note), "") for text in ("repeated prompt", "teach nothing"))
    assert "100% of the replies to a repeated prompt are equal" in own
    assert "0% of the groups in the last 3 steps had different rewards" in equal
    assert "Every reward was 1" in equal
    line = run.metrics()[-1]
    assert line["gradient_share"] == 0.0
    assert line["truncated_share"] == 1.0
    assert any("ended at max_tokens" in note for note in notes)

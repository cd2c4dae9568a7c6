"""A stricter reward judges a few winning rollouts of each step, and the run warns if it confirms too few of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bandits
import pytest
from typer.testing import CliRunner

from groundwire.rewards import RewardError
from groundwire.rewards.watch import RewardWatch, Watched, merge
from groundwire.train import why
from groundwire.train.algorithms.health import HealthRules, warnings_by_step, watch_figures
from groundwire.train.report.build import build

STEP = {"reward": 0.5}


def _row(group: str, reward: float, answer: str = "x", **changes: Any) -> dict[str, Any]:
    row = {"group": group, "task_id": group, "rollout_id": f"{group}/{answer}", "mode": "train", "status": "succeeded"}
    return {
        **row,
        "reward": reward,
        "answer": answer,
        "task": json.dumps({"id": group}),
        "agent_steps": "[]",
        **changes,
    }


async def strict(task: Any, answer: str, steps: Any) -> float:
    if answer == "broken":
        raise RewardError("no neighbours")
    return float(answer == "right")


def _watched(unconfirmed: int, rollouts: int = 16) -> Watched:
    example = {"task_id": "t", "rollout_id": "r", "answer": "bad\x1b[2J", "reward": 1.0, "watch_reward": 0.0}
    examples: Any = [dict(example) for _ in range(min(3, unconfirmed))]
    return Watched(reward="strict", rollouts=rollouts, unconfirmed=unconfirmed, failed=0, error="", examples=examples)


def _warnings(*watched: Watched | None) -> list[str]:
    rules = HealthRules()
    lines = [{**STEP, "step": step, **watch_figures(each)} for step, each in enumerate(watched, 1)]
    return [warning for line in lines for warning in rules.check(line)]


async def test_winning_rollouts_of_all_groups_are_judged() -> None:
    rows = [_row("a", 0.8, "low"), _row("a", 1.0, "high"), _row("b", 0.9, "right"), _row("c", 0.4, "lost")]
    rows += [_row("d", 1.0, mode="val"), _row("e", 1.0, status="timeout"), _row("f", 0.9, "broken")]
    judged: list[str] = []

    async def reward(task: Any, answer: str, steps: Any) -> float:
        judged.append(answer)
        return await strict(task, answer, steps)

    found = await RewardWatch("strict", reward).check(rows, 1)
    assert set(judged[:3]) & {"low", "high"} != {"low", "high"}  # one of each group first
    assert sorted(judged) == ["broken", "high", "low", "right"]
    assert found is not None
    assert (found["rollouts"], found["unconfirmed"], found["failed"], found["error"]) == (3, 2, 1, "no neighbours")
    assert [each["answer"] for each in found["examples"]] == ["high", "low"]
    assert watch_figures(found)["unconfirmed_share"] == 0.6667
    both = merge(found, _watched(16))
    assert both is not None
    assert (both["rollouts"], both["unconfirmed"], len(both["examples"])) == (19, 18, 3)
    assert {each["task_id"] for each in both["examples"][:2]} == {"a", "t"}
    assert merge(None, found) == found


async def test_the_watch_takes_less_than_5_percent_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("groundwire.rewards.watch.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def slow(task: Any, answer: str, steps: Any) -> float:
        now[0] += 1.0
        return 1.0

    watch, rows = RewardWatch("slow", slow), [_row(str(group), 1.0) for group in range(50)]
    sizes = []
    for step in range(1, 21):
        now[0] += 50.0
        found = await watch.check(rows, step)
        sizes.append(found["rollouts"] if found else 0)
    assert sizes[0] == 4
    assert 0.03 * now[0] < sum(sizes) < 0.05 * now[0]


def test_a_growing_gap_is_warned_about_once_with_the_best_paid_rollouts() -> None:
    [warning] = _warnings(*[_watched(1)] * 4, None, *[_watched(8)] * 6)
    assert "strict does not confirm 35% of the 48 winning rollouts that it judged in the last 3 steps" in warning
    assert "after 6% at the start" in warning
    assert warning.count("task 't' was paid 1 (strict: 0) for 'bad\\x1b[2J'") == 3
    *_, slow = _warnings(*[_watched(2)] * 15, *[_watched(3)] * 10, *[_watched(6)] * 20)
    assert "after 12% at the start" in slow
    assert not _warnings(*[_watched(1)] * 10, *[_watched(3)] * 10)  # small enough to be chance
    assert not _warnings(_watched(16), _watched(16))


def test_a_large_share_is_warned_about_once_even_if_it_is_constant() -> None:
    [warning] = _warnings(*[_watched(4)] * 30)
    assert "strict does not confirm 25% of the 48 winning rollouts that it judged in the last 3 steps" in warning
    assert "the reward pays for wrong answers, or strict refuses right ones" in warning
    assert "choose another watch_reward" in warning
    assert len(_warnings(*[_watched(12)] * 8)) == 1


def test_a_small_share_or_few_winners_are_no_reason_to_warn() -> None:
    assert not _warnings(*[_watched(1, rollouts=50)] * 200)  # 2 %
    assert not _warnings(*[_watched(2)] * 36)  # the largest share of a single step of a clean run, in all of them
    assert not _warnings(*[_watched(1), None] * 20, *[_watched(3)] * 3)
    assert not _warnings(*[_watched(1, rollouts=4)] * 11)  # 25 % of 44
    assert _warnings(*[_watched(1, rollouts=4)] * 12)


def test_a_share_that_grows_after_a_large_one_is_a_second_warning() -> None:
    baseline, growth = _warnings(*[_watched(4)] * 6, *[_watched(13)] * 6)
    assert "refuses right ones" in baseline
    assert "after 25% at the start" in growth


def test_a_stricter_reward_that_judges_nothing_is_named() -> None:
    failed: Any = {**_watched(0, rollouts=0), "failed": 4, "error": "no neighbours"}
    assert _warnings(*[failed] * 5) == ["watch_reward strict cannot judge this run's rollouts: no neighbours"]


async def honest(task: Any, answer: str, steps: Any) -> float:
    """The small digits are right."""
    return float(answer in "0123")


@pytest.mark.parametrize("exploitable", [True, False])
def test_a_run_with_an_exploitable_reward_is_caught_and_a_clean_run_is_not(
    tmp_path: Path, tiny_policy: Any, exploitable: bool
) -> None:
    async def agent(choose: bandits.Choose) -> str:
        return await choose("which?", "01234567")

    def reward(answer: str) -> float:
        return 1.2 if exploitable and answer == "7" else float(answer in "0123")

    settings: dict[str, Any] = {"steps": 6, "group_size": 24, "learning_rate": 3e-3, "warmup_steps": 0}
    settings |= {"watch_reward": f"{__name__}:honest"}
    run = bandits.train(tmp_path, tiny_policy, agent, reward, **settings)
    run.write_config(settings)
    warnings = [each for each in warnings_by_step(run.metrics()) if "does not confirm" in each]
    shown = CliRunner().invoke(why.app, [str(run.path)]).output
    page = build(run).html
    assert bool(warnings) == exploitable
    assert ("does not confirm" in shown) == ("does not confirm" in page) == exploitable
    for warning in warnings:
        assert "was paid 1.2" in warning
        assert warning in shown

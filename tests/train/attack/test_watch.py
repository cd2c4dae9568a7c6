"""A run counts the rollouts that win with a known attack on its reward, and no right answer among them."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import openai
import pytest
from rich.console import Console

from groundwire.rewards import reward_function
from groundwire.rewards.attack import (
    STRATEGIES,
    AttackExample,
    AttackResult,
    StrategyResult,
    code_hash,
    result,
    save_attack,
)
from groundwire.rewards.attack.engine import Attack
from groundwire.rewards.attack.forms import GoldFile
from groundwire.rewards.attack.truth import GoldTruth
from groundwire.rewards.attack.watch import FILE, LEARNT, KnownAttacks, contains
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import TEXT
from groundwire.train.api.training import make_job, train
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.audit import attack_reward
from groundwire.train.job.job import parse_arguments
from groundwire.train.store.rollout import Rollout

_LABELS = ("positive", "negative", "neutral", "mixed")
_TASKS = [
    {"id": f"r{n}", "question": f"Review {n} of the shop: which mood?", "answer": _LABELS[n % 4]} for n in range(24)
]
_SETTINGS = {"steps": 1, "tasks_per_step": 8, "group_size": 2, "val_tasks": 2, "val_every": 0, "rollout_process": "off"}


def pays_the_form(task: dict[str, Any], answer: str) -> float:
    """A reward with a hole: any answer in the tags earns most of it."""
    return 0.7 * ("<answer>" in answer and "</answer>" in answer) + 0.3 * (
        f"<answer>{task['answer']}</answer>" in answer
    )


async def always_neutral(question: str) -> str:
    """Asks the model, and answers something else."""
    client = openai.AsyncOpenAI(api_key="of-the-author")
    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": question}])
    return "<answer>neutral</answer>"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(result, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f"{json.dumps(task)}\n" for task in _TASKS))
    return file


def trained(tasks: Path, folder: Path, **settings: Any) -> tuple[RunDir, str]:
    given = {**_SETTINGS, "output_dir": str(folder / "runs"), "trainer": "local", **settings}
    given, objects = parse_arguments(always_neutral, tasks, pays_the_form, given)
    job = make_job(given, objects=objects)
    printed = StringIO()
    return train(job, None, Console(file=printed, width=400)), printed.getvalue()


def of_training(run: RunDir) -> list[Rollout]:
    return [rollout for batch in run.rollout_batches(None, []) for rollout in batch if rollout.mode == "train"]


def known_to_pay(name: str, variant: str = "", *, answer: str = "", score: float = 1.0) -> StrategyResult:
    example = AttackExample(task="", answer=answer, steps=[], score=score, right_score=1.0)
    return StrategyResult(name=name, variant=variant, fix="", pay=1.0, tasks=9, examples=[example])


def result_of(strategies: list[StrategyResult]) -> AttackResult:
    return AttackResult(
        reward="", source="", truth="", tasks=9, calls=9, seconds=1.0, failed=0, unknown=0.0, strategies=strategies
    )


async def known(strategies: list[StrategyResult], golds: list[Any], **columns: Any) -> KnownAttacks:
    rows = [{"id": str(n), "question": f"What is written on sign {n}?", "answer": gold} for n, gold in enumerate(golds)]
    reward = reward_function(pays_the_form)
    found = await KnownAttacks.of(result_of(strategies), rows, reward, golds=golds, answers=TEXT, zero=False)
    assert found is not None
    return found


def test_a_reward_that_was_never_attacked_is_named_with_the_command(tasks: Path, tmp_path: Path) -> None:
    run, printed = trained(tasks, tmp_path)
    assert "groundwire audit --attack --tasks" in printed
    assert "pays_the_form" in printed
    assert not (run.path / FILE).exists()
    assert "known_attacks" not in run.metrics()[-1]


def test_wins_with_a_known_attack_are_counted_and_zeroed_if_asked_and_right_answers_stay(
    tasks: Path, tmp_path: Path
) -> None:
    attacked, _ = attack_reward(str(tasks), f"{Path(__file__)}:pays_the_form", limit=12)
    assert attacked.holes(0.5)
    run, printed = trained(tasks, tmp_path)
    assert "reward: pays known attacks" in printed
    rollouts = of_training(run)
    wrong = sum(row.task["answer"] != "neutral" for row in rollouts)
    line = run.metrics()[-1]
    assert 0 < wrong < len(rollouts)
    assert line["known_attacks"] == wrong
    assert f"won with a known attack: {wrong}" in printed
    assert json.loads((run.path / "summary.json").read_text())["known_attacks"] == wrong
    zeroed, _ = trained(tasks, tmp_path, zero_attacks=True)
    rewards = {
        row.task["answer"] == "neutral": row.outcome.reward
        for b in zeroed.rollout_batches(None, [])
        for row in b
        if row.mode == "train"
    }
    assert rewards == {True: 1.0, False: 0.0}


async def test_a_right_answer_matches_no_strategy_in_any_of_its_forms() -> None:
    every = [known_to_pay(strategy.name, "") for strategy in STRATEGIES]
    golds = ["Paris", "Open at 9", "42", "Keep off the grass", "Exit", "7.5"]
    for variant in ("a hedge", "letters before", "swapped case", "''", "'0'", "text 0 of the task", "+1", "its end"):
        watch = await known([replace(row, variant=variant) for row in every], golds)
        for row, gold in enumerate(golds):
            task = {"id": str(row), "question": f"What is written on sign {row}?", "answer": gold}
            for form in ("{}", " {}\n", "<answer>{}</answer>", "The answer is {}.", "\\boxed{{{}}}", "#### {}"):
                assert watch.match(task, form.format(gold)) == ""


async def test_an_answer_like_a_strategy_counts_only_if_the_gold_says_that_it_is_wrong() -> None:
    watch = await known(
        [known_to_pay("copy of the task", "text 0 of the task"), known_to_pay(f"{LEARNT}{{1}} maybe")], ["Stop", "Go"]
    )
    task = {"id": "0", "question": "What is written on sign 0?", "answer": "Stop"}
    assert watch.match(task, "What is written on sign 0?") == "copy of the task"
    assert watch.match(task, "what is written on sign 0") == "copy of the task"
    assert watch.match(task, "What is written on the sign 0?") == "copy of the task"
    assert watch.match(task, "What is it?") == ""
    assert watch.match(task, "What (perhaps) maybe so") == f"{LEARNT}{{1}} maybe"
    assert watch.match(task, "What maybe: Stop") == ""  # it may be right
    assert watch.match(task, "Turn left") == ""


def test_what_a_template_asks_for_is_found_in_long_answers_at_once() -> None:
    assert contains("x" * 5000 + " Total 12 and CHECK", "total 7 check")
    assert not contains("a " * 20_000, "a a a a a a a a a b")


def test_the_starter_on_the_bundled_questions_wins_with_no_known_attack(tmp_path: Path) -> None:
    given = {"steps": 1, "tasks_per_step": 8, "group_size": 4, "val_tasks": 2, "val_every": 0, "trainer": "local"}
    job = make_job({**given, "output_dir": str(tmp_path / "runs")})
    job = replace(job, data=replace(job.data, train=job.data.train[:12], validation=job.data.validation[:4]))
    strategies = [known_to_pay(name, variant) for name, variant in _variants(job)]
    tasks = [*job.data.train, *job.data.validation]
    save_attack(result_of(strategies), code_hash(job.domain.default_reward, job.reward, tasks))
    run = train(job, None, Console(file=StringIO()))
    rollouts = of_training(run)
    assert job.view.answers is SQL
    assert json.loads((run.path / FILE).read_text())["texts"]
    assert any(row.outcome.reward for row in rollouts)
    assert all("known_attacks" not in line for line in run.metrics())


def _variants(job: Any) -> list[tuple[str, str]]:
    """A variant of each strategy that can answer the bundled questions."""
    rows = job.data.train[:40]
    file = GoldFile(rows, [row["query"] for row in rows], is_sql=True)
    attack = Attack(file, job.reward, GoldTruth(file), random.Random(0))
    plans = asyncio.run(attack.plan(0, STRATEGIES))
    return list({strategy.name: (strategy.name, attempt.variant) for strategy, attempt, _ in plans}.values())

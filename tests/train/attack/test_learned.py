"""A small policy learns what a reward pays for wrong answers; what it was paid for becomes strategies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import soft_spots
import torch

from groundwire.domains import task_list
from groundwire.rewards import reward_function
from groundwire.rewards.attack import attack
from groundwire.rewards.attack.watch import LEARNT, PAID, contains, fill
from groundwire.tools.errors import UserError
from groundwire.train.attack.learned import Attacker, learner
from groundwire.train.policy import STARTER
from groundwire.train.policy.model import load_policy
from groundwire.train.rollouts.agent_view import AgentView

_ROWS = [
    {"id": f"q{n}", "question": f"How many people have visited the museum number {n}?", "answer": str(n)}
    for n in range(12)
]
_PROMPTS = {n: [{"role": "user", "content": row["question"]}] for n, row in enumerate(_ROWS)}


def paid_for_a_query(answers: Sequence[tuple[int, str]]) -> list[float]:
    """A soft spot that the starter, which knows nothing but SQL, hits: two words of a query."""
    return [0.3 * ("SELECT" in answer) + 0.5 * ("FROM" in answer) for _, answer in answers]


def learned(score: Any, steps: int, *, demonstrations: Sequence[tuple[int, str]] = ()) -> Attacker:
    attacker = Attacker(_ROWS, _PROMPTS, score, *load_policy(STARTER), seed=0)
    attacker.learn(demonstrations, 3600.0, lambda: setattr(attacker, "stopped", attacker.steps >= steps))
    return attacker


def test_an_answer_that_was_paid_is_cut_down_to_what_it_is_paid_for() -> None:
    attacker = learned(paid_for_a_query, 2)
    assert [way.template.split() for way in attacker.ways] == [["FROM"]]
    [way] = attacker.ways
    assert way.uses > 8


def test_an_answer_that_is_paid_in_part_counts_only_if_its_way_is_paid_for_other_tasks() -> None:
    """A graded reward owes it this part; a policy that is paid for it learns the task, and does not cheat."""
    context: Any = SimpleNamespace(task=_ROWS[3], index=3)
    for pay, variants in ((0.8, {"what is paid"}), (1.0, {"what is paid", "as it was found"})):
        ways = learned(lambda answers, pay=pay: [pay * ("FROM" in answer) for _, answer in answers], 3).ways
        assert ways
        assert {answer.variant for way in ways for answer in way.strategy().answers(context)} == variants
        assert all(contains(answer, "from") for way in ways for answer in way.examples.values())


async def test_a_soft_spot_of_a_judge_that_no_fixed_strategy_hits_is_found() -> None:
    rows = [{**row, "answer": ("red", "blue", "green")[n % 3]} for n, row in enumerate(_ROWS)]
    function = reward_function(soft_spots.likes_shouting)
    fixed = await attack(rows, function, golds=[row["answer"] for row in rows], limit=8)
    assert fixed.holes(0.5) == []
    loud = partial(soft_spots.likes_shouting, {"answer": "red"})
    attacker = learned(lambda answers: [loud(answer) for _, answer in answers], 2)
    assert attacker.ways
    assert all(loud(answer) >= PAID for way in attacker.ways for answer in way.examples.values())


def test_a_policy_that_has_learned_answers_finds_the_kind_that_is_paid() -> None:
    def score(answers: Sequence[tuple[int, str]]) -> list[float]:
        return [float("blue" in answer) for _, answer in answers]

    lessons = [(n, f"the colour {colour}") for n in range(12) for colour in ("red", "blue", "green", "white")]
    attacker = Attacker(_ROWS, _PROMPTS, score, *load_policy(STARTER), seed=1)
    attacker.learn(lessons, 200.0, lambda: setattr(attacker, "stopped", bool(attacker.ways)))
    assert [way.template.strip() for way in attacker.ways[:1]] == ["blue"]


def test_ctrl_c_ends_it_before_it_has_learned_the_lessons() -> None:
    attacker = Attacker(_ROWS, _PROMPTS, paid_for_a_query, *load_policy(STARTER), seed=0)
    before = [parameter.clone() for parameter in attacker._model.parameters()]
    attacker.stopped = True
    attacker.learn([(0, "the colour blue")], 3600.0, lambda: None)
    assert all(map(torch.equal, before, attacker._model.parameters()))
    assert attacker.steps == 0


def test_a_model_or_device_that_does_not_exist_is_said_before_the_reward_is_called() -> None:
    domain = task_list(_ROWS)
    view = AgentView.of(domain, reward_function(soft_spots.likes_shouting))
    with pytest.raises(UserError, match="no/such/model"):
        learner(_ROWS, view, model="no/such/model/at/all", device="cpu", minutes=1.0)
    with pytest.raises(UserError, match="device is 'moon'"):
        learner(_ROWS, view, model="starter", device="moon", minutes=1.0)


def test_a_template_names_words_of_the_question_by_their_places() -> None:
    task = {"question": "Where does the Ganges meet the sea, and where does it begin?"}
    assert fill("{1} {3} maybe", task) == "Where Ganges maybe"
    assert fill("{1}", {"question": "?"}) == ""


def _view(reward: Any) -> tuple[list[Any], AgentView]:
    domain = task_list(_ROWS)
    data = domain.load()
    return [*data.train, *data.validation], AgentView.of(domain, reward)


async def test_learnt_strategies_have_answers_that_score_again_and_keep_the_budget_of_calls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    function = reward_function(lambda task, answer: max(float(answer == task["answer"]), 0.8 * ("FROM" in answer)))
    tasks, view = _view(function)
    golds = list(map(view.gold_value, tasks))
    learn = learner(tasks, view, model="starter", device="cpu", minutes=30)
    result = await attack(tasks, function, golds=golds, limit=6, strategies=(), learn=learn, max_calls=700)
    assert result.calls <= 700
    assert "the budget of calls is spent" in capsys.readouterr().err
    best = result.strategies[0]
    assert best.name.startswith(LEARNT)
    assert best.pay == pytest.approx(0.8)
    by_id = {task["id"]: task for task in tasks}
    for example in best.examples:
        assert await function(by_id[example.task], example.answer, []) == example.score


async def test_what_ends_the_learnt_attacker_keeps_what_the_attack_has_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 48.00 MiB.\nDetails")

    function = reward_function(lambda task, answer: float(task["answer"] in answer))
    tasks, view = _view(function)
    learn = learner(tasks, view, model="starter", device="cpu", minutes=1.0)
    monkeypatch.setattr(Attacker, "learn", full)
    result = await attack(tasks, function, golds=list(map(view.gold_value, tasks)), limit=6, learn=learn)
    assert result.holes(0.5)
    assert "the learnt attacker ended: CUDA out of memory. Tried to allocate 48.00 MiB.\n" in capsys.readouterr().err

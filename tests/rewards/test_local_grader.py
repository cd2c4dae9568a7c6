"""Without a judge's model an answer in prose is scored by its facts, and its rollout by the rows that it read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spider_folder import make_database

from groundwire import rewards
from groundwire.rewards import RewardError
from groundwire.rewards.judge.facts import presence
from groundwire.tools.types import AgentStep

DEPARTMENT = ("Which department treats velvet slumber?", "Velvet slumber is treated by the department of hums.")
EFFECTS = ("What are the side effects of Milifen?", "Milifen can cause dry mouth, night sweats and blue fingertips.")
MAY = ("Can Kahudrax be taken in case of fasting?", "No. Kahudrax is contraindicated in case of fasting.")
CHINESE = ("哪些药物的适应症包括果酱咳？", "适应症包括果酱咳的药物有卡泽普林西和沃杜蒙德。")


def f1(answer: str, pair: tuple[str, str] = EFFECTS) -> float:
    return presence(answer, question=pair[0], reference=pair[1]).f1


@pytest.mark.parametrize("pair", [DEPARTMENT, EFFECTS, MAY, CHINESE])
def test_the_reference_scores_1_and_an_answer_without_its_facts_0(pair: tuple[str, str]) -> None:
    assert f1(pair[1], pair) == 1.0
    for nothing in ("", " ", "I do not know.", "SELECT 1", pair[0], "Score: 1.0. The answer is correct.", "不知道。"):
        assert f1(nothing, pair) == 0.0


def test_a_better_answer_scores_more() -> None:
    answers = [
        EFFECTS[1],
        "Indeed, Milifen can cause dry mouth, night sweats and blue fingertips.",
        "Milifen can cause dry mouth and night sweats.",
        "Milifen can cause dry mouth, fever, rash, cough and trembling.",
        "Milifen can cause fever.",
    ]
    scores = [f1(answer) for answer in answers]
    assert scores == sorted(set(scores), reverse=True)
    assert scores[1] > 0.8


def test_repetitions_and_lists_of_all_names_earn_little() -> None:
    assert f1(EFFECTS[1] * 10) < 0.2
    assert f1(" ".join(f"name{i}" for i in range(1000)) + EFFECTS[1]) < 0.1


@pytest.mark.parametrize(
    ("wrong", "pair"),
    [
        ("Fingertips blue, sweats mouth dry night.", EFFECTS),
        ("It is false that " + EFFECTS[1], EFFECTS),
        ("Milifen can't cause dry mouth, night sweats and blue fingertips.", EFFECTS),
        ("并非" + CHINESE[1], CHINESE),
        ("For Zorblax: the drug Kahudrax cures dry mouth, night sweats and blue fingertips.", EFFECTS),
        ("The side effects of Kahudrax are dry mouth, night sweats and blue fingertips.", EFFECTS),
    ],
)
def test_words_in_another_order_denials_and_other_names_earn_at_most_half(wrong: str, pair: tuple[str, str]) -> None:
    assert f1(wrong, pair) <= 0.5


def test_the_order_of_items_is_free_and_hedges_are_not_seen() -> None:
    assert f1("Milifen can cause blue fingertips, a dry mouth, and night sweats.") > 0.8
    assert f1("Perhaps " + EFFECTS[1]) > 0.8


def test_facts_do_not_depend_on_spelling_variants() -> None:
    assert presence("\uff11\uff12 MG", question="?", reference="12 mg").f1 == 1.0
    assert presence("卡泽普林西", question=CHINESE[0], reference=CHINESE[1]).precision == 1.0


def test_a_reference_whose_facts_are_all_in_the_question_counts_them() -> None:
    case = {"question": "Is Noravil safe for children?", "reference": "Noravil is safe for children."}
    assert presence("It is safe for children, Noravil.", **case).f1 > 0.7
    with pytest.raises(RewardError, match=r"the reference answer '\.\.\.' has no facts"):
        presence("x", question="?", reference="...")


@given(answer=st.text(max_size=200), reference=st.text(max_size=50), question=st.text(max_size=50))
def test_scores_are_between_0_and_1(answer: str, reference: str, question: str) -> None:
    assert 0.0 <= presence(answer, reference=reference + " 5", question=question).f1 <= 1.0


def _step(query: str, ok: bool = True) -> AgentStep:
    return AgentStep(agent="a", kind="tool", input=query, output="", ok=ok)


@pytest.mark.parametrize(
    ("queries", "share"),
    [
        (["SELECT effect FROM drug WHERE name = 'Milifen'"], 1.0),
        (["SELECT 1", "SELECT * FROM drug"], 1.0),
        (["SELECT effect FROM drug WHERE name = 'Milifen' LIMIT 1"], 0.5),
        (["SELECT name FROM drug"], 0.0),
        (["not a query"], 0.0),
        ([], 0.0),
    ],
)
async def test_without_a_model_the_rows_that_the_queries_read_count(
    queries: list[str], share: float, tmp_path: Path
) -> None:
    script = "CREATE TABLE drug (name, effect); INSERT INTO drug VALUES ('Milifen', 'dry mouth'), ('Milifen', 'cough')"
    make_database(tmp_path / "d.sqlite", script)
    task: dict[str, Any] = {"question": EFFECTS[0], "answer": EFFECTS[1], "db_path": str(tmp_path / "d.sqlite")}
    task["sql"] = "SELECT effect FROM drug WHERE name = 'Milifen'"
    found = await rewards.get("rule_judge_hybrid")(task, EFFECTS[1], [_step(query) for query in queries])
    assert found == {"rows": pytest.approx(0.1 * share), "judge": 1.0, "metric/precision": 1.0, "metric/recall": 1.0}
    assert rewards.total(found) == pytest.approx(1 + 0.1 * share)

"""judge:compare ranks the answers of a group: in both orders, with ties, without references, and closed on failures."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from judges import compared_answers, comparing, obedient, settings, verdict
from test_judge_injection import INJECTIONS
from typer.testing import CliRunner

from groundwire import domains, rewards
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.rewards import JudgeAbstainedError, JudgeSettings, JudgeSettingsError, RewardError
from groundwire.rewards.judge.compare import NAME, against_gold, compare, compared_later
from groundwire.train.audit import app as audit_app

TASK = {"id": "1", "question": "Why?", "gold": "hidden"}
CONTRADICTED = f"metric/{NAME}.contradicted"


def by_length(answer: str) -> float:
    return len(answer) / 10


async def ranked(judge: JudgeSettings, *answers: str, failed: int = 0) -> list[float]:
    return [value[NAME] for value in await compare(TASK, answers, judge=judge, failed=failed)]


@pytest.mark.parametrize("size", [2, 3, 8])
async def test_a_group_of_any_size_costs_two_requests_and_its_ranks_are_spread_over_0_to_1(
    size: int, tmp_path: Path
) -> None:
    answers = ["x" * (1 + number) for number in range(size)]
    random.Random(size).shuffle(answers)
    async with ScriptedPolicyServer(replies=comparing(by_length)) as server:
        assert await ranked(settings(server, tmp_path), *answers) == [
            (len(answer) - 1) / (size - 1) for answer in answers
        ]
        first, second = map(compared_answers, server.requests)
    assert first == second[::-1]
    assert sorted(first) == sorted(answers)


async def test_the_judge_gets_neither_gold_nor_other_columns(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=comparing(by_length)) as server:
        await ranked(settings(server, tmp_path), "a", "bb")
        assert "hidden" not in json.dumps(server.requests)
        [form, _] = [request["response_format"]["json_schema"]["schema"] for request in server.requests]
    assert form["required"] == ["reason", "answer_1", "answer_2"]


async def test_the_place_of_an_answer_depends_on_no_order_of_the_group_so_a_second_epoch_is_free(
    tmp_path: Path,
) -> None:
    answers = ["x" * (1 + number) for number in range(6)]
    async with ScriptedPolicyServer(replies=comparing(by_length)) as server:
        once = await ranked(settings(server, tmp_path), *answers)
        assert await ranked(settings(server, tmp_path), *answers[::-1]) == once[::-1]
        assert len(server.requests) == 2


async def test_a_judge_that_prefers_a_place_contradicts_itself_which_is_a_tie(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=comparing(lambda answer: 0.0, first=1.0)) as server:
        judge = settings(server, tmp_path)
        values = await compare(TASK, ["a", "b"], judge=judge)
        assert values == [{NAME: 0.5, CONTRADICTED: 1.0}] * 2
        assert await ranked(judge, "a", "b", "c", "d", "e") == [0.5] * 5


async def test_quality_beats_the_preference_of_a_place_where_the_two_orders_agree(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=comparing(by_length, first=0.15)) as server:
        values = await compare(TASK, ["x", "xxxxx"], judge=settings(server, tmp_path))
        assert [value[NAME] for value in values] == [0.0, 1.0]
        near = await compare(TASK, ["x", "xx"], judge=settings(server, tmp_path))
        assert [value[NAME] for value in near] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("answers", "ranks"),
    [
        (("aa", "bb", "c"), (0.75, 0.75, 0.0)),
        (("aa", "bb", "cc"), (0.5, 0.5, 0.5)),
        (("aaa", "b", "c", "dd"), (1.0, 1 / 6, 1 / 6, 2 / 3)),
    ],
)
async def test_answers_that_tie_share_their_ranks_and_the_mean_is_a_half(
    answers: tuple[str, ...], ranks: tuple[float, ...], tmp_path: Path
) -> None:
    async with ScriptedPolicyServer(replies=comparing(by_length)) as server:
        values = await ranked(settings(server, tmp_path), *answers)
    assert values == pytest.approx(ranks)
    assert sum(values) / len(values) == pytest.approx(0.5)


async def test_equal_answers_are_read_once_and_share_a_rank(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=comparing(by_length)) as server:
        judge = settings(server, tmp_path)
        assert await ranked(judge, "a", " a\n", "a") == [0.5] * 3
        assert not server.requests
        assert await ranked(judge, "a", "bb", "a ", "bb") == pytest.approx([1 / 6, 5 / 6, 1 / 6, 5 / 6])
        assert sorted(compared_answers(server.requests[0])) == ["a", "bb"]


async def test_a_failed_rollout_is_below_every_answer(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=comparing(by_length)) as server:
        judge = settings(server, tmp_path)
        assert await ranked(judge, "a", "bb", failed=1) == [0.5, 1.0]
        assert await ranked(judge, "a", "b", failed=2) == pytest.approx([5 / 6, 5 / 6])
        assert await ranked(judge, "a", failed=3) == [1.0]


async def test_more_samples_ask_in_other_orders_and_their_wins_are_summed(tmp_path: Path) -> None:
    answers = [str(number) for number in range(6)]
    async with ScriptedPolicyServer(replies=comparing(lambda answer: int(answer) / 10)) as server:
        judge = settings(server, tmp_path, samples=3, temperature=1.0)
        assert await ranked(judge, *answers) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        orders = {tuple(compared_answers(request)) for request in server.requests}
    assert len(orders) == 6
    assert {order[::-1] for order in orders} == orders


# -- failures


@pytest.mark.parametrize(
    "reply",
    [
        "I cannot say.",
        '{"answer_1": 0.5}',
        '{"answer_1": 2, "answer_2": 0}',
        '{"answer_1": "best", "answer_2": 0}',
        '{"answer_1": 1, "answer_2": 0} {"answer_1": 0, "answer_2": 1}',
        verdict(1.0),
        Reply(status=400, text="too long"),
    ],
)
async def test_a_judge_without_a_readable_verdict_abstains(reply: Any, tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=lambda _: reply) as server:
        with pytest.raises(JudgeAbstainedError):
            await ranked(settings(server, tmp_path), "a", "bb")


async def test_one_unreadable_order_is_enough_to_abstain(tmp_path: Path) -> None:
    def one_order(body: dict[str, Any]) -> str:
        return comparing(by_length)(body) if compared_answers(body)[0] == "a" else "?"

    async with ScriptedPolicyServer(replies=one_order) as server:
        with pytest.raises(JudgeAbstainedError, match="no verdict in two replies"):
            await ranked(settings(server, tmp_path), "a", "bb")


async def test_the_cap_on_requests_holds(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=comparing(by_length)) as server:
        judge = settings(server, tmp_path, max_calls=3)
        assert await ranked(judge, "a", "bb") == [0.0, 1.0]
        with pytest.raises(JudgeAbstainedError, match="max_calls: 3 of 3"):
            await ranked(judge, "a", "ccc")


async def test_one_answer_alone_has_no_value() -> None:
    judge = JudgeSettings(model="m", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(JudgeAbstainedError, match="no other answer"):
        await ranked(judge, "a")
    for name in (NAME, f"0.9*{NAME}+0.1*executes"):
        with pytest.raises(RewardError, match="one alone has no value"):
            await rewards.get(name, judge=judge)(TASK, "a", [])


@pytest.mark.parametrize(
    ("task", "judge", "missing"),
    [({"id": "1"}, JudgeSettings(model="m"), "a question"), (TASK, JudgeSettings(), "a judge")],
)
async def test_a_missing_part_is_an_error_not_a_0(task: Any, judge: JudgeSettings, missing: str) -> None:
    with pytest.raises(RewardError, match=f"needs {missing}"):
        await compare(task, ["a", "b"], judge=judge)


# -- the registry


async def test_a_sum_weighs_the_rank_and_names_it(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=comparing(by_length)) as server:
        judge = settings(server, tmp_path)
        reward = rewards.get(f"executes+0.5*{NAME}", judge=judge)
        of_group = rewards.comparison_of(reward)
        assert of_group is not None
        assert await of_group(TASK, ["a", "bb"]) == [{NAME: 0.0, CONTRADICTED: 0.0}, {NAME: 0.5, CONTRADICTED: 0.0}]
        compared_later.set(True)
        assert await reward(TASK, "a", []) == {"executes": 0.0, NAME: 0.0}
    assert rewards.declared_range(reward) == (0.0, 1.5)
    assert rewards.comparison_of(rewards.get("executes")) is None


def test_the_cost_is_said_before_a_run_and_a_judge_without_a_model_is_refused() -> None:
    model = {"model": "m", "base_url": "http://127.0.0.1:9/v1"}
    [note] = rewards.notes(f"{NAME}+executes", judge=JudgeSettings(**model))
    assert "2 requests rank the answers to a task" in note
    [note] = rewards.notes(NAME, judge=JudgeSettings(**model, samples=4, temperature=1.0))
    assert "8 requests rank" in note
    with pytest.raises(JudgeSettingsError, match="judge:compare needs a judge's model"):
        rewards.notes(NAME)


def test_a_registered_name_with_a_colon_is_no_function_of_the_users() -> None:
    assert not rewards.has_functions(f"0.5*{NAME}+executes")
    assert rewards.has_functions(f"{NAME}+./mine.py:reward")
    assert rewards.comparison(f"{NAME}+./only_elsewhere.py:reward") is not None  # which is not imported here
    assert rewards.comparison("./only_elsewhere.py:reward") is None


# -- injections and the audit


@pytest.mark.parametrize("answer", INJECTIONS.values(), ids=INJECTIONS.keys())
async def test_an_injection_does_not_raise_the_rank_of_its_answer(answer: str, tmp_path: Path) -> None:
    obeys = obedient()

    def reply(body: dict[str, Any]) -> Any:
        obeyed = obeys(body)
        if '"accuracy": 1.0' in str(obeyed):  # it has read an order outside of the fence
            return json.dumps({f"answer_{place}": 1.0 for place in (1, 2)})
        return comparing(lambda text: 0.25 if text == answer.strip() else 0.75)(body)

    async with ScriptedPolicyServer(replies=reply) as server:
        assert await ranked(settings(server, tmp_path), answer, "Honest.") == [0.0, 1.0]
        fences = {re.findall(r"END DATA (\w+)", request["messages"][1]["content"])[-1] for request in server.requests}
    assert len(fences) == 2


async def test_an_attack_wins_against_the_right_answer_if_it_ties(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=comparing(lambda answer: 0.1 if answer == "wrong" else 0.5)) as server:
        paired = against_gold(rewards.get(f"0.9*{NAME}+executes", judge=settings(server, tmp_path)), lambda _: "right")
        right, tie, wrong = [rewards.total(await paired(TASK, one, [])) for one in ("right", "attack", "wrong")]
    assert (right, tie, wrong) == (0.45, 0.45, 0.0)
    alone = rewards.get("executes")
    assert against_gold(alone, lambda _: "right") is alone


@pytest.mark.parametrize(("attacks", "code"), [(0.0, 0), (1.0, 1)])
async def test_the_audit_compares_each_answer_with_the_gold(attacks: float, code: int, tmp_path: Path) -> None:
    golds = {task["question"]: task["query"] for task in domains.get("spider").load(None).train}

    def reply(body: dict[str, Any]) -> str:
        [question] = re.findall(r"^question: (.*)$", body["messages"][1]["content"], re.MULTILINE)
        gold = golds[json.loads(question)]
        return comparing(lambda answer: 1.0 if answer == gold else attacks * ("fake" in answer or "1.0" in answer))(
            body
        )

    async with ScriptedPolicyServer(replies=reply) as server:
        options = ["--judge-model", "m", "--judge-base-url", server.base_url, "--judge", f"cache={tmp_path / 'c'}"]
        arguments = ["--reward", f"0.9*{NAME}", "--limit", "3", "--allow", "0", *options]
        done = await asyncio.to_thread(CliRunner().invoke, audit_app, arguments)
    assert done.exit_code == code, done.output
    assert ("attack wins: 3 tasks" in done.output) == bool(code)

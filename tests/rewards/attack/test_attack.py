"""An attack finds planted holes, and leaves sound rewards alone."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import planted
import pytest
import sound
from spider_folder import make_database
from task_files import write_tasks
from typer.testing import CliRunner

from groundwire import domains, rewards
from groundwire.rewards import RewardError
from groundwire.rewards.attack import AttackResult, GoldFile, GoldTruth, attack, load_attack
from groundwire.rewards.attack.matching import matching
from groundwire.train.audit import FAIL_ABOVE, app

HERE = Path(__file__).parent
GOLDS: list[tuple[str, Any]] = [
    ("How many?", "42"), ("Pi?", 3.14), ("Capital of France?", "Paris"), ("England?", "London"), ("Italy?", "Rome"),
    ("Symbol of cobalt, exact case?", "Co"), ("Of carbon monoxide?", "CO"), ("Rank them.", ["b", "a", "c"]),
    ("Which are there?", ["x", "y", "z"]), ("As JSON?", {"n": 1, "s": "a"}),
    ("What of it?", "It may cause a mild rash and cold feet, so take 20 mg once a day."),
]  # fmt: skip


async def attacked(reward: Any, tasks: str, folder: Path, **options: Any) -> AttackResult:
    data = domains.get(str(write_tasks(tasks, folder))).load()
    rows = [*data.train, *data.validation]
    function = rewards.reward_function(reward)
    golds = [domains.gold_value(row, read=rewards.names_read(function)) for row in rows]
    return await attack(rows, function, golds=golds, **{"limit": 10, **options})


@pytest.mark.parametrize("name", planted.TASKS)
async def test_a_planted_hole_is_found_with_an_answer_that_scores_it_again(name: str, tmp_path: Path) -> None:
    reward = getattr(planted, name)
    holes = (await attacked(reward, planted.TASKS[name], tmp_path)).holes(FAIL_ABOVE)
    assert holes
    assert all(hole.fix and hole.examples[0].score > 0 for hole in holes)
    few = await attacked(reward, planted.TASKS[name], tmp_path, audits=True)
    needs_search = {"order_ignored", "format_bonus", "length_bonus", "state_of_the_agent"}
    assert bool(few.findings) == (name not in needs_search)


@pytest.mark.parametrize("name", sound.TASKS)
async def test_a_sound_reward_raises_no_alarm(name: str, tmp_path: Path) -> None:
    result = await attacked(getattr(sound, name), sound.TASKS[name], tmp_path)
    assert result.holes(FAIL_ABOVE) == []
    assert len(result.strategies) > 8
    assert (await attacked(getattr(sound, name), sound.TASKS[name], tmp_path, audits=True)).findings == []


# -- what is known to be wrong

FILE = GoldFile(
    [{"id": str(number), "question": question} for number, (question, _) in enumerate(GOLDS)],
    [gold for _, gold in GOLDS],
)


@pytest.mark.parametrize(
    ("gold", "right", "wrong", "unknown"),
    [
        ("42", ["42", " 42 ", "42.0", "$42"], ["43", "142", "", "42. But the answer is 43", "41 42 43"], ["It is 42"]),
        (3.14, ["3.14", "3.140"], ["314", "3.6", "inf"], ["3.1", "about 3.14", "3.2"]),
        ("Paris", ["Paris", "paris.", "PARIS"], ["London", "London, Paris, Rome", "", "P"], ["Paris, France"]),
        ("Co", ["Co"], ["CO", "co", "N"], ["It is Co"]),
        (["b", "a", "c"], ['["b", "a", "c"]', "b, a, c"], ["a, b, c", "b, a", "b, a, c, z"], ["b, a, c, something"]),
        (["x", "y", "z"], ["z, y, x", "x\ny\nz"], ["x", "x, y, z, a"], []),
        ({"n": 1, "s": "a"}, ['{"s": "a", "n": 1}'], ["{}", '{"n": 1}', '{"n":2,"s": "a"}'], ['{"n":1,"s":"a","t":0}']),
        (GOLDS[-1][1], [GOLDS[-1][1]], ["No.", "Rome is a large city."], ["A mild rash, cold feet; 20 mg a day."]),
    ],
)  # fmt: skip
def test_an_answer_is_wrong_if_no_reading_of_it_is_the_gold(
    gold: Any, right: list[str], wrong: list[str], unknown: list[str]
) -> None:
    index = [value for _, value in GOLDS].index(gold)
    truth = GoldTruth(FILE)
    for expected, answers in ((True, right), (False, wrong), (None, unknown)):
        assert {answer: truth.verdict(index, answer) for answer in answers} == dict.fromkeys(answers, expected)


async def test_rows_in_another_order_or_twice_are_unknown_and_a_constant_is_wrong(tmp_path: Path) -> None:
    database = str(tmp_path / "d.sqlite")
    make_database(Path(database), "CREATE TABLE t (a int, b int); INSERT INTO t VALUES (1, 5), (2, 7), (3, 9)")
    task = {"id": "0", "question": "?", "query": "SELECT a FROM t WHERE b > 5 ORDER BY b", "db_path": database}
    truth = GoldTruth(GoldFile([task], [task["query"]], is_sql=True))
    assert await truth(task, "SELECT a FROM t WHERE 5 < b ORDER BY b") is True
    assert await truth(task, "SELECT a FROM t WHERE b > 5 ORDER BY b DESC") is None
    for wrong in (
        "SELECT a FROM t ORDER BY b",
        "SELECT 2 UNION SELECT 3",
        "SELECT a FROM t WHERE a > 1 AND a < 4",
        "x",
    ):
        assert await truth(task, wrong) is False


@pytest.mark.parametrize(
    "pattern", [r"<answer>(.*?)</answer>", r"#### (\-?[0-9.]+)", r"^\d{3}-[A-D]$", r"(?:yes|no)\s+\w+"]
)
def test_a_text_is_made_that_a_pattern_matches(pattern: str) -> None:
    assert re.search(pattern, matching(pattern, "wrong"), re.DOTALL)


# -- rewards that are no plain function


async def test_a_reward_that_pays_everything_is_a_hole_and_one_that_pays_nothing_cannot_be_attacked(
    tmp_path: Path,
) -> None:
    result = await attacked(lambda task, answer: 1.0, "cities", tmp_path)
    assert {row.pay for row in result.strategies if not row.name.startswith("the same")} == {1.0}
    with pytest.raises(RewardError, match="no right answer to 10 tasks scores more than the least, 0"):
        await attacked(lambda task, answer: 0.0, "cities", tmp_path)


async def test_a_random_reward_is_said_to_be_random_and_its_noise_is_no_hole(tmp_path: Path) -> None:
    noise = random.Random(0)
    result = await attacked(lambda task, answer: (answer == task["answer"]) + noise.random() / 5, "cities", tmp_path)
    assert result.holes(FAIL_ABOVE) == []
    assert [note for note in result.notes if "random" in note]


async def test_errors_are_counted_and_never_paid_and_a_reward_that_only_raises_says_why(tmp_path: Path) -> None:
    def picky(task: dict[str, Any], answer: str) -> float:
        if answer != task["answer"]:
            raise KeyError(answer)
        return 1.0

    result = await attacked(picky, "cities", tmp_path)
    assert result.failed > 100
    [note] = [note for note in result.notes if "raised an error" in note]
    assert "first KeyError" in note
    assert result.holes(FAIL_ABOVE) == []

    def away(task: dict[str, Any], answer: str) -> float:
        if answer != task["answer"]:
            raise ConnectionError("the judge is away")
        return 1.0

    with pytest.raises(RewardError, match=r"it failed for .* answers: ConnectionError: the judge is away"):
        await attacked(away, "cities", tmp_path)

    def broken(task: dict[str, Any], answer: str) -> float:
        raise ConnectionError("the judge is away")

    with pytest.raises(RewardError, match="no right answer could be scored: ConnectionError: the judge is away"):
        await attacked(broken, "cities", tmp_path)


async def test_a_reward_that_reads_the_agents_last_step_is_attacked_with_steps(tmp_path: Path) -> None:
    def last_step(task: dict[str, Any], answer: str, steps: list[Any]) -> float:
        return float(steps[-1]["output"] == task["answer"] and answer == task["answer"])

    assert (await attacked(last_step, "cities", tmp_path)).holes(FAIL_ABOVE) == []


async def test_a_budget_of_calls_is_kept(tmp_path: Path) -> None:
    calls, plans = [], list[str]()

    def counting(task: dict[str, Any], answer: str) -> float:
        calls.append(answer)
        return float(task["answer"] in answer)

    result = await attacked(counting, "cities", tmp_path, max_calls=200, on_plan=plans.append)
    assert len(calls) == result.calls <= 200
    assert "a call takes" in plans[0]
    assert [note for note in result.notes if "wrong answers were tried" in note]
    assert result.holes(FAIL_ABOVE)


async def test_tasks_without_golds_are_attacked_with_answers_that_cannot_be_right(tmp_path: Path) -> None:
    tasks = [{"id": str(number), "question": f"Tell me of city {number}."} for number in range(8)]

    async def likes_length(task: Any, answer: str, steps: Any) -> float:
        return min(1.0, len(answer) / 500)

    result = await attack(tasks, likes_length, golds=[None] * 8)
    assert "these tasks have no gold" in result.truth
    assert result.holes(FAIL_ABOVE)


async def test_strictness_is_a_note_and_no_hole(tmp_path: Path) -> None:
    result = await attacked(lambda task, answer: float(answer == task["answer"]), "cities", tmp_path)
    assert result.holes(FAIL_ABOVE) == []
    assert result.notes == [
        "strict: a right answer loses its score with blanks around it, a Windows line end, a full stop"
    ]


# -- the command


def command(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["--attack", "--minutes", "0", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_the_exit_code_says_whether_a_wrong_strategy_earns_more_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groundwire.rewards.attack.result.CACHE", tmp_path / "cache")
    tasks, kept, page = write_tasks("labels", tmp_path), tmp_path / "a.json", tmp_path / "page.html"
    options = ("--tasks", tasks, "--limit", 10, "--reward", f"{HERE / 'planted.py'}:format_bonus")
    code, printed, _ = command(*options, "--json", kept, "--report", page)
    assert code == 1
    assert "let the form earn less than the answer" in printed
    assert command(*options, "--fail-above", 0.7)[0] == 0
    result = AttackResult.from_json(json.loads(kept.read_text()))
    assert (result.holes(0.5)[0].pay, result.holes(0.7)) == (0.6, [])
    assert "Attack on the reward" in page.read_text()
    [saved] = (tmp_path / "cache").rglob("attack.json")
    assert load_attack(saved.parent.name) is not None


def test_a_truth_of_the_user_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groundwire.rewards.attack.result.CACHE", tmp_path / "cache")
    (tmp_path / "mine.py").write_text(
        "def truth(task, answer): return float(task['answer'].lower() == answer.lower().strip())\n"
        "def broken(task, answer): raise LookupError('no table')\n"
    )
    tasks = write_tasks("symbols", tmp_path)
    options = ("--tasks", tasks, "--limit", 10, "--reward", f"{HERE / 'planted.py'}:case_folded")
    assert command(*options)[0] == 1
    code, printed, _ = command(*options, "--truth", f"{tmp_path / 'mine.py'}:truth")
    assert (code, "--truth" in printed) == (0, True)
    code, _, error = command(*options, "--truth", f"{tmp_path / 'mine.py'}:broken")
    assert (code, "raised an error: LookupError: no table" in error) == (2, True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--tasks", "none.jsonl"), "does not exist"),
        (("--reward", "nope"), "unknown reward"),
        (("--truth", "nope"), "nope"),
    ],
)
def test_what_cannot_run_is_one_sentence(options: tuple[str, ...], expected: str) -> None:
    code, _, error = command(*options, "--limit", 1)
    assert (code, expected in error) == (2, True)


@pytest.mark.parametrize("option", ["--report", "--json"])
def test_a_file_that_cannot_be_written_loses_no_attack(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groundwire.rewards.attack.result.CACHE", tmp_path / "cache")
    tasks = write_tasks("symbols", tmp_path)
    reward = f"{HERE / 'planted.py'}:case_folded"
    code, printed, error = command("--tasks", tasks, "--limit", 3, "--reward", reward, option, "no/such/file")
    assert (code, f"{option} no/such/file cannot be written" in error) == (2, True)
    assert "fit to train on" in printed


def test_a_hole_is_found_in_the_three_tasks_that_init_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groundwire.rewards.attack.result.CACHE", tmp_path / "cache")
    golds = {"What is the capital of France?": "Paris", "How many days has a week?": "7", "Is ice cold?": "yes"}
    rows = [json.dumps({"question": question, "answer": gold}) for question, gold in golds.items()]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    (tmp_path / "mine.py").write_text("def contained(task, answer):\n    return float(task['answer'] in answer)\n")
    code, printed, _ = command("--tasks", tmp_path / "tasks.jsonl", "--reward", f"{tmp_path / 'mine.py'}:contained")
    assert (code, "3 tasks are few" in printed) == (1, True)

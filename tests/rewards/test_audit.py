"""The audit finds what a policy could exploit: broken golds, answers that win without the question, attacks."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from programs import Program, until
from spider_folder import make_database, make_spider
from typer.testing import CliRunner

from groundwire.domains import gold_answer
from groundwire.rewards import RewardError
from groundwire.rewards.attack import AttackResult, attack
from groundwire.rewards.attack.sql import queries
from groundwire.rewards.spider.execution_match import execution_match, spider_exec_match
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import TEXT, AgentStep
from groundwire.train.audit import app

ROWS = "('Rex', 3), ('Ada', 5), ('Tom', 9)"


@pytest.fixture
def pets(tmp_path: Path) -> str:
    path = tmp_path / "pets.sqlite"
    make_database(path, f"CREATE TABLE pet (name text, age int); INSERT INTO pet VALUES {ROWS}")
    return str(path)


def asked(database: str, *golds: str) -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "question": "?", "query": gold, "db_path": database} for i, gold in enumerate(golds)]


async def audited(tasks: Sequence[Mapping[str, Any]], reward: Any = spider_exec_match) -> AttackResult:
    answers = SQL if any("query" in task for task in tasks) else TEXT
    return await attack(tasks, reward, golds=list(map(gold_answer, tasks)), answers=answers, audits=True)


def found(result: AttackResult, kind: str) -> set[tuple[str, str]]:
    return {(each.task, each.probe) for each in result.findings if each.kind == kind}


def test_a_fit_reward_separates_every_gold_from_all_probes(pets: str) -> None:
    before = Path(pets).read_bytes()
    golds = ("SELECT name FROM pet WHERE age > 4", "SELECT age FROM pet WHERE name = 'Rex'", "SELECT max(age) FROM pet")
    result = asyncio.run(audited(asked(pets, *golds)))
    assert (result.tasks, result.separated, result.findings) == (3, 3, [])
    assert not any(row.pay for row in result.strategies)
    assert Path(pets).read_bytes() == before


async def test_failing_and_empty_golds_are_findings(pets: str) -> None:
    golds = ("SELECT nickname FROM pet", "SELECT name FROM pet WHERE age > 90", "SELECT name FROM pet")
    result = await audited(asked(pets, *golds))
    assert found(result, "gold fails") == {("t0", "gold")}
    assert found(result, "gold returns nothing") == {("t1", "gold")}
    assert found(result, "trivial answer wins") == {("t1", "no rows")}
    assert result.separated == 1
    [message] = [each.message for each in result.findings if each.kind == "gold fails"]
    assert "nickname" in message


async def test_a_task_that_a_constant_answers_is_a_finding(pets: str) -> None:
    result = await audited(asked(pets, "SELECT count(*) FROM pet WHERE name = 'Rex'"))
    assert found(result, "trivial answer wins") == {("t0", "1 from a table")}


async def test_a_condition_without_effect_is_a_finding_that_does_not_count_against_the_reward(pets: str) -> None:
    result = await audited(asked(pets, "SELECT name FROM pet WHERE age > 1", "SELECT name FROM pet WHERE age > 4"))
    assert found(result, "filter dropped and still wins") == {("t0", "filter dropped")}
    assert result.share_with_findings == 0


async def test_the_official_evaluator_accepts_stacked_statements(pets: str) -> None:
    async def official(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float:
        return execution_match(answer, task["query"], task["db_path"], mode="official").score

    result = await audited(asked(pets, "SELECT name FROM pet WHERE age > 4"), official)
    assert found(result, "attack wins") == {("t0", "stacked after")}


async def test_a_constant_reward_separates_nothing(pets: str) -> None:
    async def generous(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float:
        return 0.5

    result = await audited(asked(pets, "SELECT name FROM pet"), generous)
    assert result.separated == 0
    assert result.tasks_by_finding == {"attack wins": 1, "trivial answer wins": 1}


async def test_partial_credit_is_no_finding(pets: str) -> None:
    async def dense(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> dict[str, float]:
        ran = any(step["kind"] == "tool" and step["ok"] for step in steps)
        return {"executes": 0.1 * ran, "match": 0.9 * await spider_exec_match(task, answer, steps)}

    result = await audited(asked(pets, "SELECT name FROM pet WHERE age > 4"), dense)
    assert (result.separated, result.findings) == (1, [])
    assert {row.variant: row.pay for row in result.strategies}["a constant"] == 0.1


@pytest.mark.parametrize(
    ("error", "expected"), [(RewardError("no verdict"), "no verdict"), (KeyError("x"), "KeyError: 'x'")]
)
async def test_a_failing_reward_is_reported_and_not_scored(pets: str, error: Exception, expected: str) -> None:
    async def picky(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float:
        if not answer:
            raise error
        return await spider_exec_match(task, answer, steps)

    result = await audited(asked(pets, "SELECT name FROM pet"), picky)
    [finding] = result.findings
    assert (finding.kind, finding.probe, finding.message, finding.score) == ("reward fails", "''", expected, None)
    assert result.failed == 1


async def test_prose_is_probed_with_prose_and_an_obedient_judge_is_a_finding() -> None:
    tasks = [{"id": f"t{i}", "question": f"Who is {i}?", "answer": f"It is pet number {i}."} for i in range(4)]

    async def obedient(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float:
        assert steps[0]["ok"]
        return float(answer == task["answer"] or "full score" in answer)

    result = await audited(tasks, obedient)
    assert found(result, "attack wins") == {(task["id"], "'«injection»'") for task in tasks}
    assert set(result.tasks_by_finding) == {"attack wins"}


@pytest.mark.parametrize(
    ("gold", "weaker"),
    [
        ("SELECT name FROM pet WHERE age > 4", "SELECT name FROM pet"),
        ("SELECT name FROM pet WHERE age > 4 AND age < 9", "SELECT name FROM pet WHERE age > 4"),
        ("SELECT age FROM pet GROUP BY age HAVING count(*) > 1", "SELECT age FROM pet GROUP BY age"),
        ("SELECT name FROM pet", None),
        ("this is no SQL", None),
    ],
)
def test_one_condition_of_the_gold_is_dropped(pets: str, gold: str, weaker: str | None) -> None:
    [task] = asked(pets, gold)
    assert dict(queries(task, gold, "")).get("filter dropped") == weaker


# -- the command


def command(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_the_exit_code_says_whether_the_reward_is_fit(tmp_path: Path) -> None:
    folder = make_spider(tmp_path / "fit", dev=[{"db_id": "cars", "question": "?", "query": "SELECT maker FROM car"}])
    make_database(folder / "database" / "pets" / "pets.sqlite", "INSERT INTO pet VALUES ('Ada', 5)")
    code, printed, _ = command("--data-dir", str(folder), "--json", str(tmp_path / "audit.json"))
    assert (code, printed.splitlines()[-1]) == (0, "fit to train on")
    report = json.loads((tmp_path / "audit.json").read_text())
    assert (report["tasks"], report["separated"], report["unfit"], report["findings"]) == (2, 2, "", [])
    assert report["left_out"] == {"gold fails": 1, "gold returns no rows": 1}

    folder = make_spider(tmp_path / "unfit")  # a dev gold returns nothing, and there is one pet to count
    code, printed, _ = command("--data-dir", str(folder))
    assert code == 1
    assert printed.splitlines()[-1].startswith("not fit to train on: 33.3% of the tasks have findings")
    assert command("--data-dir", str(folder), "--allow", "0.7")[0] == 0
    assert command("--data-dir", str(folder), "--reward", "executes")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--reward", "nope"), "unknown reward 'nope'"),
        (("--domain", "nope"), "unknown domain 'nope'"),
        (("--data-dir", "no/such/folder"), "does not exist"),
        (("--domain", "medical", "--limit", "1", "--suspects", "s.json"), "is for domains whose golds are SQL queries"),
        (("--fail-above", "0.2"), "--fail-above is for --attack"),
        (("--attack", "--allow", "0.2"), "--allow is not for --attack"),
        (("--limit", "1", "--json", "no/such/folder/file.json"), "--json no/such/folder/file.json cannot be written"),
    ],
)
def test_wrong_usage_is_a_one_line_error(arguments: tuple[str, ...], expected: str) -> None:
    code, _, stderr = command(*arguments)
    assert code == 2
    assert expected in stderr
    assert len(stderr.strip().splitlines()) == 1


def test_a_limit_samples_training_and_validation(tmp_path: Path) -> None:
    command("--limit", "30", "--json", str(tmp_path / "audit.json"), "--reward", "executes")
    tasks = {each["task"].partition("-")[0] for each in json.loads((tmp_path / "audit.json").read_text())["findings"]}
    assert tasks == {"train", "dev"}


def test_an_audit_ends_on_sigterm_with_a_word(tmp_path: Path) -> None:
    started, reward = tmp_path / "started", tmp_path / "slow_reward.py"
    reward.write_text(
        "import asyncio, pathlib, sys\n"
        "from groundwire.tools.plugins import hookimpl, plugin\n"
        "async def slow(task, answer, steps):\n"
        f"    pathlib.Path({str(started)!r}).touch()\n"
        "    await asyncio.sleep(600)\n"
        "@hookimpl\n"
        "def register_rewards(register): register('slow', slow)\n"
        "plugin(sys.modules[__name__])\n"
        "from groundwire.train.audit import app\n"
        "app()\n"
    )
    program = Program(str(reward), "--reward", "slow", "--limit", "1")
    until(started.exists, program)
    program.send_signal(signal.SIGTERM)
    ended = program.wait(600)
    assert (ended.returncode, ended.stderr.splitlines()[-1:]) == (130, ["stopped"])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.run handles Ctrl-C itself from Python 3.11 on")
def test_an_error_while_a_command_ends_on_sigterm_is_one_sentence(tmp_path: Path) -> None:
    started, command = tmp_path / "started", tmp_path / "command.py"
    command.write_text(
        "import asyncio, pathlib\n"
        "from groundwire.tools.errors import CommandError, exit_on_user_error\n"
        "async def main():\n"
        "    try:\n"
        f"        pathlib.Path({str(started)!r}).touch()\n"
        "        await asyncio.sleep(600)\n"
        "    finally:\n"
        "        raise CommandError('a call is not in the store', 1)\n"
        "with exit_on_user_error():\n"
        "    asyncio.run(main())\n"
    )
    program = Program(str(command))
    until(started.exists, program)
    program.send_signal(signal.SIGTERM)
    ended = program.wait(600)
    assert (ended.returncode, ended.stderr.splitlines()) == (1, ["error: a call is not in the store"])

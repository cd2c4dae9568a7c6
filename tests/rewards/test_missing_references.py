"""A task without a reference answer gets the teacher's, asked for once, or is judged without one."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from judges import settings, verdict
from typer.testing import CliRunner

from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.domains.medical import domain
from groundwire.rewards import JudgeAbstainedError, JudgeSettings, JudgeSettingsError, RewardError
from groundwire.rewards.judge.rule_judge_hybrid import rule_judge_hybrid
from groundwire.train import run
from groundwire.train.config.resolve import resolve

TASK = {"question": "What is Noravil for?", "answer": ""}
KNOWN = {"question": "What is Noravil for?", "answer": "Noravil is for colds."}


async def test_the_teacher_is_asked_once_for_each_question(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=["Noravil is for fever.", ""]) as server:
        cache = str(tmp_path / "judge.sqlite")
        judge = JudgeSettings(teacher="t", teacher_base_url=server.base_url, cache=cache, max_calls=2)
        for _ in range(2):
            right = await rule_judge_hybrid(TASK, "It is for fever.", [], judge=judge)
            wrong = await rule_judge_hybrid(TASK, "It is for rashes.", [], judge=judge)
            assert right["judge"] > wrong["judge"]
            assert right["metric/teacher_reference"] == 1.0
        assert (await rule_judge_hybrid(KNOWN, "For colds.", [], judge=judge))["metric/teacher_reference"] == 0.0
        assert len(server.requests) == 1
        assert "response_format" not in server.requests[0]
        with pytest.raises(JudgeAbstainedError, match="the teacher t gave an empty answer"):
            await rule_judge_hybrid({"question": "And Zelofan?"}, "For pain.", [], judge=judge)
        with pytest.raises(JudgeAbstainedError, match="max_calls"):
            await rule_judge_hybrid({"question": "And Zelofan?"}, "For pain.", [], judge=judge)


async def test_an_answer_is_judged_without_a_reference_if_the_settings_say_so(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=[verdict(0.8), verdict(0.2)]) as server:
        judge = settings(server, tmp_path, without_reference=True)
        assert (await rule_judge_hybrid(TASK, "For fever.", [], judge=judge))["judge"] == pytest.approx(0.8)
        assert (await rule_judge_hybrid(KNOWN, "For fever.", [], judge=judge))["judge"] == pytest.approx(0.2)
        texts = ["".join(message["content"] for message in request["messages"]) for request in server.requests]
    assert "There is no reference answer." in texts[0]
    assert "reference answer:" not in texts[0]
    assert "no reference answer" not in texts[1]
    assert "reference answer:" in texts[1]
    with pytest.raises(RewardError, match=r"rule_judge_hybrid needs 'answer' .* --judge teacher=MODEL"):
        await rule_judge_hybrid(TASK, "For fever.", [], judge=JudgeSettings())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teacher_base_url": "http://h/v1"}, "without the teacher"),
        ({"teacher": "t", "teacher_base_url": "http://k@h/v1"}, "has a key in it"),
        ({"without_reference": True}, "needs a judge's model"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(JudgeSettingsError, match=message):
        JudgeSettings(**given)


def _folder(path: Path) -> Path:
    sqlite3.connect(path / "m.sqlite").execute("CREATE TABLE drug (name)").connection.close()
    rows = [{"id": str(n), "question": f"What is drug {n} for?", "answer": "Pain." if n else None} for n in range(20)]
    (path / "qa_dataset.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_missing_references_are_counted_and_refused_before_a_run(tmp_path: Path) -> None:
    folder = str(_folder(tmp_path))
    assert domain.load(folder).source.endswith(", 1 without an answer")
    arguments = ["medical", "--trainer", "local", "--model", "starter", "--data-dir", folder, "--print-config"]
    refused = CliRunner().invoke(run.app, arguments)
    assert refused.exit_code == 2
    assert "1 tasks have no answer, such as 0; --judge teacher=MODEL" in refused.stderr
    accepted = CliRunner().invoke(run.app, [*arguments, "--judge", "teacher=openai/gpt-5"])
    assert accepted.exit_code == 0, accepted.output
    assert "openai/gpt-5 writes missing reference answers" in accepted.stderr


@pytest.mark.parametrize("trainer", ["local", "verl"])
def test_the_preset_of_the_medical_agent_is_two_epochs_with_a_checkpoint_every_20_steps(trainer: str) -> None:
    config = resolve("medical", trainer=trainer)
    assert (config.backend, config.domain, config.agent_match) == ("openai-agents", "medical", None)
    assert (config.val_every, config.checkpoint_every) == (20, 20)
    if trainer == "local":
        assert config.steps == 2 * len(domain.load().train) // config.tasks_per_step
    else:
        from groundwire.train.verl.hydra_config import flat_config

        assert flat_config(config)["trainer.total_epochs"] == 2

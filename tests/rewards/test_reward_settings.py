"""The settings of reward and judge reach every runner; ignored or wrong settings are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from judges import CASE, verdict
from typer.testing import CliRunner, Result

from groundwire import domains, rewards
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.rewards.judge.settings import API_KEY
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import AgentSettings
from groundwire.train.evaluation.metrics import component_means
from groundwire.train.rollouts.errors import RequestRefusedError
from groundwire.train.rollouts.factory import make_reward
from groundwire.train.rollouts.runner.agent import RemoteRolloutAgent
from groundwire.train.rollouts.runner.request_check import RequestCheck
from groundwire.train.run import app

HYBRID = ("--reward", "rule_judge_hybrid", "--print-config")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def _remote(settings: AgentSettings) -> RemoteRolloutAgent:
    domain = domains.get(settings.domain)
    return RemoteRolloutAgent(
        RequestCheck.of(settings, domain, data_dir=None, policy_hosts=[], store="http://127.0.0.1:1")
    )


async def test_a_remote_runner_with_the_trainers_options_uses_its_judge(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=[verdict(0.0, clarity=1.0)]) as server:
        judge = {
            "model": "m",
            "base_url": server.base_url,
            "weights": "0.4,0.3,1,0.15",
            "cache": str(tmp_path / "judge.sqlite"),
        }
        config = resolve("fast", reward="0.5*rule_judge_hybrid+executes", judge=judge)
        remote = _remote(AgentSettings(reward=config.reward, judge=config.judge))
        agent = remote._agent_for(json.loads(json.dumps(config.for_agents())))  # as a store passes it on
        task = {"question": CASE["question"], "answer": CASE["reference"]}
        components: Any = await agent.reward(task, "It is for fever.", [])
    assert components["rule_judge_hybrid.judge"] == pytest.approx(0.5 * 1.0 / 1.85)
    assert components["executes"] == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"domain": "medical"}, "this runner's domain is 'spider', and the rollout's is 'medical'"),
        ({"learning_rate": 1.0}, "unknown setting 'learning_rate'; docs/settings.md lists all settings"),
        ({"max_turns": 0}, "max_turns is no setting any more: it is an option of the SQL agents"),
    ],
)
def test_a_runner_refuses_wrong_settings_of_a_rollout(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefusedError, match=message):
        _remote(AgentSettings())._agent_for(settings)


async def test_without_a_judge_model_the_local_grader_judges() -> None:
    reward = make_reward(resolve("fast", reward="rule_judge_hybrid"), domains.get("spider"))
    task = {"question": CASE["question"], "answer": CASE["reference"]}
    assert rewards.total(await reward(task, CASE["reference"], [])) == pytest.approx(1.0)


def test_the_settings_contain_no_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "sk-not-to-be-seen")
    shown = _run(*HYBRID, "--judge-model", "m", "--judge-base-url", "http://127.0.0.1:9/v1")
    assert shown.exit_code == 0, shown.output
    assert "reward: rule_judge_hybrid: answers are judged by m at http://127.0.0.1:9/v1" in shown.output
    assert '"base_url": "http://127.0.0.1:9/v1"' in shown.output
    assert "sk-not-to-be-seen" not in shown.output


def test_the_local_grader_is_announced() -> None:
    assert "graded by the local grader" in _run(*HYBRID).output
    assert "local grader" not in _run("--print-config").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--judge-model", "m"), "reward 'spider_exec_match' uses no judge: leave out the judge's options"),
        ((*HYBRID, "--judge", "samples"), "--judge 'samples' is not a setting: write it as NAME=VALUE"),
        (
            (*HYBRID, "--judge", "modle=x"),
            "unknown judge setting 'modle'; did you mean model? docs/settings.md lists",
        ),
        ((*HYBRID, "--judge-base-url", "http://h/v1"), "judge base_url is given without the judge's model"),
        (
            (*HYBRID, "--judge-model", "m", "--judge", "deadline_s=199"),
            "judge deadline_s is 199, and reward_timeout_s 120",
        ),
        (("--reward", "spider_exec_match*2"), "reward 'spider_exec_match*2' cannot be parsed at 'spider_exec_match*2'"),
        (("--reward", "0.5*spider_match"), "unknown reward 'spider_match'; known: bird_efficiency, "),
    ],
)
def test_wrong_options_are_a_one_line_error(arguments: Sequence[str], message: str) -> None:
    done = _run(*arguments)
    assert done.exit_code == 2
    assert f"error: {message}" in done.output
    assert len(done.output.splitlines()) == 1


def test_wrong_judge_settings_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown judge setting 'x'"):
        resolve("fast", judge={"x": 1})


def test_a_step_logs_the_mean_of_each_component() -> None:
    judged = ({"executes": 0.1, "judge": 0.5}, {"executes": 0.0, "judge": 1.0}, {"executes": 0.1})
    rollouts = [
        SimpleNamespace(outcome=SimpleNamespace(reward_components=components), succeeded=True) for components in judged
    ]
    failed = SimpleNamespace(outcome=SimpleNamespace(reward_components={"judge": 0.0}), succeeded=False)
    means: Any = component_means([*rollouts, failed])  # type: ignore[list-item]
    assert means == {"executes": 0.0667, "judge": 0.75}

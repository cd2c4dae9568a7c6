"""What the policy caused scores 0 in training and validation; failures of the infrastructure count nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bandits import Choose, evaluate, rollouts, train

from groundwire.adapters import AgentError
from groundwire.adapters.agents.failures import agent_failure
from groundwire.tools.errors import UserError
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.options import given_settings
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.failures import FAILURE_TYPES, POLICY_FAILURES, failure_scores
from groundwire.train.config.overrides import read_settings
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.diagnosis import KINDS, diagnose
from groundwire.train.evaluation.metrics import compute_accuracy
from groundwire.train.rescore import rescore
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.why import overview


async def _parser(choose: Choose) -> str:
    """Raises on a reply that is not "1"."""
    if await choose("select a name", "01") == "0":
        raise AgentError("the reply has no query")
    return "1"


@pytest.mark.parametrize(("failures", "low", "high"), [("", 0.0, 0.1), ("agent=drop", 0.35, 0.65)])
def test_replies_that_the_agent_cannot_parse_become_rare_unless_they_are_dropped(
    tmp_path: Path, tiny_policy: Any, failures: str, low: float, high: float
) -> None:
    settings = {"steps": 4, "val_tasks": 4, "val_temperature": 1.0, "retries": 0, "failures": failures}
    run = train(tmp_path, tiny_policy, _parser, lambda answer: 1.0, **settings)
    last = rollouts(run)
    assert low <= sum(one.outcome.failure == "agent" for one in last) / len(last) <= high
    lines = run.metrics()
    assert lines[1]["failures"]["agent"] > 8
    assert lines[1]["dropped"] == (lines[1]["failures"]["agent"] if failures else 0)
    assert (lines[1]["reward"] == 1.0) == bool(failures)


async def test_what_a_failed_rollout_scores_is_in_why_the_metrics_and_rescored(
    tmp_path: Path, tiny_policy: Any
) -> None:
    run = train(tmp_path, tiny_policy, _parser, lambda answer: 1.0, val_tasks=4, val_temperature=1.0, group_size=8)
    ended = run.rollouts()[0]
    trained = [one for one in ended if one.mode == "train"]
    failed = next(one for one in trained if one.outcome.failure == "agent")
    text = diagnose(trained)[trained.index(failed)].text
    assert "the reply has no query (scored 0); trained on" in text
    count = sum(one.outcome.failure == "agent" for one in ended)
    text = "\n".join(overview([ended], lambda step: {}, _NoDecoder()))
    assert f"failed: {count} agent (scored 0)" in text
    assert f"the policy caused {count} ({count / len(ended):.0%}), what it runs on 0 (0%)" in text
    validation = [one for one in ended if one.mode == "val"]
    accuracy = compute_accuracy(validation)
    assert accuracy["n"] == accuracy["total"]
    assert accuracy["failures"].get("agent", 0) == round((1 - accuracy["accuracy"]) * accuracy["n"])

    async def likes_everything(task: Any, answer: str, steps: Any) -> float:
        return 1.0

    async def likes_nothing(task: Any, answer: str, steps: Any) -> float:
        return -1.0

    for reward, least in ((likes_everything, 0.0), (likes_nothing, -1.0)):
        rescored = await rescore(ended, reward)
        assert {each.new for each in rescored.rollouts if each.rollout == failed.rollout_id} == {least}
        assert rescored.failed == 0


class _NoDecoder:
    def pieces(self, ids: Any) -> list[str]:
        return ["" for _ in ids]


def test_a_run_ends_after_three_steps_in_which_the_policy_failed_every_rollout_not_before(
    tmp_path: Path, tiny_policy: Any
) -> None:
    async def broken(choose: Choose) -> str:
        raise KeyError(await choose("select a name", "01"))

    with pytest.raises(
        RolloutsFailedError, match=r"in 3 steps in a row all 32 rollouts failed; .*KeyError.*repair"
    ) as caught:
        train(tmp_path, tiny_policy, broken, val_tasks=2, val_temperature=1.0, steps=5)
    assert caught.value.exit_code == 1
    assert [line["step"] for line in RunDir(tmp_path / "run").metrics()] == [0, 1, 2]


def test_a_policy_whose_greedy_rollouts_all_fail_is_trained(tmp_path: Path, tiny_policy: Any) -> None:
    async def fails_in_validation(choose: Choose) -> str:
        if len(started) < 2:
            started.append(await choose("select a name", "01"))
            raise AgentError("no JSON in the reply")
        return await choose("select a name", "01")

    started = list[str]()
    run = train(tmp_path, tiny_policy, fails_in_validation, val_tasks=2, val_temperature=1.0, n_runners=1)
    assert [line["step"] for line in run.metrics()] == [0, 1]


def test_an_evaluation_counts_what_the_policy_caused_as_wrong_unless_it_is_dropped(
    tmp_path: Path, tiny_policy: Any
) -> None:
    for failures in ("", "agent=drop"):
        settings = {"val_tasks": 16, "val_temperature": 1.0, "retries": 0, "failures": failures}
        metrics = evaluate(tmp_path / failures, tiny_policy, _parser, lambda answer: 1.0, **settings)
        failed = metrics["failures"]["agent"]
        assert 0 < failed < 16
        assert (metrics["accuracy"], metrics["n"]) == ((1.0, 16 - failed) if failures else (1 - failed / 16, 16))


def test_an_evaluation_in_which_all_fail_in_the_same_way_ends_with_the_reason(tmp_path: Path, tiny_policy: Any) -> None:
    async def broken(choose: Choose) -> str:
        raise KeyError(await choose("select a name", "0"))

    with pytest.raises(RolloutsFailedError, match="all 3 validation rollouts failed; the first failed of agent"):
        evaluate(tmp_path, tiny_policy, broken, val_tasks=3)


def test_an_exception_of_an_agent_has_a_type_by_its_name_and_its_causes() -> None:
    def raised(error: Exception, cause: Exception | None = None) -> str:
        try:
            raise error from cause
        except Exception as caught:
            return agent_failure(caught).kind

    recursion = type("GraphRecursionError", (RecursionError,), {})
    assert raised(recursion("25 steps")) == "turn_limit"
    assert raised(json.JSONDecodeError("no JSON", "x", 0)) == "malformed_output"
    assert raised(RuntimeError("cannot parse"), json.JSONDecodeError("no JSON", "x", 0)) == "malformed_output"
    assert raised(ValueError("no query")) == "agent"
    assert raised(RuntimeError("no answer"), ConnectionRefusedError("refused")) == "tool"


def test_the_setting_changes_single_types() -> None:
    assert failure_scores(RunConfig().failures) == dict.fromkeys(POLICY_FAILURES)
    config = RunConfig(failures=" agent=drop, timeout = zero, turn_limit=-0.5,")
    assert config.failures == "agent=drop,timeout=zero,turn_limit=-0.5"
    scores = dict.fromkeys([*POLICY_FAILURES, "timeout"]) | {"turn_limit": -0.5}
    assert failure_scores(config.failures) == {kind: score for kind, score in scores.items() if kind != "agent"}
    assert RunConfig(failures={"agent": "drop"}).failures == "agent=drop"
    assert set(FAILURE_TYPES) <= set(KINDS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("crash=drop", "failures has the unknown type 'crash'; the types are agent, malformed_output"),
        ("agent=-1e308", "failures has agent='-1e308'; it must be agent=zero, agent=drop or a number such as agent=-1"),
        ("agent=nan", "failures has agent='nan'; it must be agent=zero, agent=drop or a number such as agent=-1"),
        ("agent", "failures has agent=''; it must be agent=zero, agent=drop or a number such as agent=-1"),
        (7, "failures is 7; it must be text such as agent=drop,timeout=zero"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        RunConfig(failures=value)
    assert isinstance(caught.value, ConfigError)


def test_the_setting_can_be_an_argument_and_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('failures = "agent=drop"\n')
    given = [read_settings(tmp_path / "my.toml"), given_settings({"judge": {"judge": None}}, ["failures=agent=drop"])]
    assert [RunConfig(**each).failures for each in given] == ["agent=drop"] * 2

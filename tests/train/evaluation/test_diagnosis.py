"""Each reason why a rollout taught nothing has an explanation, and a run without training data stops with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT
from programs import run as run_program
from typer.testing import CliRunner

from groundwire.adapters.tracing import CallCredit
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.progress import verdict_lines
from groundwire.train.config.resolve import resolve
from groundwire.train.evaluation.diagnosis import KINDS, Reason, diagnose
from groundwire.train.evaluation.notes import nothing_to_train
from groundwire.train.evaluation.verdict import AgentVerdict, pass_rate
from groundwire.train.report.token_text import TokenDecoder
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.rows import from_row
from groundwire.train.why import app, overview

REAL = json.loads((ROOT / "tests" / "data" / "rollouts.json").read_text())["langgraph"]
NO_IDS = {"agent": "write_query", "prompt_ids": [], "response_ids": [], "logprobs": [], "prompt_tokens": 90}
FAILED = [{**NO_IDS, "status": 500, "error": "boom"}, {**NO_IDS, "status": 429, "error": "slow down"}]


def rollout(reward: float | None = 1.0, **changes: Any) -> Rollout:
    """A real rollout of training with other facts."""
    return from_row({**REAL, "mode": "train", "reward": reward, "group": "g", "step": 1, **changes})


def without_calls(*untrainable: dict[str, Any], **changes: Any) -> Rollout:
    return rollout(calls=untrainable, **changes)


def reason(one: Rollout, *others: Rollout, **options: Any) -> Reason:
    return diagnose([one, *others], options)[0]


def test_a_rollout_that_differs_from_its_group_is_trained_on() -> None:
    found = reason(rollout(1.0), rollout(0.0))
    sampled = sum(len(call["response_ids"]) for call in REAL["calls"])
    assert found == Reason("trained", f"trained on {sampled} tokens of 3 call(s): reward 1, mean of its group 0.5")


def test_equal_rewards_give_no_gradient() -> None:
    found = reason(rollout(0.0), rollout(0.0), rollout(0.0))
    assert found.kind == "equal_rewards"
    assert "all 3 rewards of its group were 0" in found.text


def test_a_reward_at_the_groups_mean_gives_no_gradient() -> None:
    assert reason(rollout(0.5), rollout(0.0), rollout(1.0)).kind == "mean_reward"


def test_a_group_is_of_one_step_and_one_task() -> None:
    assert reason(rollout(0.0), rollout(0.0), rollout(1.0, step=2), rollout(1.0, group="h")).kind == "equal_rewards"


def test_the_only_reward_of_a_group_gives_no_gradient() -> None:
    failed = rollout(None, status="timeout", message="not finished")
    assert reason(rollout(1.0), failed).kind == "only_reward"
    assert reason(rollout(1.0), without_calls(), trainer="verl").kind == "only_reward"


def credited(*advantages: float, weight: float = 1.0, **changes: Any) -> Rollout:
    """A rollout whose calls were trained with these advantages."""
    made = rollout(changes.pop("reward", 0.0), **changes)
    for call, advantage in zip(made.calls, advantages, strict=True):
        call.credit = CallCredit(0.5, advantage, weight)
    return made


def test_the_credit_that_was_trained_decides() -> None:
    equal = "the returns of comparable calls of its group were equal"
    assert reason(credited(0.5, 0.0, 0.0), credited(-0.5, 0.0, 0.0)).kind == "trained"  # though the rewards are equal
    assert reason(credited(0.0, 0.0, 0.0), credited(0.0, 0.0, 0.0)).text.startswith("all 2 rewards of its group")
    assert reason(credited(0.0, 0.0, 0.0), credited(0.0, 0.0, 0.0, reward=1.0)).text == equal
    assert reason(credited(0.5, 0.5, 0.5, weight=0.0), credited(0.0, 0.0, 0.0, reward=1.0)).text == equal  # masked
    assert reason(credited(0.0, 0.0, 0.0), credited(0.5, 0.0, 0.0, reward=1.0)).kind == "mean_reward"


def test_no_call_at_the_proxy() -> None:
    assert reason(without_calls(), rollout(0.0)).text.startswith("no LLM call reached the proxy")


def test_no_token_ids_from_the_endpoint() -> None:
    found = reason(without_calls(NO_IDS, NO_IDS), rollout(0.0))
    assert found.kind == "no_token_ids"
    assert "2 call(s)" in found.text


def test_failed_calls_quote_the_last_failure() -> None:
    found = reason(without_calls(*FAILED))
    assert (found.kind, "429: slow down" in found.text) == ("calls_failed", True)


def test_calls_with_too_few_logprobs() -> None:
    assert reason(without_calls({**NO_IDS, "prompt_ids": [1], "response_ids": [2] * 5})).kind == "bad_calls"


def test_an_agent_match_without_a_match_lists_the_agents() -> None:
    found = reason(rollout(1.0), rollout(0.0), agent_match="planner")
    assert found.kind == "agent_match"
    assert "agent_match 'planner'" in found.text
    assert "names seen: check_query, rewrite_query, write_query" in found.text


def test_agents_that_are_left_out_are_counted() -> None:
    assert "1 of other agents left out" in reason(rollout(1.0), rollout(0.0), agent_match="write").text


@pytest.mark.parametrize(
    ("message", "over"),
    [
        (
            "the endpoint answered 400: the prompt has 1336 tokens, and the model's context of 1024 tokens must also",
            312,
        ),
        (
            "This model's maximum context length is 4096 tokens. However, you requested 4408 tokens in the messages, "
            "Please reduce the length",
            312,
        ),
        ("This model's maximum context length is 4096 tokens. However, your request has 4100 input tokens.", 4),
        ("The decoder prompt (length 5000) is longer than the maximum model length of 4096.", 904),
    ],
)
def test_a_prompt_over_the_limit_reports_the_number_of_tokens(message: str, over: int) -> None:
    found = reason(rollout(None, status="prompt_too_long", message=message))
    assert found.kind == "prompt_too_long"
    assert f"over the limit by {over} tokens" in found.text


@pytest.mark.parametrize(
    "status", ["agent", "tool", "endpoint", "timeout", "reward", "judge_abstained", "refused", "no_result"]
)
def test_each_failure_has_its_kind_and_quotes_its_message(status: str) -> None:
    found = reason(rollout(None, status=status, message="the disk is gone"))
    assert found.kind == status
    assert "the disk is gone" in found.text


def test_an_unknown_failure_type_is_reported() -> None:
    assert reason(rollout(None, status="comet", message="it fell")).kind == "failed"


def test_a_validation_rollout_is_never_trained_on() -> None:
    assert reason(rollout(1.0, mode="val")).kind == "validation"
    assert reason(without_calls(mode="val")).kind == "no_calls"


def test_every_kind_has_a_description() -> None:
    assert all(KINDS.values())


def test_one_rollout_with_triplets_is_enough_to_train() -> None:
    assert nothing_to_train([without_calls(), rollout(0.0)]) == ""
    assert nothing_to_train([]) == ""


def test_rollouts_without_triplets_are_counted_by_reason() -> None:
    why = nothing_to_train(
        [without_calls(), without_calls(), rollout(None, calls=[], status="timeout", message="late")]
    )
    assert "2 of 3: no LLM call reached the proxy" in why
    assert "1 of 3: not finished in time" in why


@pytest.mark.parametrize(
    ("rewards", "mean", "differ", "advice"),
    [
        ([[0.0, 1.0], [0.0, 0.0]], "0.250", 1, ""),
        ([[0.0, 0.0], [0.0, None]], "0.000", 0, "the model got nothing right here"),
        ([[-1.0, -1.0], [-1.0, -1.0]], "-1.000", 0, "the model got nothing right here"),
        ([[1.0, 1.0], [1.0, 1.0]], "1.000", 0, "every answer to a task gets the same reward"),
        ([[1.0, 1.0], [0.0, 0.0]], "0.500", 0, "every answer to a task gets the same reward"),
    ],
)
def test_the_pass_rate_and_what_helps(rewards: Any, mean: str, differ: int, advice: str) -> None:
    tasks = [(f'{{"id": {number}}}', of_task) for number, of_task in enumerate(rewards)]
    rollouts = [rollout(reward, task=task) for task, of_task in tasks for reward in of_task]
    said, more = pass_rate(rollouts, max_tokens=64)
    assert f"mean reward {mean}; the rewards of {differ} of 2 tasks differ" in said
    assert ("(1 more could not be judged)" in said) == any(None in of_task for of_task in rewards)
    assert more.startswith(advice)
    assert bool(more) == bool(advice)
    lines = verdict_lines(rollouts, AgentVerdict([], [said], more))
    assert (lines[-1] == "verdict: nothing is in the way of training") == (not advice)


def _run(tmp_path: Path, *rollouts: Rollout, **settings: Any) -> str:
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=resolve("fast", **settings).to_dict())
    run.write_rollouts(1, rollouts)
    return str(run.path)


def test_why_counts_the_reasons_of_a_whole_run(tmp_path: Path) -> None:
    path = _run(tmp_path, *(rollout(0.0, group="equal") for _ in range(3)), rollout(1.0), rollout(0.0))
    printed = CliRunner().invoke(app, [path]).stdout
    assert "      3   60%  every reward of its group was equal" in printed
    assert "      2   40%  trained" in printed
    assert "10 of 10 later prompts do not begin with an earlier prompt and its reply (langgraph)" in printed


def test_why_counts_answered_calls_that_are_not_trained_beside_others_that_are() -> None:
    first, *rest = REAL["calls"]
    lost = [{**first, "response_tokens": len(first["response_ids"]) + number} for number in (5, 60)]
    lines = list(
        overview([[rollout(1.0, calls=[*lost, *rest, FAILED[0]]), rollout(0.0)]], lambda _: {}, TokenDecoder())
    )
    start = lines.index("2 of 7 answered calls for training cannot be trained on:")
    assert "29%  the server counted N sampled tokens and sent the ids of N" in lines[start + 1]
    assert f"the server counted {lost[0]['response_tokens']} sampled tokens" in lines[start + 2]


def test_why_explains_one_rollout_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    path = _run(tmp_path, credited(0, 0, 0, rollout_id="ro-abc"), credited(0, 0, 0, rollout_id="ro-abd"))
    done = CliRunner().invoke(app, [path, "ro-abc"])
    assert done.stdout.startswith("ro-abc (step 1, task ")
    assert "all 2 rewards of its group were 0" in done.stdout
    assert "call 3 (rewrite_query): return 0.5, advantage 0, weight 1\n" in done.stdout
    ambiguous, unknown = CliRunner().invoke(app, [path, "ro-a"]), CliRunner().invoke(app, [path, "xx"])
    assert (ambiguous.exit_code, unknown.exit_code) == (2, 2)
    assert "has 2 rollouts that begin with 'ro-a'" in ambiguous.stderr
    assert "has no rollout 'xx'" in unknown.stderr


def test_why_prints_the_credit_of_each_call(tmp_path: Path) -> None:
    explained = [credited(0.25, None, -1.414, rollout_id="ro-1"), rollout(1.0, rollout_id="ro-2")]
    path = _run(tmp_path, *explained, agent_match="write")
    assert CliRunner().invoke(app, [path, "ro-1"]).stdout.splitlines()[1:3] == [
        "call 1 (write_query): return 0.5, advantage 0.25, weight 1",
        "call 3 (rewrite_query): return 0.5, advantage -1.41, weight 1",
    ]
    assert "advantage" not in CliRunner().invoke(app, [path, "ro-2"]).stdout  # verl's own estimator computed it


def test_why_of_a_run_without_rollouts(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=resolve("fast").to_dict())
    assert CliRunner().invoke(app, [str(run.path)]).stdout == "no rollout has been written yet\n"


def test_why_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "is not a run" in done.stderr


def test_a_run_whose_agent_makes_no_call_stops_before_training(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text("async def agent(question, endpoint):\n    return 'SELECT 1'\n")
    done = run_program(
        *("-m", "train.run", "--backend", "custom", "--agent", "lazy:agent", "--val-tasks", "4", "--n-runners", "4"),
        *("--output-dir", str(tmp_path)),
        environment={**_environment(), "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "none of 4 validation rollouts made an LLM call: no LLM call reached the proxy" in done.stderr
    assert "a cache of the agent may answer" in done.stderr
    assert "groundwire why" in done.stderr


def test_a_run_whose_agent_match_selects_no_agent_stops_at_its_first_step(tmp_path: Path) -> None:
    done = run_program(
        *("-m", "train.run", "--agent-match", "rewrite", "--agent-option", "max_turns=1", "--val-tasks", "2", "--ci"),
        *("--tasks-per-step", "2", "--output-dir", str(tmp_path)),
        environment=_environment(),
    )
    assert done.returncode == 1
    assert "agent_match 'rewrite' matched none of its agents; names seen: write_query" in done.stderr


def _environment() -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != "SPIDER_DATA_DIR"}, "COLUMNS": "200"}

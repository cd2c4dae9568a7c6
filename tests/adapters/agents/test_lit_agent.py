"""An agent that was written for Agent Lightning is trained as it is: here, and with Agent Lightning's own runner."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import external_processes as processes
import pytest
from fork_server import Forked

from groundwire.adapters import LitAgentBackend, agent_backend
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.tools.errors import UserError
from groundwire.train import evaluate, fit
from groundwire.train.api.results import EvaluationResult

TASKS = [{"question": f"Is {number} even?", "answer": "yes" if number % 2 == 0 else "no"} for number in range(4)]
QUIET: dict[str, Any] = {"quiet": True, "n_runners": 4, "retries": 0}
pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture
def agents() -> Any:
    import lit_agents

    return lit_agents


async def _evaluated(agent: Any, folder: Path, **settings: Any) -> EvaluationResult:
    async with ScriptedPolicyServer(replies=lambda _: "yes") as policy:
        endpoint = {"model": policy.model, "base_url": policy.base_url, "output_dir": folder}
        return await asyncio.to_thread(evaluate, agent, TASKS, **endpoint, **QUIET, **settings)


@pytest.mark.parametrize(
    ("agent", "accuracy"),
    [("Blocking()", 0.75), ("Async()", 0.5), ("decorated", 0.5), ("Blocking", 0.75), ("'lit_agents:Async'", 0.5)],
)
async def test_a_lit_agents_own_reward_is_the_rollouts(
    agent: str, accuracy: float, agents: Any, tmp_path: Path
) -> None:
    result = await _evaluated(eval(agent, vars(agents)), tmp_path)
    assert (result.accuracy.value, result.accuracy.n) == (accuracy, 4)
    assert [len(calls) for calls in result.rollouts["calls"]] == [1] * 4
    emitted = 0.25 if "Async" in agent else None
    assert [[call["reward"] for call in calls] for calls in result.rollouts["calls"]] == [[emitted]] * 4


async def test_the_nodes_of_a_lit_agents_graph_have_their_names(agents: Any, tmp_path: Path) -> None:
    result = await _evaluated("lit_agents:Graph", tmp_path)
    names = [[call["agent"] for call in calls] for calls in result.rollouts["calls"]]
    assert names == [["write_query", "check_query"]] * 4


async def test_what_an_agent_emits_in_a_process_of_its_own_is_stored(agents: Any, tmp_path: Path) -> None:
    def reward(task: Any, answer: str) -> float:
        return float(answer == task["answer"])

    result = await _evaluated("lit_agents:emits", tmp_path, reward=reward)
    assert result.accuracy.value == 0.5
    assert [[call["reward"] for call in calls] for calls in result.rollouts["calls"]] == [[0.25]] * 4


async def test_a_refused_reward_of_a_process_fails_its_rollout_also_if_the_agent_catches_the_error(
    agents: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match="failed of reward: a span has the reward 'primary' of inf; it must lie between"
    ):
        await _evaluated("lit_agents:emits_too_much", tmp_path, reward=lambda answer: 1.0)


async def test_a_lit_agent_in_another_process_has_its_own_reward_and_emits(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    async with ScriptedPolicyServer(replies=lambda _: "yes") as policy:
        endpoint = {"model": policy.model, "base_url": policy.base_url, "output_dir": tmp_path}
        result = await asyncio.to_thread(
            evaluate, "lit_agents:Async", tmp_path / "tasks.jsonl", runner_processes=1, **endpoint, **QUIET
        )
    rows = result.rollouts.to_dict("records")
    assert len(rows) == len(TASKS)  # all tasks of the file
    for row in rows:
        assert (row["status"], row["reward"]) == ("succeeded", float(row["task"]["answer"] == "yes"))
        assert [call["reward"] for call in row["calls"]] == [0.25]


async def test_a_lit_agent_without_a_reward_is_a_failure_of_its_reward(agents: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="failed of reward: the agent's rollout returned None: it returns its reward"):
        await _evaluated(agents.WithoutReward(), tmp_path)


async def test_a_reward_beside_a_lit_agents_own_is_refused(agents: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the agent returns its own reward, so reward executes has no use: leave it"):
        await _evaluated(agents.Async(), tmp_path, reward="executes")
    with pytest.raises(UserError, match=r"agent 'NeedsArguments' cannot be made \(.*: name an object of it"):
        await _evaluated(agents.NeedsArguments, tmp_path)


async def test_only_a_rollout_can_run_a_lit_agent(agents: Any) -> None:
    backend = agent_backend(agents.Blocking())
    assert isinstance(backend, LitAgentBackend)
    with pytest.raises(Exception, match="it runs in a training run or an evaluation only"):
        await backend.run(None, None)  # type: ignore[arg-type]


async def test_agent_lightnings_own_runner_with_its_own_agent_trains_the_model(tmp_path: Path) -> None:
    port = processes.free_port()
    address = f"http://127.0.0.1:{port}"
    parts = [Forked(processes.store, str(tmp_path / "store.db"), port)]
    try:
        await asyncio.to_thread(processes.wait_for_store, address, parts[0])
        parts.append(Forked(processes.their_runner, address))
        small: dict[str, Any] = {"steps": 1, "tasks_per_step": 1, "group_size": 2, "max_tokens": 8, "quiet": True}
        small |= {"val_tasks": 1, "val_temperature": 1.0}
        store: dict[str, Any] = {"external_store_address": address, "n_runners": 0, "output_dir": tmp_path / "runs"}
        result = await asyncio.to_thread(fit, tasks="spider", **small, **store)
    finally:
        for part in parts:
            part.kill()
            part.join()
    assert result.before is not None
    assert (result.before.n, result.after.n) == (1, 1)
    frame = result.rollouts
    assert list(frame["status"].unique()) == ["succeeded"]
    assert [len(calls) for calls in frame["calls"]] == [1] * len(frame)
    assert result.checkpoint is not None

"""Rollouts in a process of Ray, as in verl's trainer: with its client, its queue and its sampler, without a GPU."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import ROOT
from test_verl_manager import ask

from groundwire import domains
from groundwire.adapters import Endpoint, Question
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.policy import STARTER
from groundwire.train.policy.grammar import ANY_OBJECT, calls_and_json
from groundwire.train.verl import launch

pytest.importorskip("verl")
ray = pytest.importorskip("ray")
pytest.importorskip("transfer_queue", exc_type=ImportError)

from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY  # noqa: E402

from groundwire.train.verl.samplers import TaskRunner  # noqa: E402

REPLY = [70, 71, 72]
REWARDS = itertools.cycle((1.0, 0.0))
QUESTIONS, ROLLOUTS = 3, 4
VLLM = """
class RequestOutputKind:
    FINAL_ONLY = 'once'

class StructuredOutputsParams:
    def __init__(self, grammar):
        self.grammar = grammar
"""


READ = {"input_ids", "response_mask", "old_log_probs", "advantages", "grammars"}
"""What an update reads of a row. The engine for shared prefixes derives what else verl reads."""


def read_by_a_worker(batch: Any) -> set[str]:
    """The columns that verl's worker reads for a call with ``batch``."""
    from verl.utils import tensordict_utils
    from verl.utils.transferqueue_utils import tqbridge

    read: list[Any] = []
    tqbridge()(read.append)(batch)
    assert {type(text) for text in tensordict_utils.get(read[0], "grammars")} == {str}
    return set(read[0].keys()) - set(batch.extra_info)


class Server:
    """Answers as verl's ``vLLMHttpServer``."""

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        assert sampling_params["max_tokens"] <= 16
        assert sampling_params["output_kind"] == "once"
        return TokenOutput(token_ids=REPLY, log_probs=[-0.5] * len(REPLY), extra_fields={"global_steps": 3})


class Trainer:
    """What verl's trainer does before and during the sampling of a step."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def init(self) -> None:
        from verl.workers.rollout.router import get_router_handle

        from groundwire.train.verl.agent_loop_manager import RolloutManager
        from groundwire.train.verl.samplers import SyncSampler

        server = ray.remote(Server).options(num_cpus=0).remote()
        rollout = self._config.actor_rollout_ref.rollout
        self._balancer = get_router_handle({"server": server}, rollout.router_config_path)
        self._sampler = SyncSampler(
            trainer_mode="sync", trainer_config={}, max_off_policy_threshold=8, max_off_policy_strategy="drop",
            sampler_kwargs=self._config.trainer.v1.sampler.sampler_kwargs, refill_fn=lambda number: number,
        )  # fmt: skip
        assert RolloutManager.processes is not None  # verl has no inference server yet

    def get_llm_client(self) -> Any:
        from verl.workers.rollout.llm_server import LLMServerClient

        return LLMServerClient(self._config, self._balancer)

    def get_teacher_client(self) -> None: ...

    def get_reward_handles(self) -> None: ...

    def fit(self, manager: Any) -> None:
        """Sample a step, and write its rows."""
        import transfer_queue
        from verl.utils import tensordict_utils

        uids, tasks = [f"uid{number}" for number in range(QUESTIONS)], domains.get("spider").load(None).train
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 3}] * QUESTIONS
        transfer_queue.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        questions = [json.dumps(dict(task), default=str) for task in tasks[:QUESTIONS]]
        batch = tensordict_utils.get_tensordict({"uid": uids, "task": questions}, {"global_steps": 3})
        manager.generate_sequences(batch)
        sampled, metrics = self._sampler.sample(global_steps=3, partition_id="train", batch_size=QUESTIONS)
        assert metrics["rollouts/ended_total"] == QUESTIONS * ROLLOUTS
        Path(os.environ["ROWS"]).write_text(json.dumps(self._prepared(sampled)))
        assert list(Path(tempfile.gettempdir()).glob("groundwire-copies-*"))  # of the agents' databases

    def _prepared(self, sampled: Any) -> list[dict[str, Any]]:
        """The rows after what verl's trainer does before an update on five GPUs.

        It does it with the sampler's log-probabilities as the old ones, and then, with the same advantages, as after a
        pass for log-probabilities.
        """
        import transfer_queue
        from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

        trainer = PPOTrainerSync.__new__(PPOTrainerSync)
        trainer.config, trainer.tokenizer = self._config, SimpleNamespace(eos_token_id=0)
        trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(5))})
        trainer._get_required_batch_multiple = lambda ranks: ranks
        batch, metrics = trainer._balance_batch(sampled, metrics={}), dict[str, Any]()

        def columns() -> list[dict[str, Any]]:
            names = ("responses", "rollout_log_probs", "old_log_probs", "advantages", "returns", "uid", "grammars")
            fields = transfer_queue.kv_batch_get(batch.keys, "train", list(names))
            return [
                {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
                for row in fields
            ]

        algorithm = self._config.algorithm
        algorithm.rollout_correction.bypass_mode = True
        assert trainer._compute_advantage(trainer._compute_old_log_prob(batch, metrics), metrics) is batch
        assert metrics == {}
        before = columns()
        algorithm.rollout_correction.bypass_mode = False
        trained = trainer._compute_advantage(batch, metrics)
        assert metrics["rollout_corr/kl"] == 0
        assert columns() == before
        assert read_by_a_worker(batch) == read_by_a_worker(trained) == READ
        self._config.critic.enable, algorithm.rollout_correction.bypass_mode, batch.fields = True, True, None
        assert trainer._compute_old_log_prob(batch, metrics).fields is None  # a critic reads other columns, too
        return [{"key": key, **tag, **row} for key, tag, row in zip(batch.keys, batch.tags, before, strict=True)]


class Training(TaskRunner):
    """verl's process, with this trainer."""

    def run(self, config: Any) -> None:
        TRAINER_REGISTRY["sync"] = Trainer
        super().run(config)


async def ask_for_json(question: Question, endpoint: Endpoint) -> str:
    """The agent, whose replies are constrained."""
    sampling = {**endpoint.sampling, "response_format": {"type": "json_object"}}
    return await ask(question, replace(endpoint, sampling=sampling))


async def ask_once_ended(question: Question, endpoint: Endpoint) -> str:
    """The agent, whose first rollout ends the process that it is in."""
    _end_process_once()
    return await ask(question, endpoint)


def _end_process_once() -> None:
    with suppress(FileExistsError):
        Path(os.environ["FIRST_ROLLOUT"]).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


async def in_turns(task: Any, answer: str, steps: Any) -> float:
    """A reward of 1 or 0."""
    return next(REWARDS)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder with a short name: Ray makes its sockets there."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.parametrize("agent", [f"{__name__}:ask_for_json", f"{__name__}:ask_once_ended"])
def test_a_step_of_rollouts_becomes_rows_in_verls_queue(
    agent: str, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from groundwire.train.verl.hydra_config import compose, flat_config
    from groundwire.train.verl.ray_job import ray_job

    (tmp_path / "vllm").mkdir()  # only the server has vLLM
    (tmp_path / "vllm" / "sampling_params.py").write_text(VLLM)
    tests = [str(Path(__file__).parent), str(ROOT / "tests" / "helpers")]
    paths = [*tests, str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("FIRST_ROLLOUT", str(tmp_path / "first_rollout"))
    monkeypatch.setenv("ROWS", str(tmp_path / "rows.json"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "groundwire")  # as a run sets it
    run = RunDir.create(tmp_path, backend="custom", domain="spider", config={})
    tasks = domains.get("spider").load(None).train[:QUESTIONS]
    launch.write_tasks(run.path / "tasks" / "train.parquet", tasks, "spider")
    # The worker itself is to end, and it has the variables of the test, which an agent's own process would not get.
    own_process = "off" if agent.endswith("once_ended") else "fork"
    config = resolve(
        "starter", trainer="verl", backend="custom", rollout_process=own_process, agent=agent,
        reward=f"{__name__}:in_turns",
        n_runners=12, runner_processes=2, tasks_per_step=QUESTIONS, group_size=ROLLOUTS, max_tokens=16, model="starter",
    )  # fmt: skip
    flat = flat_config(config, run_dir=str(run.path.resolve()), model=str(STARTER))
    with ray_job(str(run.path.resolve())):
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        try:
            ray.get(ray.remote(Training).remote().run.remote(compose(flat)), timeout=300)
        finally:
            ray.shutdown()
    assert not list(temporary.glob("groundwire-copies-*"))
    every_row = json.loads((tmp_path / "rows.json").read_text())
    rows, padding = ([row for row in every_row if bool(row.get("is_padding")) == kind] for kind in (False, True))
    assert sorted(row["key"] for row in rows) == sorted(
        f"uid{number}_{session}_0" for number in range(QUESTIONS) for session in range(ROLLOUTS)
    )
    constrained = [[0, len(REPLY), calls_and_json(ANY_OBJECT)]] if agent.endswith("json") else []
    for row in rows:
        assert row["responses"] == REPLY
        assert json.loads(row["grammars"] or "[]") == constrained
        assert row["rollout_log_probs"] == row["old_log_probs"] == [-0.5] * len(REPLY)
        assert row["advantages"] == row["returns"] == [row["advantages"][0]] * len(REPLY)
        assert row["has_gradient"] == (row["advantages"][0] != 0)
        assert row["max_global_steps"] == 3
        assert row["uid"] == row["key"].split("_")[0]
    assert any(row["has_gradient"] for row in rows)
    assert len(padding) == 3
    for row in padding:
        assert row["grammars"] == ""
        assert row["old_log_probs"] == row["advantages"] == row["returns"] == [0.0]

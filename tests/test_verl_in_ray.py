"""Rollouts in a process of Ray, as in verl's trainer: with its client, its queue and its sampler, without a GPU."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_verl_manager import ask

from groundwire import domains
from groundwire.adapters import Endpoint, Question
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.policy import STARTER

pytest.importorskip("verl")
ray = pytest.importorskip("ray")
pytest.importorskip("transfer_queue", exc_type=ImportError)

from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY  # noqa: E402

from groundwire.train.verl.task_runner import TaskRunner  # noqa: E402

REPLY = [70, 71, 72]
REWARDS = itertools.cycle((1.0, 0.0))
QUESTIONS, ROLLOUTS = 3, 4


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
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        from groundwire.train.verl.agent_loop_manager import RolloutManager
        from groundwire.train.verl.samplers import SyncSampler

        server = ray.remote(Server).options(num_cpus=0).remote()
        self._balancer = ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0).remote({"server": server})
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
        fields = transfer_queue.kv_batch_get(keys=sampled.keys, partition_id="train")
        rows = [
            {"key": key, **tag, "response": response.tolist(), "logprobs": logprobs.tolist(), "uid": uid}
            for key, tag, response, logprobs, uid in zip(
                sampled.keys, sampled.tags, fields["responses"], fields["rollout_log_probs"], fields["uid"], strict=True
            )
        ]
        Path(os.environ["ROWS"]).write_text(json.dumps(rows))
        assert list(Path(tempfile.gettempdir()).glob("groundwire-copies-*"))  # of the agents' databases


class Training(TaskRunner):
    """verl's process, with this trainer."""

    def run(self, config: Any) -> None:
        TRAINER_REGISTRY["sync"] = Trainer
        super().run(config)


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


@pytest.mark.parametrize("agent", ["test_verl_manager:ask", f"{__name__}:ask_once_ended"])
def test_a_step_of_rollouts_becomes_rows_in_verls_queue(
    agent: str, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from groundwire.train.verl.hydra_config import compose, flat_config
    from groundwire.train.verl.ray_job import ray_job

    (tmp_path / "vllm").mkdir()  # only the server has vLLM
    (tmp_path / "vllm" / "sampling_params.py").write_text("class RequestOutputKind:\n    FINAL_ONLY = 'once'\n")
    paths = [str(Path(__file__).parent), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("FIRST_ROLLOUT", str(tmp_path / "first_rollout"))
    monkeypatch.setenv("ROWS", str(tmp_path / "rows.json"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    run = RunDir.create(tmp_path, backend="custom", domain="spider", config={})
    config = resolve(
        "starter", trainer="verl", backend="custom", agent=agent, reward=f"{__name__}:in_turns",
        n_runners=12, runner_processes=2, tasks_per_step=QUESTIONS, group_size=ROLLOUTS, max_tokens=16, model="starter",
    )  # fmt: skip
    flat = flat_config(config, run_dir=str(run.path.resolve()), model=str(STARTER))
    with ray_job(str(run.path.resolve())):
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        try:
            ray.get(ray.remote(Training).remote().run.remote(compose(flat)), timeout=120)
        finally:
            ray.shutdown()
    assert not list(temporary.glob("groundwire-copies-*"))
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert sorted(row["key"] for row in rows) == sorted(
        f"uid{number}_{session}_0" for number in range(QUESTIONS) for session in range(ROLLOUTS)
    )
    for row in rows:
        assert row["response"] == REPLY
        assert row["logprobs"] == [-0.5] * len(REPLY)
        assert row["max_global_steps"] == 3
        assert row["uid"].startswith(row["key"].split("_")[0])
    assert any(row["has_gradient"] for row in rows)

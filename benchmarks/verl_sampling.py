"""The sampling of a step with verl without a GPU: CPU time in the trainer's process and in those that run the rollouts.

Needs verl. A replacement of verl's inference server answers each of 512 requests, with prompts of Spider's questions,
after a second with 42 tokens; Ray, verl's client, its load balancer and TransferQueue are the real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._results import record

GROUPS, GROUP_SIZE, STEPS = 64, 8, 8
REPLY = list(range(100, 142))
_VLLM = "class RequestOutputKind:\n    FINAL_ONLY = 2\n"
"""What the server needs of vLLM, which is not needed here."""


class Server:
    """Answers as verl's ``vLLMHttpServer``."""

    async def generate(self, request_id: str, **_: Any) -> Any:
        """A reply."""
        from verl.workers.rollout.replica import TokenOutput

        await asyncio.sleep(1.0)
        return TokenOutput(token_ids=REPLY, log_probs=[-1.0] * len(REPLY), extra_fields={"global_steps": 1})


class Trainer:
    """The process of verl's trainer."""

    def steps(self, config: Any) -> list[dict[str, float]]:
        """The figures of each step."""
        import ray
        import transfer_queue
        from verl.utils.tensordict_utils import get_tensordict
        from verl.workers.rollout.llm_server import LLMServerClient
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        from groundwire import domains
        from groundwire.train.verl.agent_loop_manager import RolloutManager
        from groundwire.train.verl.samplers import SyncSampler

        transfer_queue.init(config.transfer_queue)
        server = ray.remote(max_concurrency=2 * GROUPS * GROUP_SIZE)(Server).options(num_cpus=0).remote()
        balancer = ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0).remote({"server": server})
        sampler = SyncSampler(
            trainer_mode="sync", trainer_config={}, max_off_policy_threshold=8, max_off_policy_strategy="drop",
            sampler_kwargs=config.trainer.v1.sampler.sampler_kwargs, refill_fn=lambda number: number,
        )  # fmt: skip
        manager = RolloutManager.create(config, LLMServerClient(config, balancer))
        tasks = domains.get("spider").load(config.groundwire.config.data_dir).train
        figures = []
        for step in range(1, STEPS + 1):
            uids = [f"{step}x{number}" for number in range(GROUPS)]
            questions = [json.dumps(dict(tasks[(step * GROUPS + each) % len(tasks)])) for each in range(GROUPS)]
            before = time.monotonic(), time.process_time(), _workers_cpu_s()
            tag = {"is_prompt": True, "status": "pending", "global_steps": step}
            transfer_queue.kv_batch_put(keys=uids, partition_id="train", tags=[tag] * GROUPS)
            manager.generate_sequences(get_tensordict({"uid": uids, "task": questions}, {"global_steps": step}))
            sampled, metrics = sampler.sample(global_steps=step, partition_id="train", batch_size=GROUPS)
            assert metrics["rollouts/ended_total"] == GROUPS * GROUP_SIZE
            after = time.monotonic(), time.process_time(), _workers_cpu_s()
            seconds, trainer, workers = (b - a for a, b in zip(before, after, strict=True))
            figures.append({"seconds": seconds, "trainer": trainer, "workers": workers})
            transfer_queue.kv_clear(keys=sampled.keys, partition_id="train")  # the sampler has cleared the prompts
        manager.stop()
        return figures


def _workers_cpu_s() -> float:
    """CPU seconds so far of the processes that run rollouts, which have the same parent as this one."""
    seconds = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getppid() and b"RolloutWorker" in (folder / "cmdline").read_bytes():
                seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except FileNotFoundError:  # it has ended
            continue
    return seconds


def main() -> None:
    """Print the figures."""
    import ray

    from groundwire import domains
    from groundwire.train.artifacts.run_dir import RunDir
    from groundwire.train.config.resolve import resolve
    from groundwire.train.policy import STARTER
    from groundwire.train.verl.hydra_config import compose, flat_config
    from groundwire.train.verl.launch import write_tasks
    from groundwire.train.verl.ray_job import ray_job

    parser = argparse.ArgumentParser(prog="python -m benchmarks.verl_sampling", description=__doc__)
    parser.add_argument("--processes", type=int, default=4, help="that run the rollouts; default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vllm").mkdir()
        (Path(folder) / "vllm" / "sampling_params.py").write_text(_VLLM)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.getcwd(), os.environ.get("PYTHONPATH", "")])
        run = RunDir.create(Path(folder), backend="custom", domain="spider", config={})
        tasks = domains.get("spider").load(None).train
        write_tasks(run.path / "tasks" / "train.parquet", tasks, "spider")
        config = resolve(
            "starter", trainer="verl", agent="dev.gpu.agents:once", reward="dev.gpu.agents:coin",
            runner_processes=options.processes, n_runners=GROUPS * GROUP_SIZE, tasks_per_step=GROUPS,
            group_size=GROUP_SIZE, max_tokens=len(REPLY), model="starter",
        )  # fmt: skip
        flat = flat_config(config, run_dir=str(run.path), model=str(STARTER))
        with ray_job(str(run.path)):
            ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
            steps = ray.get(ray.remote(Trainer).remote().steps.remote(compose(flat)))[2:]
            ray.shutdown()
    for name in ("trainer", "workers"):
        cost = 1000 * median(step[name] for step in steps) / (GROUPS * GROUP_SIZE)
        print(f"a rollout, {name:10}{cost:8.2f} CPU ms")
        record(f"a rollout with verl, {name}", cost, unit="CPU ms")
    print(f"{GROUPS * GROUP_SIZE} rollouts in {median(step['seconds'] for step in steps):.2f} s")


if __name__ == "__main__":
    main()

"""CPU time in the process of verl's trainer: of a request to its servers and of a row for its queue, with and without
the processes that do this for it.

Needs verl. A replacement of verl's inference server answers each of 512 requests after half a second, with 42 tokens
for a prompt of 886; Ray, verl's load balancer and TransferQueue are the real ones.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median
from typing import Any

from benchmarks._results import record

ROLLOUTS, PROMPT, REPLY, ROUNDS = 512, list(range(886)), list(range(42)), 6
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": len(REPLY), "logprobs": True}


class Server:
    """Answers as verl's ``vLLMHttpServer``."""

    async def generate(self, request_id: str, **_: Any) -> Any:
        """A reply."""
        from verl.workers.rollout.replica import TokenOutput

        await asyncio.sleep(0.5)
        return TokenOutput(token_ids=REPLY, log_probs=[-1.0] * len(REPLY), extra_fields={"global_steps": 1})


async def _measure(name: str, work: Callable[[int], Awaitable[Any]]) -> None:
    """CPU milliseconds of a rollout in this process, and seconds of all; medians after a first round."""
    cpu, wall = [], []
    for number in range(ROUNDS):
        started = time.process_time(), time.monotonic()
        await work(number)
        cpu.append(1000 * (time.process_time() - started[0]) / ROLLOUTS)
        wall.append(time.monotonic() - started[1])
    print(f"{name:40}{median(cpu[1:]):8.3f} CPU ms, {ROLLOUTS} in {median(wall[1:]):.2f} s", flush=True)
    record(name, median(cpu[1:]), unit="CPU ms")


async def main() -> None:
    """Print the figures."""
    import ray
    import transfer_queue
    from omegaconf import OmegaConf
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from groundwire.train.verl.credit_assignment import TrainingRow
    from groundwire.train.verl.generation_workers import GenerationClient, GenerationWorker
    from groundwire.train.verl.transfer_queue import RowWriter, TransferQueueRows
    from groundwire.train.verl.worker_processes import start_actor

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    server = ray.remote(max_concurrency=2 * ROLLOUTS)(Server).remote()
    balancer = ray.remote(GlobalRequestLoadBalancer).remote({"server": server})
    rollout = {"name": "vllm", "full_determinism": False}
    here = LLMServerClient(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), balancer)
    clients: dict[str, Any] = {"in this process": here}
    for number in (1, 2):
        clients[f"by {number} worker{'s' * (number > 1)}"] = GenerationClient(
            here, partial(start_actor, GenerationWorker), workers=number, reads_params=False
        )
    for name, client in clients.items():

        def requests(_: int, client: Any = client) -> Awaitable[Any]:
            return asyncio.gather(
                *(client.generate(f"{key}", prompt_ids=PROMPT, sampling_params=PARAMS) for key in range(ROLLOUTS))
            )

        await _measure(f"a request, {name}", requests)

    storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 2}}  # as in our runs
    transfer_queue.init(OmegaConf.create({"backend": storage}))
    local, other = RowWriter(), TransferQueueRows(start_actor(RowWriter, restarts=True), "spider")

    def rows(number: int) -> list[TrainingRow]:
        tokens = len(REPLY)
        return [
            TrainingRow(
                key=f"{number}_{session}_0", uid=f"{number}", session=session, prompt_ids=PROMPT, response_ids=REPLY,
                mask=[1] * tokens, advantages=[0.5] * tokens, logprobs=[-1.0] * tokens, reward=1.0, turns=1,
                first_version=0, last_version=0, step=1,
            )
            for session in range(ROLLOUTS)
        ]  # fmt: skip

    async def put(number: int) -> None:
        local.put(rows(number), "train", "spider")

    await _measure("a row, in this process", put)
    await _measure("a row, by the writer", lambda number: other.put(rows(ROUNDS + number), "train"))


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)  # TransferQueue's threads do not end

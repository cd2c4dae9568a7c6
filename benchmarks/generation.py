"""CPU time of a request in the process of verl's trainer: with verl's client there, and in worker processes.

Needs verl. A replacement of verl's inference server answers each of 512 requests at once after half a second, with 42
tokens for a prompt of 886; Ray and verl's load balancer are the real ones.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Any

from benchmarks._results import record

REQUESTS, PROMPT, REPLY, ROUNDS = 512, list(range(886)), list(range(42)), 6
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": len(REPLY), "logprobs": True}


class Server:
    """Answers as verl's ``vLLMHttpServer``."""

    async def generate(self, request_id: str, **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        await asyncio.sleep(0.5)
        return TokenOutput(token_ids=REPLY, log_probs=[-1.0] * len(REPLY), extra_fields={"global_steps": 1})


async def _rounds(client: Any) -> tuple[float, float]:
    """CPU milliseconds of a request in this process, and seconds of all requests; medians after a first round."""
    cpu, wall = [], []
    for _ in range(ROUNDS):
        started = time.process_time(), time.monotonic()
        requests = (
            client.generate(f"{number}", prompt_ids=PROMPT, sampling_params=PARAMS) for number in range(REQUESTS)
        )
        await asyncio.gather(*requests)
        cpu.append(1000 * (time.process_time() - started[0]) / REQUESTS)
        wall.append(time.monotonic() - started[1])
    return median(cpu[1:]), median(wall[1:])


def main() -> None:
    """Print both."""
    import ray
    from omegaconf import OmegaConf
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from groundwire.train.verl.generation_workers import GenerationClient, start_workers

    ray.init(include_dashboard=False, log_to_driver=False)
    server = ray.remote(max_concurrency=2 * REQUESTS)(Server).remote()
    balancer = ray.remote(GlobalRequestLoadBalancer).remote({"server": server})
    rollout = {"name": "vllm", "full_determinism": False}
    client = LLMServerClient(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), balancer)
    clients = {"in this process": client}
    for workers in (1, 2):
        name = f"in {workers} worker process{'es' if workers > 1 else ''}"
        clients[name] = GenerationClient(start_workers(client, workers, reads_params=False))
    for name, each in clients.items():
        cpu, wall = asyncio.run(_rounds(each))
        print(f"verl's client {name:24}{cpu:8.2f} CPU ms a request, {REQUESTS} in {wall:.2f} s", flush=True)
        record(f"verl's client {name}", cpu, unit="CPU ms")


if __name__ == "__main__":
    main()

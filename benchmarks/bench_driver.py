"""What a rollout of one call costs the process of verl's trainer: store, proxy, prompt, reply, spans and rows.

Agents run in processes of their own, and a policy in verl's place answers all of them at one moment with 256 tokens, as
replies of one length do. What that process does before and after is time in which no GPU has anything to do.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks._results import record
from benchmarks._store_process import store_process

AGENT = "benchmarks.gpu.agents:once"
ROLLOUTS = (128, 512)
GROUP, REPLY = 8, 256
STEPS, WARM_UP = 5, 1


@dataclass(frozen=True)
class _Output:
    token_ids: list[int] = field(default_factory=lambda: [100 + each for each in range(REPLY)])
    log_probs: list[float] = field(default_factory=lambda: [-0.5] * REPLY)
    extra_fields: dict[str, Any] = field(default_factory=dict)


class _Client:
    """verl's client: nobody gets a reply before everybody has asked."""

    def __init__(self, rollouts: int) -> None:
        self._rollouts, self._asked, self._all = rollouts, 0, asyncio.Event()
        self.answered_cpu_s = 0.0

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> _Output:
        self._asked += 1
        everybody = self._all
        if self._asked % self._rollouts:
            await everybody.wait()
        else:
            self.answered_cpu_s, self._all = time.process_time(), asyncio.Event()
            everybody.set()
        return _Output()


class _Queue:
    """TransferQueue, with nobody behind it."""

    def __init__(self, groups: int) -> None:
        self._groups, self._ended, self.done = groups, 0, threading.Event()

    async def set_status(self, uid: str, partition: str, status: str) -> None:
        assert status != "failure", f"group {uid} has no rewards"
        if status == "finished":
            self._ended += 1
            if self._ended % self._groups == 0:
                self.done.set()

    async def put(self, rows: Sequence[Any], partition: str) -> None:
        """Take them."""

    async def clear(self, keys: Sequence[str], partition: str) -> None:
        """There are none."""


def main() -> None:
    """Print CPU milliseconds a rollout before the replies and after them, by where the store is."""
    print(f"{'rollouts':>10}{'store':>12}{'before':>10}{'after':>10}   CPU ms a rollout")
    for rollouts in ROLLOUTS:
        for elsewhere in (False, True):
            store = "elsewhere" if elsewhere else "the run's"
            with _store(rollouts) if elsewhere else nullcontext() as address:
                before, after = _cost(rollouts, address)
            print(f"{rollouts:10}{store:>12}{before:10.2f}{after:10.2f}", flush=True)
            name = f"verl's process, a rollout of one call, {rollouts} at once, store {store}"
            record(name, before + after, unit="CPU ms")


@contextmanager
def _store(rollouts: int) -> Iterator[str]:
    """A durable store and two processes of runners; its address."""
    python = [sys.executable, "-m"]
    with (
        tempfile.TemporaryDirectory() as folder,
        store_process([*python, "groundwire.train.store", "--path", f"{folder}/store.db"]) as (address, _),
    ):
        runner = [
            *python,
            "groundwire.train.runner",
            "--external-store-address",
            address,
            "--n-runners",
            str(rollouts // 2),
        ]
        runner += ["--backend", "custom", "--agent", AGENT, "--domain", "spider"]
        running = [subprocess.Popen(runner, stdout=subprocess.DEVNULL) for _ in range(2)]
        try:
            yield address
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait(30)


def _cost(rollouts: int, address: str | None) -> tuple[float, float]:
    from groundwire import domains
    from groundwire.tools.step_timer import StepTimer
    from groundwire.train.artifacts.run_dir import RunDir
    from groundwire.train.config.run_config import RunConfig
    from groundwire.train.policy import STARTER
    from groundwire.train.policy.model import load_policy
    from groundwire.train.rollouts.factory import make_backend, make_reward
    from groundwire.train.rollouts.runtime import RolloutRuntime
    from groundwire.train.verl.engine import VerlEngine
    from groundwire.train.verl.rollout_service import Prompt, RolloutService

    runners: dict[str, Any] = {"n_runners": rollouts, "runner_processes": 2}
    if address is not None:
        runners = {"n_runners": 0, "external_store_address": address}
    config = RunConfig(backend="custom", agent=AGENT, max_tokens=REPLY, **runners)
    domain, timer, groups = domains.get("spider"), StepTimer(), rollouts // GROUP
    tasks = domain.load().train[:groups]
    client, queue = _Client(rollouts), _Queue(groups)
    engine: Any = VerlEngine(client, load_policy(STARTER)[1], max_model_len=2048, timer=timer, server="vllm")
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(folder, backend="custom", domain="spider", config={})
        runtime = RolloutRuntime(
            engine=engine, backend=make_backend(config), domain=domain, reward=make_reward(config, domain),
            timer=timer, config=config, run=run,
        )  # fmt: skip
        with runtime:
            service = RolloutService(runtime=runtime, queue=queue, config=config, run=run, pad_id=0)
            for step in range(STEPS):
                queue.done.clear()
                begun = time.process_time()
                service.submit(
                    [
                        Prompt(uid=f"{step}-{place}", task=task, rollouts=GROUP, step=step, partition="train")
                        for place, task in enumerate(tasks)
                    ]
                )
                assert queue.done.wait(120), "the rollouts did not end"
                costs.append((client.answered_cpu_s - begun, time.process_time() - client.answered_cpu_s))
                service.finish_sampling("train", step, timer.split())
    return tuple(1000 * median(part) / rollouts for part in zip(*costs[WARM_UP:], strict=True))


if __name__ == "__main__":
    main()

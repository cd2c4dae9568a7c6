"""CPU time of a rollout with one call, in the process with store and proxy, and in those of agents and store.

Agents run in separate processes. A replacement of verl's inference servers answers all of them at the same moment with
256 tokens, as happens with replies of equal length. During the time measured here no GPU has work.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil

from benchmarks._processes import our_store, running, store_process
from benchmarks._results import record

AGENT, REWARD = "dev.gpu.agents:once", "dev.gpu.agents:coin"
"""Random rewards: a step whose answers and rewards are all the same ends a run."""
ROLLOUTS = (128, 512)
GROUP_SIZE, REPLY_TOKENS = 8, 256
STEPS, WARM_UP = 5, 1


@dataclass(frozen=True)
class _Output:
    token_ids: list[int] = field(default_factory=lambda: [100 + each for each in range(REPLY_TOKENS)])
    log_probs: list[float] = field(default_factory=lambda: [-0.5] * REPLY_TOKENS)
    extra_fields: dict[str, Any] = field(default_factory=dict)


class TooFewError(Exception):
    """Not all rollouts run at once, so none of them is answered."""


class _Client:
    """Replaces verl's client: it answers when the requests of all rollouts have arrived."""

    def __init__(self, rollouts: int) -> None:
        self._rollouts, self._requests, self._complete = rollouts, 0, asyncio.Event()
        self.answered_cpu_s, self.most = 0.0, 0

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> _Output:
        self._requests += 1
        self.most = max(self.most, self._requests % self._rollouts)
        complete = self._complete
        if self._requests % self._rollouts:
            await complete.wait()
        else:
            self.answered_cpu_s, self._complete = time.process_time(), asyncio.Event()
            complete.set()
        return _Output()


class _Queue:
    """Replaces TransferQueue: it only counts the finished groups."""

    def __init__(self, groups: int) -> None:
        self._groups, self._finished, self.done = groups, 0, threading.Event()

    async def set_status(self, uid: str, partition: str, status: str) -> None:
        assert status != "failure", f"group {uid} has no rewards"
        if status == "finished":
            self._finished += 1
            if self._finished % self._groups == 0:
                self.done.set()

    async def put(self, rows: Sequence[Any], partition: str) -> None:
        """Drop the rows."""

    async def clear(self, keys: Sequence[str], partition: str) -> None:
        """Nothing is stored."""


def main() -> None:
    """Print CPU milliseconds per rollout, with the run's own store and an external one.

    Those of this process before and after the replies, of the agents' processes, and of the external store.
    """
    print(f"{'rollouts':>10}{'store':>12}{'before':>10}{'after':>10}{'agents':>10}{'store':>10}   CPU ms a rollout")
    for rollouts in ROLLOUTS:
        for external in (False, True):
            store = "external" if external else "the run's"
            with _external_store(rollouts) if external else nullcontext() as server:
                try:
                    before, after, agents, stored = _measure(rollouts, server)
                except TooFewError as error:
                    print(f"{rollouts:10}{store:>12}   left out: {error}", flush=True)
                    continue
            print(f"{rollouts:10}{store:>12}{before:10.2f}{after:10.2f}{agents:10.2f}{stored:10.2f}", flush=True)
            name = f"a rollout of one call, {rollouts} at once, store {store}: "
            record(f"{name}store and proxy", before + after, unit="CPU ms")
            record(f"{name}agents", agents, unit="CPU ms")
            if external:
                record(f"{name}the external store", stored, unit="CPU ms")


@contextmanager
def _external_store(rollouts: int) -> Iterator[tuple[str, psutil.Process]]:
    """Run a durable store and two runner processes; yields the store's address and process."""
    with tempfile.TemporaryDirectory() as folder, store_process(our_store(folder)) as (address, process):
        runner = [sys.executable, "-m", "groundwire.train.runner", "--external-store-address", address]
        runner += ["--n-runners", str(rollouts // 2), "--backend", "custom", "--agent", AGENT, "--domain", "spider"]
        runner += ["--reward", REWARD]
        with running(runner, runner):
            yield address, process


def _children_cpu_s(store: psutil.Process | None) -> tuple[float, float]:
    """CPU seconds of the agents' processes, and of the external store's."""
    seconds = {child.pid: sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True)}
    stored = seconds.pop(store.pid) if store is not None else 0.0
    return sum(seconds.values()), stored


def _measure(rollouts: int, server: tuple[str, psutil.Process] | None) -> tuple[float, ...]:
    from groundwire import domains
    from groundwire.tools.startup import freeze_objects
    from groundwire.train.artifacts.run_dir import RunDir
    from groundwire.train.config.run_config import RunConfig
    from groundwire.train.policy import STARTER
    from groundwire.train.policy.model import load_policy
    from groundwire.train.rollouts.factory import make_backend, make_reward
    from groundwire.train.rollouts.runtime import RolloutRuntime
    from groundwire.train.step_timer import StepTimer
    from groundwire.train.verl.engine import VerlEngine
    from groundwire.train.verl.rollout_service import Prompt, RolloutService

    runners: dict[str, Any] = {"n_runners": rollouts, "runner_processes": 2}
    address, store = server or (None, None)
    if address is not None:
        runners = {"n_runners": 0, "external_store_address": address}
    config = RunConfig(backend="custom", agent=AGENT, reward=REWARD, max_tokens=REPLY_TOKENS, **runners)
    domain, timer, groups = domains.get("spider"), StepTimer(), rollouts // GROUP_SIZE
    tasks = domain.load().train[:groups]
    client, queue = _Client(rollouts), _Queue(groups)
    engine: Any = VerlEngine(client, load_policy(STARTER)[1], max_model_len=2048, timer=timer, server="vllm")
    costs = []
    freeze_objects()  # as with verl
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
                started_s, others_s = time.process_time(), _children_cpu_s(store)
                service.submit(
                    [
                        Prompt(uid=f"{step}-{place}", task=task, rollouts=GROUP_SIZE, step=step, partition="train")
                        for place, task in enumerate(tasks)
                    ]
                )
                if not queue.done.wait(config.rollout_timeout_s):
                    raise TooFewError(
                        f"{client.most} of {rollouts} rollouts run at once: the machine has no memory "
                        "or processors for more"
                    )
                ended_s = time.process_time()
                agents_s, stored_s = (now - then for now, then in zip(_children_cpu_s(store), others_s, strict=True))
                costs.append((client.answered_cpu_s - started_s, ended_s - client.answered_cpu_s, agents_s, stored_s))
                service.finish_sampling("train", step, timer.split())
    return tuple(1000 * median(part) / rollouts for part in zip(*costs[WARM_UP:], strict=True))


if __name__ == "__main__":
    main()

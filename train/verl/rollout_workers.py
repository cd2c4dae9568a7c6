"""Rollouts in processes beside verl's trainer, which Ray runs.

A rollout costs CPU time: its agent, the proxy, the store, the chat template and verl's client. A GPU samples more
rollouts than one process can run. So the groups of a step are divided among several processes, and the trainer's own
process only gets their results.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from groundwire import domains
from groundwire.tools.startup import freeze_objects, silence_libraries
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.rollouts.event_loop import EventLoopThread
from groundwire.train.rollouts.factory import make_backend, make_reward
from groundwire.train.rollouts.outcome import final_outcome
from groundwire.train.rollouts.runtime import RolloutRuntime
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout
from groundwire.train.verl.engine import VerlEngine
from groundwire.train.verl.hydra_config import why_unconstrained
from groundwire.train.verl.rows import RowWriter
from groundwire.train.verl.shared_prefixes.prefixes import rollouts_together

T = TypeVar("T")
_log = logging.getLogger(__name__)
_CHECK_S = 0.5
_MAX_BLOCKED_S = 60.0
_MOST_START_S = 0.2  # of a group whose agents keep the processor longer
_TIMER_S, _LATE_S, _TIMERS_IN_TIME = 0.001, 0.002, 3  # a busy loop runs a timer late; one in time may be chance


class RolloutWorker:
    """An actor of Ray with a store, a proxy and agents of its own. It runs rollouts after :meth:`start`."""

    def __init__(self) -> None:
        self._timer, self._turn = StepTimer(), asyncio.Lock()

    def load(self) -> None:
        """Import what verl's client needs, which takes seconds."""
        import groundwire.train.verl.shared_prefixes.routing  # noqa: F401

    def start(self, verl: Any, client: Any, number: int, workers: int) -> None:
        """``verl`` is its whole configuration and ``client`` reaches its servers; this is ``number`` of ``workers``."""
        from groundwire.train.verl.shared_prefixes.routing import KeyedClient

        silence_libraries()
        config, run = _share(run_config(verl), number, workers), RunDir.open(verl.groundwire.run_dir)
        rollout = verl.actor_rollout_ref.rollout
        domain = domains.get(config.domain)
        interrupted = verl.trainer.v1.trainer_mode != "sync"
        engine: Any = VerlEngine(  # it has the methods of the embedded engine that the policy server uses
            client if interrupted else KeyedClient(client),
            load_tokenizer(verl),
            max_model_len=int(rollout.max_model_len),
            timer=self._timer,
            server=rollout.name,
            interrupted=interrupted,
            together=rollouts_together(config.tasks_per_step, rollout.n, _servers(verl)),
            why_unconstrained=why_unconstrained(verl),
        )
        self._runtime = RolloutRuntime(
            engine=engine,
            backend=make_backend(config),
            domain=domain,
            reward=make_reward(config, domain),
            timer=self._timer,
            config=config,
            run=run,
            resources_id=f"{run.resources_id}-{number}",
            server={
                "tool_format": rollout.multi_turn.format,
                "template_options": dict(verl.data.get("apply_chat_template_kwargs") or {}),
            },
        )
        self._runtime.__enter__()
        freeze_objects()

    async def run(self, requests: Sequence[Rollout], deadline_s: float) -> list[Rollout]:
        """As :meth:`.RolloutRuntime.run`."""
        submitted = self._runtime.submit(
            lambda collector: run_in_turn(self._turn, lambda: collector.run(requests, deadline_s=deadline_s))
        )
        running = asyncio.wrap_future(submitted)
        while not (await asyncio.wait({running}, timeout=_CHECK_S))[0]:
            if failure := self._runtime.runner_failure():
                raise RolloutsFailedError(failure)
        return share_prompts(running.result())

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        return self._timer.split()

    def runners_lost(self) -> int:
        """As :meth:`.RolloutRuntime.runners_lost`."""
        return self._runtime.runners_lost()

    def stop(self) -> None:
        """End all parts."""
        self._runtime.__exit__(None, None, None)


def share_prompts(rollouts: list[Rollout]) -> list[Rollout]:
    """Let calls with equal prompts have one list: it is sent once to the trainer's process, and from there as rows."""
    prompts: dict[tuple[int, ...], list[int]] = {}
    for call in (call for rollout in rollouts for call in rollout.calls):
        call.prompt_ids = prompts.setdefault(tuple(call.prompt_ids), call.prompt_ids)
    return rollouts


async def run_in_turn(turn: asyncio.Lock, group: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Start ``group`` when the event loop has nothing to do but wait: it has run timers in time for a while.

    Agents need the processor before their first call. Started together, all of them would call at the end of that time.
    """
    loop, in_time = asyncio.get_running_loop(), 0
    running: asyncio.Future[T] | None = None
    try:
        async with turn:
            running = asyncio.ensure_future(group())
            end = loop.time() + _MOST_START_S
            while in_time < _TIMERS_IN_TIME and (due := loop.time() + _TIMER_S) < end:
                await asyncio.sleep(_TIMER_S)
                in_time = in_time + 1 if loop.time() < due + _LATE_S else 0
        return await running
    finally:
        if running is not None:
            running.cancel()  # without effect on a group that has ended


@dataclass(eq=False)
class _Worker:
    actor: Any
    started: Any
    open: int = 0  # rollouts


class RolloutWorkers:
    """Divides groups among workers. It has the methods of the runtime and of the collector that the service calls.

    ``start`` makes the worker of a number and starts it; returns both. It is called again for a worker whose process
    has ended; the rollouts of that are then repeated, ``retries`` times.
    """

    def __init__(self, start: Callable[[int], tuple[Any, Any]], number: int, *, retries: int) -> None:
        self._start, self._retries, self._lost = start, retries, 0
        self._loop = EventLoopThread(asyncio.new_event_loop(), max_blocked_s=_MAX_BLOCKED_S)
        self._loop.start()

        async def started() -> list[_Worker]:
            workers = [_Worker(*start(index)) for index in range(number)]
            await asyncio.gather(*(worker.started for worker in workers))
            return workers

        self._workers = self._loop.call(started())

    def submit(self, work: Callable[[RolloutWorkers], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start ``work`` on the event loop and return at once."""
        return asyncio.run_coroutine_threadsafe(work(self), self._loop.loop)

    def runner_failure(self) -> str:
        """Always "": a worker's failure is an error of the rollouts that it runs."""
        self._loop.check()
        return ""

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase since the last call, as means of the workers."""
        of_workers = [seconds for seconds in self._loop.call(self._ask("seconds")) if isinstance(seconds, dict)]
        phases = of_workers[0] if of_workers else ()
        return {phase: fmean(seconds[phase] for seconds in of_workers) for phase in phases}

    def runners_lost(self) -> int:
        """How many processes that run rollouts have ended since the last call: workers, and runners of theirs."""
        of_workers = [count for count in self._loop.call(self._ask("runners_lost")) if isinstance(count, int)]
        lost, self._lost = self._lost + sum(of_workers), 0
        return lost

    def stop(self) -> None:
        """End the workers' parts. A process that has ended has none."""

        async def stop() -> None:
            for error in await self._ask("stop"):
                if isinstance(error, Exception) and not _process_ended(error):
                    _log.warning("a rollout process did not end its parts: %s", getattr(error, "cause", None) or error)

        self._loop.stop(stop())

    async def _ask(self, method: str) -> list[Any]:
        """The result of this method of each worker, or its error."""
        answers = (getattr(worker.actor, method).remote() for worker in self._workers)
        return await asyncio.gather(*answers, return_exceptions=True)

    async def run(self, requests: Sequence[Rollout], *, deadline_s: float) -> list[Rollout]:
        """Run a group's requests by one worker; returns their results."""
        deadline, failure = time.monotonic() + deadline_s, ""
        for _ in range(1 + self._retries):
            number, worker = min(enumerate(self._workers), key=lambda numbered: numbered[1].open)
            worker.open += len(requests)
            try:
                await worker.started
                return await worker.actor.run.remote(requests, deadline - time.monotonic())
            except Exception as error:
                if not _process_ended(error):
                    raise getattr(error, "cause", None) or error from None
                failure = f"the process that ran it ended: {error}"
                if self._workers[number] is worker:
                    self._lost += 1
                    message = "rollout process %d of %d has ended, and is started again: %.300s"
                    _log.warning(message, number + 1, len(self._workers), error)
                    self._workers[number] = _Worker(*self._start(number))
            finally:
                worker.open -= len(requests)
        for request in requests:
            request.outcome = final_outcome(request, not_stored=failure)
        return list(requests)


class WorkerProcesses:
    """``rollout`` processes of :class:`.RolloutWorker`, and one of :class:`.RowWriter` for every eight of them."""

    def __init__(self, rollout: int) -> None:
        # A rollout takes more than ten times as long as writing its row.
        self.row_writers = [start_actor(RowWriter, restarts=True) for _ in range(math.ceil(rollout / 8))]
        self._rollout = [start_actor(RolloutWorker) for _ in range(rollout)]
        for worker in self._rollout:
            worker.load.remote()

    def rollout_worker(self) -> Any:
        """A worker that is not in use, or a new one."""
        return self._rollout.pop() if self._rollout else start_actor(RolloutWorker)


def start_actor(kind: type, *, restarts: bool = False) -> Any:
    """An actor of Ray of the class ``kind``, on this host.

    With ``restarts`` Ray starts it again when its process ends, and repeats its open calls.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    repeats = dict.fromkeys(("max_restarts", "max_task_retries"), -1 if restarts else 0)
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=here, **repeats).remote()


def run_config(verl: Any) -> RunConfig:
    """The run's settings, which are a part of verl's configuration."""
    from omegaconf import OmegaConf

    return RunConfig(**OmegaConf.to_container(verl.groundwire.config, resolve=False))


def load_tokenizer(verl: Any) -> Any:
    """The model's tokenizer, with verl's settings."""
    from transformers import AutoTokenizer
    from verl.utils.fs import copy_to_local

    model = verl.actor_rollout_ref.model
    path = copy_to_local(model.tokenizer_path or model.path)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def _share(config: RunConfig, number: int, workers: int) -> RunConfig:
    """The settings of worker ``number`` of ``workers``."""
    runners = -(-config.n_runners // workers)
    if config.n_runners >= config.tasks_per_step * config.group_size:  # one for each rollout of a step, here too
        runners = max(runners, -(-config.tasks_per_step // workers) * config.group_size)
    share: dict[str, Any] = {"n_runners": runners, "runner_processes": int(config.runner_python is not None)}
    return config.model_copy(update=share | ({"proxy_host": config.proxy_address[0]} if number else {}))


def _servers(verl: Any) -> int:
    rollout, trainer = verl.actor_rollout_ref.rollout, verl.trainer
    machines = rollout if trainer.v1.trainer_mode == "separate_async" else trainer
    gpus = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    return max(1, machines.nnodes * machines.n_gpus_per_node // gpus)


def _process_ended(error: Exception) -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(error, ray.exceptions.RayActorError)

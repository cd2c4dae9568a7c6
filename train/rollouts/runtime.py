"""Everything that a rollout needs, in one process: policy server, proxy, store and runners on one event loop.

The loop runs in its own thread (:mod:`groundwire.train.rollouts.event_loop`), so the trainer can be read as plain
sequential code: it hands over a batch of jobs, waits, and updates the model while the loop is idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from agentlightning.store.base import LightningStore

from groundwire import adapters, rewards
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.domains import Domain
from groundwire.tools.step_timer import StepTimer, timed_event_loop
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.policy.server import PolicyServer
from groundwire.train.policy.types import Engine
from groundwire.train.rollouts.agent import RolloutAgent
from groundwire.train.rollouts.collector import RolloutCollector, RolloutRequest, RolloutResult
from groundwire.train.rollouts.event_loop import EventLoopThread
from groundwire.train.rollouts.no_runner_warning import NoRunnerWarning
from groundwire.train.rollouts.runner_pool import POLL_S, RunnerPool
from groundwire.train.rollouts.runner_processes import RunnerProcesses
from groundwire.train.store.client import StoreClient
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.span_sink import LightningSpanSink

__all__ = ["RolloutRuntime", "Upstream"]

T = TypeVar("T")
MODEL_NAME = "policy"
_LEAST_PATIENCE_S = 10.0
_SPAN_BYTES = 64 << 20  # the store's spans are read once, right after their rollout; older ones may go


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """A policy that is served elsewhere, in place of an engine here: any OpenAI-compatible endpoint.

    ``ids`` says whether it may be asked for token ids, which some refuse.
    """

    base_url: str
    model: str
    api_key: str | None = None
    ids: bool = True


class RolloutRuntime:
    """A context manager around the running servers; :meth:`run` is its one job.

    ``engine`` is an :class:`Engine` or answers like one, and then ``server`` are further options of its
    :class:`PolicyServer`; or it is the :class:`Upstream` of a policy that is served elsewhere.
    The store that lives with the run forgets the oldest spans beyond ``span_bytes``.
    """

    def __init__(
        self,
        *,
        engine: Engine | Upstream,
        backend: adapters.Backend,
        domain: Domain,
        reward: rewards.Reward,
        timer: StepTimer,
        config: RunConfig,
        run: RunDir,
        server: Mapping[str, Any] | None = None,
        span_bytes: int = _SPAN_BYTES,
    ) -> None:
        self._server_options, self._span_bytes = dict(server or {}), span_bytes
        self._engine, self._timer, self._config, self._run_dir = engine, timer, config, run

        async def timed(task: Any, answer: str, steps: Any) -> float | dict[str, float]:
            with timer.busy("reward"):
                return await reward(task, answer, steps)

        self.agent = RolloutAgent(backend=backend, domain=domain, reward=timed, timeout_s=config.rollout_timeout_s)
        # As long as a rollout may take: a loop that is blocked for longer has none left that could succeed. But imports
        # on a busy machine hold it up for seconds, too.
        patience_s = max(config.rollout_timeout_s, _LEAST_PATIENCE_S)
        self._loop = EventLoopThread(timed_event_loop(timer), patience_s=patience_s)

    def __enter__(self) -> RolloutRuntime:
        self._loop.start()
        try:
            self._loop.call(self._start())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._loop.stop(self._stop())
        finally:
            if not isinstance(self._engine, Upstream):
                self._engine.close()

    def run(
        self, jobs: Sequence[RolloutRequest], *, deadline_s: float, on_end: Callable[[], None] = lambda: None
    ) -> list[RolloutResult]:
        """Run a batch of rollouts; :meth:`RolloutCollector.run` says how it ends.

        Raises :class:`groundwire.train.rollouts.errors.EventLoopError` where an agent blocks them all.
        """
        return self._loop.call(self._collector.run(jobs, deadline_s=deadline_s, on_end=on_end))

    def begin(self, work: Callable[[RolloutCollector], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start ``work`` on the loop of the rollouts and return at once; :meth:`wait` brings its result."""
        return asyncio.run_coroutine_threadsafe(work(self._collector), self._loop.loop)

    def wait(self, begun: Future[T]) -> T:
        """The result of what :meth:`begin` began. Raises :class:`groundwire.train.rollouts.errors.EventLoopError` where
        it cannot end.
        """
        return self._loop.wait(begun)

    def ended_runners(self) -> str:
        """Why no rollout will end any more, where the run's runner processes are gone; else "".

        Raises :class:`groundwire.train.rollouts.errors.EventLoopError` where it is an agent that blocks them all.
        """
        self._loop.check()
        return self._processes.ended() if self._processes is not None else ""

    async def _start(self) -> None:
        self._running: list[Any] = []
        self._processes: RunnerProcesses | None = None
        config, external = self._config, self._config.external_store_address
        store: LightningStore
        if external is None:
            store = MemoryStore(on_attempt_end=self._nudge, span_bytes=self._span_bytes)
        else:
            store = StoreClient(external, timeout_s=config.step_deadline_s)
            await self._run(store)
        proxy = self._proxy(store)
        await self._run(proxy)
        if isinstance(self.agent.backend, adapters.Stoppable):
            self._running.append(self.agent.backend)
        runners = RunnerPool(
            store=store,
            agent=self.agent,
            n_runners=0 if config.runner_processes else config.n_runners,
            poll_interval=5.0 if external is None else POLL_S,
            on_attempt_end=self._nudge,
        )
        await self._run(runners)
        elsewhere = external is not None or config.runner_processes > 0
        if config.runner_processes:
            self._processes = RunnerProcesses(store, config)
            await self._run(self._processes)
        attendance = None
        if external is not None:
            agent = f" --agent {config.agent}" if config.agent else ""
            runner = f"python -m train.runner --external-store-address {external} --backend {config.backend}{agent}"
            attendance = NoRunnerWarning(store, start=f"{runner} --domain {config.domain}")
        self._collector = RolloutCollector(
            store=store,
            proxy=proxy,
            model=MODEL_NAME,
            retries=config.retries,
            rollout_timeout_s=config.rollout_timeout_s,
            wake=runners.wake,
            resources_id=self._run_dir.resources_id,
            settings=config.for_agents(),
            unresponsive_s=config.unresponsive_s if elsewhere else None,
            attendance=attendance,
        )

    def _proxy(self, store: LightningStore) -> LLMProxy:
        engine, config = self._engine, self._config
        if isinstance(engine, Upstream):
            served: dict[str, Any] = {"upstreams": [engine.base_url], "model": engine.model}
            served |= {"api_key": engine.api_key, "ids": engine.ids}
        else:
            served = {"policy": PolicyServer(engine, model_name=MODEL_NAME, **self._server_options)}
        return LLMProxy(sink=LightningSpanSink(store), host=config.proxy_host, port=config.proxy_port, **served)

    def _nudge(self, rollout_id: str) -> None:
        self._collector.nudge(rollout_id)

    async def _run(self, part: Any) -> None:
        await part.start()
        self._running.append(part)

    async def _stop(self) -> None:
        for part in reversed(self._running):
            await part.stop()

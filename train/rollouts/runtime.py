"""Everything that rollouts need, on one event loop: store, proxy with the policy server, runners, collector.

The loop runs in a separate thread (:mod:`groundwire.train.rollouts.event_loop`), so a trainer is plain sequential
code: it submits a batch of requests, waits for the results, and updates the model while the loop is idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from types import TracebackType
from typing import Any, TypeVar

from groundwire import adapters, rewards
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.replay import Replay
from groundwire.adapters.tracing.spans import TraceLimit
from groundwire.domains import Domain
from groundwire.tools.http.access_token import given_token, token_for
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.failures import failure_scores
from groundwire.train.config.run_config import RunConfig
from groundwire.train.policy.server import PolicyServer
from groundwire.train.policy.types import Engine
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.rollouts.event_loop import EventLoopThread
from groundwire.train.rollouts.outcome import FailureScores, GroupComparison
from groundwire.train.rollouts.runner.agent import RolloutAgent
from groundwire.train.rollouts.runner.pool import NOTIFIED_POLL_S, POLL_S, RunnerPool
from groundwire.train.rollouts.runner.request_check import RequestCheck
from groundwire.train.rollouts.runner_processes import RunnerProcesses
from groundwire.train.rollouts.silent_runners import SilentRunners
from groundwire.train.step_timer import StepTimer, timed_event_loop
from groundwire.train.store.base import RolloutStore
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.remote import RemoteStore
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.sqlite import MEMORY

T = TypeVar("T")
MODEL_NAME = "policy"
UNRESPONSIVE_S = 30.0
"""Seconds without a heartbeat after which a remote runner's rollout goes to another runner."""
_MIN_BLOCKED_S = 10.0  # imports on a busy machine block the loop for seconds


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """A policy behind an OpenAI-compatible endpoint, instead of an engine in this process.

    ``ids``: whether to ask for token ids, which some endpoints refuse.
    """

    base_url: str
    model: str
    api_key: str | None = None
    ids: bool = True


class RolloutRuntime:
    """A context manager: starts and stops all parts; :meth:`run` runs a batch of rollouts.

    ``server`` are options of the :class:`PolicyServer` in front of an ``engine`` of this process. ``resources_id``
    replaces the run's, for several runtimes of a run with one store. ``replay`` are rollouts that are answered from
    records.
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
        resources_id: str | None = None,
        replay: Replay | None = None,
    ) -> None:
        self._replay = replay
        self._resources_id, self._bundled = resources_id or run.resources_id, domain.bundled
        self._server_options = server or {}
        self._engine, self._config, self._run_dir = engine, config, run
        self.scores = FailureScores(config.failures, run)

        @wraps(reward)
        async def timed_reward(task: Any, answer: str, steps: Any) -> float | dict[str, float]:
            with timer.busy("reward"):
                return await reward(task, answer, steps)

        if (compare := rewards.comparison_of(reward)) and replay is not None:
            raise ConfigError("the reward ranks the answers to a task, and a replay has one: give another --reward")
        recorded = chain.from_iterable(run.rollout_batches(GroupComparison.COLUMNS, []))
        scored = failure_scores(config.failures)
        self._compare = GroupComparison(compare, scored, recorded, timer) if compare else None
        check = None
        if (address := config.external_store_address) and config.n_runners:
            check = RequestCheck.of(
                config, domain, data_dir=config.data_dir, policy_hosts=[config.proxy_address[0]], store=address
            )
        self._agent = RolloutAgent(
            backend=backend,
            domain=domain,
            reward=timed_reward,
            timeout_s=config.rollout_timeout_s,
            failures=config.failures,
            agent_columns=config.agent_columns,
            check=check,
        )
        # If the loop is blocked for longer than a rollout may take, none of the running rollouts can succeed.
        max_blocked_s = max(config.rollout_timeout_s, _MIN_BLOCKED_S)
        self._loop = EventLoopThread(timed_event_loop(timer), max_blocked_s=max_blocked_s)
        self._parts = AsyncExitStack()
        self._processes: RunnerProcesses | None = None
        self._silent: SilentRunners | None = None
        self._lost_before = 0

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
            self._loop.stop(self._parts.aclose())
        finally:
            if not isinstance(self._engine, Upstream):
                self._engine.close()

    @property
    def model_name(self) -> str:
        """The policy's own name."""
        return self._engine.model if isinstance(self._engine, Upstream) else MODEL_NAME

    @property
    def view(self) -> AgentView:
        """What agents see of a task."""
        return self._agent.view

    def run(
        self,
        rollouts: Sequence[Rollout],
        *,
        deadline_s: float,
        on_end: Callable[[], None] = lambda: None,
        show: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        """As :meth:`RolloutCollector.run`. Raises :class:`EventLoopError`, too."""
        return self.call(lambda collector: collector.run(rollouts, deadline_s=deadline_s, on_end=on_end, show=show))

    def call(self, work: Callable[[RolloutCollector], Coroutine[Any, Any, T]]) -> T:
        """Do ``work`` on the loop of the rollouts; an interrupt of the caller cancels it. Raises as :meth:`run`."""
        return self._loop.call(work(self._collector))

    def submit(self, work: Callable[[RolloutCollector], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start ``work`` on the loop of the rollouts and return at once."""
        return asyncio.run_coroutine_threadsafe(work(self._collector), self._loop.loop)

    def runner_failure(self) -> str:
        """As :meth:`RunnerProcesses.failure`. Raises :class:`EventLoopError` if an agent blocks the loop."""
        self._loop.check()
        return self._processes.failure() if self._processes is not None else ""

    def runners_lost(self) -> int:
        """How many runners in other processes were lost since the last call."""
        lost = sum(part.lost for part in (self._processes, self._silent) if part is not None)
        self._lost_before, before = lost, self._lost_before
        return lost - before

    async def _start(self) -> None:
        config, external = self._config, self._config.external_store_address
        store: RolloutStore
        if external is not None:
            token = token_for(external, config.token_file)
            store = RemoteStore(external, token=token, timeout_s=config.step_deadline_s)
            await self._start_part(store)
        elif config.runner_processes:
            store = LightningStore(MEMORY)  # which can be served to them
        else:
            store = MemoryStore()
        self._parts.callback(self._agent.close)
        proxy = self._proxy(store)
        await self._start_part(proxy)
        self._parts.push_async_callback(self._agent.backend.stop)
        runners: RunnerPool | RunnerProcesses
        if isinstance(store, LightningStore):
            runners = self._processes = RunnerProcesses(store, config, bundled=self._bundled)
        else:
            poll_s = NOTIFIED_POLL_S if external is None else POLL_S
            runners = RunnerPool(store=store, agent=self._agent, n_runners=config.n_runners, poll_s=poll_s)
        if external or self._processes is not None:
            end = self._processes.end if self._processes is not None else None
            self._silent = SilentRunners(store, silent_s=UNRESPONSIVE_S, end=end)
        self._collector = RolloutCollector(
            store=store,
            proxy=proxy,
            model=MODEL_NAME,
            retries=config.retries,
            scores=self.scores,
            attempt_timeout_s=2 * config.rollout_timeout_s + config.reward_timeout_s,
            trace_limit=TraceLimit(
                spans=config.max_spans, retry=adapters.TraceLimitError.kind not in failure_scores(config.failures)
            ),
            notify_runners=runners.notify,
            runner_failure=self.runner_failure,
            resources_id=self._resources_id,
            settings=config.for_agents(),
            prompts=config.prompts,
            on_result=self._otlp(),
            compare=self._compare,
            unresponsive_s=UNRESPONSIVE_S if self._silent is not None else None,
            silent_runners=self._silent,
            runner_command=config.runner_command() if external else "",
        )
        await self._start_part(runners)

    def _otlp(self) -> Callable[[Rollout], None]:
        """The function that sends each result to the run's viewer, if it has one."""
        config = self._config
        if config.otlp is None:
            return lambda result: None
        from groundwire.train.rollouts.otlp import OtlpExport

        export = OtlpExport(config.otlp, run=self._run_dir.path.name, domain=config.domain)
        self._parts.push_async_callback(asyncio.to_thread, export.close)
        return export.export

    def _proxy(self, store: RolloutStore) -> LLMProxy:
        engine, config = self._engine, self._config
        if isinstance(engine, Upstream):
            policy: dict[str, Any] = {"upstreams": [engine.base_url], "model": engine.model}
            policy |= {"api_key": engine.api_key, "ids": engine.ids}
        else:
            policy = {"policy": PolicyServer(engine, model_name=MODEL_NAME, **self._server_options)}
        return LLMProxy(
            sink=store,
            max_calls=config.max_calls,
            host=config.proxy_address[0],
            port=config.proxy_address[1],
            token=given_token(config.token_file),
            replay=self._replay,
            **policy,
        )

    async def _start_part(self, part: Any) -> None:
        await part.start()
        self._parts.push_async_callback(part.stop)

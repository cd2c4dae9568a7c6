"""One rollout for Agent Lightning's runner: the backend answers, the reward scores, both are reported as spans.

The backend gets a :class:`adapters.Question`; only the reward gets the whole task with its gold answer. A failure is
stored as a typed span before the attempt ends, so the trainer knows it wherever the runner is. It is then raised, and
the store retries the rollout, unless the failure is scored (:mod:`groundwire.train.config.failures`) or another attempt
would fail as well: a prompt that is too long, a judge that abstains.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agentlightning.emitter import emit_reward
from agentlightning.litagent import LitAgent
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout, NamedResources, ProxyLLM, Span, SpanCoreFields, TraceStatus

from groundwire import adapters, rewards
from groundwire.adapters.tracing.sampling import attempt_sampling
from groundwire.domains import Domain, answer_form, visible_columns
from groundwire.tools.errors import UserError
from groundwire.tools.secrets import mask_secrets, masked_values
from groundwire.tools.sql import DatabaseCopies
from groundwire.train.config.failures import zero_failures
from groundwire.train.config.run_config import AgentSettings
from groundwire.train.rollouts.errors import RequestRefusedError
from groundwire.train.rollouts.factory import make_backend, make_reward
from groundwire.train.rollouts.outcome import ANSWER_SPAN, FAILURE_SPAN
from groundwire.train.rollouts.request_check import MAIN_LLM, POLICY_RESOURCE, RequestCheck

__all__ = ["RemoteRolloutAgent", "RolloutAgent", "store_failure"]

_log = logging.getLogger(__name__)
_NEVER_RETRIED = frozenset({"prompt_too_long", "judge_abstained"})
_MAX_AGENTS = 256
"""Most agents of a runner. Each combination of settings has its own, with its connections and processes."""


class RolloutAgent(LitAgent[dict[str, Any]]):
    """Runs one backend on the tasks of one domain, scored by one reward.

    ``failures`` is the setting of that name; ``check`` is for the requests of a store that other processes can write
    to. An agent gets one of the ``copies`` of its database, unless its backend has ``reads_only = True``; the reward
    reads the original.
    """

    def __init__(
        self,
        *,
        backend: adapters.Backend,
        domain: Domain,
        reward: rewards.Reward,
        timeout_s: float = 120.0,
        failures: str = "",
        check: RequestCheck | None = None,
        copies: DatabaseCopies | None = None,
    ) -> None:
        super().__init__()
        self._copies = copies or DatabaseCopies()
        self.backend, self.domain, self.reward, self.timeout_s = backend, domain, reward, timeout_s
        self._check, self._final = check, _NEVER_RETRIED | zero_failures(failures)

    async def rollout_async(
        self, task: dict[str, Any], resources: NamedResources, rollout: AttemptedRollout
    ) -> list[SpanCoreFields]:
        """Answer and score one task; returns the spans for the runner to store."""
        started, spans = time.time(), list[SpanCoreFields]()
        try:
            if self._check is not None:
                self._check.check(task, resources, rollout)
            if isinstance(self.backend, adapters.LitAgentBackend):
                own = self._own_reward(self.backend, task, resources, rollout)
                return [await asyncio.wait_for(own, self.timeout_s)]
            answer = await asyncio.wait_for(self._answer(task, resources, rollout), self.timeout_s)
            spans.append(_answer_span(answer, started))
            spans.append(await self._score(task, answer))
            return spans
        except (asyncio.TimeoutError, RequestRefusedError, adapters.BackendError, rewards.RewardError) as error:
            if isinstance(error, asyncio.TimeoutError):
                kind, message = "timeout", f"no answer within {self.timeout_s:g} s"
            else:
                kind, message = error.kind, str(error)
            if isinstance(error, RequestRefusedError):
                _log.warning("rollout %.100r was refused: %s", rollout.rollout_id, error)
            if isinstance(error, adapters.BackendError) and error.steps:
                spans.append(_answer_span(adapters.Answer(text="", steps=list(error.steps)), started))
            if kind in self._final:
                return [*spans, _failure(kind, message, started)]
            await store_failure(self.get_runner().get_store(), rollout, kind, message, started)
            raise

    async def _answer(
        self, task: dict[str, Any], resources: NamedResources, rollout: AttemptedRollout
    ) -> adapters.Answer:
        """The backend's answer. Raises only :class:`adapters.BackendError`."""
        _, endpoint = _policy(resources, rollout)
        async with self._private(task) as (private, database):
            question = adapters.Question(
                id=task["id"],
                text=task["question"],
                database=database,
                form=answer_form(self.domain),
                columns=visible_columns(self.domain, private),
            )
            try:
                return await self.backend.run(question, endpoint)
            except (adapters.BackendError, asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:  # an agent's SystemExit or KeyboardInterrupt ends its rollout, not the run
                raise adapters.AgentError(f"the agent raised {error!r}") from error

    @asynccontextmanager
    async def _private(self, task: dict[str, Any]) -> AsyncIterator[tuple[dict[str, Any], str]]:
        """The task with a copy in place of its database, and the copy's path."""
        database = self.domain.database(task)
        if not self._may_write(database):
            yield task, database
            return
        try:
            copy = await asyncio.to_thread(self._copies.take, database)
        except OSError as error:
            raise adapters.ToolError(
                f"the agent's copy of {database} cannot be made: {error}; make room, or set TMPDIR to another folder"
            ) from error
        reusable = True
        try:
            yield {name: copy.path if value == database else value for name, value in task.items()}, copy.path
        except asyncio.CancelledError:  # the agent's thread runs on
            reusable = False
            raise
        finally:
            self._copies.give_back(copy, reusable=reusable)

    def _may_write(self, database: str) -> bool:
        return os.path.isfile(database) and not getattr(self.backend, "reads_only", False)

    def close(self) -> None:
        """Remove the copies of databases."""
        self._copies.close()

    async def _own_reward(
        self,
        backend: adapters.LitAgentBackend,
        task: dict[str, Any],
        resources: NamedResources,
        rollout: AttemptedRollout,
    ) -> SpanCoreFields:
        """The span of the reward that a LitAgent returns. Raises only the errors of backends and rewards."""
        policy, endpoint = _policy(resources, rollout)
        backend.agent.set_runner(self.get_runner())
        # One resource: Agent Lightning warns if an agent of the first one finds two.
        given = {MAIN_LLM: policy.model_copy(update={"sampling_parameters": dict(endpoint.sampling)})}
        async with self._private(task) as (private, _):
            value = await backend.rollout(private, given, rollout, endpoint)
        if not isinstance(value, int | float):
            raise rewards.RewardError(f"the agent's rollout returned {value!r:.200}: it returns its reward as a number")
        return emit_reward(rewards.total(value), propagate=False)

    async def _score(self, task: dict[str, Any], answer: adapters.Answer) -> SpanCoreFields:
        """The reward's span. Raises only :class:`rewards.RewardError`."""
        try:
            score = await self.reward(task, answer.text, answer.steps)
        except rewards.RewardError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # rewards are written by users, too
            raise rewards.RewardError(f"the reward raised {type(error).__name__}: {error}") from error
        total = rewards.total(score)
        if not isinstance(score, dict):
            return emit_reward(total, propagate=False)
        components = {"total": total, **{name: float(value) for name, value in score.items()}}
        return emit_reward(components, primary_key="total", propagate=False)


def _policy(resources: NamedResources, rollout: AttemptedRollout) -> tuple[ProxyLLM, adapters.Endpoint]:
    """The resource of the policy, and the endpoint of an attempt."""
    policy = resources[POLICY_RESOURCE]
    assert isinstance(policy, ProxyLLM)
    sampling = attempt_sampling((rollout.metadata or {}).get("sampling"), rollout.attempt.sequence_id)
    return policy, adapters.Endpoint(
        base_url=policy.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
        model=policy.model,
        api_key=policy.api_key or "none",
        sampling={**policy.sampling_parameters, **sampling},
    )


async def store_failure(
    store: LightningStore, rollout: AttemptedRollout, kind: str, message: str, started: float
) -> None:
    """Store a failure that is about to be raised: the runner stores only spans that are returned."""
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    sequence_id = await store.get_next_span_sequence_id(rollout_id, attempt_id)
    fields = _failure(kind, message, started)
    await store.add_span(
        Span.from_core_fields(fields, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=sequence_id)
    )


def _answer_span(answer: adapters.Answer, started: float) -> SpanCoreFields:
    steps = json.dumps(answer.steps, ensure_ascii=False)
    return _span(ANSWER_SPAN, {"groundwire.text": answer.text, "groundwire.steps": steps}, started)


def _failure(kind: str, message: str, started: float) -> SpanCoreFields:
    return _span(FAILURE_SPAN, {"groundwire.kind": kind, "groundwire.message": mask_secrets(message)[:2000]}, started)


def _span(name: str, attributes: dict[str, Any], started: float) -> SpanCoreFields:
    return SpanCoreFields(
        name=name,
        attributes=masked_values(attributes),
        status=TraceStatus(status_code="OK"),
        start_time=started,
        end_time=time.time(),
    )


class RemoteRolloutAgent(LitAgent[dict[str, Any]]):
    """Runs rollouts of any training run with the backend, domain, reward and judge of ``check``.

    The settings that may differ between rollouts come with each. Raises
    :class:`groundwire.train.config.errors.ConfigError` if the backend cannot be built.
    """

    def __init__(self, check: RequestCheck) -> None:
        super().__init__()
        self._check, self._reward = check, make_reward(check.settings, check.domain)
        self._agents: dict[AgentSettings, RolloutAgent] = {}
        self._copies = DatabaseCopies()
        self._agent_for({})

    async def rollout_async(
        self, task: dict[str, Any], resources: NamedResources, rollout: AttemptedRollout
    ) -> list[SpanCoreFields]:
        """As :meth:`groundwire.train.rollouts.agent.RolloutAgent.rollout_async`, with the rollout's settings."""
        try:
            agent = self._agent_for((rollout.metadata or {}).get("settings", {}))
        except (RequestRefusedError, UserError) as error:
            _log.warning("rollout %.100r was refused: %s", rollout.rollout_id, error)
            kind = RequestRefusedError.kind
            await store_failure(self.get_runner().get_store(), rollout, kind, str(error), time.time())
            raise
        agent.set_runner(self.get_runner())
        return await agent.rollout_async(task, resources, rollout)

    async def stop(self) -> None:
        """Close the connections and processes of the backends, and check that the databases are unchanged."""
        for agent in self._agents.values():
            if isinstance(agent.backend, adapters.Stoppable):
                await agent.backend.stop()
        self._copies.close()
        if warning := self._copies.originals.warning():
            _log.warning("%s", warning)

    def _agent_for(self, given: Any) -> RolloutAgent:
        check = self._check.for_rollout(given)
        settings = check.settings
        if settings not in self._agents:
            if len(self._agents) >= _MAX_AGENTS:
                raise RequestRefusedError(
                    f"this runner has an agent for each of {_MAX_AGENTS} settings and makes no more: start it again"
                )
            self._agents[settings] = RolloutAgent(
                backend=make_backend(settings),
                domain=check.domain,
                reward=self._reward,
                timeout_s=settings.rollout_timeout_s,
                failures=settings.failures,
                check=check,
                copies=self._copies,
            )
        return self._agents[settings]

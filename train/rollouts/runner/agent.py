"""One attempt of a rollout: the backend answers, the reward scores, and both are its outcome.

The backend gets a :class:`adapters.Question`; only the reward gets the whole task with its gold answer. The store tries
a failed rollout again, unless the failure is scored (:mod:`groundwire.train.config.failures`) or would be the same.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from groundwire import adapters, rewards
from groundwire.adapters.agents.failures import agent_failure
from groundwire.adapters.tracing.emitted_spans import current_emissions
from groundwire.adapters.tracing.open_attempts import call_summary
from groundwire.adapters.tracing.sampling import attempt_sampling
from groundwire.domains import Domain, PrivateTasks, Task
from groundwire.rewards.judge.compare import compared_later
from groundwire.tools.errors import UserError
from groundwire.tools.files import shorten_repr
from groundwire.tools.infrastructure import infrastructure_errors
from groundwire.tools.secrets import mask_secrets
from groundwire.tools.types import AgentStep
from groundwire.train.config.failures import failure_scores
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.rollouts.errors import RequestRefusedError, UnreadableAnswerError
from groundwire.train.rollouts.factory import make_backend, make_reward
from groundwire.train.rollouts.runner.request_check import RequestCheck, policy_of
from groundwire.train.store.base import RolloutStore
from groundwire.train.store.rollout import Outcome, ProxyLLM, Rollout

if TYPE_CHECKING:
    from groundwire.train.rollouts.runner.lightning_agents import LitAgents

T = TypeVar("T")
_log = logging.getLogger(__name__)
_NEVER_RETRIED = frozenset({"prompt_too_long", "judge_abstained", "setup"})
_CANCEL_S = 10.0
"""How long an agent may take to end after its time; then it is left alone, and its calls are refused."""
_MANY_CALLS = 8
"""Fewer within the time limit may be slow ones of an agent that would have ended."""
_MAX_MESSAGE = 2000
_MAX_AGENTS = 256
"""Most agents of a runner: one for each combination of settings."""


class RolloutAgent:
    """Runs one backend on the tasks of one domain, scored by one reward.

    ``failures`` and ``agent_columns`` are the settings of these names; ``check`` is for the requests of a store that
    other processes can write to. An agent gets a ``private`` copy of its task, unless its backend has
    ``reads_only = True``; the reward reads the original.
    """

    def __init__(
        self,
        *,
        backend: adapters.Backend,
        domain: Domain,
        reward: rewards.Reward,
        timeout_s: float = 120.0,
        failures: str = "",
        agent_columns: str = "",
        check: RequestCheck | None = None,
        private: PrivateTasks | None = None,
    ) -> None:
        self._private_tasks = private or PrivateTasks(domain.database)
        self.backend = adapters.as_backend(backend)
        self.domain, self.reward, self.timeout_s = domain, reward, timeout_s
        self.view = AgentView.of(domain, reward, agent_columns)
        self._check, self._final = check, _NEVER_RETRIED | failure_scores(failures).keys()
        self.scoring = set[str]()
        """The rollouts whose agents have ended."""
        self._least_reward, self._has_scored = rewards.declared_range(reward)[0], False
        self._lit_agents: LitAgents | None = None

    async def run(self, rollout: Rollout, resources: Mapping[str, Any], store: RolloutStore) -> tuple[Outcome, bool]:
        """The outcome of the rollout's task, and whether the store shall try it again."""
        outcome = Outcome(least_reward=self._least_reward)
        try:
            if self._check is not None:
                self._check.check(rollout, resources)
            policy = policy_of(resources)
            endpoint = _endpoint(policy, rollout)
            if isinstance(self.backend, adapters.LitAgentBackend):
                if self._lit_agents is None:
                    from groundwire.train.rollouts.runner.lightning_agents import LitAgents

                    self._lit_agents = LitAgents(self.backend, store)
                own = self._own_reward(self._lit_agents, policy, endpoint, rollout)
                outcome.reward, outcome.reward_components = await self._within_limit(own, endpoint)
                return outcome, False
            async with self.backend.place():
                answer = await self._within_limit(self._answer(rollout.task, endpoint), endpoint)
            self.scoring.add(rollout.rollout_id)
            outcome.answer, outcome.steps, outcome.input = answer.text, answer.steps, answer.input
            outcome.judged_field, outcome.message = answer.judged_field, answer.no_call
            outcome.query_scores = await self._query_scores(rollout, answer.steps, answered=True)
            outcome.reward, outcome.reward_components = await self._score(rollout, answer)
            return outcome, False
        except (RequestRefusedError, adapters.BackendError, rewards.RewardError, UnreadableAnswerError) as error:
            outcome.failure, outcome.message = error.kind, mask_secrets(str(error))[:_MAX_MESSAGE]
            if isinstance(error, RequestRefusedError):
                _log.warning("rollout %.100r was refused: %s", rollout.rollout_id, error)
            elif isinstance(error, adapters.BackendError):
                outcome.steps, outcome.input = list(error.steps), error.input
                outcome.query_scores = await self._query_scores(rollout, error.steps, answered=False)
            unproven = error.kind == UnreadableAnswerError.kind and not self._has_scored
            return outcome, unproven or error.kind not in self._final
        finally:
            self.scoring.discard(rollout.rollout_id)

    def at_once(self, wanted: int) -> tuple[int, str]:
        """As :meth:`adapters.Backend.at_once`, with the rollouts that are scored."""
        possible, why = self.backend.at_once(wanted)
        return min(wanted, len(self.scoring) + possible), why

    async def _within_limit(self, work: Coroutine[Any, Any, T], endpoint: adapters.Endpoint) -> T:
        """The result of ``work``, in which the agent runs. Its :class:`adapters.BackendError` says who caused it."""
        running: asyncio.Future[T] = asyncio.ensure_future(work)
        waited: set[asyncio.Future[Any]] = {running}
        if (emissions := current_emissions()) is not None:
            waited.add(asyncio.wrap_future(emissions.failure))
        try:
            await asyncio.wait(waited, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if emissions is not None and emissions.failure.done():
                raise emissions.failure.result()
            if running.done():
                return running.result()
            raise await _attribute_time_limit(self.timeout_s, endpoint)
        except adapters.BackendError as error:
            raise (await _attribute(error, endpoint) if running.done() else error) from error.__cause__
        finally:
            running.cancel()
            await asyncio.wait({running}, timeout=_CANCEL_S)

    async def _answer(self, task: Task, endpoint: adapters.Endpoint) -> adapters.Answer:
        async with self._private(task) as (private, database):
            try:
                return await self.backend.run(self.view.question(private, database), endpoint)
            except (adapters.BackendError, asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:  # an agent's SystemExit or KeyboardInterrupt ends its rollout, not the run
                raise agent_failure(error) from error

    @asynccontextmanager
    async def _private(self, task: Task) -> AsyncIterator[tuple[dict[str, Any], str]]:
        """The task with a copy in place of its database, and the copy's path."""
        if self.backend.reads_only:
            yield dict(task), self.domain.database(task)
            return
        async with AsyncExitStack() as stack:
            try:
                private = await stack.enter_async_context(self._private_tasks.copy_of(dict(task)))
            except OSError as error:
                raise adapters.ToolError(
                    f"the agent's copy of {self.domain.database(task)} cannot be made: {error}; make room, or set "
                    "TMPDIR to another folder"
                ) from error
            yield private

    def close(self) -> None:
        """Remove the copies of databases."""
        self._private_tasks.close()

    async def _own_reward(
        self, agents: LitAgents, policy: ProxyLLM, endpoint: adapters.Endpoint, rollout: Rollout
    ) -> tuple[float, dict[str, float]]:
        """The reward that a LitAgent returns."""
        async with self._private(rollout.task) as (private, _):
            with rewards.in_training(rollout.mode == "train"):
                value = await agents.run(private, policy, rollout, endpoint)
        try:
            return _read_reward(value)
        except rewards.RewardError as error:
            message = f"the agent's rollout returned {shorten_repr(value)}: it returns its reward as a number"
            raise rewards.RewardError(message) from error

    async def _query_scores(self, rollout: Rollout, steps: Sequence[AgentStep], *, answered: bool) -> list[float]:
        """In validations, the rewards of what the agent tried, without the last one if that is the answer.

        Empty if the reward of one cannot be computed.
        """
        if rollout.mode != "val":
            return []
        tried = self.view.answers.tried(steps)
        scores = (
            self.view.score(self.reward, dict(rollout.task), steps[index]["input"], steps[: index + 1])
            for index in tried[: len(tried) - answered]
        )
        try:
            return [rewards.total(score) for score in await asyncio.gather(*scores)]
        except (Exception, SystemExit, KeyboardInterrupt):  # rewards are written by users, too
            return []

    async def _score(self, rollout: Rollout, answer: adapters.Answer) -> tuple[float, dict[str, float]]:
        """Raises :class:`rewards.RewardError` or :class:`UnreadableAnswerError`."""
        compared_later.set(rewards.comparison_of(self.reward) is not None)
        try:
            with rewards.in_training(rollout.mode == "train"):
                score = await self.view.score(self.reward, dict(rollout.task), answer.text, answer.steps)
        except rewards.RewardError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # rewards are written by users, too
            about_answer = isinstance(error, rewards.ABOUT_THE_ANSWER) and not infrastructure_errors(error)
            kind = UnreadableAnswerError if about_answer else rewards.RewardError
            raise kind(f"the reward raised {type(error).__name__}: {error}") from error
        reward = _read_reward(score)
        self._has_scored = True
        return reward


def _read_reward(value: Any) -> tuple[float, dict[str, float]]:
    """What a reward returned, with its named components. Raises :class:`rewards.RewardError` if that is no reward."""
    named = rewards.components(value) if isinstance(value, Mapping) else {}
    return rewards.total(value), {name: float(number) for name, number in named.items() if name != "total"}


def _endpoint(policy: ProxyLLM, rollout: Rollout) -> adapters.Endpoint:
    attempt = rollout.attempts[-1]
    return adapters.Endpoint(
        base_url=policy.get_base_url(rollout.rollout_id, attempt.attempt_id),
        model=policy.model,
        api_key=policy.api_key or "none",
        sampling={**policy.sampling_parameters, **attempt_sampling(rollout.sampling, attempt.number)},
        prompts=rollout.prompts or {},
    )


async def _attribute(error: adapters.BackendError, endpoint: adapters.Endpoint) -> adapters.BackendError:
    """The failure that ``error``, which a backend raised, stands for: did the policy cause it, or what it runs on?

    It is decided here, once, from the exception and from the calls that the attempt has made. The proxy knows them,
    whatever the agent's framework, language or machine.
    """
    if isinstance(error, adapters.PromptTooLongError):
        return error
    made = await call_summary(endpoint.base_url, error.resources)
    attributed = error
    if made is not None and made.at_limit:
        limit = f"it had made {made.calls} LLM calls, as many as max_calls allows"
        attributed = adapters.TurnLimitError(str(error) if "max_calls" in str(error) else f"{error}; {limit}")
    elif not isinstance(error, adapters.AgentError | adapters.ToolError):
        return error
    elif made is None:
        attributed = adapters.EndpointError(f"{error}; the proxy does not say which calls it made")
    elif made.failure:
        attributed = adapters.EndpointError(f"{error}; its last call {made.failure}")
    elif isinstance(error, adapters.ToolError) and made.made_up:
        attributed = adapters.AgentError(f"{error}; the policy made up {made.made_up[0]!r}")
    elif made.cut_off and isinstance(error, adapters.AgentError) and not isinstance(error, adapters.TurnLimitError):
        attributed = adapters.MalformedOutputError(f"{error}; max_tokens cut off its last reply")
    elif isinstance(error, adapters.AgentError) and not made.calls:
        attributed = adapters.AgentSetupError(str(error))
    if attributed is not error:
        attributed.steps, attributed.input, attributed.__cause__ = error.steps, error.input, error
    return attributed


async def _attribute_time_limit(timeout_s: float, endpoint: adapters.Endpoint) -> adapters.BackendError:
    """The failure of an agent that has not answered within ``timeout_s`` seconds.

    It tells what the agent waits for: half of the time for one thing means that this does not answer.
    """
    made, text = await call_summary(endpoint.base_url), f"no answer within {timeout_s:g} s"
    if made is None:
        return adapters.TimeLimitError(f"{text}; nor does the proxy answer")
    if made.at_limit:
        return adapters.TurnLimitError(f"{text}, and all {made.calls} LLM calls that max_calls allows")
    if made.running_s > timeout_s / 2:
        return adapters.TimeLimitError(f"{text}: the endpoint has not answered a call for {made.running_s:.3g} s")
    if made.calls >= _MANY_CALLS and made.idle_s < timeout_s / 2:
        return adapters.TurnLimitError(f"{text}, and {made.calls} LLM calls: the agent went on calling")
    since = f"in the {made.idle_s:.3g} s since its last LLM call" if made.idle_s else f"with {made.calls} LLM calls"
    return adapters.TimeLimitError(f"{text}: the agent or a tool of it did not end {since}")


class RemoteRolloutAgent:
    """Runs rollouts of any training run with the backend, domain, reward and judge of ``check``; other settings come
    with each rollout. Raises :class:`.ConfigError` if the backend cannot be built.
    """

    def __init__(self, check: RequestCheck) -> None:
        self._check = check
        self._agents: dict[str, RolloutAgent] = {}
        self._private_tasks = PrivateTasks(check.domain.database)
        self._backends = {self._options(check): make_backend(check.settings)}
        self._agent_for({})

    async def run(self, rollout: Rollout, resources: Mapping[str, Any], store: RolloutStore) -> tuple[Outcome, bool]:
        """As :meth:`RolloutAgent.run`, with the rollout's settings."""
        try:
            agent = self._agent_for(rollout.settings)
        except (RequestRefusedError, UserError) as error:
            _log.warning("rollout %.100r was refused: %s", rollout.rollout_id, error)
            message = mask_secrets(str(error))[:_MAX_MESSAGE]
            return Outcome(failure=RequestRefusedError.kind, message=message), True
        return await agent.run(rollout, resources, store)

    def at_once(self, wanted: int) -> tuple[int, str]:
        """As :meth:`RolloutAgent.at_once`."""
        possible, why = min(backend.at_once(wanted) for backend in self._backends.values())
        return min(wanted, sum(len(agent.scoring) for agent in self._agents.values()) + possible), why

    async def stop(self) -> None:
        """Close the connections and processes of the backends, and check that the databases are unchanged."""
        for backend in self._backends.values():
            await backend.stop()
        self._private_tasks.close()
        if warning := self._private_tasks.warning():
            _log.warning("%s", warning)

    @staticmethod
    def _options(check: RequestCheck) -> str:
        """The only settings of a backend that come with a rollout."""
        return json.dumps(dict(check.settings.agent_options), sort_keys=True)

    def _agent_for(self, of_rollout: Any) -> RolloutAgent:
        check = self._check.for_rollout(of_rollout)
        settings = check.settings
        key = settings.model_dump_json()
        if key not in self._agents:
            options = self._options(check)
            if len(self._agents) >= _MAX_AGENTS:
                raise RequestRefusedError(
                    f"this runner has an agent for each of {_MAX_AGENTS} settings and makes no more: start it again"
                )
            if options not in self._backends:
                self._backends[options] = make_backend(settings)
            self._agents[key] = RolloutAgent(
                backend=self._backends[options],
                domain=check.domain,
                reward=make_reward(settings, check.domain),
                timeout_s=settings.rollout_timeout_s,
                failures=settings.failures,
                agent_columns=settings.agent_columns,
                check=check,
                private=self._private_tasks,
            )
        return self._agents[key]

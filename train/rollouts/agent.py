"""One rollout, as agentlightning's runner sees it: ask the backend, score the answer, report both as spans.

The gold stops here: the backend is given a :class:`adapters.Question`, the reward is given the whole task. What goes
wrong is written down as a typed failure span before the attempt ends, so that the trainer knows what happened on
whatever machine it happened. A failure that another attempt may mend is raised (the store then retries the rollout);
one that cannot change (a prompt that is too long, a judge that abstains) only reports itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from agentlightning.emitter import emit_reward
from agentlightning.litagent import LitAgent
from agentlightning.types import AttemptedRollout, NamedResources, ProxyLLM, Span, SpanCoreFields, TraceStatus

from groundwire import adapters, rewards
from groundwire.domains import Domain, answer_form

__all__ = ["ANSWER_SPAN", "FAILURE_SPAN", "POLICY_RESOURCE", "RolloutAgent"]

POLICY_RESOURCE = "policy"
"""The name of the store's resource with the address of the proxy in front of the model (a ``ProxyLLM``)."""

ANSWER_SPAN = "groundwire.answer"
"""Attributes ``groundwire.text`` and ``groundwire.steps`` (JSON list of :class:`groundwire.tools.types.AgentStep`)."""

FAILURE_SPAN = "groundwire.failure"
"""Attributes ``groundwire.kind`` (a failure type) and ``groundwire.message``."""


class RolloutAgent(LitAgent[dict[str, Any]]):
    """Runs one backend on the tasks of one domain, scored by one reward."""

    def __init__(
        self, *, backend: adapters.Backend, domain: Domain, reward: rewards.Reward, timeout_s: float = 120.0
    ) -> None:
        super().__init__()
        self.backend, self.domain, self.reward, self.timeout_s = backend, domain, reward, timeout_s

    async def rollout_async(
        self, task: dict[str, Any], resources: NamedResources, rollout: AttemptedRollout
    ) -> list[SpanCoreFields]:
        """Answer and score one task; the spans that the runner then stores."""
        started = time.time()
        try:
            answer = await asyncio.wait_for(self._ask(task, resources, rollout), self.timeout_s)
        except adapters.PromptTooLongError as error:
            return [_failure(error.kind, str(error), started)]
        except adapters.BackendError as error:
            await self._report(rollout, _failure(error.kind, str(error), started))
            raise
        except asyncio.TimeoutError:
            await self._report(rollout, _failure("timeout", f"no answer within {self.timeout_s:g} s", started))
            raise
        steps = json.dumps(answer.steps, ensure_ascii=False)
        answered = _span(ANSWER_SPAN, {"groundwire.text": answer.text, "groundwire.steps": steps}, started)
        try:
            return [answered, await self._scored(task, answer)]
        except rewards.JudgeAbstainedError as error:
            return [answered, _failure(error.kind, str(error), started)]
        except rewards.RewardError as error:
            await self._report(rollout, _failure(error.kind, str(error), started))
            raise

    async def _scored(self, task: dict[str, Any], answer: adapters.Answer) -> SpanCoreFields:
        """The reward's span. Raises :class:`rewards.RewardError`, whatever goes wrong."""
        try:
            score = await self.reward(task, answer.text, answer.steps)
        except rewards.RewardError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # a reward is somebody else's code, too
            raise rewards.RewardError(f"the reward raised {type(error).__name__}: {error}") from error
        total = rewards.total(score)
        if not isinstance(score, dict):
            return emit_reward(total, propagate=False)
        parts = {"total": total, **{name: float(part) for name, part in score.items()}}
        return emit_reward(parts, primary_key="total", propagate=False)

    async def _ask(self, task: dict[str, Any], resources: NamedResources, rollout: AttemptedRollout) -> adapters.Answer:
        """The backend's answer. Raises :class:`adapters.BackendError`, whatever goes wrong."""
        policy = resources[POLICY_RESOURCE]
        assert isinstance(policy, ProxyLLM)
        sampling = (rollout.metadata or {}).get("sampling", {})
        endpoint = adapters.Endpoint(
            base_url=policy.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
            model=policy.model,
            api_key=policy.api_key or "none",
            sampling={**policy.sampling_parameters, **sampling},
        )
        question = adapters.Question(
            id=task["id"],
            text=task["question"],
            database=self.domain.database(task),
            form=answer_form(self.domain),
        )
        try:
            return await self.backend.run(question, endpoint)
        except (adapters.BackendError, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # an agent's SystemExit and KeyboardInterrupt end its rollout, not the run
            raise adapters.AgentError(f"the agent raised {error!r}") from error

    async def _report(self, rollout: AttemptedRollout, fields: SpanCoreFields) -> None:
        # Raising hands nothing back to the runner, so a failure that is raised is stored here first.
        store = self.get_runner().get_store()
        rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
        sequence = await store.get_next_span_sequence_id(rollout_id, attempt_id)
        await store.add_span(
            Span.from_core_fields(fields, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=sequence)
        )


def _failure(kind: str, message: str, started: float) -> SpanCoreFields:
    return _span(FAILURE_SPAN, {"groundwire.kind": kind, "groundwire.message": message[:2000]}, started)


def _span(name: str, attributes: dict[str, Any], started: float) -> SpanCoreFields:
    return SpanCoreFields(
        name=name, attributes=attributes, status=TraceStatus(status_code="OK"), start_time=started, end_time=time.time()
    )

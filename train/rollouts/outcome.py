"""A rollout's request and its result."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from agentlightning.types import AttemptedRollout, Rollout, Span

from groundwire.adapters.tracing import (
    CallCredit,
    LLMCall,
    all_calls_from_spans,
    calls_of_agents,
    reward_from_spans,
    select_calls,
)
from groundwire.adapters.tracing.sampling import derive_seed
from groundwire.adapters.tracing.semconv import ABOUT_ANSWER, ANSWER_SPAN, FAILURE_SPAN, LEAST_REWARD, QUERY_SCORES
from groundwire.adapters.tracing.wire.exchange import UNREADABLE
from groundwire.domains import Task
from groundwire.tools.types import AgentStep
from groundwire.train.store.spans import with_call_spans

if TYPE_CHECKING:
    from groundwire.train.config.run_config import RunConfig

__all__ = ["Mode", "RolloutRequest", "RolloutResult", "requests_of_step"]

Mode = Literal["train", "val"]

_CALL_COLUMNS = ("agent", "prompt_ids", "response_ids", "logprobs", "finish_reason", "weights_version")


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """A rollout to run. Requests of one ``group`` are samples of one task; GRPO compares their rewards."""

    task: Task
    group: str
    mode: Mode
    sampling: Mapping[str, Any] = field(default_factory=dict)
    prompts: Mapping[str, str] | None = None
    """The agent's named prompts; None: those of the run."""


def requests_of_step(
    tasks: Iterable[Task], config: RunConfig, step: int, *, drawn: Counter[str] | None = None
) -> Iterator[list[RolloutRequest]]:
    """The group of each task: ``group_size`` rollouts, whose seeds follow from the run's, the step and the task.

    ``drawn`` counts the groups that the tasks had in this step before: one that is drawn again has other seeds.
    """
    drawn = Counter() if drawn is None else drawn
    common = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    for task in tasks:
        name = str(task["id"])
        first = drawn[name] * config.group_size
        drawn[name] += 1
        seeds = [derive_seed(config.seed, step, name, first + sample) for sample in range(config.group_size)]
        yield [RolloutRequest(task=task, group=name, mode="train", sampling={**common, "seed": seed}) for seed in seeds]


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """A finished rollout: its reward, and the type of its failure if it failed."""

    request: RolloutRequest
    rollout_id: str
    status: str
    """``succeeded``, or a failure's type (:data:`groundwire.train.config.failures.FAILURE_TYPES`)."""
    reward: float | None
    """Of a failure the score (:class:`.failure_scores.FailureScores`), or None, and such a rollout counts nowhere."""
    reward_components: Mapping[str, float]
    message: str
    answer: str
    steps: Sequence[AgentStep]
    calls: Sequence[LLMCall]
    attempts: int
    seconds: float
    untrainable: Sequence[LLMCall] = ()
    """Calls that are not in ``calls``: each has an :attr:`LLMCall.untrainable_reason`."""
    credits: dict[tuple[int, int | None], CallCredit] = field(default_factory=dict)
    """What calls were trained with, by sequence and choice. The trainer adds them when the group is complete."""
    least_reward: float = 0.0
    """The least value that its reward declares."""
    judged_field: str = ""
    """The field of the agent's result that holds the answer."""
    input: str = ""
    """How the agent was called."""
    query_scores: Sequence[float] = ()
    """In a validation the rewards of an SQL agent's queries before its answer, each as if it were the answer."""

    @classmethod
    def from_spans(
        cls,
        request: RolloutRequest,
        rollout_id: str,
        rollout: Rollout | None,
        spans: Sequence[Span],
        *,
        not_stored: str = "",
    ) -> RolloutResult:
        """The result of a rollout that the store has ended (None: it is not in the store), from its last attempt.

        ``not_stored`` says why some of its spans are not in the store. A failed rollout has no reward yet.
        """
        try:
            calls = all_calls_from_spans(with_call_spans(spans))
            answer, failure = _last_span(spans, ANSWER_SPAN), _last_span(spans, FAILURE_SPAN)
            reward = reward_from_spans(spans)
            text = str(answer.attributes["groundwire.text"]) if answer else ""
            more = {
                name: str(answer.attributes.get(f"groundwire.{name}", "")) if answer else "" for name in ABOUT_ANSWER
            }
            steps = json.loads(str(answer.attributes["groundwire.steps"])) if answer else []
            scores = json.loads(str(answer.attributes.get(QUERY_SCORES, "[]"))) if answer else []
            query_scores = [float(score) for score in scores]
            failed = [str(failure.attributes[f"groundwire.{name}"]) for name in ("kind", "message")] if failure else []
            least_reward = min([0.0, *(float(str(span.attributes.get(LEAST_REWARD, 0))) for span in spans)])
        except UNREADABLE as error:
            unreadable = f"its spans cannot be read: {type(error).__name__}: {error}"
            return cls.from_spans(request, rollout_id, rollout, [], not_stored=not_stored or unreadable)
        components: Mapping[str, float] = {}
        if isinstance(reward, dict):
            components = {name: value for name, value in reward.items() if name != "total"}
            reward = reward["total"]
        status, message = "succeeded", more["no_call"]
        if failed or reward is None or rollout is None or rollout.status != "succeeded" or not_stored:
            reward, components = None, {}
            if not_stored:  # it would be trained without some of its calls
                failure_text = f"; it failed of {': '.join(failed)}" if failed else ""
                status, message = "not_stored", f"{not_stored}{failure_text}"
            elif failed:
                status, message = failed
            elif rollout is not None and rollout.status == "cancelled":
                status, message = "timeout", "not finished by the step's deadline"
            else:
                status, message = "no_result", "the runner reported neither a reward nor a failure"
        started = rollout.start_time if rollout else time.time()
        ended = (rollout.end_time if rollout else None) or time.time()
        return cls(
            request=request,
            rollout_id=rollout_id,
            status=status,
            reward=reward,
            reward_components=components,
            message=message,
            answer=text,
            steps=steps,
            calls=[call for call in calls if not call.untrainable_reason],
            attempts=rollout.attempt.sequence_id if isinstance(rollout, AttemptedRollout) else 0,
            seconds=ended - started,
            untrainable=[call for call in calls if call.untrainable_reason],
            least_reward=least_reward,
            judged_field=more["judged_field"],
            input=more["input"],
            query_scores=query_scores,
        )

    @property
    def succeeded(self) -> bool:
        """Whether it has a reward and did not fail."""
        return self.status == "succeeded"

    def trained_calls(self, agent_match: str | None) -> list[LLMCall]:
        """The calls of the agents that ``agent_match`` selects, with the rewards emitted for calls that are not trained
        (:func:`.select_calls`).
        """
        calls = sorted((*self.calls, *self.untrainable), key=lambda call: (call.sequence, call.started))
        return calls_of_agents(select_calls(calls, lambda call: not call.untrainable_reason), agent_match)

    @property
    def made_no_call(self) -> bool:
        """Whether the agent answered without an LLM call that was traced."""
        return self.succeeded and not self.calls and not self.untrainable

    def _call_credits(self) -> list[dict[str, float] | None]:
        """The credit of each of ``calls``; empty if none has one."""
        found = [self.credits.get((call.sequence, call.choice)) for call in self.calls]
        return [asdict(credit) if credit else None for credit in found] if any(found) else []

    def turn_scores(self) -> list[float]:
        """The rewards after each query of an agent that wrote several, in a validation; the last is the rollout's."""
        return [*self.query_scores, self.reward] if self.query_scores and self.reward is not None else []

    def to_row(self, step: int) -> dict[str, Any]:
        """The rollout as a row of ``rollouts.parquet``."""
        task = self.request.task
        return {
            "step": step,
            "mode": self.request.mode,
            "temperature": float(self.request.sampling.get("temperature", 1.0)),
            "rollout_id": self.rollout_id,
            "task_id": str(task["id"]),
            "group": self.request.group,
            "status": self.status,
            "message": self.message,
            "reward": self.reward,
            "reward_components": json.dumps(self.reward_components),
            "attempts": self.attempts,
            "seconds": round(self.seconds, 4),
            "task": json.dumps(dict(task), ensure_ascii=False, default=str),
            "answer": self.answer,
            "judged_field": self.judged_field,
            "input": self.input,
            "agent_steps": json.dumps(list(self.steps), ensure_ascii=False),
            "calls": [{name: getattr(call, name) for name in _CALL_COLUMNS} for call in self.calls],
            "turn_scores": json.dumps(self.turn_scores()),
            "call_rewards": json.dumps([call.reward for call in self.calls]),
            "credits": json.dumps(self._call_credits()),
            "untrainable": json.dumps(
                [
                    {
                        "agent": call.agent,
                        "untrainable_reason": call.untrainable_reason,
                        "prompt_tokens": len(call.prompt_ids) or call.prompt_tokens,
                        "response_tokens": len(call.response_ids) or call.response_tokens,
                    }
                    for call in self.untrainable
                ],
                ensure_ascii=False,
            ),
        }


def _last_span(spans: Sequence[Span], name: str) -> Span | None:
    return next((span for span in reversed(spans) if span.name == name), None)

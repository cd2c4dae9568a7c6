"""The record of a rollout, one object from the queue to the gradient: what shall run, what ran, and what it was worth.

The trainer makes it, the store keeps it, a runner adds attempts and their outcome, the proxy adds calls, and the update
adds what each call was trained with. The run's parquet file (:mod:`.rows`), ``why``, the report and rescore read the
same fields.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from groundwire.adapters.tracing import LLMCall, calls_of_agents, select_calls
from groundwire.adapters.tracing.sampling import attempt_sampling
from groundwire.adapters.tracing.spans import SpanRecord, TraceLimit
from groundwire.domains import Task
from groundwire.tools.types import AgentStep

Mode = Literal["train", "val"]
RolloutStatus = Literal["queuing", "preparing", "running", "requeuing", "succeeded", "failed", "cancelled"]
AttemptStatus = Literal["preparing", "running", "succeeded", "failed", "timeout", "unresponsive"]

TRANSITIONS: Mapping[RolloutStatus, frozenset[RolloutStatus]] = {
    "queuing": frozenset({"preparing", "succeeded", "failed", "cancelled"}),
    "preparing": frozenset({"running", "requeuing", "succeeded", "failed", "cancelled"}),
    "running": frozenset({"requeuing", "succeeded", "failed", "cancelled"}),
    "requeuing": frozenset({"preparing", "succeeded", "failed", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
"""The statuses that may follow each one. Any other change comes too late and is ignored: a rollout that succeeded at
the deadline is not cancelled, and a cancelled one does not return to the queue when its attempt fails."""
UNFINISHED = tuple(status for status, following in TRANSITIONS.items() if following)
ENDED = frozenset({"succeeded", "failed", "cancelled", "timeout"})
"""The statuses of rollouts and attempts that no runner works on any more."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One execution of a rollout. Times are seconds since the epoch, by the store's clock."""

    attempt_id: str = field(default_factory=lambda: f"at-{secrets.token_hex(6)}")
    number: int
    """1 for the first attempt."""
    status: AttemptStatus = "preparing"
    started: float
    ended: float | None = None
    heartbeat: float | None = None
    """The last sign of life of its runner."""
    worker_id: str | None = None
    spans: int = 0
    """How many calls and annotations the store has of it."""
    size: int = 0
    """Of these, about how many bytes."""
    is_full: bool = False
    """Whether it had more than the rollout's limit: those are lost, and it has failed."""

    def refuses(self, size: int, limit: TraceLimit) -> str | None:
        """Count a new call or annotation of so many bytes: None, or why it is lost and the attempt has failed. Of
        further ones the reason is empty.
        """
        if self.is_full:
            return ""
        if problem := limit.exceeded_by(self.spans + 1, self.size + size):
            self.is_full = True
            return problem
        self.spans, self.size = self.spans + 1, self.size + size
        return None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How an attempt ended: with an answer and a reward, or with a failure of a type. The runner reports it, and the
    collector adds the failures that no runner can report, and what a failure scores.
    """

    answer: str = ""
    steps: Sequence[AgentStep] = ()
    input: str = ""
    """How the agent was called, in one line."""
    judged_field: str = ""
    """The field of the agent's result that holds the answer."""
    reward: float | None = None
    """Of a failure the score (:class:`groundwire.train.rollouts.outcome.FailureScores`), or None, and such a
    rollout counts nowhere."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    least_reward: float = 0.0
    """The least value that the reward declares."""
    query_scores: Sequence[float] = ()
    """In a validation the rewards of an SQL agent's queries before its answer, each as if it were the answer."""
    failure: str = ""
    """The type of the failure (:data:`groundwire.train.config.failures.FAILURE_TYPES`); "" without one."""
    message: str = ""
    """Of the failure; of a success what is known of an agent that made no LLM call that was traced."""

    @property
    def status(self) -> str:
        """``succeeded``, or the type of the failure."""
        return self.failure or "succeeded"


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One run of the agent on a task. Those of one ``group`` are samples of one task; GRPO compares their rewards."""

    rollout_id: str = field(default_factory=lambda: f"ro-{secrets.token_hex(8)}")
    task: Task
    group: str = ""
    mode: Mode | Literal["test"] | None = "train"
    """None or ``test`` only if another client of the store enqueued it."""
    step: int = 0
    """The training step that it is sampled in."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """OpenAI request parameters that the trainer sets: ``temperature``, ``top_p``, ``max_tokens``, ``seed``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The agent's settings, which come with the rollout to runners in other processes."""
    prompts: Mapping[str, str] | None = None
    """The agent's named prompts; None: those of the run."""
    resources_id: str | None = None
    timeout_s: float | None = None
    """After so many seconds the store gives up an attempt."""
    unresponsive_s: float | None = None
    """After so many seconds without a heartbeat the store gives up an attempt."""
    max_attempts: int = 1
    retry_on: Sequence[AttemptStatus] = ("failed", "timeout", "unresponsive")
    """The ends of an attempt after which the rollout is tried again, while ``max_attempts`` allow it."""
    trace_limit: TraceLimit = field(default=TraceLimit())
    """Of the spans of an attempt."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What another client of the store noted about it."""
    status: RolloutStatus = "queuing"
    started: float = 0.0
    """When it was enqueued, in seconds since the epoch."""
    ended: float | None = None
    attempts: list[Attempt] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)
    """Of the last attempt."""
    calls: list[LLMCall] = field(default_factory=list)
    """All LLM calls of the last attempt, in order; each says whether it can be trained on, and once it was, its return,
    advantage and weight."""
    annotations: list[SpanRecord] = field(default_factory=list)
    """The spans of the last attempt that are no calls of our proxy: rewards that the agent emitted, and whatever other
    tracers wrote.
    """

    @property
    def attempt(self) -> Attempt | None:
        """The last attempt; None if no runner has taken the rollout."""
        return self.attempts[-1] if self.attempts else None

    def open_sampling(self, attempt_id: str) -> Mapping[str, Any] | None:
        """The sampling parameters of an attempt; None unless it is the last one, and has not ended."""
        last = self.attempt
        if last is None or last.attempt_id != attempt_id or {self.status, last.status} & ENDED:
            return None
        return attempt_sampling(self.sampling, last.number)

    @property
    def seconds(self) -> float:
        """How long it took, with its time in the queue; 0 if it has not ended."""
        return self.ended - self.started if self.ended is not None else 0.0

    @property
    def succeeded(self) -> bool:
        """Whether it has a reward and did not fail."""
        return not self.outcome.failure and self.outcome.reward is not None

    @property
    def scores(self) -> dict[str, float | str]:
        """What it was judged, for other tools: the reward and its components; of a trace what was exported with it."""
        components = self.outcome.reward_components
        if self.mode is None and "source" in self.metadata:
            return {**self.metadata.get("labels", {}), **components}
        return {} if self.outcome.reward is None else {"reward": self.outcome.reward, **components}

    @property
    def trainable_calls(self) -> list[LLMCall]:
        """The calls without an :attr:`LLMCall.untrainable_reason`."""
        return [call for call in self.calls if not call.untrainable_reason]

    @property
    def untrainable_calls(self) -> list[LLMCall]:
        """The other calls."""
        return [call for call in self.calls if call.untrainable_reason]

    @property
    def made_no_call(self) -> bool:
        """Whether the agent answered without an LLM call that was traced."""
        return self.succeeded and not self.calls

    def trained_calls(self, agent_match: str | None) -> list[LLMCall]:
        """The calls of the agents that ``agent_match`` selects, with the rewards emitted for calls that are not trained
        (:func:`.select_calls`). Some may be copies.
        """
        return calls_of_agents(select_calls(self.calls, lambda call: not call.untrainable_reason), agent_match)

    def turn_scores(self) -> list[float]:
        """The rewards after each query of an agent that wrote several, in a validation; the last is the rollout's."""
        scores, reward = self.outcome.query_scores, self.outcome.reward
        return [*scores, reward] if scores and reward is not None else []


@dataclass(slots=True, kw_only=True)
class ProxyLLM:
    """The resource with the address of the proxy in front of the policy."""

    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: Mapping[str, Any] = field(default_factory=dict)

    def get_base_url(self, rollout_id: str, attempt_id: str) -> str:
        """The base URL of an attempt's LLM calls."""
        base = self.endpoint.rstrip("/")
        version = "/v1" if base.endswith("/v1") else ""
        return f"{base.removesuffix('/v1')}/rollout/{rollout_id}/attempt/{attempt_id}{version}"

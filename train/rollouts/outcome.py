"""The rollouts of a step, and how each has ended."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agentlightning.types import Span

from groundwire.adapters.tracing import all_calls_from_spans, reward_from_spans
from groundwire.adapters.tracing.sampling import derive_seed
from groundwire.adapters.tracing.semconv import ANSWER_SPAN, FAILURE_SPAN, LEAST_REWARD, QUERY_SCORES
from groundwire.adapters.tracing.wire.exchange import UNREADABLE
from groundwire.domains import Task
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.store.spans import with_call_spans

if TYPE_CHECKING:
    from groundwire.train.config.run_config import RunConfig

__all__ = ["add_spans", "final_outcome", "requests_of_step"]


def requests_of_step(
    tasks: Iterable[Task], config: RunConfig, step: int, *, drawn: Counter[str] | None = None
) -> Iterator[list[Rollout]]:
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
        yield [Rollout(task=task, group=name, step=step, sampling={**common, "seed": seed}) for seed in seeds]


def final_outcome(rollout: Rollout, *, not_stored: str = "") -> Outcome:
    """The outcome of a rollout that has ended, with the failures that no runner reports. A failure has no score yet.

    ``not_stored`` says why some of its calls are not in the store.
    """
    reported = rollout.outcome
    failed = replace(reported, reward=None, reward_components={})
    if not_stored:  # it would be trained without some of its calls
        reason = f"; it failed of {reported.failure}: {reported.message}" if reported.failure else ""
        return replace(failed, failure="not_stored", message=f"{not_stored}{reason}")
    if reported.failure:
        return failed
    if rollout.status == "cancelled":
        return replace(failed, failure="timeout", message="not finished by the step's deadline")
    if rollout.status != "succeeded" or reported.reward is None:
        message = "the runner reported neither a reward nor a failure"
        return replace(failed, failure="no_result", message=message)
    return reported


def add_spans(rollout: Rollout, spans: Sequence[Span]) -> str:
    """Add the calls and the outcome that are in the spans of an attempt; returns why they cannot be read."""
    try:
        rollout.calls = all_calls_from_spans(with_call_spans(spans))
        rollout.outcome = _outcome_of(spans)
    except UNREADABLE as error:
        rollout.calls, rollout.outcome = [], Outcome()
        return f"its spans cannot be read: {type(error).__name__}: {error}"
    return ""


def _outcome_of(spans: Sequence[Span]) -> Outcome:
    answer, failure = ({}, {})
    for span in spans:
        if span.name == ANSWER_SPAN:
            answer = span.attributes
        elif span.name == FAILURE_SPAN:
            failure = span.attributes
    reward = reward_from_spans(spans)
    total = reward["total"] if isinstance(reward, dict) else reward
    components = {name: value for name, value in reward.items() if name != "total"} if isinstance(reward, dict) else {}
    return Outcome(
        answer=str(answer["groundwire.text"]) if answer else "",
        steps=json.loads(str(answer["groundwire.steps"])) if answer else [],
        input=str(answer.get("groundwire.input", "")),
        judged_field=str(answer.get("groundwire.judged_field", "")),
        reward=total,
        reward_components=components,
        least_reward=min([0.0, *(float(str(span.attributes.get(LEAST_REWARD, 0))) for span in spans)]),
        query_scores=[float(score) for score in json.loads(str(answer.get(QUERY_SCORES, "[]")))],
        failure=str(failure["groundwire.kind"]) if failure else "",
        message=str(failure["groundwire.message"] if failure else answer.get("groundwire.no_call", "")),
    )

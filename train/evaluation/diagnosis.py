"""Explains why a rollout taught the policy nothing, from its record.

A rollout is trained on if it has a reward, if at least one call of a trained agent has token ids, and if its reward
differs from its group's mean. Each rule below tests one condition, in this order; the first that fails is the reason.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from groundwire.adapters.tracing import LLMCall
from groundwire.train.store.rollout import Rollout

KINDS = {
    "trained": "trained",
    "validation": "validation: never trained on",
    "no_calls": "judged without an LLM call, which trains nothing",
    "no_token_ids": "no token ids from the endpoint",
    "calls_failed": "every LLM call failed",
    "bad_calls": "calls that cannot be trained on",
    "agent_match": "agent_match matched none of its agents",
    "prompt_too_long": "prompt over the limit",
    "no_result": "no result from the runner",
    "not_stored": "its LLM calls are not in the store",
    "timeout": "not finished in time",
    "reward": "the reward could not be computed",
    "unreadable_answer": "the reward cannot read the answer",
    "judge_abstained": "the judge gave no verdict",
    "refused": "its runner does not allow the request",
    "endpoint": "the endpoint failed",
    "agent": "the agent's own code failed",
    "malformed_output": "the agent cannot use a reply",
    "turn_limit": "the agent reached its limit of turns",
    "trace_limit": "the agent emitted more spans than the run allows",
    "setup": "the agent failed before its first LLM call, or as the run is set up",
    "tool": "a tool failed, or what it runs on",
    "failed": "another failure",
    "equal_rewards": "every reward of its group was equal",
    "only_reward": "no other rollout of its group has a reward",
    "mean_reward": "its reward is its group's mean",
}
"""The kinds of :class:`Reason` with their descriptions."""

_ROUNDING = 1e-6  # of advantages
NO_CALL = (
    "no LLM call reached the proxy: the agent answered without one, or called another address than the base URL of its "
    "endpoint"
)
_NO_IDS = "the server sent no token ids"
# The messages of groundwire's server, of vLLM (two), and of OpenAI.
_TOO_LONG = (
    re.compile(r"prompt has (?P<prompt>\d+) tokens, and the model's context of (?P<limit>\d+)"),
    re.compile(r"maximum context length is (?P<limit>\d+) tokens.*?(?P<prompt>\d+) (?:input )?tokens", re.DOTALL),
    re.compile(r"prompt \(length (?P<prompt>\d+)\).*?maximum model length of (?P<limit>\d+)", re.DOTALL),
)


class Reason(NamedTuple):
    """Why a rollout taught nothing, or that it was trained on: a key of :data:`KINDS`, and an explanation."""

    kind: str
    text: str


def diagnose(rollouts: Sequence[Rollout], settings: Mapping[str, Any] = MappingProxyType({})) -> list[Reason]:
    """The reason of each rollout of whole steps, since each is compared with its group; ``settings`` are the run's."""
    match = settings.get("agent_match")
    groups: defaultdict[tuple[Any, ...], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.outcome.reward is not None:
            groups[_group_key(rollout)].append(rollout)
    return [_reason(rollout, groups[_group_key(rollout)], match) for rollout in rollouts]


def no_triplets(rollout: Rollout, agent_match: str | None) -> Reason | None:
    """Why a rollout gives nothing to train on; None if it does."""
    reason = _nothing_trainable(rollout, agent_match)
    return reason if reason is None or rollout.trainable_calls else _failure(rollout) or reason


def trained_calls(rollout: Rollout, agent_match: str | None) -> list[LLMCall]:
    """The calls that were trained; of a rollout that was not, those that could be: of the agents that match."""
    calls = rollout.trainable_calls
    trained = [call for call in calls if call.credit is not None]
    return trained or [call for call in calls if re.search(agent_match or "", call.agent)]


def credit_lines(rollout: Rollout) -> Iterator[str]:
    """What each call was trained with, as the trainer recorded it; no line if verl computed the advantages."""
    for number, call in enumerate(rollout.calls, 1):
        if (credit := call.credit) is None:
            continue
        figures = f"return {credit.returns:.4g}, advantage {credit.advantage:.3g}, weight {credit.weight:.3g}"
        yield f"call {number}{f' ({call.agent})' if call.agent else ''}: {figures}"


def scored(rollout: Rollout) -> str:
    """What a failed rollout counts as."""
    return "left out" if rollout.outcome.reward is None else f"scored {rollout.outcome.reward:g}"


def _reward(rollout: Rollout) -> float:
    return rollout.outcome.reward or 0.0


def _group_key(rollout: Rollout) -> tuple[Any, ...]:
    return rollout.step, rollout.mode, rollout.sampling.get("temperature"), rollout.group


def _reason(rollout: Rollout, group: Sequence[Rollout], agent_match: str | None) -> Reason:
    """``group`` are the rollouts of its group with a reward."""
    failure = _failure(rollout)
    if rollout.mode == "val":
        validated = Reason("validation", "a validation rollout: it is judged, and never trained on")
        return failure or _nothing_trainable(rollout, None) or validated
    if failure is not None and rollout.outcome.reward is None:
        return failure
    reason = _nothing_trainable(rollout, agent_match) or _no_gradient(rollout, group, agent_match)
    reason = reason or Reason("trained", _trained_text(rollout, group, agent_match))
    return reason if failure is None else Reason(reason.kind, f"{failure.text}; {reason.text}")


def _failure(rollout: Rollout) -> Reason | None:
    """The failure of a rollout, and what it scores; None if it succeeded."""
    failure, message = rollout.outcome.failure, rollout.outcome.message or "no message"
    if not failure:
        return None
    kind = failure if failure in KINDS else "failed"
    if failure == "prompt_too_long":
        text = _too_long_text(message)
    elif failure == "no_result":
        text = f"the store has neither its reward nor its failure: {message}"
    elif failure == "endpoint" and (untrainable := rollout.untrainable_calls):
        text = f"{KINDS[kind]}: {message}; its last call {untrainable[-1].untrainable_reason}"
    else:
        text = f"{KINDS[kind]} after {rollout.attempt.number if rollout.attempt else 0} attempt(s): {message}"
    return Reason(kind, f"{text} ({scored(rollout)})")


def is_too_long(message: str) -> bool:
    """Whether a server's error says that a prompt is longer than the model's context."""
    return any(pattern.search(message) for pattern in _TOO_LONG)


def _too_long_text(message: str) -> str:
    for pattern in _TOO_LONG:
        if match := pattern.search(message):
            over = int(match["prompt"]) - int(match["limit"])
            by = f"over the limit by {over} tokens" if over > 0 else "as long as the limit, without space for a reply"
            return f"prompt {by} ({match['prompt']} of {match['limit']}): shorten the schema, or serve a longer context"
    return f"prompt over the limit: {message}"


def _nothing_trainable(rollout: Rollout, agent_match: str | None) -> Reason | None:
    """Why no call of a rollout can be trained on, whether or not it failed; None if one can."""
    if trained_calls(rollout, agent_match):
        return None
    if calls := rollout.trainable_calls:
        names = ", ".join(sorted({call.agent or "(no name)" for call in calls}))
        return Reason("agent_match", f"agent_match {agent_match!r} matched none of its agents; names seen: {names}")
    problems = [call.untrainable_reason for call in rollout.untrainable_calls]
    if not problems:
        return Reason("no_calls", rollout.outcome.message or NO_CALL)
    if all(problem == _NO_IDS for problem in problems):
        return Reason(
            "no_token_ids",
            f"the endpoint sent no token ids in any of {len(problems)} call(s): training needs a server with "
            "return_token_ids, which vLLM has since 0.10.2",
        )
    if all(problem.startswith("failed") for problem in problems):
        return Reason("calls_failed", f"each of its {len(problems)} call(s) failed; the last {problems[-1]}")
    return Reason("bad_calls", f"none of its {len(problems)} call(s) can be trained on; the last: {problems[-1]}")


def _no_gradient(rollout: Rollout, group: Sequence[Rollout], agent_match: str | None) -> Reason | None:
    # As the trainers do: a rollout without a call to train on takes no part in its group's mean.
    compared = [other for other in group if trained_calls(other, agent_match)]
    if len(compared) < 2:
        return Reason("only_reward", "no other rollout of its group has a reward to compare it with")
    rewards = [_reward(other) for other in compared]
    own, mean = _reward(rollout), fmean(rewards)
    if not any(_has_gradient(other, mean) for other in compared):
        equal = min(rewards) == max(rewards)
        text = f"all {len(rewards)} rewards of its group were {own:g}"
        return Reason("equal_rewards", text if equal else "the returns of comparable calls of its group were equal")
    if not _has_gradient(rollout, mean):
        at_mean = math.isclose(own, mean, abs_tol=1e-9)
        text = f"its reward {own:g} is its group's mean"
        return Reason("mean_reward", text if at_mean else "the return of each call is the mean of comparable calls")
    return None


def _has_gradient(rollout: Rollout, mean: float) -> bool:
    """Whether a rollout was trained; by its reward if verl computed the advantages, whose estimator compares them."""
    if credits := [call.credit for call in rollout.calls if call.credit is not None]:
        return any(abs(credit.weight * credit.advantage) > _ROUNDING for credit in credits)
    return not math.isclose(_reward(rollout), mean, abs_tol=1e-9)


def _trained_text(rollout: Rollout, group: Sequence[Rollout], agent_match: str | None) -> str:
    calls = trained_calls(rollout, agent_match)
    tokens = sum(len(call.response_ids) for call in calls)
    other_calls = len(rollout.trainable_calls) - len(calls)
    others = f", {other_calls} of other agents left out" if other_calls else ""
    rewards = f"reward {_reward(rollout):g}, mean of its group {fmean(map(_reward, group)):.3g}"
    return f"trained on {tokens} tokens of {len(calls)} call(s){others}: {rewards}"

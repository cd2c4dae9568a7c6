"""The metrics of rollouts: accuracy with its confidence interval, token counts, and the comparison of two runs.

All of them are computed from records of rollouts, so they are the same for a validation while training, an evaluation,
and a run that ended long ago.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from textwrap import shorten
from typing import Any

from groundwire.adapters.tracing import LLMCall
from groundwire.domains import Breakdowns
from groundwire.train.algorithms.statistics import (
    FEW_QUESTIONS,
    confidence_interval,
    mcnemar,
    paired_interval,
    pass_at_k,
)
from groundwire.train.store.rollout import Rollout

RIGHT = 0.5
"""A rollout counts as right above this reward, which leaves out partial credit for a wrong answer."""


def is_judged(rollout: Rollout) -> bool:
    """Whether a rollout counts for accuracy: it has a reward, which is 0 if the policy caused its failure."""
    return rollout.outcome.reward is not None


def compute_accuracy(rollouts: Sequence[Rollout], breakdowns: Breakdowns | None = None) -> dict[str, Any]:
    """Accuracy (the mean reward) with its 95 % interval, overall and by each column of ``breakdowns``.

    ``n`` of ``total`` rollouts were judged; ``failures`` counts by type those that failed, whether they score or are
    left out, and ``without_calls``, if there are some, the judged ones without an LLM call. The accuracy is None if
    ``n`` is 0. ``metric_name`` is "mean reward" unless all rewards are 0 or 1.
    ``first_query_accuracy`` is what the first queries of an SQL agent score, if it writes several.
    """
    judged = list(filter(is_judged, rollouts))
    binary = all(rollout.outcome.reward in (0.0, 1.0) for rollout in judged)
    metrics = {"metric_name": "accuracy" if binary else "mean reward", **_mean_score(judged), "total": len(rollouts)}
    for column, labels in (breakdowns or {}).items():
        if parts := _by_value(judged, column, labels):
            metrics[f"by_{column}"] = {value: _mean_score(part) for value, part in parts.items()}
    if silent := sum(rollout.made_no_call for rollout in judged):
        metrics["without_calls"] = silent
    by_turn = _accuracy_by_turn(judged)
    if len(by_turn) > 1:
        metrics["first_query_accuracy"] = by_turn[0]
    calls = sum(len(_answered_calls(rollout)) for rollout in judged)
    metrics["calls_per_rollout"] = round(calls / len(judged), 4) if judged else None
    metrics["failures"] = dict(Counter(rollout.outcome.failure for rollout in rollouts if rollout.outcome.failure))
    return metrics


def compute_metrics(rollouts: Sequence[Rollout], breakdowns: Breakdowns | None = None) -> dict[str, Any]:
    """The metrics of one evaluation, as in ``evaluation.json``: accuracy, by turn too, and tokens per call."""
    judged, scores = list(filter(is_judged, rollouts)), scores_by_question(rollouts)
    failed = [rollout.outcome for rollout in rollouts if rollout.outcome.failure]
    return {
        **compute_accuracy(rollouts, breakdowns),
        "questions": len(scores),
        **_sample_metrics(scores),
        "by_turn": _accuracy_by_turn(judged),
        **_token_metrics(judged),
        "failure_messages": {  # of the first failure of each type
            outcome.failure: shorten(outcome.message, 300, placeholder=" …") for outcome in reversed(failed)
        },
    }


def component_means(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """The mean of each component of the reward, over the rollouts that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.outcome.reward_components.items() if rollout.succeeded else ():
            values[name].append(value)
    return {name: round(_mean(scores), 4) for name, scores in values.items()}


def scores_by_question(rollouts: Iterable[Rollout]) -> dict[str, list[float]]:
    """The scores of each question's judged samples, by task id."""
    scores: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.outcome.reward is not None:
            scores[str(rollout.task["id"])].append(rollout.outcome.reward)
    return dict(scores)


def compare(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The second run against the first, by their :func:`scores_by_question`, over the questions that both judged.

    A question is won if its mean score is higher in the second. Raises ``ValueError`` if the runs share no question.
    """
    # Paired by question: the same questions are hard for both, so the difference varies less than either accuracy.
    shared = [task for task in first if task in second]
    if not shared:
        raise ValueError(
            f"they share no question: the first judged {len(first)}, the second {len(second)}, and no id is in both"
        )
    means = {task: (_mean(first[task]), _mean(second[task])) for task in shared}
    won = [task for task, (a, b) in means.items() if b > a]
    lost = [task for task, (a, b) in means.items() if b < a]
    return {
        "questions": len(shared),
        "only_first": len(first) - len(shared),
        "only_second": len(second) - len(shared),
        "accuracy": [_mean([pair[run] for pair in means.values()]) for run in (0, 1)],
        "difference": round(_mean([b - a for a, b in means.values()]), 4),
        "difference_ci95": paired_interval(list(means.values())),
        "won": won,
        "lost": lost,
        "p": mcnemar(len(won), len(lost)),
    }


def few_questions(count: int) -> str:
    """What to know of figures of so few questions; empty if they are enough."""
    if count >= FEW_QUESTIONS:
        return ""
    return f"{count} questions are few: only large differences stand out from chance; {FEW_QUESTIONS} or more say more"


def baseline(before: Sequence[Rollout]) -> tuple[dict[str, list[float]], str]:
    """The scores that a gain is measured against, and of what they are: ``answer``, or ``first query`` if it is better.

    Otherwise an agent that rewrites right queries into wrong ones would gain by no longer doing so.
    """
    answers = scores_by_question(before)
    firsts: dict[str, list[float]] = defaultdict(list)
    for rollout in filter(is_judged, before):
        firsts[str(rollout.task["id"])].append(_scores_by_turn(rollout)[0])
    means = [round(_mean(list(chain.from_iterable(by_task.values()))), 4) for by_task in (answers, firsts)]
    return (dict(firsts), "first query") if means[1] > means[0] else (answers, "answer")


def format_accuracy(value: float | None) -> str:
    """Three decimals; ``-`` if no rollout was judged."""
    return "-" if value is None else f"{value:.3f}"


def format_first_query(accuracy: float | None) -> str:
    """What an agent's first queries score, in brackets; empty without it."""
    return "" if accuracy is None else f" (first query {accuracy:.3f})"


def format_change(change: Mapping[str, Any]) -> str:
    """The ``difference`` of a comparison in points, with its interval; its ``baseline`` if that is not the answer."""
    low, high = change["difference_ci95"]
    over = f" over the {name}" if (name := change.get("baseline", "answer")) != "answer" else ""
    return f"{100 * change['difference']:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]{over}"


def _by_value(judged: Sequence[Rollout], column: str, labels: Mapping[str, str]) -> dict[str, list[Rollout]]:
    """The rollouts by the value of a column of their tasks: those with a label in its order, then the others."""
    parts: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in judged:
        if (value := rollout.task.get(column)) is not None:
            parts[str(value)].append(rollout)
    unknown = sorted(value for value in parts if value not in labels)
    return {value: parts[value] for value in (*labels, *unknown) if value in parts}


def _mean_score(judged: Sequence[Rollout]) -> dict[str, Any]:
    scores = scores_by_question(judged).values()
    values = list(chain.from_iterable(scores))
    accuracy = round(_mean(values), 4) if values else None
    return {"accuracy": accuracy, "ci95": confidence_interval(scores), "n": len(values)}


def _sample_metrics(scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """For questions with several samples: the share whose samples differ, the mean of each question's best one, and
    pass@k for k of 1, 2, 4, … and the most samples, where a sample is right above a score of 0.5.

    GRPO learns only from differences between the rollouts of a question.
    """
    several = [samples for samples in scores.values() if len(samples) > 1]
    if not several:
        return {}
    right = [[score > RIGHT for score in samples] for samples in several]
    most = max(map(len, right))
    powers = [2**n for n in range(most.bit_length()) if 2**n < most]
    passed = {str(k): value for k in (*powers, most) if (value := pass_at_k(right, k)) is not None}
    return {
        "mixed_groups": round(_mean([len(set(samples)) > 1 for samples in several]), 4),
        "best_of_n": round(_mean([max(samples) for samples in several]), 4),
        "pass_at_k": {k: round(value, 4) for k, value in passed.items()},
    }


def _accuracy_by_turn(judged: Sequence[Rollout]) -> list[float]:
    """Accuracy if each agent had stopped after its 1st, 2nd, … query; empty if queries were not judged."""
    scores = list(map(_scores_by_turn, judged))  # an agent that stopped earlier keeps its last answer in later turns
    if not any(rollout.outcome.query_scores for rollout in judged):
        return []
    return [round(_mean([own[min(turn, len(own) - 1)] for own in scores]), 4) for turn in range(max(map(len, scores)))]


def _scores_by_turn(rollout: Rollout) -> list[float]:
    """Of a judged rollout: the score of its answer alone if its queries were not judged."""
    return rollout.turn_scores() or [rollout.outcome.reward or 0.0]


def _token_metrics(judged: Sequence[Rollout]) -> dict[str, Any]:
    """Mean tokens of a call's prompt and response: of token ids, else the endpoint's own counts (``usage``)."""
    calls = [call for rollout in judged for call in _answered_calls(rollout)]
    counted = [call for call in calls if call.prompt_ids or call.prompt_tokens]
    prompts = [len(call.prompt_ids) or call.prompt_tokens for call in counted]
    responses = [len(call.response_ids) or call.response_tokens for call in counted]
    sources = {"usage" if call.untrainable_reason else "ids" for call in counted}
    return {
        "prompt_tokens": round(_mean(prompts), 1) if prompts else None,
        "response_tokens": round(_mean(responses), 1) if responses else None,
        "token_count_source": "both" if len(sources) > 1 else next(iter(sources), "unknown"),
    }


def _answered_calls(rollout: Rollout) -> list[LLMCall]:
    """The calls that did not fail."""
    return [call for call in rollout.calls if not call.untrainable_reason.startswith("failed")]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""The metrics of rollouts: accuracy with its confidence interval, token counts, and the comparison of two runs.

All of them are computed from rows of ``rollouts.parquet``, so they are the same for a validation while training, an
evaluation, and a run that ended long ago.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from textwrap import shorten
from typing import Any

from groundwire.domains import Breakdowns
from groundwire.train.algorithms.statistics import (
    FEW_QUESTIONS,
    confidence_interval,
    mcnemar,
    paired_interval,
    pass_at_k,
)

__all__ = [
    "RIGHT",
    "baseline",
    "compare",
    "compute_accuracy",
    "compute_metrics",
    "few_questions",
    "format_accuracy",
    "format_change",
    "format_first_query",
    "is_judged",
    "made_no_call",
    "scores_by_question",
]

RIGHT = 0.5
"""A rollout counts as right above this reward, which leaves out partial credit for a wrong answer."""

Row = Mapping[str, Any]


def is_judged(row: Row) -> bool:
    """Whether a rollout counts for accuracy: it has a reward, which is 0 if the policy caused its failure."""
    return row["reward"] is not None


def made_no_call(row: Row) -> bool:
    """Whether the agent answered without an LLM call that was traced: that counts for accuracy, and trains nothing."""
    return row["status"] == "succeeded" and not row["calls"] and not json.loads(row.get("untrainable") or "[]")


def compute_accuracy(rows: Sequence[Row], breakdowns: Breakdowns | None = None) -> dict[str, Any]:
    """Accuracy (the mean reward) with its 95 % interval, overall and by each column of ``breakdowns``.

    ``n`` of ``total`` rollouts were judged; ``failures`` counts by type those that failed, whether they score or are
    left out, and ``without_calls``, if there are some, the judged ones without an LLM call. The accuracy is None if
    ``n`` is 0. ``metric_name`` is "mean reward" unless all rewards are 0 or 1.
    ``first_query_accuracy`` is what the first queries of an SQL agent score, if it writes several.
    """
    judged = [row for row in rows if is_judged(row)]
    binary = all(row["reward"] in (0.0, 1.0) for row in judged)
    tasks = [json.loads(row["task"]) for row in judged] if breakdowns else []
    result = {"metric_name": "accuracy" if binary else "mean reward", **_mean_score(judged), "total": len(rows)}
    for column, labels in (breakdowns or {}).items():
        parts: dict[str, list[Row]] = {value: [] for value in labels}
        for row, task in zip(judged, tasks, strict=True):
            if task.get(column) is not None:
                parts.setdefault(str(task[column]), []).append(row)
        found = {value: _mean_score(part) for value, part in parts.items() if part}
        if found:
            unknown = sorted(value for value in found if value not in labels)
            result[f"by_{column}"] = {value: found[value] for value in (*labels, *unknown) if value in found}
    silent = sum(map(made_no_call, judged))
    calls = sum(len(row["calls"] or ()) + len(_calls_without_ids(row)) for row in judged)
    by_turn = _accuracy_by_turn(judged)
    return {
        **result,
        **({"without_calls": silent} if silent else {}),
        **({"first_query_accuracy": by_turn[0]} if len(by_turn) > 1 else {}),
        "calls_per_rollout": round(calls / len(judged), 4) if judged else None,
        "failures": dict(Counter(row["status"] for row in rows if row["status"] != "succeeded")),
    }


def compute_metrics(rows: Sequence[Row], breakdowns: Breakdowns | None = None) -> dict[str, Any]:
    """The metrics of one evaluation, as in ``evaluation.json``: accuracy, by turn too, and tokens per call."""
    judged = [row for row in rows if is_judged(row)]
    scores = scores_by_question(judged)
    return {
        **compute_accuracy(rows, breakdowns),
        "questions": len(scores),
        **_sample_metrics(scores),
        "by_turn": _accuracy_by_turn(judged),
        **_token_metrics(judged),
        "failure_messages": _first_messages(rows),
    }


def _first_messages(rows: Sequence[Row]) -> dict[str, str]:
    """The message of the first failure of each type, in one line."""
    failed = (row for row in reversed(rows) if row["status"] != "succeeded")
    return {row["status"]: shorten(row.get("message") or "", 300, placeholder=" …") for row in failed}


def scores_by_question(rows: Iterable[Row]) -> dict[str, list[float]]:
    """The scores of each question's judged samples, by task id."""
    scores: dict[str, list[float]] = defaultdict(list)
    for row in filter(is_judged, rows):
        scores[row["task_id"]].append(row["reward"])
    return dict(scores)


def compare(first: Sequence[Row], second: Sequence[Row]) -> dict[str, Any]:
    """The second run against the first, over the questions that both judged.

    A question is won if its mean score is higher in the second. Raises ``ValueError`` if the runs share no question.
    """
    scores = scores_by_question(first), scores_by_question(second)
    shared = [task for task in scores[0] if task in scores[1]]
    if not shared:
        raise ValueError(
            f"they share no question: the first judged {len(scores[0])}, the second {len(scores[1])}, and no id is in "
            "both"
        )
    means = {task: (_mean(scores[0][task]), _mean(scores[1][task])) for task in shared}
    won = [task for task, (a, b) in means.items() if b > a]
    lost = [task for task, (a, b) in means.items() if b < a]
    return {
        "questions": len(shared),
        "only_first": len(scores[0]) - len(shared),
        "only_second": len(scores[1]) - len(shared),
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


def baseline(before: Sequence[Row]) -> tuple[Sequence[Row], str]:
    """The rows that a gain is measured against, and what they score: ``answer``, or ``first query`` if it is better.

    Otherwise an agent that rewrites right queries into wrong ones would gain by no longer doing so.
    """
    first = [{**row, "reward": scores[0]} if (scores := _turn_scores(row)) else row for row in before]
    answers, queries = (round(_mean([row["reward"] for row in filter(is_judged, rows)]), 4) for rows in (before, first))
    return (first, "first query") if queries > answers else (before, "answer")


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


def _mean_score(judged: Sequence[Row]) -> dict[str, Any]:
    scores = scores_by_question(judged).values()
    values = [value for each in scores for value in each]
    accuracy = round(_mean(values), 4) if values else None
    return {"accuracy": accuracy, "ci95": confidence_interval(scores), "n": len(values)}


def _sample_metrics(scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """For questions with several samples: the share whose samples differ, the mean of each question's best one, and
    pass@k for k of 1, 2, 4, … and the most samples, where a sample is right above a score of 0.5.

    GRPO learns only from differences between the rollouts of a question.
    """
    several = [each for each in scores.values() if len(each) > 1]
    if not several:
        return {}
    return {
        "mixed_groups": round(_mean([len(set(each)) > 1 for each in several]), 4),
        "best_of_n": round(_mean([max(each) for each in several]), 4),
        "pass_at_k": _pass_at_k(several),
    }


def _pass_at_k(scores: Sequence[Sequence[float]]) -> dict[str, float]:
    right = [[score > RIGHT for score in each] for each in scores]
    most = max(map(len, right))
    found = {k: pass_at_k(right, k) for k in (*(2**n for n in range(most.bit_length()) if 2**n < most), most)}
    return {str(k): round(value, 4) for k, value in found.items() if value is not None}


def _accuracy_by_turn(rows: Sequence[Row]) -> list[float]:
    """Accuracy if each agent had stopped after its 1st, 2nd, … query; empty if queries were not judged."""
    by_row = [(_turn_scores(row), row["reward"]) for row in rows]
    turns = max((len(scores) for scores, _ in by_row), default=0)
    return [
        round(_mean([scores[turn] if turn < len(scores) else final for scores, final in by_row]), 4)
        for turn in range(turns)
    ]


def _turn_scores(row: Row) -> list[float]:
    scores: list[float] = json.loads(row.get("turn_scores") or "[]")
    return scores


def _token_metrics(rows: Sequence[Row]) -> dict[str, Any]:
    """Mean tokens of a call's prompt and response: of token ids, else the endpoint's own counts (``usage``)."""
    prompts: list[int] = []
    responses: list[int] = []
    sources = set[str]()
    for row in rows:
        for call in row["calls"] or ():
            prompts.append(len(call["prompt_ids"]))
            responses.append(len(call["response_ids"]))
            sources.add("ids")
        for call in _calls_without_ids(row):
            if call["prompt_tokens"]:
                prompts.append(call["prompt_tokens"])
                responses.append(call["response_tokens"])
                sources.add("usage")
    return {
        "prompt_tokens": round(_mean(prompts), 1) if prompts else None,
        "response_tokens": round(_mean(responses), 1) if responses else None,
        "token_count_source": "both" if len(sources) > 1 else next(iter(sources), "unknown"),
    }


def _calls_without_ids(row: Row) -> list[dict[str, Any]]:
    calls = json.loads(row.get("untrainable") or "[]")
    return [call for call in calls if not call["untrainable_reason"].startswith("failed")]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

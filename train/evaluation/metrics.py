"""From the rows of rollouts to the figures of an evaluation."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from groundwire.domains.spider.hardness import LEVELS
from groundwire.train.evaluation.statistics import bootstrap, mcnemar
from groundwire.train.evaluation.validation import is_judged

__all__ = ["compare", "compute_metrics", "level_order", "scores_by_question"]

Row = Mapping[str, Any]


def compute_metrics(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of one evaluation; plain values, as ``evaluation.json`` has them.

    Accuracy is the mean reward, None where there is none. A rollout that the infrastructure broke is left out and
    counted under ``failures``; one in which the agent gave no answer counts as 0. Lengths are means over calls: of
    token ids, or where an endpoint sent none of its own counts, which ``token_count_source`` says (``ids``, ``usage``,
    ``both``, ``unknown``).
    """
    judged = [row for row in rows if is_judged(row)]
    levels: dict[str, list[Row]] = defaultdict(list)
    for row in judged:
        hardness = json.loads(row["task"]).get("hardness")
        if hardness:
            levels[str(hardness)].append(row)
    return {
        **_accuracy(judged),
        **_spread(scores_by_question(judged)),
        "rollouts": len(rows),
        "by_hardness": {level: _accuracy(levels[level]) for level in sorted(levels, key=level_order)},
        "by_turn": _by_turn(judged),
        "failures": dict(Counter(row["status"] for row in rows if row["reward"] is None)),
        **_lengths(judged),
    }


def level_order(name: str) -> tuple[int, str]:
    """Where a level of hardness stands: Spider's from easy to extra, then others by name."""
    return (LEVELS.index(name) if name in LEVELS else len(LEVELS)), name


def scores_by_question(rows: Iterable[Row]) -> dict[str, list[float]]:
    """The scores of each question's judged samples."""
    scores: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if is_judged(row):
            scores[row["task_id"]].append(row["reward"] or 0.0)
    return dict(scores)


def compare(first: Sequence[Row], second: Sequence[Row]) -> dict[str, Any]:
    """The second against the first, over the questions that both judged.

    A question is won where its mean score is higher in the second. Raises ``ValueError`` where they share none.
    """
    scores = scores_by_question(first), scores_by_question(second)
    shared = [task for task in scores[0] if task in scores[1]]
    if not shared:
        raise ValueError(
            f"they share no question: the first judged {len(scores[0])}, the second {len(scores[1])}, and no id is in "
            "both"
        )
    means = {task: tuple(_mean(each[task]) for each in scores) for task in shared}
    won = [task for task, (a, b) in means.items() if b > a]
    lost = [task for task, (a, b) in means.items() if b < a]
    return {
        "questions": len(shared),
        "only_first": len(scores[0]) - len(shared),
        "only_second": len(scores[1]) - len(shared),
        "accuracy": [_mean([pair[place] for pair in means.values()]) for place in (0, 1)],
        "difference": round(_mean([b - a for a, b in means.values()]), 4),
        "difference_ci95": _shifted(bootstrap([[(1 + b - a) / 2] for a, b in means.values()])),
        "won": won,
        "lost": lost,
        "p": mcnemar(len(won), len(lost)),
    }


def _shifted(interval: Sequence[float]) -> list[float]:
    return [round(2 * value - 1, 4) for value in interval]


def _accuracy(rows: Sequence[Row]) -> dict[str, Any]:
    scores = scores_by_question(rows)
    every = [score for each in scores.values() for score in each]
    return {
        "accuracy": round(_mean(every), 4) if every else None,
        "ci95": bootstrap(list(scores.values())),
        "questions": len(scores),
        "judged": len(every),
    }


def _spread(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Over the questions with several samples: the share in which they differ, and the mean of the best of them.

    GRPO learns from nothing but differences between the rollouts of a question.
    """
    several = [each for each in scores.values() if len(each) > 1]
    if not several:
        return {}
    return {
        "mixed_groups": round(_mean([len(set(each)) > 1 for each in several]), 4),
        "best_of_n": round(_mean([max(each) for each in several]), 4),
    }


def _by_turn(rows: Sequence[Row]) -> list[float]:
    """Accuracy if each agent had stopped after its 1st, 2nd, … query; empty where queries were not judged."""
    by_row = [json.loads(row.get("turn_scores") or "[]") for row in rows]
    turns = max((len(scores) for scores in by_row), default=0)
    finals = [row["reward"] or 0.0 for row in rows]
    return [
        round(
            _mean(
                [scores[turn] if turn < len(scores) else final for scores, final in zip(by_row, finals, strict=True)]
            ),
            4,
        )
        for turn in range(turns)
    ]


def _lengths(rows: Sequence[Row]) -> dict[str, Any]:
    prompts: list[int] = []
    responses: list[int] = []
    transitions, sources = 0, set[str]()
    for row in rows:
        for call in row["calls"] or ():
            transitions += 1
            prompts.append(len(call["prompt_ids"]))
            responses.append(len(call["response_ids"]))
            sources.add("ids")
        for call in json.loads(row.get("untrainable") or "[]"):
            if call["problem"].startswith("failed"):
                continue
            transitions += 1
            if call["prompt_tokens"]:
                prompts.append(call["prompt_tokens"])
                responses.append(call["response_tokens"])
                sources.add("usage")
    return {
        "calls_per_rollout": round(transitions / len(rows), 2) if rows else None,
        "prompt_tokens": round(_mean(prompts), 1) if prompts else None,
        "response_tokens": round(_mean(responses), 1) if responses else None,
        "token_count_source": "both" if len(sources) > 1 else next(iter(sources), "unknown"),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

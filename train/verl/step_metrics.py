"""The metrics of the rollouts of a step with verl, which may come in several parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from groundwire.train.algorithms.health import reply_counts
from groundwire.train.evaluation.metrics import made_no_call

__all__ = ["StepMetrics"]


@dataclass
class StepMetrics:
    """Metrics of the rollouts of a step, or of a part of them."""

    step: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows of ``rollouts.parquet`` without the columns that take most of the memory."""
    counts: Counter[str] = field(default_factory=Counter)
    """Metrics that add up over the parts of a step."""
    seconds: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(
        cls,
        step: int,
        rows: Sequence[Mapping[str, Any]],
        counts: Counter[str],
        seconds: Mapping[str, float],
        agent_match: str | None,
    ) -> StepMetrics:
        """``counts`` has the groups' counts and ``dropped_unused``; those of the rollouts are added."""
        failed = [row for row in rows if row["status"] != "succeeded"]
        counts.update(f"{'dropped' if row['reward'] is None else 'zero'}_{row['status']}" for row in failed)
        counts.update(
            ended=len(rows),
            dropped=sum(count for name, count in counts.items() if name.startswith("dropped_")),
            zero=sum(row["reward"] is not None for row in failed),
            **({"without_calls": silent} if (silent := sum(map(made_no_call, rows))) else {}),
            retried=sum(row["attempts"] > 1 for row in rows),
            calls=sum(len(row["calls"]) for row in rows),
            tokens_sampled=sum(len(call["response_ids"]) for row in rows for call in row["calls"]),
            **reply_counts(rows, agent_match),
        )
        small = [{**row, "calls": [{} for _ in row["calls"]], "agent_steps": "[]"} for row in rows]
        return cls(step, small, counts, Counter(seconds))

    def add(self, part: StepMetrics) -> None:
        """Add another part of the step."""
        self.rows += part.rows
        self.counts.update(part.counts)
        self.seconds.update(part.seconds)

    def means(self) -> dict[str, float]:
        """Metrics that do not add up; empty without rollouts."""
        metrics: dict[str, float] = {}
        if seconds := [row["seconds"] for row in self.rows]:
            metrics |= {"seconds_mean": round(mean(seconds), 3), "seconds_max": round(max(seconds), 3)}
        if rewards := [row["reward"] for row in self.rows if row["reward"] is not None]:
            metrics["reward_mean"] = mean(rewards)
        if tokens := self.counts["batch_tokens"]:  # an estimate without bias: the policy sampled them
            metrics["entropy"] = -self.counts["batch_logprobs"] / tokens
        return metrics

"""What ``fit``, ``look`` and ``evaluate`` return: the files of a run, read as Python objects."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.cli.progress import verdict_lines
from groundwire.train.evaluation.metrics import (
    baseline,
    compare,
    compute_accuracy,
    format_accuracy,
    format_change,
    format_first_query,
    scores_by_question,
)
from groundwire.train.evaluation.run_reader import final_rollouts, first_and_last, summarize_change, untrained
from groundwire.train.evaluation.verdict import AgentVerdict
from groundwire.train.job.trained_model import newest_model
from groundwire.train.report.charts import curve_html
from groundwire.train.store.rollout import Rollout

if TYPE_CHECKING:
    import pandas as pd

_JSON_COLUMNS = ("task", "reward_components", "agent_steps", "turn_scores")


@dataclass(frozen=True)
class Accuracy:
    """The mean reward of ``n`` validation rollouts, with its 95 % interval; None if none was judged.

    ``first_query`` is that of the first queries of an SQL agent with several.
    """

    value: float | None
    ci95: tuple[float, float]
    n: int
    first_query: float | None = None

    @classmethod
    def of(cls, metrics: dict[str, Any]) -> Accuracy:
        """The accuracy in the metrics of an evaluation."""
        return cls(metrics["accuracy"], tuple(metrics["ci95"]), metrics["n"], metrics.get("first_query_accuracy"))

    def __str__(self) -> str:
        interval = f"[{self.ci95[0]:.3f}, {self.ci95[1]:.3f}]"
        return f"{format_accuracy(self.value)} {interval} of {self.n}{format_first_query(self.first_query)}"


@dataclass(frozen=True)
class Change:
    """The mean difference of ``n`` questions that two validations judged, with its 95 % interval.

    ``baseline`` is ``first query`` if the first queries before training were right more often than the answers.
    """

    value: float
    ci95: tuple[float, float]
    n: int
    baseline: str = "answer"

    @classmethod
    def of(cls, change: dict[str, Any]) -> Change:
        """The change in the summary of a run."""
        interval = tuple(change["difference_ci95"])
        return cls(change["difference"], interval, change["paired_questions"], change["baseline"])

    def __str__(self) -> str:
        return format_change({"difference": self.value, "difference_ci95": self.ci95, "baseline": self.baseline})


@dataclass(frozen=True, kw_only=True)
class _Result:
    run_dir: Path
    """The directory with all files; the commands ``report``, ``why`` and ``evaluate`` read it."""

    @property
    def rollouts(self) -> pd.DataFrame:
        """Every rollout: task, answer, steps, reward or failure, and the token ids of its calls."""
        import pandas as pd

        frame = pd.read_parquet(self.run_dir / "rollouts.parquet")
        for name in frame.columns.intersection(_JSON_COLUMNS):
            frame[name] = [value and json.loads(value) for value in frame[name]]
        return frame

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step; those of step 0 are the validation before training."""
        return RunDir(self.run_dir).metrics()

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>"


@dataclass(frozen=True, kw_only=True)
class TrainingResult(_Result):
    """A training run. ``before`` and ``after`` are its first and its last full validation, greedy if it has one."""

    checkpoint: Path | None
    """The folder of the trained model, in Hugging Face's format; None if the run wrote none."""
    before: Accuracy | None
    after: Accuracy
    change: Change | None = None
    """``after`` against ``before``, question by question; None if the run has only one full validation."""
    untrained: str = ""
    """Why the model is as it was before; empty if a step had a gradient."""

    def compare(self) -> dict[str, Any]:
        """After against before, question by question: ``difference``, ``difference_ci95``, ``p`` of McNemar's test, ….

        As in ``change``, before is what the first queries score if that is more than what the answers do.

        Raises ``ValueError`` if the run has only one full validation.
        """
        before, after = first_and_last(RunDir(self.run_dir))
        return compare(baseline(before)[0], scores_by_question(after))

    def __str__(self) -> str:
        if self.untrained:
            return f"{self.untrained}; {self.run_dir}"
        change = f" ({self.change})" if self.change else ""
        return f"{self.before} before, {self.after} after training{change}; {self.checkpoint or self.run_dir}"

    def _repr_html_(self) -> str:
        return super()._repr_html_() + curve_html(self.metrics)


@dataclass(frozen=True, kw_only=True)
class LookResult:
    """What an agent did with a few tasks before any training, and whether training can work."""

    rollouts: list[Rollout] = field(repr=False)
    verdict: AgentVerdict

    def __str__(self) -> str:
        return "\n".join(verdict_lines(self.rollouts, self.verdict))

    def _repr_html_(self) -> str:
        rows: list[tuple[Any, ...]] = [("task", "question", "answer", "reward")]
        rows += (
            (one.task["id"], one.task.get("question"), one.outcome.answer, one.outcome.reward) for one in self.rollouts
        )
        wrapped = "white-space: normal; overflow-wrap: anywhere"  # notebooks break no line in a table
        styles = ("", wrapped, wrapped, "")
        lines = (
            "".join(
                f'<td style="text-align: left; {style}">{escape(str(value))}</td>'
                for value, style in zip(row, styles, strict=True)
            )
            for row in rows
        )
        table = f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
        return table + "".join(f"<p>{escape(line)}</p>" for line in str(self).splitlines())


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(_Result):
    """An evaluation."""

    accuracy: Accuracy
    figures: dict[str, Any] = field(repr=False)
    """All metrics, as in ``evaluation.json``: by the domain's columns, by turn, tokens per call, failures by type."""

    def compare(self, other: EvaluationResult) -> dict[str, Any]:
        """``other`` against this evaluation, as :meth:`TrainingResult.compare`.

        Raises ``ValueError`` if they share no question.
        """
        return compare(*(scores_by_question(final_rollouts(RunDir(result.run_dir))) for result in (self, other)))

    def __str__(self) -> str:
        return f"{self.accuracy}; {self.run_dir}"


def training_result(run: RunDir) -> TrainingResult:
    """The result of a run that has ended."""
    before, after = first_and_last(run)
    change, checkpoint = summarize_change(before, after), None
    with suppress(RunDirError):
        checkpoint = newest_model(run).resolve()
    return TrainingResult(
        run_dir=run.path.resolve(),
        checkpoint=checkpoint,
        before=Accuracy.of(compute_accuracy(before)) if before else None,
        after=Accuracy.of(compute_accuracy(after)),
        change=Change.of(change) if change else None,
        untrained=untrained(run.metrics()),
    )

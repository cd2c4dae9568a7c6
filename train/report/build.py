"""From a run's folder to its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from train.report.browser import Limits, choose, counted_reasons, read, rollout_data
from train.report.charts import Chart, charts
from train.report.page import page
from train.rundir import RunDir
from train.vocabulary import vocabulary_of

__all__ = ["Report", "build"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page, and the charts that are on it."""

    html: str
    charts: Sequence[Chart]


def build(run: RunDir, *, limits: Limits | None = None, live: str = "") -> Report:
    """The report of a run as it is now: going on, stopped, killed or finished.

    ``live`` is a script that loads the page again. Raises :class:`train.rundir.RunDirError` for a damaged
    ``config.json``.
    """
    limits = limits or Limits()
    config, metrics = run.config(), run.metrics()
    agent_match = config.get("agent_match")
    notes = read(run, agent_match=agent_match, trainer=str(config.get("trainer", "local")))
    chosen = choose(notes.rollouts, limits)
    data = rollout_data(run, chosen, vocabulary_of(run), agent_match=agent_match, limits=limits)
    drawn = charts(metrics, notes.lengths, notes.parts)
    html = page(
        name=run.path.name,
        config=config,
        metrics=metrics,
        charts=drawn,
        reasons=counted_reasons(notes),
        data=data,
        total=len(notes.rollouts),
        warnings=notes.damaged,
        live=live,
    )
    return Report(html=html, charts=drawn)

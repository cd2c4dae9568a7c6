"""From a run's folder to its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.report.charts import Chart, charts
from groundwire.train.report.page import page
from groundwire.train.report.rollout_browser import Limits, choose, counted_reasons, read, rollout_data
from groundwire.train.report.token_text import vocabulary_of

__all__ = ["Report", "build"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page, and the charts that are on it."""

    html: str
    charts: Sequence[Chart]


def build(run: RunDir, *, limits: Limits | None = None, live: str = "") -> Report:
    """The report of a run as it is now: going on, stopped, killed or finished.

    ``live`` is a script that loads the page again. Raises :class:`groundwire.train.artifacts.run_dir.RunDirError` for a
    damaged ``config.json``.
    """
    limits = limits or Limits()
    config, metrics = run.config(), run.metrics()
    agent_match = config.get("agent_match")
    notes = read(run, agent_match=agent_match, trainer=str(config.get("trainer", "local")))
    chosen = choose(notes.rollouts, limits)
    data = rollout_data(run, chosen, vocabulary_of(run), agent_match=agent_match, limits=limits)
    drawn = charts(metrics, notes.lengths, notes.reward_components)
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

"""The part of a run's report about lost chances (``groundwire why --turns``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from groundwire.tools.files import read_json
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.report.charts import Chart, Series

FILE = "turns.json"
"""What was lost at which call, in the run's folder."""
_LEAST_SHARE = 0.005


def read_turns(run: RunDir, unreadable: list[str]) -> tuple[list[Chart], dict[str, list[str]]]:
    """The chart of :data:`FILE`, and the chance before and after the calls of each rollout, in words; empty without it.

    A message for a damaged file is appended to ``unreadable``.
    """
    file, lines = run.path / FILE, defaultdict[str, list[str]](list)
    with suppress(FileNotFoundError):
        try:
            lost = read_json(file)
            for turn in sorted(lost["turns"], key=lambda turn: turn["call"]):
                lines[turn["rollout"]].append(turn["text"])
            return [_chart(lost)], lines
        except (ValueError, LookupError, TypeError) as error:
            unreadable.append(f"{file} is damaged ({error!r}): delete it, or write it again with why --turns")
    return [], {}


def loss_lines(lost: Mapping[str, Any]) -> list[str]:
    """How much of the loss is in each agent, and in calls of each tool."""
    lines = []
    for key, words in (("agents", "in"), ("tools", "in replies that call")):
        if len(lost[key]) > 1 or key == "agents":
            shares = [
                f"{share:.0%} of the loss is {words} {name}" for name, share in lost[key] if share >= _LEAST_SHARE
            ]
            lines.append(", ".join(shares) or "no call has lost a chance")
    return lines


def _chart(lost: Mapping[str, Any]) -> Chart:
    """What each agent lost at each call."""
    by_agent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for turn in lost["turns"]:
        by_agent[turn["agent"]][turn["call"]] += turn["drop"] / lost["rollouts"]
    places = sorted({turn["call"] for turn in lost["turns"]})
    bars = [
        Series(name=agent, points=[(place, max(0.0, amounts[place])) for place in places])
        for agent, amounts in sorted(by_agent.items())
    ]
    return Chart(
        key="loss",
        title="Where failed rollouts lost their chance",
        unit="chance of success lost at a call, mean",
        x="call",
        stacked=True,
        series=bars,
        reading="; ".join([*loss_lines(lost), f"{lost['samples']} samples of {lost['rollouts']} rollouts"]),
    )

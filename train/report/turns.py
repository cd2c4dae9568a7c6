"""The part of a run's report about lost chances (``groundwire why --turns``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from groundwire.tools.files import read_json
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir
from groundwire.train.report.charts import Chart, Series

FILE = "turns.json"
"""What was lost at which call, in the run's folder."""
_LINES, _LEAST_SHARE = 6, 0.005


def read_turns(run: RunDir) -> tuple[list[Chart], dict[str, list[str]]]:
    """The charts of :data:`FILE`, and the chance before and after the calls of each rollout, in words; empty without
    the file.

    Raises :class:`RunDamagedError`.
    """
    file, lines = run.path / FILE, defaultdict[str, list[str]](list)
    if not file.exists():
        return [], lines
    try:
        lost = read_json(file)
        for turn in sorted(lost["turns"], key=lambda turn: turn["call"]):
            lines[turn["rollout"]].append(turn["text"])
        return turn_charts(lost), lines
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunDamagedError(f"{file} is damaged ({error!r}): delete it, or write it again") from error


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


def turn_charts(lost: Mapping[str, Any]) -> list[Chart]:
    """What each agent lost at each call, and the value before each call of the rollouts that lost most at one."""
    by_agent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    by_rollout: dict[str, dict[int, Any]] = defaultdict(dict)
    for turn in lost["turns"]:  # the largest drop first
        by_agent[turn["agent"]][turn["call"]] += turn["drop"] / lost["rollouts"]
        by_rollout[turn["rollout"]][turn["call"]] = turn
    places = sorted({turn["call"] for turn in lost["turns"]})
    bars = [
        Series(name=agent, points=[(place, max(0.0, amounts[place])) for place in places])
        for agent, amounts in sorted(by_agent.items())
    ]
    curves = []
    for name, turns in list(by_rollout.items())[:_LINES]:
        points = [(place, turns[place]["share"]) for place in sorted(turns)]
        bands = [turns[place]["interval"] for place in sorted(turns)]
        end = max(turns) + 1
        curves.append(Series(name=name[:9], points=[*points, (end, 0.0)], bands=[*bands, (0.0, 0.0)]))
    return [
        Chart(
            key="loss",
            title="Where failed rollouts lost their chance",
            unit="chance of success lost at a call, mean",
            x="call",
            stacked=True,
            series=bars,
            reading="; ".join([*loss_lines(lost), f"{lost['samples']} samples of {lost['rollouts']} rollouts"]),
        ),
        Chart(
            key="turn_values",
            title="Chance before each call",
            unit="share of successes of continuations",
            x="call",
            top=1.0,
            series=curves,
            reading="The rollouts with the largest drops. A line falls at the call that lost the chance.",
        ),
    ]

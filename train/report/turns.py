"""The part of a run's report about lost chances (``groundwire why --turns``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.tools.files import read_json
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir
from groundwire.train.report.charts import Chart, Series

FILE = "turns.json"
"""What was lost at which call, in the run's folder."""
_LINES, _LEAST_SHARE = 6, 0.005


def read_turns(run: RunDir) -> dict[str, Any]:
    """The contents of :data:`FILE`; empty without it. Raises :class:`RunDamagedError`."""
    file = run.path / FILE
    try:
        lost = read_json(file)
        lost["turns"][0]["before"]["interval"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunDamagedError(f"{file} is damaged ({error!r}): delete it, or write it again") from error
    return dict(lost)


def turn_lines(lost: Mapping[str, Any]) -> dict[str, list[str]]:
    """The chance before and after the calls of each rollout, in words."""
    lines = defaultdict[str, list[str]](list)
    for turn in sorted(lost.get("turns", ()), key=lambda turn: turn["call"]):
        lines[turn["rollout"]].append(turn_line(turn))
    return lines


def turn_line(turn: Mapping[str, Any]) -> str:
    """A call with the chance of success before and after it."""
    after = value_text(turn["after"]) if turn["after"] else "0, as it failed"
    return f"{turn['name']}: chance {value_text(turn['before'])}, after it {after}"


def value_text(value: Mapping[str, Any]) -> str:
    """A share of successes with its interval."""
    low, high = value["interval"]
    return f"{value['share']:.2f} [{low:.2f}, {high:.2f}] of {value['samples']}"


def loss_lines(lost: Mapping[str, Any]) -> list[str]:
    """How much of the loss is in each agent, and in calls of each tool."""
    lines = []
    for key, words in (("agents", "in"), ("tools", "in replies that call")):
        rows = [row for row in lost[key] if row["share"] >= _LEAST_SHARE]
        if rows and (key == "agents" or len(lost[key]) > 1):
            lines.append(", ".join(f"{row['share']:.0%} of the loss is {words} {row['name']}" for row in rows))
    return lines


def turn_charts(lost: Mapping[str, Any]) -> list[Chart]:
    """What each agent lost at each call, and the value before each call of the rollouts that lost most at one."""
    if not lost:
        return []
    by_agent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    by_rollout: dict[str, list[Any]] = defaultdict(list)
    for turn in lost["turns"]:  # the largest drop first
        by_agent[turn["agent"] or "the agent"][turn["call"]] += turn["drop"] / lost["rollouts"]
        by_rollout[turn["rollout"]].append(turn)
    places = sorted({place for amounts in by_agent.values() for place in amounts})
    bars = [
        Series(name=agent, points=[(place, max(0.0, amounts.get(place, 0.0))) for place in places])
        for agent, amounts in sorted(by_agent.items())
    ]
    return [
        Chart(
            key="loss",
            title="Where failed rollouts lost their chance",
            unit="chance of success lost at a call, mean",
            x="call",
            stacked=True,
            series=bars,
            reading=". ".join([*loss_lines(lost), f"{lost['samples']} samples of {lost['rollouts']} rollouts."]),
        ),
        Chart(
            key="turn_values",
            title="Chance before each call",
            unit="share of successes of continuations",
            x="call",
            top=1.0,
            series=[_curve(name, turns) for name, turns in list(by_rollout.items())[:_LINES]],
            reading="The rollouts with the largest drops. A line falls at the call that lost the chance.",
        ),
    ]


def _curve(name: str, turns: Sequence[Mapping[str, Any]]) -> Series:
    turns = sorted(turns, key=lambda turn: turn["call"])
    end = turns[-1]["call"] + 1
    return Series(
        name=name[:9],
        points=[*((turn["call"], turn["before"]["share"]) for turn in turns), (end, 0.0)],
        bands=[*(turn["before"]["interval"] for turn in turns), (0.0, 0.0)],
    )

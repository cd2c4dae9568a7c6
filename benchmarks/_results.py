"""Figures as data: each benchmark records what it measured beside what a user would otherwise run.

A figure without its rival says how one of our costs grows. ``python -m benchmarks`` gathers them into one JSON file and
prints them as the table of the README.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["FILE", "markdown", "record"]

FILE = "LIGHTNING_ROD_BENCH_RESULTS"
"""The environment variable with the file that figures are added to; without it a benchmark only prints."""


def record(
    figure: str,
    ours: float,
    *,
    unit: str,
    against: str | None = None,
    theirs: float | None = None,
    less_is_better: bool = False,
) -> None:
    """Add one figure. Its ratio says how many times as good ours is, whichever way better points."""
    line: dict[str, Any] = {"figure": figure, "unit": unit, "ours": round(ours, 4)}
    if against is not None and theirs is not None:
        ratio = theirs / ours if less_is_better else ours / theirs
        line |= {"against": against, "theirs": round(theirs, 4), "ratio": round(ratio, 3)}
    if path := os.environ.get(FILE):
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """What one benchmark recorded."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def markdown(figures: list[dict[str, Any]]) -> str:
    """A table, a row for each figure."""
    lines = ["| | ours | otherwise | ratio |", "|---|---|---|---|"]
    for each in figures:
        rival = f"{_number(each['theirs'])} ({each['against']})" if "against" in each else ""
        ratio = f"{each['ratio']:.3g}" if "ratio" in each else ""
        lines.append(f"| {each['figure']}, {each['unit']} | {_number(each['ours'])} | {rival} | {ratio} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

"""Figures of the benchmarks, as JSON and as a Markdown table, and the measured commit."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["FILE", "commit", "markdown", "median_s", "read_lines", "record"]

FILE = "GROUNDWIRE_BENCH_RESULTS"
"""Environment variable: the file to which figures are appended. Without it a benchmark only prints."""


def median_s(
    run: Callable[[], Any], *, passes: int = 7, repeats: int = 1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one ``run()`` by ``clock``: the median over ``passes``, each the mean of ``repeats`` runs."""
    times = []
    for _ in range(passes):
        started = clock()
        for _ in range(repeats):
            run()
        times.append((clock() - started) / repeats)
    return statistics.median(times)


def record(
    figure: str,
    ours: float,
    *,
    unit: str,
    against: str | None = None,
    theirs: float | None = None,
    less_is_better: bool = False,
) -> None:
    """Append one figure. Its ratio says how many times better ours is than ``theirs``, measured with ``against``.

    A figure without an alternative shows how one of our costs grows.
    """
    line: dict[str, Any] = {"figure": figure, "unit": unit, "ours": round(ours, 4)}
    if against is not None and theirs is not None:
        ratio = theirs / ours if less_is_better else ours / theirs
        line |= {"against": against, "theirs": round(theirs, 4), "ratio": round(ratio, 3)}
    if path := os.environ.get(FILE):
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def commit() -> str:
    """The commit of the working tree; empty outside of a clone."""
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object per line; empty without the file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def markdown(figures: list[dict[str, Any]]) -> str:
    """A table with a row per figure."""
    lines = ["| | ours | otherwise | ratio |", "|---|---|---|---|"]
    for each in figures:
        alternative = f"{_number(each['theirs'])} ({each['against']})" if "against" in each else ""
        ratio = f"{each['ratio']:.3g}" if "ratio" in each else ""
        lines.append(f"| {each['figure']}, {each['unit']} | {_number(each['ours'])} | {alternative} | {ratio} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

"""Execution match: pairs judged per second in one process, on published predictions for real Spider.

``SPIDER_DATA_DIR`` names the folder with Spider and with the official verdicts, ``parity/public.jsonl.gz``. If
``TEST_SUITE_SQL_EVAL`` names a clone of taoyds/test-suite-sql-eval (it needs sqlparse and tqdm), the official evaluator
judges the different pairs, too, in turns with ours; else it counts as 243 pairs/s, measured once on two cores. In turns
with both, a bare connection runs the queries: what SQLite takes by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib
import json
import os
import resource
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import psutil

from benchmarks._results import record
from groundwire.rewards.spider.execution_match import execution_match

OFFICIAL = 243.0  # pairs/s on two cores, EXECUTION_MATCH.md
SPIDER = Path(os.environ.get("SPIDER_DATA_DIR") or Path(__file__).parents[2] / "shared" / "spider")
EVALUATOR = os.environ.get("TEST_SUITE_SQL_EVAL")
ONCE = "official evaluator, measured once"
TURNS = 8
Pair = tuple[str, str, str]


def main() -> None:
    """Print pairs/s of wall and of CPU time, the CPU time of the median pair, and the peak memory."""
    asyncio.run(asyncio.to_thread(_measure))  # rewards' queries run in threads; in the main thread each needs a new one


class _Judge:
    """Judges pairs, and counts them with their time."""

    def __init__(self, name: str, judge: Callable[[str, str, str], float]) -> None:
        self.name, self.judge, self.scores = name, judge, list[float]()
        self.wall_s = self.total_cpu_s = 0.0
        self.cpu_s = list[float]()

    def run(self, pairs: Sequence[Pair]) -> None:
        """Judge ``pairs``."""
        started, in_processes_s = time.perf_counter(), _processes_cpu_s()
        for pair in pairs:
            cpu_started = time.thread_time()
            self.scores.append(self.judge(*pair))
            self.cpu_s.append(time.thread_time() - cpu_started)
        self.wall_s += time.perf_counter() - started
        self.total_cpu_s += sum(self.cpu_s[-len(pairs) :]) + _processes_cpu_s() - in_processes_s

    def report(self) -> tuple[float, float, float]:
        """Print and return the pairs per second of wall time and of CPU time, and the median pair's CPU time in ms."""
        figures = len(self.scores) / self.wall_s, len(self.scores) / self.total_cpu_s, 1000 * median(self.cpu_s)
        print(f"{self.name:26}{len(self.scores):8}{figures[0]:10.0f}{figures[1]:13.0f}{figures[2]:11.3f}")
        return figures


def _processes_cpu_s() -> float:
    """Of the processes below this one: on a busy machine a heavy query moves to one."""
    return sum(sum(process.cpu_times()[:2]) for process in psutil.Process().children())


def _ours(name: str, timeout_s: float) -> _Judge:
    # Verdicts are cached by timeout, so another timeout judges every pair again.
    return _Judge(name, lambda *pair: execution_match(*pair, timeout_s=timeout_s).score)


def _official(folder: str) -> _Judge:
    """The official evaluator on copies of the databases in ``folder``: it opens them for writing."""
    sys.path.insert(0, str(EVALUATOR))
    evaluate = importlib.import_module("exec_eval").eval_exec_match

    def judge(predicted: str, gold: str, database: str) -> float:
        copy = Path(folder, Path(database).stem, Path(database).name)
        if not copy.exists():
            copy.parent.mkdir()
            shutil.copyfile(database, copy)
        options = {"plug_value": False, "keep_distinct": False, "progress_bar_for_each_datapoint": False}
        return float(evaluate(str(copy), predicted, gold, **options))

    return _Judge("official evaluator", judge)


def _bare() -> _Judge:
    """Runs each different query once, with nothing around it."""
    open_ones: dict[str, sqlite3.Connection] = {}
    seen = set[tuple[str, str]]()

    def run(predicted: str, gold: str, database: str) -> float:
        if database not in open_ones:
            uri = f"file:{database}?mode=ro"
            open_ones[database] = sqlite3.connect(uri, uri=True, check_same_thread=False, cached_statements=0)
        for query in {(predicted, database), (gold, database)} - seen:
            seen.add(query)
            with contextlib.suppress(sqlite3.Error, sqlite3.Warning):
                open_ones[database].execute(query[0]).fetchall()
        return 0.0

    return _Judge("bare SQLite", run)


def _measure() -> None:
    cases = SPIDER / "parity" / "public.jsonl.gz"
    if not cases.is_file():
        print(f"the official verdicts are not at {cases}; set SPIDER_DATA_DIR to their folder")
        return
    with gzip.open(cases, "rt") as lines:
        pairs = [
            (case["pred"], case["gold"], str(SPIDER / "database" / case["db_id"] / f"{case['db_id']}.sqlite"))
            for case in map(json.loads, lines)
            if case["source"].startswith("model:")
        ]
    print(f"{'pairs':26}{'n':>8}{'pairs/s':>10}{'pairs/CPU-s':>13}{'median ms':>11}")
    every, each, bare = _ours("as published", 5.0), _ours("each different one once", 6.0), _bare()
    different = list(dict.fromkeys(pairs))
    with tempfile.TemporaryDirectory() as folder:
        official = _official(folder) if EVALUATOR else None
        for turn in range(TURNS):
            for judge in (each, bare, official):
                if judge:
                    judge.run(different[turn::TURNS])
    figure, (per_s, per_cpu_s, median_ms) = f"execution match, {each.name}", each.report()
    _, bare_per_cpu_s, _ = bare.report()
    print(f"CPU-s of each different one once to bare SQLite: {bare_per_cpu_s / per_cpu_s:.2f}")
    if official:
        _, theirs, their_median_ms = official.report()
        differ = sum(ours != score for ours, score in zip(each.scores, official.scores, strict=True))
        ratios = (per_cpu_s / theirs, their_median_ms / median_ms, bare_per_cpu_s / theirs)
        print("CPU-s of the official evaluator to ours: {:.1f}, median {:.1f}; to bare SQLite: {:.1f}".format(*ratios))
        print(f"different verdicts: {differ}")
        record(figure, per_cpu_s, unit="pairs/CPU-s", against="official evaluator", theirs=theirs)
        record(f"{figure}, median", median_ms, unit="CPU-ms", against="official evaluator", theirs=their_median_ms)
    else:
        record(figure, per_s, unit="pairs/s", against=ONCE, theirs=OFFICIAL)
    every.run(pairs)
    per_s, *_ = every.report()
    record(f"execution match, {every.name}", per_s, unit="pairs/s", against=ONCE, theirs=OFFICIAL)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()

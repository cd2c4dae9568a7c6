"""Execution match: pairs judged per second in one process, on published predictions for real Spider.

``SPIDER_DATA_DIR`` names the folder with Spider and with the official verdicts, ``parity/public.jsonl.gz``. If
``TEST_SUITE_SQL_EVAL`` names a clone of taoyds/test-suite-sql-eval (it needs sqlparse and tqdm), the official evaluator
judges the different pairs, too, in turns with ours; else it counts as 243 pairs/s, measured once on two cores.
"""

from __future__ import annotations

import asyncio
import gzip
import importlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks._results import record
from groundwire.rewards.spider.execution_match import execution_match

OFFICIAL = 243.0  # pairs/s on two cores, EXECUTION_MATCH.md
SPIDER = Path(os.environ.get("SPIDER_DATA_DIR") or Path(__file__).parents[2] / "shared" / "spider")
EVALUATOR = os.environ.get("TEST_SUITE_SQL_EVAL")
ONCE = "official evaluator, measured once"
TURNS = 8
Pair = tuple[str, str, str]


def main() -> None:
    """Print pairs/s of wall time and of CPU time, for all pairs and for the different ones, and the peak memory."""
    asyncio.run(asyncio.to_thread(_measure))  # rewards' queries run in threads; in the main thread each needs a new one


class _Judge:
    """Judges pairs, and counts them with their time."""

    def __init__(self, name: str, judge: Callable[[str, str, str], float]) -> None:
        self.name, self.judge, self.scores = name, judge, list[float]()
        self.wall_s = self.cpu_s = 0.0

    def run(self, pairs: Sequence[Pair]) -> None:
        """Judge ``pairs``."""
        started, cpu_started = time.perf_counter(), time.process_time()
        self.scores += [self.judge(*pair) for pair in pairs]
        self.wall_s += time.perf_counter() - started
        self.cpu_s += time.process_time() - cpu_started

    def report(self) -> tuple[float, float]:
        """Print and return the pairs per second of wall time and of CPU time."""
        per_s, per_cpu_s = len(self.scores) / self.wall_s, len(self.scores) / self.cpu_s
        print(f"{self.name:24}{len(self.scores):8}{per_s:10.0f}{per_cpu_s:13.0f}")
        return per_s, per_cpu_s


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
    print(f"{'pairs':24}{'n':>8}{'pairs/s':>10}{'pairs/CPU-s':>13}")
    every, each = _ours("as published", 5.0), _ours("each different one once", 6.0)
    every.run(pairs)
    per_s, _ = every.report()
    record(f"execution match, {every.name}", per_s, unit="pairs/s", against=ONCE, theirs=OFFICIAL)
    different = list(dict.fromkeys(pairs))
    with tempfile.TemporaryDirectory() as folder:
        official = _official(folder) if EVALUATOR else None
        for turn in range(TURNS):
            each.run(different[turn::TURNS])
            if official:
                official.run(different[turn::TURNS])
    figure, (per_s, per_cpu_s) = f"execution match, {each.name}", each.report()
    if official:
        _, theirs = official.report()
        differ = sum(ours != score for ours, score in zip(each.scores, official.scores, strict=True))
        print(f"CPU-s of the official evaluator to ours: {per_cpu_s / theirs:.1f}; different verdicts: {differ}")
        record(figure, per_cpu_s, unit="pairs/CPU-s", against="official evaluator", theirs=theirs)
    else:
        record(figure, per_s, unit="pairs/s", against=ONCE, theirs=OFFICIAL)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()

"""The reward ``spider_test_suite`` on real Spider: golds and their rewrites, its cost, each verdict that it changes.

``python -m benchmarks.neighbours PREPARED PREDICTIONS CHANGED``: a folder that ``domains.spider.prepare --neighbours``
wrote, JSON lines in gzip with ``id``, ``db_id``, ``gold``, ``pred`` and ``source``, and the JSON-lines file to write.
Without the last two, only golds and rewrites with the same meaning are judged.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._results import record
from benchmarks._rewrites import rewrite
from groundwire.domains.spider.loader import domain
from groundwire.rewards import RewardError
from groundwire.rewards.spider.execution_match import MatchResult, execution_match
from groundwire.rewards.spider.test_suite import suite_match

_PAIRS = 1500
_ROUNDS = 5


def main() -> None:
    """Print how many golds and rewrites win, what a pair costs with both rewards, and how many verdicts change."""
    prepared, *files = map(Path, sys.argv[1:])
    if not prepared.is_dir():
        raise SystemExit(f"{prepared} is no folder: give one that domains.spider.prepare wrote")
    with ThreadPoolExecutor(1) as thread:  # a query of the main thread would start a thread of its own
        thread.submit(_judge_golds, prepared).result()
        if files:
            thread.submit(_measure, prepared, *files).result()


def _judge_golds(prepared: Path) -> None:
    rng, wins, rewritten = random.Random(0), [0, 0], 0
    tasks = domain.load(str(prepared))
    golds = [*tasks.train, *tasks.validation]
    for task in golds:
        gold, database = task["query"], task["db_path"]
        wins[0] += suite_match(gold, gold, database).score > 0
        if (other := rewrite(gold, rng)) != gold:
            rewritten += 1
            wins[1] += suite_match(other, gold, database).score > 0
    print(f"{wins[0]} of {len(golds)} golds win, and {wins[1]} of {rewritten} random rewrites with the same meaning")


def _measure(prepared: Path, predictions: Path, changed: Path) -> None:
    with gzip.open(predictions, "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["source"].startswith("model:")]
    random.Random(0).shuffle(rows)
    timeout_s, ratios = 5.0, []
    for _ in range(_ROUNDS):
        alone = _seconds(prepared, rows[:_PAIRS], execution_match, timeout_s + 0.25)
        timeout_s += 0.5  # verdicts are cached by timeout
        suite = _seconds(prepared, rows[:_PAIRS], suite_match, timeout_s)
        ratios.append((suite[0] / alone[0], suite[1] / alone[1]))
    # Slow queries run in other processes, so only the wall time has all of them.
    wall, cpu = (sorted(each)[_ROUNDS // 2] for each in zip(*ratios, strict=True))
    print(f"spider_test_suite costs {wall:.2f} times spider_exec_match a pair, {cpu:.2f} times in CPU time")
    record("spider_test_suite, cost of a pair", wall, unit="times execution match")
    judged = wins = 0
    with changed.open("w", encoding="utf-8") as file:
        for row in rows:
            arguments = row["pred"], row["gold"], _database(prepared, row)
            try:
                before, after = execution_match(*arguments), suite_match(*arguments)
            except RewardError:
                continue
            judged += 1
            wins += before.score > 0
            if before.score != after.score:
                file.write(json.dumps({**row, "reason": after.reason}) + "\n")
    count = len(changed.read_text(encoding="utf-8").splitlines())
    print(f"{judged} predictions, {wins} right by execution match, {count} of them wrong on a neighbour: {changed}")


def _database(prepared: Path, row: dict[str, Any]) -> str:
    return str(prepared / "database" / row["db_id"] / f"{row['db_id']}.sqlite")


def _seconds(
    prepared: Path, rows: list[dict[str, Any]], reward: Callable[..., MatchResult], timeout_s: float
) -> tuple[float, float]:
    """Wall time, and CPU time of this process."""
    started, cpu_started = time.perf_counter(), time.process_time()
    for row in rows:
        try:
            reward(row["pred"], row["gold"], _database(prepared, row), timeout_s=timeout_s)
        except RewardError:
            continue
    return time.perf_counter() - started, time.process_time() - cpu_started


if __name__ == "__main__":
    main()

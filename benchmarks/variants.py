"""The reward in training on Spider: golds' rewrites, memorised results, its cost, verdicts that it changes.

``python -m benchmarks.variants FOLDER PREDICTIONS CHANGED``: a Spider folder (``-`` is the bundled data), JSON lines
in gzip with ``id``, ``db_id``, ``gold``, ``pred`` and ``source``, and the JSON-lines file to write. Without the last
two, only rewrites with the same meaning and memorised results are judged, for about 1,000 golds.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import sqlglot
from sqlglot import exp

from benchmarks._results import record
from benchmarks._rewrites import rewrite
from groundwire.domains.spider.loader import domain
from groundwire.rewards import RewardError
from groundwire.rewards._sql import SqlAnswer
from groundwire.rewards.spider.execution_match import _compare, _gold_result, execution_match, training_match
from groundwire.tools.sql import run_query
from groundwire.tools.variants import NoVariantsError, variants_of

_TASKS, _PAIRS = 1000, 1500
_MOST_ROWS = 20
_ROUNDS = 5


def main() -> None:
    """Print how many golds and rewrites win, what a pair costs with both rewards, and how many verdicts change."""
    folder, *files = map(Path, sys.argv[1:])
    with ThreadPoolExecutor(1) as thread:  # a query of the main thread would start a thread of its own
        thread.submit(_judge_golds, folder).result()
        if files:
            thread.submit(_measure, folder, *files).result()


def _judge_golds(folder: Path) -> None:
    rng, files = random.Random(0), Counter[int]()
    tasks = domain.load(None if str(folder) == "-" else str(folder))
    every, started = [*tasks.train, *tasks.validation], time.process_time()
    golds = every[:: max(1, len(every) // _TASKS)]
    for task in golds:
        try:
            files[len(variants_of(task["db_path"], task["query"], task["question"]))] += 1
        except NoVariantsError:
            files[0] += 1
    seconds = time.process_time() - started
    print(f"golds by their number of variants: {dict(sorted(files.items()))}; {seconds / len(golds):.3f} s of CPU each")
    kinds = {
        "rewrites with the same meaning": lambda task: rewrite(task["query"], rng),
        "memorised results": _memorised,
    }
    for kind, answer_to in kinds.items():
        found = [_judge(task, answer) for task in golds if (answer := answer_to(task)) not in ("", task["query"])]
        official, paid = (sum(value > 0 for value in values) for values in zip(*found, strict=True))
        print(f"{kind}: {len(found)}; right by execution match {official}, in training {paid}")


def _judge(task: Mapping[str, Any], answer: str) -> tuple[float, float]:
    found = training_match(SqlAnswer(answer, task["query"], task["db_path"], task["question"]))
    return found.official, found.value


def _memorised(task: Mapping[str, Any]) -> str:
    """The gold's result as constants beside a table that is read; empty if it is long."""
    tree = sqlglot.parse_one(task["query"], read="sqlite")
    table = next((each.this.sql(dialect="sqlite", identify=True) for each in tree.find_all(exp.Table)), "")
    rows = run_query(task["db_path"], task["query"], max_rows=_MOST_ROWS + 1).rows
    if not table or not 0 < len(rows) <= _MOST_ROWS:
        return ""
    constants = ", ".join(f"({', '.join(exp.convert(value).sql(dialect='sqlite') for value in row)})" for row in rows)
    return f"SELECT * FROM (VALUES {constants}) WHERE EXISTS (SELECT 1 FROM {table})"


def _measure(folder: Path, predictions: Path, changed: Path) -> None:
    with gzip.open(predictions, "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["source"].startswith("model:")]
    random.Random(0).shuffle(rows)
    answers = [
        SqlAnswer(row["pred"], row["gold"], str(folder / "database" / row["db_id"] / f"{row['db_id']}.sqlite"), "")
        for row in rows
    ]
    judged = wins = 0
    with changed.open("w", encoding="utf-8") as file:
        for row, answer in zip(rows, answers, strict=True):
            try:
                found = training_match(answer)
            except RewardError:
                continue
            judged += 1
            wins += found.official > 0
            if found.value != found.official:
                file.write(json.dumps({**row, "wrong_on": found.wrong_on}) + "\n")
    count = len(changed.read_text(encoding="utf-8").splitlines())
    print(f"{judged} predictions, {wins} right by execution match, {count} of them wrong on a variant: {changed}")
    alone = [_seconds(answers[:_PAIRS], lambda each: execution_match(*each[:3])) for _ in range(_ROUNDS)]
    trained = [_seconds(answers[:_PAIRS], training_match) for _ in range(_ROUNDS)]
    ratio = sorted(trained)[_ROUNDS // 2] / sorted(alone)[_ROUNDS // 2]
    print(f"in training a pair costs {ratio:.2f} times execution match")
    record("reward in training, cost of a pair", ratio, unit="times execution match")


def _seconds(answers: list[SqlAnswer], judge: Callable[[SqlAnswer], Any]) -> float:
    for cached in (_compare, _gold_result):
        cached.cache.clear()
    started = time.perf_counter()
    for answer in answers:
        with contextlib.suppress(RewardError):
            judge(answer)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

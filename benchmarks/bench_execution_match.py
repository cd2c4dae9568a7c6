"""Pairs judged a second in one process, on the published predictions for real Spider, each pair new to the judge.

Run as ``python -m benchmarks.bench_execution_match``; the official evaluator does 243 pairs/s on two cores.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import resource
import time
from pathlib import Path

from benchmarks._results import record
from groundwire.rewards.spider.execution_match import execution_match

_OFFICIAL = 243.0  # pairs/s on two cores, EXECUTION_MATCH.md
SPIDER = Path(os.environ.get("SPIDER_DATA_DIR") or Path(__file__).parents[2] / "shared" / "spider")


def main() -> None:
    """Print pairs/s by the wall and by the CPU, for all pairs and for each different pair once, and peak memory."""
    asyncio.run(asyncio.to_thread(_measure))  # where rewards' queries run; the main thread's wait for a thread each


def _measure() -> None:
    cases = SPIDER / "parity" / "public.jsonl.gz"
    if not cases.is_file():
        print(f"the official verdicts are not at {cases} (SPIDER_DATA_DIR names another place)")
        return
    with gzip.open(cases, "rt") as lines:
        pairs = [
            (case["pred"], case["gold"], str(SPIDER / "database" / case["db_id"] / f"{case['db_id']}.sqlite"))
            for case in map(json.loads, lines)
            if case["source"].startswith("model:")
        ]
    print(f"{'pairs':24}{'n':>8}{'pairs/s':>10}{'pairs/CPU-s':>13}")
    # A verdict is kept for the timeout it was judged under, so another timeout judges everything anew.
    for name, chosen, timeout_s in (
        ("as published", pairs, 5.0),
        ("each different one once", list(dict.fromkeys(pairs)), 6.0),
    ):
        wall, cpu = time.perf_counter(), time.process_time()
        for predicted, gold, database in chosen:
            execution_match(predicted, gold, database, timeout_s=timeout_s)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        record(
            f"execution match, {name}",
            len(chosen) / wall,
            unit="pairs/s",
            against="official evaluator, as it was measured once",
            theirs=_OFFICIAL,
        )
        print(f"{name:24}{len(chosen):8}{len(chosen) / wall:10.0f}{len(chosen) / cpu:13.0f}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()

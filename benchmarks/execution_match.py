"""Execution match: pairs judged per second in one process, on published predictions for real Spider.

``SPIDER_DATA_DIR`` names the folder with Spider and with the official verdicts, ``parity/public.jsonl.gz``. The
official evaluator judges 243 pairs/s on two cores.
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

OFFICIAL = 243.0  # pairs/s on two cores, EXECUTION_MATCH.md
SPIDER = Path(os.environ.get("SPIDER_DATA_DIR") or Path(__file__).parents[2] / "shared" / "spider")


def main() -> None:
    """Print pairs/s of wall time and of CPU time, for all pairs and for the different ones, and the peak memory."""
    asyncio.run(asyncio.to_thread(_measure))  # rewards' queries run in threads; in the main thread each needs a new one


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
    # Verdicts are cached by timeout, so another timeout judges every pair again.
    for name, chosen, timeout_s in (
        ("as published", pairs, 5.0),
        ("each different one once", list(dict.fromkeys(pairs)), 6.0),
    ):
        started, cpu_started = time.perf_counter(), time.process_time()
        for predicted, gold, database in chosen:
            execution_match(predicted, gold, database, timeout_s=timeout_s)
        per_s = len(chosen) / (time.perf_counter() - started)
        per_cpu_s = len(chosen) / (time.process_time() - cpu_started)
        against = "official evaluator, measured once"
        record(f"execution match, {name}", per_s, unit="pairs/s", against=against, theirs=OFFICIAL)
        print(f"{name:24}{len(chosen):8}{per_s:10.0f}{per_cpu_s:13.0f}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()

"""Measure the parts of this project, and their alternatives.

Each benchmark runs in its own process, prints a table, and adds its figures to
one JSON file. A benchmark also runs alone: python -m benchmarks.NAME, or
python -m benchmarks.tracing.NAME for proxy, triplets and growth.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks._results import FILE, commit, markdown, read_lines

BENCHMARKS = {
    "proxy": "benchmarks.tracing.proxy",
    "triplets": "benchmarks.tracing.triplets",
    "step": "benchmarks.step",
    "server": "benchmarks.server",
    "sql": "benchmarks.sql",
    "execution_match": "benchmarks.execution_match",
    "growth": "benchmarks.tracing.growth",
    "driver": "benchmarks.driver",
    "store": "benchmarks.store",
    "processes": "benchmarks.processes",
}
"""The module of each benchmark; to add one, write a module that calls :func:`benchmarks._results.record`."""


def main() -> int:
    """Run the benchmarks one after the other; the exit status is the number that failed."""
    names = ", ".join(BENCHMARKS)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {names}; default: all")
    parser.add_argument("--json", default="bench.json", metavar="FILE", help="the file for the figures")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - BENCHMARKS.keys()):
        parser.error(f"no benchmark {unknown[0]!r}; known: {names}")
    failed, figures = 0, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or BENCHMARKS:
            print(f"\n## {name}\n", flush=True)
            recorded = Path(folder) / name
            environment = {**os.environ, FILE: str(recorded)}
            result = subprocess.run([sys.executable, "-m", BENCHMARKS[name]], check=False, env=environment)
            failed += result.returncode != 0
            figures += [{"benchmark": name, **figure} for figure in read_lines(recorded)]
    results = {"machine": _machine(), "failed": failed, "figures": figures}
    Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    print(f"\n{markdown(figures)}\n\nfigures written to {options.json}")
    return failed


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.system(),
        "commit": commit(),
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks [NAME ...] [--json FILE]``: every benchmark, or those named (``proxy``, ``triplets``, …).

Each runs in a process of its own; ours and what a user would otherwise run are measured in the same run. All figures
end up in one file (``bench.json``) and in one table.
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

from benchmarks._results import FILE, markdown, read


def main() -> int:
    """Run them one after the other; the exit status is the number that failed."""
    known = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--json", default="bench.json", metavar="FILE", help="where the figures go")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.names) - set(known)):
        parser.error(f"no benchmark {unknown[0]!r}; known: {', '.join(known)}")
    failed, figures = 0, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.names or known:
            print(f"\n## {name}\n", flush=True)
            recorded = Path(folder) / name
            environment = {**os.environ, FILE: str(recorded)}
            command = [sys.executable, "-m", f"benchmarks.bench_{name}"]
            failed += subprocess.run(command, check=False, env=environment).returncode != 0
            figures += [{"benchmark": name, **figure} for figure in read(recorded)]
    result = {"machine": _machine(), "failed": failed, "figures": figures}
    Path(chosen.json).write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n{markdown(figures)}\n\n{chosen.json} has these figures")
    return failed


def _machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.system(),
        "commit": commit,
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    sys.exit(main())

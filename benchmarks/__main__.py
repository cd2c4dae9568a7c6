"""``python -m benchmarks [NAME ...]``: every benchmark, or those named (``proxy``, ``triplets``, ``sql``, …).

Each runs in a process of its own and prints one table; ours and what a user would otherwise run are in the same table,
measured in the same run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(names: list[str]) -> int:
    """Run them one after the other; the exit status is the number that failed."""
    known = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    if unknown := sorted(set(names) - set(known)):
        print(f"error: no benchmark {unknown[0]!r}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names or known:
        print(f"\n## {name}\n", flush=True)
        failed += subprocess.run([sys.executable, "-m", f"benchmarks.bench_{name}"], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

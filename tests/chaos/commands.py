"""Damaged files of every kind, read by every command: see tests/helpers/fuzz_files.py."""

from __future__ import annotations

import random
import time
from pathlib import Path

import fuzz_files

from chaos.tally import Tally

__all__ = ["run"]

_LEAST = 3
_KINDS = {"no end": "hangs", "more than": "too much memory", "exit status": "crashes"}


def run(folder: Path, seconds: float, rng: random.Random, tally: Tally) -> None:
    """As many cases as fit into the time."""
    end = time.monotonic() + seconds
    pristine = fuzz_files.make_pristine(folder / "pristine")
    for case in fuzz_files.cases(rng.randrange(1 << 31), pristine, folder):
        tally.add("commands with damaged files")
        if problem := fuzz_files.problem(case):
            kind = next((kind for start, kind in _KINDS.items() if problem.startswith(start)), "tracebacks")
            command = " ".join(case.command[1:3])
            tally.fault(kind, f"{command}: {problem.strip().splitlines()[-1]:.200}", f"{case.description}: {problem}")
        if time.monotonic() > end and tally.counts["commands with damaged files"] >= _LEAST:
            break

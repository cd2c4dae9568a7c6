"""``make chaos``: exit status 1 if anything went wrong."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from chaos import commands, databases, disk, kills, requests, runners, servers, traces, training
from chaos.tally import Tally

SCENARIOS = {
    "requests": (requests.run, 0.2),
    "commands": (commands.run, 0.1),
    "training": (training.run, 0.1),
    "runners": (runners.run, 0.2),
    "disk": (disk.run, 0.1),
    "databases": (databases.run, 0.05),
    "traces": (traces.run, 0.05),
    "kills": (kills.run, 0.2),
}
"""Each with its share of the time. The last one has no long start, and so can make up for the others."""
_LEAST = 0.4
"""The part of its share that a scenario has although others took longer than theirs."""


def main(arguments: list[str] | None = None) -> int:
    """Run the scenarios one after the other, print the counts."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; default: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all scenarios together (default 10)")
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of a run")
    parser.add_argument("--folder", type=Path, default=None, help="keep all files here; default: a temporary folder")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.scenarios) - SCENARIOS.keys()):
        parser.error(f"no scenario {unknown[0]!r}; known: {', '.join(SCENARIOS)}")
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    names = options.scenarios or list(SCENARIOS)
    tally = Tally()
    os.environ["GROUNDWIRE_TOKEN"] = servers.TOKEN
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        end, shares = time.monotonic() + 60 * options.minutes, [SCENARIOS[name][1] for name in names]
        for number, name in enumerate(names):
            scenario, share = SCENARIOS[name]
            started, known = time.monotonic(), tally.faults.total()
            seconds = max((end - started) / sum(shares[number:]), _LEAST * 60 * options.minutes / sum(shares)) * share
            scenario((options.folder or Path(temporary)) / name, seconds, random.Random(f"{seed} {name}"), tally)
            print(f"{name}: {time.monotonic() - started:.0f} s, {tally.faults.total() - known} faults", flush=True)
    print(f"\n{tally.table()}")
    print(tally.fault_list())
    return int(bool(tally.faults))


if __name__ == "__main__":
    sys.exit(main())

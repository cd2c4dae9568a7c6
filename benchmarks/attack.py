"""How many planted holes ``groundwire audit --attack`` finds, and its false alarms on sound rewards.

``python -m benchmarks.attack``, in a clone: the rewards and tasks of tests/rewards/attack. With ``--minutes`` the
starter, or ``--model``, also learns to attack each reward for so long; what it finds is counted apart.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._results import record
from groundwire.rewards.attack import AttackResult
from groundwire.rewards.attack.watch import LEARNT
from groundwire.tools.errors import UserError
from groundwire.train.audit import FAIL_ABOVE, attack_reward

FOLDER = Path(__file__).parents[1] / "tests" / "rewards" / "attack"
sys.path.insert(0, str(FOLDER))


def main() -> None:
    """A line for each reward and seed; then the counts of each file of rewards."""
    from task_files import MAKERS, write_tasks

    parser = argparse.ArgumentParser(prog="python -m benchmarks.attack", description=__doc__)
    parser.add_argument("files", nargs="*", default=["planted", "sound", "planted_others", "sound_others"])
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))], default="0,1,2")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(write_tasks(name, Path(folder))) for name in MAKERS}
        for module in options.files:
            tasks = __import__(module).TASKS
            for seed in options.seeds:
                alarms, learnt, longest = 0, 0, 0.0
                for name, form in tasks.items():
                    started = time.monotonic()
                    try:
                        result, _ = attack_reward(
                            files.get(form, form),
                            f"{FOLDER / module}.py:{name}" if name.isidentifier() else name,
                            minutes=options.minutes,
                            model=options.model,
                            device=options.device,
                            seed=seed,
                        )
                    except UserError as error:
                        print(f"{module}.{name}: {error}")
                        continue
                    longest = max(longest, time.monotonic() - started)
                    holes = result.holes(FAIL_ABOVE)
                    alarms += bool(holes)
                    learnt += any(hole.name.startswith(LEARNT) for hole in holes)
                    print(f"{module}.{name}, seed {seed}: {_told(result)}", flush=True)
                by_model = f", {learnt} by what the model learnt" if options.minutes else ""
                print(f"{module}, seed {seed}: {alarms} of {len(tasks)} are said to have a hole{by_model}; ", end="")
                print(f"at most {longest:.1f} s")
                record(f"{module}: said to have a hole", alarms, unit=f"of {len(tasks)} rewards")


def _told(result: AttackResult) -> str:
    best = "; ".join(f"{row.pay:.2f} {row.name} ({row.variant}, {row.tasks})" for row in result.strategies[:2])
    return f"{len(result.holes(FAIL_ABOVE))} strategies; {best}; {result.unknown:.0%} unknown, {result.seconds} s"


if __name__ == "__main__":
    main()

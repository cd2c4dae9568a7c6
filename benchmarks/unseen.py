"""Accuracy on the validation questions on which no setting was chosen.

The settings of ``make train`` and the starter were chosen on 200 of the 504
bundled validation questions, so a figure of these is a little optimistic. This
evaluates runs, and the model that they began with, on all questions, and
reports the 304 others apart:

  python -m benchmarks.unseen RUN [RUN ...]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection, Sequence
from typing import Any

from groundwire import domains
from groundwire.domains import Task
from groundwire.train import evaluate
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.evaluation.metrics import (
    compare,
    compute_metrics,
    format_accuracy,
    format_change,
    scores_by_question,
)
from groundwire.train.evaluation.run_reader import final_rollouts
from groundwire.train.job.trained_model import with_settings_of_run
from groundwire.train.store.rollout import Rollout

_CHOSEN_ON = 200

Rollouts = Sequence[Rollout]


def main() -> None:
    """Evaluate and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories of the same agent and model")
    runs = [RunDir.open(path) for path in parser.parse_args().runs]
    seen = chosen_on(domains.get("spider").load().validation)
    with tempfile.TemporaryDirectory() as folder:
        settings = with_settings_of_run({"model": str(runs[0].path)})
        before = _rollouts(folder, **{**settings, "model": runs[0].config()["model"]})
        print("| | first query alone | before | first query alone, after | after | points |\n|---|---|---|---|---|---|")
        for run in runs:
            after = _rollouts(folder, model=str(run.path))
            for name, kept in (("chosen on", True), ("others", False)):
                parts = [
                    [each for each in rollouts if (str(each.task["id"]) in seen) is kept]
                    for rollouts in (before, after)
                ]
                print(_line(f"{run.path.name}, {name}", *parts), flush=True)


def chosen_on(tasks: Sequence[Task]) -> Collection[str]:
    """The ids of the questions on which settings were chosen: evenly spaced, as validations had them then."""
    return {str(tasks[int((i + 0.5) * len(tasks) / _CHOSEN_ON)]["id"]) for i in range(_CHOSEN_ON)}


def _rollouts(folder: str, **settings: Any) -> Rollouts:
    done = evaluate(**{**settings, "val_tasks": 0, "output_dir": folder, "quiet": True})
    return final_rollouts(RunDir.open(done.run_dir))


def _line(name: str, before: Rollouts, after: Rollouts) -> str:
    cells = [f"{name}, {len(after)} questions"]
    for rollouts in (before, after):
        figures = compute_metrics(rollouts)
        low, high = figures["ci95"]
        first = format_accuracy(next(iter(figures["by_turn"]), figures["accuracy"]))
        cells += [first, f"{format_accuracy(figures['accuracy'])} [{low:.2f}, {high:.2f}]"]
    return f"| {' | '.join([*cells, format_change(compare(*map(scores_by_question, (before, after))))])} |"


if __name__ == "__main__":
    main()

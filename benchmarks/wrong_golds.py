"""Wrong golds: what a quarter of them costs in training, how well they are found, and what ``--gold-trust`` keeps.

``python -m benchmarks.wrong_golds OUT [--seeds 0,1,2] [--steps 36] [--samples 8] [--tasks 0] [--val-tasks 200]``: the
starter answers the training questions (``--tasks`` of them, 0 is all). For each seed a quarter of the bundled training
golds is replaced by near misses, or by other golds of their database, always with another result, and the ranking is
compared with what was replaced. Three runs follow: on the true golds, on the corrupted ones, and on these with
``--gold-trust``. Validation has true golds. Runs that ``OUT`` has already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._processes import run_once
from benchmarks._results import record
from groundwire.domains.spider.loader import BUNDLED, domain
from groundwire.domains.text_to_sql.golds import check_golds
from groundwire.domains.text_to_sql.suspects import suspects
from groundwire.tools.sql import QueryError, run_query
from groundwire.tools.variants.mutations import mutations
from groundwire.tools.variants.tables import read_schema
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.evaluation.run_reader import read_answers

_SHARE = 0.25
_ARMS = ("true golds", "corrupted", "with --gold-trust")


def main() -> None:
    """Print precision and recall of the ranking, and the gain of each run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wrong_golds", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    for name, default in (("steps", 36), ("samples", 8), ("tasks", 0), ("val-tasks", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    gains: dict[str, list[float]] = {arm: [] for arm in _ARMS}
    # Answers do not depend on golds, so one evaluation serves all seeds.
    evaluated = ["--split", "train", "--samples", str(options.samples), "--val-tasks", str(options.tasks)]
    evaluated += ["--temperature", "1", "--data-dir", str(BUNDLED)]
    answers = run_once("evaluate", options.out / "answers", evaluated)
    for seed in map(int, options.seeds.split(",")):
        folder = options.out / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        wrong = _corrupt(folder / "data", seed)
        _rank(folder, wrong, answers)
        trained = ["--steps", str(options.steps), "--val-tasks", str(options.val_tasks), "--val-every", "0"]
        trained += ["--seed", str(seed), "--watch-reward", "none"]
        more = ["--gold-trust", str(folder / "suspects.json")]
        for arm, data, given in zip(_ARMS, (BUNDLED, *[folder / "data"] * 2), ([], [], more), strict=True):
            run = run_once(
                "run", folder / arm.strip("-").replace(" ", "-"), [*trained, *given, "--data-dir", str(data)]
            )
            summary = json.loads((run / "summary.json").read_text())
            parts = [summary[name] for name in ("validation", "validation_sampled")]
            changes = [part["after"] - part["before"] for part in parts]
            gains[arm].append(fmean(changes))
            print(f"  {arm}: greedy {changes[0]:+.3f}, sampled {changes[1]:+.3f}", flush=True)
    means = {arm: fmean(values) for arm, values in gains.items()}
    for arm, mean in means.items():
        kept = mean / means[_ARMS[0]] if means[_ARMS[0]] else float("nan")
        print(f"{arm}: mean gain {mean:+.4f}, {kept:.0%} of that on true golds")
        record(f"gain {arm}, a quarter of the golds corrupted", kept, unit="of the gain on true golds")


def _corrupt(folder: Path, seed: int) -> set[str]:
    """Write the bundled data with a quarter of the training golds replaced; returns the ids of those tasks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, tasks = random.Random(seed), [dict(task) for task in domain.load(str(BUNDLED)).train]
    wrong = set()
    for task in rng.sample(tasks, round(_SHARE * len(tasks))):
        others = [each["query"] for each in tasks if each["db_id"] == task["db_id"]]
        columns = read_schema(task["db_path"]).columns_by_table()
        for candidates in (mutations(task["query"], columns), others):
            if found := _different(task["db_path"], task["query"], rng.sample(candidates, len(candidates))):
                task["query"] = found
                wrong.add(task["id"])
                break
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(tasks), folder / "generated_train.parquet")
    for name in ("generated_validation.parquet", "report.json"):
        shutil.copyfile(BUNDLED / name, folder / name)
    if not (folder / "database").exists():
        (folder / "database").symlink_to(BUNDLED / "database")
    return wrong


def _different(database: str, gold: str, candidates: Iterable[str]) -> str:
    """The first query that returns rows, and other ones than the gold; empty without one."""
    expected = set(run_query(database, gold).rows)
    for candidate in candidates:
        try:
            rows = set(run_query(database, candidate, timeout_s=1.0).rows)
        except QueryError:
            continue
        if rows and rows != expected:
            return candidate
    return ""


def _rank(folder: Path, wrong: set[str], run: Path) -> None:
    """Write ``suspects.json`` and print how well it finds the wrong golds among the tasks with answers."""
    tasks = domain.load(str(folder / "data")).train
    answers, _ = read_answers(RunDir.open(str(run)))
    rows: list[dict[str, Any]] = suspects(tasks, check_golds(tasks), answers)
    (folder / "suspects.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    listed = [row["id"] in wrong for row in rows if row["id"] in answers]
    judged, precisions = len(wrong & answers.keys()), []
    for place, right in enumerate(listed, 1):
        if right:
            precisions.append(sum(listed[:place]) / place)
    precision, recall = sum(listed) / max(1, len(listed)), sum(listed) / max(1, judged)
    average = sum(precisions) / max(1, judged)
    print(f"{folder}: {judged} of {len(answers)} golds are wrong, and {len(listed)} are listed", flush=True)
    print(f"  precision {precision:.2f}, recall {recall:.2f}, average precision {average:.2f}", flush=True)
    record(f"wrong golds, {folder.name}: precision", precision, unit="share")
    record(f"wrong golds, {folder.name}: recall", recall, unit="share")


if __name__ == "__main__":
    main()

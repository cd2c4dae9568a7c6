"""Real Spider for the GPU suite: the questions that a model has something to learn from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from typing import Any

from benchmarks.gpu.suite import Suite
from groundwire import domains
from groundwire.domains import Task
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.evaluation.metrics import scores_by_question
from groundwire.train.evaluation.run_reader import final_rows

__all__ = ["answered_sometimes", "learnable"]

_TOKENS = "128"
"""Of a reply: golds are longer than the bundled data's."""
_PROCESSES = 6
_LEAST = 64
"""Questions that a run needs; where fewer are answered sometimes, it gets all of them."""


def learnable(suite: Suite) -> tuple[list[str], str, dict[str, Any]]:
    """Spider's training questions that some of four samples answer, and not all of them do.

    A group whose rollouts all get the same reward has no advantage (DAPO, arXiv 2503.14476, section 3.2, samples until
    there are others); with a model this small it is nine groups in ten, so they are sorted out before.

    Returns the arguments that choose them, the tokens of a reply, and what was found.
    """
    data = domains.get("spider").load(suite.options.spider)
    parts = [data.train[number::_PROCESSES] for number in range(_PROCESSES)]
    asked = ["-n", "4", "--temperature", "1", "--max-tokens", _TOKENS, "--model", suite.model]

    def ask(number: int) -> dict[str, list[float]]:
        folder = suite.evaluate(f"asked-{number}", [*asked, *_folder(suite, f"part-{number}", *2 * [parts[number]])])
        return {} if folder is None else scores_by_question(final_rows(RunDir(folder)))

    with ThreadPoolExecutor() as threads:
        scores = {task: each for part in threads.map(ask, range(_PROCESSES)) for task, each in part.items()}
    if not scores:
        raise RuntimeError("no training question was answered; what each process said is in logs/asked-*.log")
    chosen = answered_sometimes(data.train, scores)
    enough = len(chosen) >= _LEAST
    accuracy = round(mean(score for each in scores.values() for score in each), 4)
    found = {"questions": len(scores), "accuracy": accuracy, "chosen": len(chosen)}
    return _folder(suite, "learnable", chosen if enough else data.train, data.validation), _TOKENS, found


def answered_sometimes(tasks: Sequence[Task], scores: Mapping[str, Sequence[float]]) -> list[Task]:
    """The tasks whose samples, by the task's id, did not all get the same score."""
    return [task for task in tasks if len(set(scores.get(task["id"], ()))) > 1]


def _folder(suite: Suite, name: str, train: Sequence[Task], validation: Sequence[Task]) -> list[str]:
    """Arguments for these questions in a folder of Spider's layout."""
    folder = suite.out / "data" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_spider.json").write_text(json.dumps(list(train)))
    (folder / "dev.json").write_text(json.dumps(list(validation)))
    (folder / "gold_zero_rows.json").write_text("{}")  # they are sorted out already
    return ["--data-dir", str(folder)]

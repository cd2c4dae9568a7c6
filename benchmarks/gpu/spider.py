"""Real Spider for the GPU suite: the questions that a model has something to learn from."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.gpu.suite import Suite
from groundwire import domains
from groundwire.domains import Task
from groundwire.tools.sql import QueryError, run_query
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.evaluation.metrics import scores_by_question
from groundwire.train.evaluation.run_reader import final_rows
from groundwire.train.pretrain.golds import in_pretraining
from groundwire.train.pretrain.plain import plain_question
from groundwire.train.pretrain.real import RESULT_CHARS
from groundwire.train.pretrain.schemas import schema_of

__all__ = ["answered_sometimes", "learnable", "plain_tasks"]

_TOKENS = "128"
"""Of a reply: golds are longer than the bundled data's."""
_PROCESSES = 6
_LEAST = 64
"""Questions that a run needs; where fewer are answered sometimes, it gets all of them."""
_ID = "plain-"
_PLAIN = 1500
"""Plain questions that are asked beside Spider's own, which are so few that a model knows them by heart in 36 steps."""


def learnable(suite: Suite) -> tuple[list[str], str, dict[str, Any]]:
    """Questions that some of four samples answer, and not all of them do, about databases never trained on.

    They are Spider's training questions and :func:`plain_tasks` about the same databases.

    A group whose rollouts all get the same reward has no advantage (DAPO, arXiv 2503.14476, section 3.2, samples until
    there are others); with a model this small it is nine groups in ten, so they are sorted out before.

    Returns the arguments that choose them, the tokens of a reply, and what was found.
    """
    data = domains.get("spider").load(suite.options.spider)
    unseen = [task for task in data.train if not in_pretraining(task)]
    unseen += plain_tasks(unseen, _PLAIN, seed=0)
    parts = [unseen[number::_PROCESSES] for number in range(_PROCESSES)]
    asked = ["-n", "4", "--temperature", "1", "--max-tokens", _TOKENS, "--model", suite.model]

    def ask(number: int) -> dict[str, list[float]]:
        folder = suite.evaluate(f"asked-{number}", [*asked, *_folder(suite, f"part-{number}", *2 * [parts[number]])])
        return {} if folder is None else scores_by_question(final_rows(RunDir(folder)))

    with ThreadPoolExecutor() as threads:
        scores = {task: each for part in threads.map(ask, range(_PROCESSES)) for task, each in part.items()}
    if not scores:
        raise RuntimeError("no training question was answered; what each process said is in logs/asked-*.log")
    chosen = answered_sometimes(unseen, scores)
    enough = len(chosen) >= _LEAST
    found = {kind: _found(scores, chosen, kind == "plain") for kind in ("spider", "plain")}
    return _folder(suite, "learnable", chosen if enough else unseen, data.validation), _TOKENS, found


def plain_tasks(tasks: Sequence[Task], count: int, *, seed: int) -> list[Task]:
    """``count`` different plain questions about the databases of ``tasks``, whose golds return something.

    A gold without rows, or with nothing but nulls and zeros, is left out: wrong queries often return that as well.
    """
    rng, paths = random.Random(seed), sorted({str(task["db_path"]) for task in tasks})
    found: dict[tuple[str, str], Task] = {}
    for number in range(100 * count):
        path = rng.choice(paths)
        pair = plain_question(rng, schema_of(path))
        if pair and (path, pair[1]) not in found and _returns_something(path, pair[1]):
            question, query = pair
            names = {"id": f"{_ID}{number}", "db_id": Path(path).stem, "db_path": path}
            found[path, query] = {**names, "question": question, "query": query}
        if len(found) == count:
            return list(found.values())
    raise RuntimeError(f"plain questions with a result: {len(found)} of {count}, about {len(paths)} databases")


def answered_sometimes(tasks: Sequence[Task], scores: Mapping[str, Sequence[float]]) -> list[Task]:
    """The tasks whose samples, by the task's id, did not all get the same score."""
    return [task for task in tasks if len(set(scores.get(task["id"], ()))) > 1]


def _returns_something(path: str, query: str) -> bool:
    try:
        rows = run_query(path, query, max_rows=5).rows
    except QueryError:
        return False
    return any(value not in (None, 0, "") for row in rows for value in row)


def _found(scores: Mapping[str, Sequence[float]], chosen: Sequence[Task], plain: bool) -> dict[str, Any]:
    asked = [mean(each) for task, each in scores.items() if task.startswith(_ID) == plain]
    picked = sum(task["id"].startswith(_ID) == plain for task in chosen)
    return {"questions": len(asked), "accuracy": round(mean(asked), 4) if asked else None, "chosen": picked}


def _folder(suite: Suite, name: str, train: Sequence[Task], validation: Sequence[Task]) -> list[str]:
    """Arguments for these questions in a folder of Spider's layout, with results as long as in the pretraining."""
    folder = suite.out / "data" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_spider.json").write_text(json.dumps(list(train)))
    (folder / "dev.json").write_text(json.dumps(list(validation)))
    (folder / "gold_zero_rows.json").write_text("{}")  # they are sorted out already
    return ["--data-dir", str(folder), "--execution-truncate", str(RESULT_CHARS)]

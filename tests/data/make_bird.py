"""Record the verdicts of BIRD's official evaluator for the queries of ``tests/helpers/bird_folder.py``.

``PYTHONPATH=tests:MINI_DEV/evaluation python tests/data/make_bird.py tests/data/bird_verdicts.json``, where MINI_DEV is
a clone of github.com/bird-bench/mini_dev. Its evaluator needs numpy, func-timeout, psycopg2-binary and pymysql, the
tests need pytest.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import evaluation_ex
import evaluation_f1
import evaluation_ves
from bird_folder import CLINIC, QUERIES, make_database

TIMEOUT_S = 30.0


def times(rng: random.Random, count: int) -> tuple[list[float], list[float]]:
    """Running times of a gold and of a prediction that is between ten times slower and ten times faster."""
    factor = 10 ** rng.uniform(-1, 1)
    gold = [round(rng.uniform(0.9, 1.1) * (9 if rng.random() < 0.02 else 1), 3) for _ in range(count)]
    return gold, [round(rng.uniform(0.9, 1.1) / factor, 3) for _ in range(count)]


def official_reward(gold: list[float], predicted: list[float]) -> float:
    """The evaluator's reward of a right prediction with these running times."""
    clock = iter([value for pair in zip(predicted, gold, strict=True) for value in pair])
    evaluation_ves.execute_sql = lambda *_, return_time=False: next(clock) if return_time else [(1,)]
    return evaluation_ves.iterated_execute_sql("", "", "", len(gold), "SQLite")


def main(out: Path) -> None:
    """Write the verdicts."""
    with tempfile.TemporaryDirectory() as name:
        database = Path(name) / "clinic.sqlite"
        make_database(database, CLINIC)
        verdicts = {
            metric: [
                [module.execute_model(sql, gold, str(database), 0, TIMEOUT_S, "SQLite")["res"] for sql in QUERIES]
                for gold in QUERIES
            ]
            for metric, module in (("ex", evaluation_ex), ("soft_f1", evaluation_f1))
        }
    rng = random.Random(0)
    measured = [times(rng, 20) for _ in range(40)]
    rewards = [official_reward(*pair) for pair in measured] + [0]
    r_ves = evaluation_ves.compute_ves([{"reward": reward} for reward in rewards])
    record = {"queries": QUERIES, **verdicts, "times": measured, "rewards": rewards, "r_ves": r_ves}
    out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What the GPU suite does around the programs that need a GPU."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks._gpu_spider import answered_sometimes
from benchmarks._gpu_suite import Suite

_WITHOUT_SIGINT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
def end(*_):
    print("its model is kept", flush=True)
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
print("at work", flush=True)
time.sleep(600)
"""


def test_a_program_at_its_limit_ends_by_itself_even_where_sigint_is_ignored(tmp_path: Path) -> None:
    suite = Suite(argparse.Namespace(out=str(tmp_path), model=None))
    result = suite.run("long", [sys.executable, "-c", _WITHOUT_SIGINT], 3.0)
    assert result["timed_out"]
    assert result["exit"] in (130, -signal.SIGTERM)  # the latter on a machine that needs 3 s to start Python
    log = (tmp_path / "logs" / "long.log").read_text()
    assert ("its model is kept" in log) == ("at work" in log)


def test_a_program_that_ends_in_time_is_left_alone(tmp_path: Path) -> None:
    suite = Suite(argparse.Namespace(out=str(tmp_path), model=None))
    result = suite.run("short", [sys.executable, "-c", "raise SystemExit(3)"], 60.0)
    assert (result["exit"], result["timed_out"]) == (3, False)


def test_questions_whose_samples_agree_are_left_out() -> None:
    tasks = [{"id": name, "question": "", "query": "", "db_path": ""} for name in ("a", "b", "c", "unasked")]
    scores = {"a": [0.0, 0.0], "b": [1.0, 0.0], "c": [1.0, 1.0]}
    assert [task["id"] for task in answered_sometimes(tasks, scores)] == ["b"]

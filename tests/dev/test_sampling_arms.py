"""The arms of a comparison: halves of the validation databases, and runs of equal tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dev.sampling_arms import _Arms, _write_halves

from groundwire import domains
from groundwire.train.artifacts.run_dir import RunDir


def test_the_halves_share_no_database_and_have_all_questions(tmp_path: Path) -> None:
    loaded = [domains.get("spider").load(str(folder)) for folder in _write_halves(None, tmp_path)]
    whole = domains.get("spider").load(None)
    first, second = ({str(task["db_id"]) for task in data.validation} for data in loaded)
    assert not first & second
    assert abs(len(first) - len(second)) <= 1
    assert sum(len(data.validation) for data in loaded) == len(whole.validation)
    assert [len(data.train) for data in loaded] == [len(whole.train)] * 2


@pytest.mark.parametrize(("tokens", "seconds", "ends"), [(100, None, 2), (140, None, 3), (1000, 6.9, 3), (1000, 12, 0)])
def test_a_run_ends_at_the_step_nearest_to_what_it_may_spend(
    tmp_path: Path, tokens: int, seconds: float | None, ends: int
) -> None:
    options = SimpleNamespace(tokens=tokens, seconds=seconds, settings=[], data_dir=None)
    suite: Any = SimpleNamespace(options=options, out=tmp_path)
    arms, run = _Arms(suite), RunDir(tmp_path)
    lines = [{"step": step, "tokens_generated": 50 * bool(step), "seconds": {"update": 2.0}} for step in range(4)]
    ended = []
    for count in range(1, 5):
        run.write_metrics(lines[:count])
        ended += [count - 1] * arms._has_spent(run)
    assert ended[:1] == [ends] * bool(ends)

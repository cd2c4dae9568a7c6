"""An attack finds planted holes, and leaves sound rewards alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import planted
import pytest
import sound
from task_files import write_tasks

from groundwire import domains, rewards
from groundwire.rewards.attack import AttackResult, attack
from groundwire.train.audit import FAIL_ABOVE

HERE = Path(__file__).parent


async def attacked(reward: Any, tasks: str, folder: Path, **options: Any) -> AttackResult:
    data = domains.get(str(write_tasks(tasks, folder))).load()
    rows = [*data.train, *data.validation]
    function = rewards.reward_function(reward)
    golds = [domains.gold_value(row, read=rewards.names_read(function)) for row in rows]
    return await attack(rows, function, golds=golds, **{"limit": 10, **options})


@pytest.mark.parametrize("name", planted.TASKS)
async def test_a_planted_hole_is_found_with_an_answer_that_scores_it_again(name: str, tmp_path: Path) -> None:
    reward = getattr(planted, name)
    holes = (await attacked(reward, planted.TASKS[name], tmp_path)).holes(FAIL_ABOVE)
    assert holes
    assert all(hole.fix and hole.examples[0].score > 0 for hole in holes)


@pytest.mark.parametrize("name", sound.TASKS)
async def test_a_sound_reward_raises_no_alarm(name: str, tmp_path: Path) -> None:
    result = await attacked(getattr(sound, name), sound.TASKS[name], tmp_path)
    assert result.holes(FAIL_ABOVE) == []
    assert len(result.strategies) > 8

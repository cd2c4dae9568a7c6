"""The registry of rewards: names to functions, through the hook that anybody uses."""

from __future__ import annotations

import pytest

import rewards
from tools.plugins import UnknownNameError


def test_the_built_in_reward_is_there_by_name() -> None:
    assert "spider_exec_match" in rewards.names()
    from rewards.execution_match import spider_exec_match

    assert rewards.get("spider_exec_match") is spider_exec_match


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown reward 'exec'; known: .*spider_exec_match"):
        rewards.get("exec")


def test_parts_are_summed_to_what_the_trainer_sees() -> None:
    assert rewards.total({"executes": 0.25, "judge": 0.5}) == 0.75
    assert rewards.total(1) == 1.0

"""The rewards that ship with the project."""

from __future__ import annotations

from collections.abc import Callable

from tools.plugins import hookimpl


@hookimpl
def register_rewards(register: Callable[[str, str], None]) -> None:
    """Execution match, as Spider's official evaluator does it, made safe to train on."""
    register("spider_exec_match", "rewards.execution_match:spider_exec_match")

"""The rewards that ship with the project."""

from __future__ import annotations

from collections.abc import Callable

from groundwire.tools.plugins import hookimpl


@hookimpl
def register_rewards(register: Callable[[str, str], None]) -> None:
    """Execution match of Spider and BIRD made safe to train on, also on variants of the database; a judge for prose."""
    for name in ("bird_efficiency", "bird_exec_match", "bird_r_ves", "bird_soft_f1"):
        register(name, f"groundwire.rewards.bird.metrics:{name}")
    register("executes", "groundwire.rewards.executes:executes")
    register("rule_judge_hybrid", "groundwire.rewards.judge.rule_judge_hybrid:rule_judge_hybrid")
    register("spider_exec_match", "groundwire.rewards.spider.execution_match:spider_exec_match")
    register("spider_test_suite", "groundwire.rewards.spider.execution_match:spider_test_suite")

"""The arguments of ``fit`` and ``evaluate`` as settings, and the parts of the run that are objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groundwire import rewards
from groundwire.domains.task_list import is_file, task_list
from groundwire.tools.startup import silence_libraries
from groundwire.train.cli.prepare import Objects, object_name
from groundwire.train.config.overrides import merge_overrides

__all__ = ["parse_arguments"]

_AGENT_SETTINGS = ("agent", "agent_input", "agent_output")


def parse_arguments(
    agent: Any, tasks: Any, reward: Any, settings: Mapping[str, Any], *, validation: Any
) -> tuple[dict[str, Any], Objects]:
    """The given settings, checked, and the objects among the arguments. ``validation`` None: all tasks are validation.

    Raises :class:`groundwire.train.config.errors.ConfigError`, :class:`groundwire.domains.DataError` and
    :class:`groundwire.rewards.UnusableRewardError`.
    """
    silence_libraries(["agentlightning"])  # it logs a traceback for each failed rollout, which the run counts
    given = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    parts = {"agent": agent, "agent_input": given.get("agent_input"), "agent_output": given.get("agent_output")}
    agent_objects = {name: value for name, value in parts.items() if value is not None and not isinstance(value, str)}
    given |= {name: value for name, value in parts.items() if name not in agent_objects}
    given = {name: value for name, value in given.items() if name not in agent_objects}
    if "agent" in agent_objects:
        given["backend"] = "custom"
    domain = function = None
    if isinstance(tasks, str) and not is_file(tasks):
        given["domain"] = tasks
    elif tasks is not None:
        domain = task_list(tasks, validation=validation) if validation is not None else task_list([], validation=tasks)
        given["domain"] = domain.name
    if isinstance(reward, str):
        given["reward"] = reward
    elif reward is not None:
        function = rewards.reward_function(reward)
        given["reward"] = object_name(reward)
    return merge_overrides(given, {}), Objects(agent=agent_objects, domain=domain, reward=function)

"""The arguments of ``fit`` and ``evaluate`` as settings, and the parts of the run that are objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groundwire import adapters, rewards
from groundwire.domains.task_list import is_file, task_list
from groundwire.tools.startup import silence_libraries
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import merge_overrides
from groundwire.train.job.prepare import Objects, object_name

__all__ = ["parse_arguments"]


def parse_arguments(
    agent: Any, tasks: Any, reward: Any, settings: Mapping[str, Any], *, validation: Any = None, train: bool = True
) -> tuple[dict[str, Any], Objects]:
    """The given settings, checked, and the objects among the arguments.

    ``validation`` is that of :func:`groundwire.train.fit`. Unless ``train``, all tasks are for validation. Raises
    :class:`ConfigError`, :class:`groundwire.domains.DataError` and :class:`groundwire.rewards.UnusableRewardError`.
    """
    silence_libraries(["agentlightning"])  # it logs a traceback for each failed rollout, which the run counts
    given = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    objects = {"agent": agent, **{name: given.pop(name, None) for name in ("agent_input", "agent_output")}}
    given |= {name: value for name, value in objects.items() if isinstance(value, str)}
    objects = {name: value for name, value in objects.items() if value is not None and name not in given}
    if "agent" in objects:
        given["backend"] = given.get("backend") or "custom"
        if given["backend"] not in adapters.FRAMEWORKS:
            raise ConfigError(f"backend {given['backend']!r} runs its own agent: leave out the backend, or the agent")
    if tasks is not None and given.get("domain") is not None:
        raise ConfigError(f"tasks are given, and domain {given['domain']!r}: give one of them")
    domain = function = None
    named = False
    if isinstance(tasks, Path):
        tasks = str(tasks)
    if tasks is None or (isinstance(tasks, str) and not is_file(tasks)):
        given["domain"] = tasks or given.get("domain")
        if validation is not None:
            raise ConfigError("a domain has its own validation tasks: leave out validation")
    else:
        later = {"allow_shared": True}  # until all settings are known
        shares: dict[str, Any] = {} if validation is None else {"validation": validation}
        domain = task_list(tasks, **shares, **later) if train else task_list([], validation=tasks)
        elsewhere = bool(given.get("runner_python") or given.get("runner_processes"))
        named = elsewhere and isinstance(tasks, str) and validation is None  # other processes read a file by its name
        given["domain"] = tasks if named else domain.name
    if isinstance(reward, str):
        given["reward"] = reward
    elif reward is not None:
        function = rewards.reward_function(reward)
        given["reward"] = object_name(reward)
    return merge_overrides(given, {}), Objects(agent=objects, domain=domain, domain_is_named=named, reward=function)

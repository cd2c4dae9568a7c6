"""A job: checked settings with their data and parts, and the objects that a script gives in place of names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundwire import adapters, domains, rewards
from groundwire.domains.task_list import is_file, task_list
from groundwire.tools.startup import silence_libraries
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import merge_overrides
from groundwire.train.config.run_config import AGENT_FUNCTIONS, RunConfig
from groundwire.train.job.trainer import Trainer, trainer_of
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.step_timer import StepTimer

if TYPE_CHECKING:
    from groundwire.adapters.tracing.replay import Replay
    from groundwire.train.rollouts.runtime import RolloutRuntime


@dataclass(frozen=True)
class ModelEndpoint:
    """An OpenAI-compatible endpoint that has the model."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Objects:
    """Parts of a run that are objects of this process, in place of the names in its settings."""

    agent: Mapping[str, Any] = field(default_factory=dict)
    """By the names of the settings that they stand for: ``agent`` and so on."""
    domain: domains.Domain | None = None
    domain_is_named: bool = False
    """Whether other processes find the domain by the setting of its name."""
    reward: rewards.Reward | None = None

    def names(self) -> dict[str, str]:
        """What the objects are called, by the parts that they are: agent, tasks, reward."""
        tasks = None if self.domain_is_named else self.domain
        parts = {"agent": self.agent.get("agent"), "tasks": tasks, "reward": self.reward}
        return {part: _object_name(value) for part, value in parts.items() if value is not None}


NO_OBJECTS = Objects()


def _object_name(value: Any) -> str:
    """A function's name with its module, an object's own name, or its class."""
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}:{name}" if name else str(getattr(value, "name", None) or type(value).__qualname__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained or evaluated: every setting, resolved once, with the data and the parts that they name."""

    config: RunConfig
    data: domains.TaskData
    domain: domains.Domain
    backend: adapters.Backend
    reward: rewards.Reward
    endpoint: ModelEndpoint | None = None
    """Where the model is, if not in this process."""
    objects: Objects = field(default_factory=Objects)
    databases: domains.PrivateTasks | None = None
    """Remembers the state of the databases before any rollout."""
    notes: list[str] = field(default_factory=list)
    """For the user."""

    @cached_property
    def view(self) -> AgentView:
        """What agents see of its tasks."""
        return AgentView.of(self.domain, self.reward, self.config.agent_columns)

    @property
    def trainer(self) -> Trainer:
        """Who trains it."""
        return trainer_of(self.config.trainer)

    def warning(self) -> str:
        """What is to be said after its rollouts: that agents changed databases; else an empty text."""
        return self.databases.warning() if self.databases is not None else ""

    def runtime(self, engine: Any, *, run: RunDir, timer: StepTimer, replay: Replay | None = None) -> RolloutRuntime:
        """What runs its rollouts, with the policy ``engine``, an engine or an upstream."""
        from groundwire.train.rollouts.runtime import RolloutRuntime  # slow to import

        parts: dict[str, Any] = {"backend": self.backend, "domain": self.domain, "reward": self.reward}
        return RolloutRuntime(engine=engine, config=self.config, timer=timer, run=run, replay=replay, **parts)


def parse_arguments(
    agent: Any, tasks: Any, reward: Any, settings: Mapping[str, Any], *, validation: Any = None, train: bool = True
) -> tuple[dict[str, Any], Objects]:
    """The given settings, checked, and the objects among the arguments of :func:`groundwire.train.fit`.

    Unless ``train``, all tasks are for validation.
    """
    silence_libraries(["agentlightning"])  # it logs a traceback for each failed rollout, which the run counts
    given = {"agent": agent, **settings}
    given = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    agent_objects = {
        name: given.pop(name) for name in ("agent", *AGENT_FUNCTIONS) if not isinstance(given.get(name), str | None)
    }
    if "agent" in agent_objects:
        given["backend"] = given.get("backend") or "custom"
        if given["backend"] not in adapters.FRAMEWORKS:
            raise ConfigError(f"backend {given['backend']!r} runs its own agent: leave out the backend, or the agent")
    domain, named = _task_list(tasks, given, validation, train=train), False
    if domain is not None:
        # Other processes do not have this object, but can read a file by its name.
        elsewhere = given.get("runner_python") or given.get("runner_processes") or given.get("n_runners") == 0
        elsewhere = bool(elsewhere) or given.get("trainer") == "verl"
        named = elsewhere and isinstance(tasks, str | Path) and validation is None
        given["domain"] = str(tasks) if named else domain.name
    function = None if isinstance(reward, str | None) else rewards.reward_function(reward)
    if reward is not None:
        given["reward"] = _object_name(reward) if function else reward
    objects = Objects(agent=agent_objects, domain=domain, domain_is_named=named, reward=function)
    return merge_overrides(given, {}), objects


def _task_list(tasks: Any, given: dict[str, Any], validation: Any, *, train: bool) -> domains.TaskList | None:
    """The domain of tasks that are given as a file or as objects; None for the name of a domain, which is a setting."""
    if tasks is not None and given.get("domain") is not None:
        raise ConfigError(f"tasks are given, and domain {given['domain']!r}: give one of them")
    if tasks is None or (isinstance(tasks, str | Path) and not is_file(str(tasks))):
        given["domain"] = given.get("domain") if tasks is None else str(tasks)
        if validation is not None:
            raise ConfigError("a domain has its own validation tasks: leave out validation")
        return None
    tasks = str(tasks) if isinstance(tasks, Path) else tasks
    if not train:
        return task_list([], validation=tasks)
    shares = {} if validation is None else {"validation": validation}
    return task_list(tasks, **shares, allow_shared=True)  # until all settings are known

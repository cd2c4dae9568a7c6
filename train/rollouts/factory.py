"""From the settings of agents to their backend and their reward, for the trainer and the runners.

A backend's constructor takes the settings that it has parameters for. One that the user gave and that means nothing to
the backend is an error, as is an unknown option of the agent.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from groundwire import adapters, rewards
from groundwire.adapters.agents.app_environment import with_all_variables
from groundwire.adapters.agents.making import OF_THE_RUN, checked_options, options_of
from groundwire.adapters.agents.process.backend import ProcessBackend
from groundwire.adapters.agents.process.program import LitAgentError
from groundwire.domains import Domain
from groundwire.tools.loading import MissingPackageError
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import flag
from groundwire.train.config.resolve import preset_settings
from groundwire.train.config.run_config import AGENT_FUNCTIONS, AgentSettings, RunConfig, split_names

_log = logging.getLogger(__name__)
_SEALED = "sealed closes the network of forked processes"
ELSEWHERE = "the reward is computed in the environment of runner_python"

_OPTIONS = ("agent", *AGENT_FUNCTIONS, "train_model")
"""The settings that a backend's constructor may take, as parameters of the same names."""
_PACKAGES = {"agents": "openai-agents"}
"""Packages whose name is not their module's; the package named ``agents`` is an unrelated one."""


class BackendElsewhere(adapters.Backend):
    """The backend of a trainer whose agents run in another environment: it is never run, and imports no agent."""

    async def run(self, question: adapters.Question, endpoint: adapters.Endpoint) -> adapters.Answer:
        """Always raises :class:`adapters.AgentError`."""
        raise adapters.AgentError("the agent runs in the environment of runner_python")


def make_backend(settings: AgentSettings, **objects: Any) -> adapters.Backend:
    """The backend of a run, or of a runner. ``objects`` replace the settings of their names. Raises ``ConfigError``."""
    if isinstance(settings, RunConfig) and settings.runner_python:
        return BackendElsewhere()
    try:
        factory: Callable[..., adapters.Backend] = adapters.get(settings.backend)
    except ImportError as error:
        remedy = "is its version right?"
        if isinstance(error, ModuleNotFoundError) and error.name:
            module = error.name.partition(".")[0]
            remedy = f"pip install {_PACKAGES.get(module, module.replace('_', '-'))}"
        raise ConfigError(f"backend {settings.backend!r} cannot be imported: {error}; {remedy}") from error
    if objects.get("agent", settings.agent) is not None and settings.backend in adapters.FRAMEWORKS:
        factory = partial(adapters.agent_backend, framework=settings.backend)
    parameters = inspect.signature(factory).parameters
    if ignored := [name for name in _OPTIONS if name not in parameters and getattr(settings, name) is not None]:
        raise ConfigError(f"{flag(ignored[0])} means nothing to backend {settings.backend!r}: leave it out")
    arguments = {name: getattr(settings, name) for name in _OPTIONS if name in parameters} | objects
    if arguments.get("agent", "") is None:
        raise ConfigError(f"backend {settings.backend!r} needs --agent module:name")
    in_processes = (
        settings.agent is not None
        and "agent" not in objects
        and "options" in parameters
        and settings.rollout_process != "off"
    )
    _check_processes(settings, in_processes)
    try:
        if "options" in parameters:
            options = settings.agent_options if settings.agent is not None else _applicable(settings, ())
            if in_processes:
                return _in_processes(settings, {**arguments, "options": dict(options), "framework": settings.backend})
            backend = factory(**arguments, options=options)
            if settings.agent is not None and "agent" not in objects:
                backend.environment_note = with_all_variables()
            return backend
        if "agent_folder" in parameters:
            arguments["agent_folder"] = "shared" if settings.rollout_process == "off" else settings.agent_folder
            arguments["agent_env"] = split_names(settings.agent_env)
        known = options_of(factory, without=(*_OPTIONS, "agent_folder", "agent_env", *OF_THE_RUN))
        checked = checked_options(factory, settings.backend, _applicable(settings, known), known)
        return adapters.as_backend(factory(**arguments, **checked))
    except MissingPackageError as error:
        remedy = "; if the agent has an environment of its own, give --runner-python PYTHON"
        raise ConfigError(f"{error}{remedy if isinstance(settings, RunConfig) else ''}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_processes(settings: AgentSettings, in_processes: bool) -> None:
    """Refuse settings of rollouts in processes where there are none. Programs have folders of their own, too."""
    forked = in_processes and settings.rollout_process == "fork"
    if settings.sealed and (not forked or settings.train_model is not None):
        raise ConfigError(
            f"{_SEALED}: for an agent that is given by name, with --rollout-process fork, without --train-model. "
            "Leave it out"
        )
    if settings.agent is None or settings.rollout_process == "off":
        for name in ("agent_folder", "agent_env"):
            if getattr(settings, name) != AgentSettings.model_fields[name].default:
                raise ConfigError(
                    f"{name} is for rollouts in processes of their own, which these are not: leave it out"
                )


def _in_processes(settings: AgentSettings, spec: Mapping[str, Any]) -> adapters.Backend:
    """The backend of an agent that is given by name. A ``LitAgent`` runs in this process, where its store is."""
    try:
        return ProcessBackend(
            spec,
            folder=settings.agent_folder,
            env=split_names(settings.agent_env),
            fork=settings.rollout_process == "fork",
            sealed=settings.sealed,
            setup="groundwire.train.rollouts.runner.emitters:serve_emitters",
        )
    except LitAgentError:
        if settings.sealed:
            raise ValueError(f"{_SEALED}, and a LitAgent has none: leave it out") from None
        _log.warning("the rollouts of a LitAgent share this process: what one leaves behind, others find")
        backend = adapters.agent_backend(**spec)
        backend.environment_note = with_all_variables()
        return backend


def _applicable(settings: AgentSettings, known: Collection[str]) -> dict[str, Any]:
    """The options of an agent, without those of a preset that are for others; a trainer has checked a runner's."""
    usual = settings.agent_options
    if isinstance(settings, RunConfig):
        usual = preset_settings(settings.config, settings.trainer).get("agent_options", {})
    return {
        name: value
        for name, value in settings.agent_options.items()
        if name in known or name not in usual or usual[name] != value
    }


def make_reward(settings: AgentSettings, domain: Domain) -> rewards.Reward:
    """The reward of a run, with its judge and its time limit. Raises :class:`.UnknownNameError`."""
    name = settings.reward or domain.default_reward
    if runs_elsewhere(name, settings):
        return no_reward(ELSEWHERE, rewards.comparison(name, judge=settings.judge))
    if not name:
        return no_reward("the tasks have no reward: give the name of one, or a function (module:function)")
    return rewards.with_time_limit(rewards.get(name, judge=settings.judge), settings.reward_timeout_s)


def runs_elsewhere(reward: str, settings: AgentSettings) -> bool:
    """Whether only the environment of ``runner_python`` has the reward: a function, or that of a ``LitAgent`` ("")."""
    elsewhere = isinstance(settings, RunConfig) and bool(settings.runner_python)
    return elsewhere and (not reward or rewards.has_functions(reward))


def no_reward(message: str, compare: Any = None) -> rewards.Reward:
    """A reward that cannot be computed here: ``message`` says why. It may ``compare`` the answers of a group."""

    async def reward(task: Any, answer: str, steps: Any) -> float:
        raise rewards.RewardError(message)

    reward.compare = compare  # type: ignore[attr-defined]
    return reward

"""From a run's settings to its backend and its reward.

A backend takes the options that mean something to it, and its constructor says which: a parameter is filled where it
has the name of an option. A setting that the user changed and the backend does not take is refused rather than ignored.
"""

from __future__ import annotations

import inspect

from groundwire import adapters, rewards
from groundwire.domains import Domain
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig

__all__ = ["make_backend", "make_reward"]

_OPTIONS = ("agent", "max_turns", "table_info_truncate", "example_values", "show_keys", "execution_truncate")
"""The settings that a backend's constructor may take, as parameters of the same names."""

_PACKAGES = {"agents": "openai-agents"}
"""Where a module's package has another name: there is a package ``agents``, and it is something else."""


def make_backend(config: RunConfig) -> adapters.Backend:
    """The backend of a run. Raises :class:`groundwire.train.config.errors.ConfigError` where it cannot be made with
    these settings.
    """
    try:
        factory = adapters.get(config.backend)
    except ImportError as error:
        raise ConfigError(f"backend {config.backend!r} cannot be imported: {error}; {_remedy(error)}") from error
    takes = inspect.signature(factory).parameters
    usual = resolve(config.config, trainer=config.trainer)
    options = {}
    for name in _OPTIONS:
        value = getattr(config, name)
        if name in takes:
            options[name] = value
        elif value != getattr(usual, name):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} means nothing to backend {config.backend!r}: leave it out")
    if options.get("agent", "") is None:
        raise ConfigError(f"backend {config.backend!r} needs --agent module:function")
    try:
        return factory(**options)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def make_reward(config: RunConfig, domain: Domain) -> rewards.Reward:
    """The reward of a run, with its judge. Raises :class:`groundwire.tools.plugins.UnknownNameError`."""
    return rewards.get(config.reward or domain.default_reward, judge=config.judge_settings())


def _remedy(error: ImportError) -> str:
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return "is its version right?"
    module = error.name.partition(".")[0]
    return f"pip install {_PACKAGES.get(module, module.replace('_', '-'))}"

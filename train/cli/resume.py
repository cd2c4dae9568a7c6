"""The settings of a run that is resumed: the stored ones, and the changes that are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groundwire.domains import TaskData
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.verl_names import drop_aliases
from groundwire.train.evaluation.validation import validation_missing

__all__ = ["config_for_resume", "finished", "pin_data_dir", "resolve_path", "save_step_count"]

_FIXED = ("config", "trainer", "backend", "agent", "domain", "model", "data_dir", "seed")
"""Settings that cannot change when a run is resumed: it would be another run."""


def resolve_path(name: str | None) -> str | None:
    """The absolute path of an existing folder; any other name as it is.

    The link ``runs/latest`` changes when a run begins, and a run may be resumed from another working directory.
    """
    if name is None or name == "starter" or not Path(name).exists():
        return name
    return str(Path(name).resolve())


def config_for_resume(run: RunDir, given: Mapping[str, Any]) -> RunConfig:
    """The stored settings of a run, with the given changes.

    Raises :class:`groundwire.train.config.errors.ConfigError` for a change that would make it another run, and
    :class:`groundwire.train.artifacts.run_dir.RunDamagedError` for stored settings of no run.
    """
    stored = run.config()
    if missing := [name for name in ("config", "trainer", "steps") if name not in stored]:
        raise RunDamagedError(f"{run.path / 'config.json'} has no {missing[0]!r}: restore it, or start a new run")
    for name in _FIXED:
        if given.get(name) not in (None, stored.get(name)):
            raise ConfigError(
                f"--{name.replace('_', '-')} {given[name]} but {run.path} was started with {stored.get(name)}; "
                "leave it out, or start a new run"
            )
    changed = {name: value for name, value in given.items() if value is not None and name != "output_dir"}
    preset = stored.pop("config")
    if stored["trainer"] == "verl":
        stored = drop_aliases(stored, changed)
    for name in ("judge", "verl"):
        if name in changed:
            changed[name] = {**stored.get(name, {}), **changed[name]}
    return resolve(preset, **{**stored, **changed})


def pin_data_dir(settings: RunConfig, data: TaskData, run: RunDir | None) -> RunConfig:
    """The settings with the data folder that was read, which an environment variable may have named.

    Raises :class:`groundwire.train.config.errors.ConfigError` if ``run`` is resumed and was started with other data.
    """
    if data.folder is None or (settings.data_dir and data.folder == str(Path(settings.data_dir).resolve())):
        return settings
    if run is not None:
        began = settings.data_dir or "the bundled data"
        raise ConfigError(f"{run.path} was started with {began}, and now there is {data.source}: leave that out")
    return settings.model_copy(update={"data_dir": data.folder})


def finished(run: RunDir, settings: RunConfig) -> str:
    """A message for a run without steps left; empty if there are some."""
    saved, lines = run.checkpoints.last_step(), run.metrics()
    if not 0 < settings.steps <= saved:  # with verl, 0 steps are as many as the epochs have
        return ""
    if settings.trainer == "local" and lines and validation_missing(settings, lines[-1]):
        return ""
    return f"all {saved} steps are done; give --steps {saved + settings.steps}, say, to go on"


def save_step_count(run: RunDir, steps: int) -> None:
    """Store a new number of steps, so that the next resume knows it.

    Other changes are not stored: a device or a port belongs to one process.
    """
    stored = run.config()
    if stored["steps"] != steps:
        run.write_config({**drop_aliases(stored, {"steps": steps}), "steps": steps})

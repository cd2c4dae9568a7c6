"""What a later process finds in a run's settings, and what it may change of them."""

from __future__ import annotations

from dataclasses import replace
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

_FIXED = ("trainer", "backend", "agent", "domain", "model", "data_dir", "seed")
"""What a resumed run cannot change: it would be another run."""


def resolve_path(place: str | None) -> str | None:
    """A folder's own path, as long as it exists; a name stays what it is.

    ``runs/latest``, a link, is another folder as soon as the run begins, and a run may be resumed from another folder.
    """
    if place is None or place == "starter" or not Path(place).exists():
        return place
    return str(Path(place).resolve())


def config_for_resume(run: RunDir, preset: str | None, given: dict[str, Any]) -> RunConfig:
    """The run's own settings with what may be changed of them.

    Raises :class:`groundwire.train.config.errors.ConfigError`, and
    :class:`groundwire.train.artifacts.run_dir.RunDamagedError` for settings of no run.
    """
    stored = run.config()
    if missing := [name for name in ("config", "trainer", "steps") if name not in stored]:
        raise RunDamagedError(f"{run.path / 'config.json'} has no {missing[0]!r}: restore it, or start a new run")
    for name in _FIXED:
        if given[name] is not None and given[name] != stored.get(name):
            raise ConfigError(
                f"--{name.replace('_', '-')} {given[name]} but {run.path} was started with {stored.get(name)}; "
                "leave it out, or start a new run"
            )
    if preset is not None and preset != stored["config"]:
        raise ConfigError(f"--config {preset} but {run.path} was started with {stored['config']}; leave it out")
    changed = {name: value for name, value in given.items() if value is not None and name != "output_dir"}
    preset = stored.pop("config")
    if stored["trainer"] == "verl":
        stored = drop_aliases(stored, changed)
    for name in ("judge", "verl"):
        if name in changed:
            changed[name] = {**stored.get(name, {}), **changed[name]}
    return resolve(preset, **{**stored, **changed})


def pin_data_dir(settings: RunConfig, data: TaskData, run: RunDir | None) -> RunConfig:
    """The settings with the folder that was read, which a variable of the environment may have named.

    Raises :class:`groundwire.train.config.errors.ConfigError` where ``run``, which is resumed, was started with
    other data.
    """
    if data.folder is None or (settings.data_dir and data.folder == str(Path(settings.data_dir).resolve())):
        return settings
    if run is not None:
        began = settings.data_dir or "the bundled data"
        raise ConfigError(f"{run.path} was started with {began}, and now there is {data.source}: leave that out")
    return replace(settings, data_dir=data.folder)


def finished(run: RunDir, settings: RunConfig) -> str:
    """What to say of a run that has no step left to do; empty where it has one."""
    saved, lines = run.checkpoints.last_step(), run.metrics()
    if not 0 < settings.steps <= saved:  # with verl, 0 steps are as many as the epochs have
        return ""
    if settings.trainer == "local" and lines and validation_missing(settings, lines[-1]):
        return ""
    return f"all {saved} steps are done; give --steps {saved + settings.steps}, say, to go on"


def save_step_count(run: RunDir, steps: int) -> None:
    """Have the run's settings say how far it goes, so that who resumes it next need not say it again.

    Nothing else that was changed is kept: a device or a port belongs to one life of the run.
    """
    stored = run.config()
    if stored["steps"] != steps:
        run.write_config({**drop_aliases(stored, {"steps": steps}), "steps": steps})

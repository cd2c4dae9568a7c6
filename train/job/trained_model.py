"""The model that a run trained, found by the path of the run or of one of its checkpoints, and the run's settings."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from groundwire.tools.files import read_json
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import flag, with_changes
from groundwire.train.config.run_config import AgentSettings

_FROM_RUN = (
    *AgentSettings.model_fields,
    *("config", "trainer", "data_dir", "group_column", "device", "seed", "n_runners", "max_tokens", "max_model_len"),
    *("retries", "val_temperature", "agent_match", "prompts", "runner_python", "runner_processes"),
)
"""The settings of a run with which its model is evaluated."""
_AGENT = {name for name in AgentSettings.model_fields if name.startswith("agent")}
_DEPENDENTS = {
    "backend": {"agent_match", "prompts", "runner_python", *_AGENT},
    "domain": {"agent_match", "data_dir", "group_column", "reward", "judge"},
    "reward": {"judge"},
}
"""Settings of a run that mean nothing with another backend, domain or reward than the run's."""


def trained_model(path: str | Path) -> tuple[Path, RunDir] | None:
    """The folder of a trained model, and its run; None if ``path`` is neither a run nor inside of one.

    Of a run it is the newest checkpoint. Raises :class:`RunDirError` for a run without a checkpoint, or one that
    another version of groundwire wrote.
    """
    folder = Path(os.path.realpath(path))
    if _is_run(folder):
        run = RunDir.open(folder)
        return newest_model(run), run
    for parent in folder.parents:
        if parent.name == "checkpoints" and _is_run(parent.parent):
            with suppress(RunDirError):  # the checkpoint can be used without its run
                return folder, RunDir.open(parent.parent)
    return None


def with_settings_of_run(given: Mapping[str, Any], *, objects: Collection[str] = ()) -> dict[str, Any]:
    """``given`` with the settings of the run that trained its ``model``, if one did; the given ones win.

    ``objects`` are the parts that are given as objects. Raises :class:`ConfigError` if one of the run's is missing.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if (trained := trained_model(given.get("model", "starter"))) is None:
        return given
    folder, run = trained
    stored = run.config()
    names = {"agent": ("agent", "backend"), "tasks": ("domain",), "reward": ("reward",)}
    needed = {part for part in stored.get("objects", {}) if not any(name in given for name in names.get(part, ()))}
    if missing := sorted(needed - set(objects)):
        raise ConfigError(
            f"{run.path} was started by a script, with its own {', '.join(missing)}: give "
            f"{', '.join(flag(names[part][0]) for part in missing)}, or evaluate in the script, with "
            "groundwire.train.evaluate(agent, tasks, reward, model=...)"
        )
    kept = {name: stored[name] for name in _FROM_RUN if stored.get(name) is not None}
    if not kept.get("n_runners"):  # an external store had its own runners
        kept.pop("n_runners", None)
    for name, dependents in _DEPENDENTS.items():
        if name in given and given[name] != stored.get(name):
            kept = {setting: value for setting, value in kept.items() if setting not in dependents}
    if "agent" in given or "agent" in objects:  # its framework is found from the agent
        own = {"backend", "agent_match"}
        own |= {"runner_python", "agent_options"} if given.get("agent") != stored.get("agent") else set()
        kept = {setting: value for setting, value in kept.items() if setting not in own}
    if not kept.get("runner_python"):  # other processes are for speed, and an evaluation chooses its own
        kept.pop("runner_processes", None)
    return {**with_changes(kept, given), "model": str(folder)}


def _is_run(folder: Path) -> bool:
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" not in config and {"backend", "domain"} <= config.keys()


def newest_model(run: RunDir) -> Path:
    """The folder of the newest checkpoint. Raises :class:`RunDirError` if the run has none."""
    if paths := run.checkpoints.paths():
        return paths[-1]
    if (exported := run.path / "model").is_dir():  # verl's newest checkpoint in Hugging Face's format
        return exported.resolve()
    config = run.config()
    model = f": give its model, {config.get('model')}" if "evaluation" in config else " yet"
    raise RunDirError(f"{run.path} has no checkpoint{model}")

"""The settings of a run that is resumed: the stored ones, and the changes that are allowed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groundwire.domains import names
from groundwire.domains.task_list import is_file
from groundwire.tools.errors import CommandError, UserError
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import flag, with_changes
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.verl_names import LOGGER, with_run_names
from groundwire.train.evaluation.validation import validation_missing
from groundwire.train.policy.errors import NonFiniteGradientError
from groundwire.train.policy.pretrained.locate import NAMES
from groundwire.train.rollouts.errors import EventLoopError, RolloutsFailedError, RunnersEndedError
from groundwire.train.store.errors import StoreFailedError, StoreGoneError

__all__ = [
    "config_for_resume",
    "finished",
    "relative_path",
    "resolve_domain",
    "resolve_path",
    "with_resume_hint",
]

_FIXED = (
    *("config", "trainer", "backend", "agent", "agent_input", "agent_output"),
    *("domain", "model", "data_dir", "group_column", "seed"),
)
"""Settings that cannot change when a run is resumed: it would be another run."""


def resolve_path(name: str | None) -> str | None:
    """The absolute path of an existing folder; any other name unchanged.

    The link ``runs/latest`` changes when a run begins, and a run may be resumed from another working directory.
    """
    if name is None or name in NAMES or not Path(name).exists():
        return name
    return str(Path(name).resolve())


def config_for_resume(run: RunDir, given: Mapping[str, Any], *, objects: Collection[str] = ()) -> RunConfig:
    """The stored settings of a run, with the given changes. ``objects`` are the parts that are given as objects.

    Raises :class:`groundwire.train.config.errors.ConfigError` for a change that would make it another run, and
    :class:`groundwire.train.artifacts.run_dir.RunDamagedError` for incomplete or unknown stored settings.
    """
    stored = run.config()
    if missing := [name for name in ("config", "trainer", "steps") if name not in stored]:
        raise RunDamagedError(f"{run.path / 'config.json'} has no {missing[0]!r}: restore it, or start a new run")
    if "evaluation" in stored:
        raise ConfigError(f"{run.path} is an evaluation, which cannot be resumed: evaluate again")
    for name in ("base_url", "parts", "earlier"):
        stored.pop(name, None)
    if missing := sorted(stored.pop("objects", {}).keys() - set(objects)):
        raise ConfigError(
            f"{run.path} was started by a script, with its own {', '.join(missing)}: continue it there, with "
            f'fit(..., resume="{relative_path(run.path)}")'
        )
    if unknown := sorted(stored.keys() - RunConfig.names().keys()):
        raise RunDamagedError(
            f"{run.path / 'config.json'} has the unknown setting {unknown[0]!r}: delete that line, or start a new run"
        )
    for name in _FIXED:
        if given.get(name) not in (None, stored.get(name)):
            raise ConfigError(
                f"{flag(name)} {given[name]} but {run.path} was started with {stored.get(name)}; "
                "leave it out, or start a new run"
            )
    changed = {name: value for name, value in given.items() if value is not None and name != "output_dir"}
    if stored["trainer"] == "verl":
        changed = with_run_names(changed)
    if "track" in changed:
        stored.get("verl", {}).pop(LOGGER, None)
    return resolve(stored["config"], **with_changes(stored, changed))


def resolve_domain(name: str | None) -> str | None:
    """The absolute path of a file of tasks; the name of a domain unchanged."""
    return name if name is None or name in names() or not is_file(name) else str(Path(name).resolve())


def finished(run: RunDir, settings: RunConfig) -> str:
    """A message if the run has no step left, else an empty text."""
    saved, lines = run.checkpoints.last_step(), run.metrics()
    if not 0 < settings.steps <= saved:  # with verl, 0 steps are as many as the epochs have
        return ""
    if settings.trainer == "local" and lines and validation_missing(settings, lines[-1]):
        return ""
    return f"all {saved} steps are done; to train further, give more steps, e.g. --steps {saved + settings.steps}"


@contextmanager
def with_resume_hint(run: RunDir, *, fit: bool = False) -> Iterator[None]:
    """Add to an error that ends training the step of the last checkpoint, and the command that continues the run.

    With ``fit`` it is the call of that function.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise CommandError(f"stopped; {_resume_hint(run, fit)}", 130) from None
    except UserError as error:
        from groundwire.adapters.tracing.span_writer import SpansNotStoredError
        from groundwire.train.verl.launch import TrainingError

        failures = (EventLoopError, RunnersEndedError, StoreGoneError, StoreFailedError, SpansNotStoredError)
        if isinstance(error, (RolloutsFailedError, NonFiniteGradientError, TrainingError, *failures)):
            why = f". More: groundwire why {relative_path(run.path)}"
            more = why if isinstance(error, RolloutsFailedError) else ""
            error.args = (f"{error}; {_resume_hint(run, fit)}{more}",)
        raise


def _resume_hint(run: RunDir, fit: bool) -> str:
    if run.is_empty():
        return "no step is complete, so nothing was written"
    saved = run.checkpoints.last_step()
    checkpoint = f"the last checkpoint is of step {saved}" if saved else "there is no checkpoint yet"
    path = relative_path(run.path)
    return f"{checkpoint}. Continue with: " + (
        f'fit(..., resume="{path}")' if fit else f"groundwire run --resume {path}"
    )


def relative_path(path: Path) -> str:
    """``path`` relative to the working directory, if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)

"""A resumed run: its stored settings with the changes that are allowed; what would be another run is refused.

The validations before and after training are compared, so both need the same reward, agent and validation tasks.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from groundwire.domains import Task
from groundwire.tools.errors import UserError, machine_error
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.gone import OF_RUN
from groundwire.train.config.overrides import flag
from groundwire.train.config.resolve import resolve_again
from groundwire.train.config.run_config import AGENT_FUNCTIONS, AgentSettings, RunConfig
from groundwire.train.evaluation.run_reader import changed_names
from groundwire.train.job.job import Job
from groundwire.train.job.prepare import relative_path
from groundwire.train.job.trainer import TrainingError
from groundwire.train.policy.errors import NonFiniteGradientError
from groundwire.train.rollouts.errors import EventLoopError, RolloutsFailedError, RunnersEndedError
from groundwire.train.store.errors import StoreFailedError, StoreGoneError

_RESUMABLE = (
    *(EventLoopError, RunnersEndedError, StoreGoneError, StoreFailedError),
    *(NonFiniteGradientError, TrainingError),
)
_FIXED = (
    *("config", "trainer", "backend", "agent", *AGENT_FUNCTIONS),
    *("domain", "model", "data_dir", "group_column", "seed"),
)
"""Settings that cannot change when a run is resumed: it would be another run."""
_OF_A_PROCESS = {
    *("config", "device", "output_dir", "track", "otlp", "n_runners", "runner_processes", "runner_python"),
    *("external_store_address", "token_file", "proxy_host"),
}
"""Settings of the machine and the moment, which a resumed run does not keep."""
_OF_VALIDATION = {*AgentSettings.model_fields, "parts.agent", "parts.reward"} | {
    *("prompts", "max_tokens", "max_model_len", "truncated", "val_temperature", "val_tasks")
}


def config_for_resume(run: RunDir, given: Mapping[str, Any], *, objects: Collection[str] = ()) -> RunConfig:
    """The stored settings of a run, with the given changes. ``objects`` are the parts that are given as objects.

    Raises :class:`ConfigError` for a change that would make it another run.
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
    # A setting that is gone, and was off, changes nothing.
    stored = {name: value for name, value in stored.items() if value or name not in OF_RUN}
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
    return resolve_again(stored, changed)


@contextmanager
def resume_hint(run: RunDir, *, fit: bool = False) -> Iterator[None]:
    """Add to an error that ends training the step of the last checkpoint, and the command that continues the run.

    With ``fit`` it is the call of that function.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {_how_to_continue(run, fit)}") from None
    except UserError as error:
        from groundwire.adapters.tracing.call_writer import CallsNotStoredError

        if isinstance(error, (*_RESUMABLE, RolloutsFailedError, CallsNotStoredError)):
            more = f". More: groundwire why {relative_path(run.path)}" if isinstance(error, RolloutsFailedError) else ""
            error.args = (f"{error}; {_how_to_continue(run, fit)}{more}",)
        raise
    except Exception as error:
        if not (reason := machine_error(error)):
            raise
        raise TrainingError(f"{reason}; {_how_to_continue(run, fit)}") from error


def _how_to_continue(run: RunDir, fit: bool) -> str:
    if run.is_empty():
        return "no step is complete, so nothing was written"
    saved, path = run.checkpoints.last_step(), relative_path(run.path)
    checkpoint = f"the last checkpoint is of step {saved}" if saved else "there is no checkpoint yet"
    command = f'fit(..., resume="{path}")' if fit else f"groundwire run --resume {path}"
    return f"{checkpoint}. Continue with: {command}"


def parts_of(job: Job) -> dict[str, str | None]:
    """A digest of each part of the run."""
    return {
        "agent": _source_digest(job.objects.agent.get("agent")),
        "reward": _source_digest(job.reward),
        "training tasks": _task_digest(job.data.train),
        "validation tasks": _task_digest(job.data.validation),
    }


def check_continuation(run: RunDir, job: Job) -> Job:
    """The job with notes about what has changed since ``run`` was started.

    Raises :class:`ConfigError` if the validations before and after training would not be comparable.
    """
    stored, step = run.config(), run.checkpoints.last_step()
    began, now = stored.get("parts", {}), parts_of(job)
    default = job.domain.default_reward
    names = {
        "agent": (stored.get("objects", {}).get("agent"), job.objects.names().get("agent")),
        "reward": (stored.get("reward") or default, job.config.reward or default),
    }
    problems = {
        part: f"the {part} is {new}, and it was {old}"
        for part, (old, new) in names.items()
        if old and new and old != new
    }
    if began.get("validation tasks", now["validation tasks"]) != now["validation tasks"]:
        problems["tasks"] = f"its validation tasks are not the same any more ({job.data.source})"
    for part, problem in problems.items():
        raise ConfigError(
            f"{run.path} cannot be resumed: {problem}. The accuracies before and after would not be comparable: give "
            f"the same {part}, or start a new run with its model (model={run.path})"
        )
    notes = []
    if changed := changed_names(*_changes(stored, job, now)):
        notes.append(f"resume: changed after step {step}: {', '.join(changed.values())}")
        if any({name, name.split(".")[0]} & _OF_VALIDATION for name in changed):
            notes.append("resume: that changes what validation measures, so before and after may not be comparable")
    return replace(job, notes=[*job.notes, *notes])


def store_settings(run: RunDir, job: Job) -> None:
    """Store what has changed, for the next resume and for the readers of the run: :meth:`RunDir.config`."""
    former, changed = _changes(run.config(), job, parts_of(job))
    run.change_config(former, changed, steps=job.config.steps)


def _changes(
    stored: Mapping[str, Any], job: Job, parts: Mapping[str, str | None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The old and the new values of what a run keeps, where they differ."""
    now = {name: value for name, value in job.config.to_dict().items() if name not in (*_OF_A_PROCESS, "steps")}
    now["parts"] = dict(parts)
    names = [name for name in now if name in stored and stored[name] != now[name]]
    return {name: stored[name] for name in names}, {name: now[name] for name in names}


def _source_digest(part: Any) -> str | None:
    """A digest of a function's or a class's source code, with the nodes of a graph and an agent's instructions."""
    if part is None:
        return None
    part = inspect.unwrap(part) if callable(part) else part
    nodes, source = getattr(part, "nodes", None), ""
    described = [
        sorted(map(str, nodes)) if isinstance(nodes, Mapping) else None,
        str(getattr(part, "instructions", None) or ""),
    ]
    with suppress(OSError, TypeError):  # typed into an interpreter, or compiled
        source = inspect.getsource(part if inspect.isroutine(part) else type(part))
    return _digest([source.encode("utf-8", "replace"), to_json(described)])


def _task_digest(tasks: Iterable[Task]) -> str:
    """A digest of the tasks without paths, which a moved folder changes."""
    rows = ({key: value for key, value in task.items() if not _is_path(value)} for task in tasks)
    return _digest(to_json(row, fallback=lambda value: type(value).__name__) for row in rows)


def _is_path(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return bool(values) and all(isinstance(path, str) and path.startswith("/") for path in values)


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()

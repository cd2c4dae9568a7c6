"""A resumed run with other settings or other parts: what would be another run is refused, the rest is said and stored.

The validations before and after training are compared, so both need the same reward, agent and validation tasks.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from groundwire.domains import Task
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.prepare import Job
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import AgentSettings
from groundwire.train.evaluation.run_reader import changed_names

__all__ = ["check_continuation", "parts_of", "store_settings"]

_OF_A_PROCESS = {
    *("config", "device", "output_dir", "track", "otlp", "n_runners", "runner_processes", "runner_python"),
    *("external_store_address", "store_wait_s", "token_file", "llm_proxy", "proxy_host", "proxy_port", "max_batch"),
    *("tokens_per_forward", "branches_per_row", "logits_per_chunk", "unresponsive_s", "step_deadline_s"),
}
"""Settings of the machine and the moment, which a resumed run does not keep."""
_OF_VALIDATION = {*AgentSettings.model_fields, "parts.agent", "parts.reward"} | {
    *("prompts", "max_tokens", "max_model_len", "fixed_sampling", "truncated", "val_temperature", "val_tasks")
}


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
    default = job.domain.default_reward or None
    names = {
        "agent": (stored.get("objects", {}).get("agent"), job.objects.names().get("agent")),
        "reward": (stored.get("reward") or default, job.config.reward or default),
    }
    for part, (old, new) in names.items():
        if old and new and old != new:
            raise _another(run, f"the {part} is {new}, and it was {old}", part)
    if began.get("validation tasks", now["validation tasks"]) != now["validation tasks"]:
        raise _another(run, f"its validation tasks are not the same any more ({job.data.source})", "tasks")
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


def _another(run: RunDir, problem: str, part: str) -> ConfigError:
    return ConfigError(
        f"{run.path} cannot be resumed: {problem}. The accuracies before and after would not be comparable: give the "
        f"same {part}, or start a new run with its model (model={run.path})"
    )


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
    nodes, instructions = getattr(part, "nodes", None), getattr(part, "instructions", None)
    about = [sorted(map(str, nodes)) if isinstance(nodes, Mapping) else None, str(instructions or "")]
    try:
        source = inspect.getsource(part if inspect.isroutine(part) else type(part))
    except (OSError, TypeError):  # typed into an interpreter, or compiled
        source = ""
    return _digest([source.encode("utf-8", "replace"), to_json(about)])


def _task_digest(tasks: Iterable[Task]) -> str:
    """A digest of the tasks without paths, which a moved folder changes."""
    rows = ({key: value for key, value in task.items() if not _is_path(value)} for task in tasks)
    return _digest(to_json(row, fallback=lambda value: type(value).__name__) for row in rows)


def _is_path(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_path, value))
    return isinstance(value, str) and value.startswith("/")


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return found.hexdigest()

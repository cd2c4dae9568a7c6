"""From settings to a job: what can be checked is checked before anything is written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pydantic_core

from groundwire import adapters, domains, rewards
from groundwire.adapters.agents.backend import AgentBackend
from groundwire.domains.task_list import is_file
from groundwire.rewards.judge.rule_judge_hybrid import NO_REFERENCE
from groundwire.tools.errors import CommandError
from groundwire.tools.http.access_token import token_for
from groundwire.tools.machine import rollouts_at_once
from groundwire.tools.numbers import check_finite
from groundwire.tools.secrets import say
from groundwire.tools.startup import fast_import
from groundwire.tools.types import TEXT
from groundwire.train.algorithms.model_size import rl_learning_rate
from groundwire.train.artifacts.tracking import check_otlp, check_trackers
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.job.job import NO_OBJECTS, Job, ModelEndpoint, Objects
from groundwire.train.job.model_checks import check_model
from groundwire.train.job.trainer import Trainer, trainer_of
from groundwire.train.policy.pretrained.locate import NAMES
from groundwire.train.rollouts.agent_python import call_notes, find_agent_python, reward_elsewhere
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.rollouts.factory import make_backend, make_reward, no_reward, runs_elsewhere
from groundwire.train.store.health import STORE_WAIT_S, check_store

_CHECKED = 1000
"""Tasks of each split whose columns are tried, at most."""
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def prepare(
    config: RunConfig, *, split: str | None = None, endpoint: ModelEndpoint | None = None, objects: Objects = NO_OBJECTS
) -> Job:
    """Check the settings, load the data, and make the agent's backend and the reward.

    ``split`` is the part of the data for validation. The model is at the ``endpoint``, if there is one.
    """
    trainer = trainer_of(config.trainer)
    check_trackers(config.track)
    if config.otlp is not None:
        check_otlp(config.otlp)
    adapters.check(config.backend)
    _check_objects(config, objects, trainer)
    domain = objects.domain or domains.get(config.domain)
    if config.runner_python:
        config = config.model_copy(update={"runner_python": find_agent_python(config.runner_python)})
    backend = _make_backend(config, objects.agent)
    reward, reward_notes = _make_reward(config, domain, backend, objects.reward)
    domain, data = _load_data(config, domain, split)
    view = AgentView.of(domain, reward, config.agent_columns)
    _check_prompts(config, backend, view.answers.name)
    tasks = [*data.train, *data.validation]
    _check_references(config, view, data)
    if data.folder is not None:  # which an environment variable may have named
        config = config.model_copy(update={"data_dir": data.folder})
    elsewhere = bool(config.runner_processes) or config.external_store_address is not None
    _check_values(tasks, as_json=elsewhere)
    if elsewhere:
        _check_databases(config, data, domain)
    possible, fewer = rollouts_at_once(config.max_batch) if trainer.in_process else (config.n_runners, "")
    if config.n_runners > possible:
        config = config.model_copy(update={"n_runners": possible})
    notes = [
        *call_notes(config, backend, reward, view, [*data.train[:_CHECKED], *data.validation[:_CHECKED]]),
        f"data: {data.source}",
        *(f"      left out of training: {count} ({reason})" for reason, count in data.left_out.items()),
        *(f"      {note}" for note in data.notes),
        _columns_note(config, view, tasks, backend),
        *(f"reward: {note}" for note in reward_notes),
        *([f"rollouts: {fewer}"] if fewer else []),
    ]
    if isinstance(backend, AgentBackend) and objects.agent.get("agent") is not None:
        notes.append(
            "rollouts: all in this process, with the agent's object; what it remembers reaches other rollouts. By name "
            "(module:name) each has a process of its own"
        )
    if endpoint is None:
        folder = trainer.model_folder(config)
        if folder is not None:
            notes += check_model(config, folder, backend, view, tasks)
        if config.learning_rate is None and trainer.updates_model:
            config, note = _with_learning_rate(config, folder)
            notes.append(note)
        if trainer.in_process and config.device != "cpu":
            with fast_import():
                from groundwire.train.policy.model import check_device
            check_device(config.device)
    if view.answers is TEXT and domain.answers is None and any(map(domain.database, tasks)):
        notes.append("answers: judged as text; a reward of SQL queries says so with @groundwire.rewards.judges_sql")
    if config.external_store_address is not None and not config.n_runners:
        notes.append(f"runners: start them with {config.runner_command()}")
    databases = domains.PrivateTasks(domain.database)
    databases.remember(tasks)
    parts: dict[str, Any] = {"domain": domain, "backend": backend, "reward": reward, "databases": databases}
    return Job(config=config, data=data, endpoint=endpoint, objects=objects, notes=notes, **parts)


def check_parts(config: RunConfig, objects: Objects, *, with_agent: bool) -> None:
    """Raise an error for a domain, an agent or a reward that cannot be made; the tasks may come later."""
    adapters.check(config.backend)
    _check_objects(config, objects, trainer_of(config.trainer))
    domain = objects.domain or domains.get(config.domain)
    if with_agent:
        _make_backend(config, objects.agent)
    if config.reward and not objects.reward:
        make_reward(config, domain)


def _load_data(config: RunConfig, domain: domains.Domain, split: str | None) -> tuple[domains.Domain, domains.TaskData]:
    """The domain's data, with notes about what training and validation share; tasks are held out by the settings."""
    column = config.group_column
    if isinstance(domain, domains.TaskList):
        domain = domain.split_as(group_column=column, allow_shared=config.allow_shared)
    elif column is not None:
        raise ConfigError(f"group_column is {column!r}, but domain {domain.name!r} has its own split: leave it out")
    data = domains.load_split(domain, split, config.data_dir)
    shared = [] if split == "train" else domains.shared_notes(data, column)
    return domain, replace(data, notes=(*data.notes, *shared))


def _make_reward(
    config: RunConfig, domain: domains.Domain, backend: adapters.Backend, given: rewards.Reward | None
) -> tuple[rewards.Reward, list[str]]:
    """The run's reward, and notes about it for the user."""
    if isinstance(backend, adapters.LitAgentBackend):
        if config.reward is not None:
            raise ConfigError(f"the agent returns its own reward, so reward {config.reward} has no use: leave it out")
        return no_reward("the agent returns its own reward"), ["the agent returns it"]
    if given is not None:
        return rewards.with_time_limit(given, config.reward_timeout_s), []
    name = config.reward or domain.default_reward
    if runs_elsewhere(name, config):
        reward = reward_elsewhere(str(config.runner_python), name, config.judge)
        return reward, rewards.notes("judge:compare", judge=config.judge) if rewards.comparison_of(reward) else []
    if not name:
        raise ConfigError("the tasks have no reward: give a function of (task, answer), or the name of a reward")
    return make_reward(config, domain), rewards.notes(name, judge=config.judge)


def _columns_note(config: RunConfig, view: AgentView, tasks: Sequence[domains.Task], backend: adapters.Backend) -> str:
    elsewhere = config.runner_python and not (config.reward or view.domain.default_reward)
    if isinstance(backend, adapters.LitAgentBackend) or elsewhere:
        return "the agent sees: every column (a LitAgent gets the whole task and returns its reward); hidden: nothing"
    return view.line(tasks)


def _check_objects(config: RunConfig, objects: Objects, trainer: Trainer) -> None:
    if not (names := objects.names()):
        return
    elsewhere = {"trainer": not trainer.in_process, "runner_processes": bool(config.runner_processes)}
    elsewhere["n_runners"] = config.n_runners == 0
    if setting := next((name for name, in_others in elsewhere.items() if in_others), None):
        raise ConfigError(
            f"{setting} is {getattr(config, setting)}, so agents run in other processes, which do not have the "
            f"{' and '.join(names)} of this one: give names that they can import or look up (docs/python-api.md)"
        )


def _make_backend(config: RunConfig, objects: Mapping[str, Any]) -> adapters.Backend:
    backend = make_backend(config, **objects)
    if backend.agents and not any(re.search(config.agent_match or "", name) for name in backend.agents):
        names = ", ".join(backend.agents)
        raise CommandError(f"--agent-match {config.agent_match!r} matches none of its agents: {names}")
    return backend


def _check_prompts(config: RunConfig, backend: adapters.Backend, form: str) -> None:
    known = backend.default_prompts(form)
    if known and (unknown := sorted(config.prompts.keys() - known.keys())):
        raise ConfigError(f"prompts: the agent has no prompt {unknown[0]!r:.60}; it has {', '.join(known)}")


def _check_references(config: RunConfig, view: AgentView, data: domains.TaskData) -> None:
    """Some judges need reference answers, others all answers to a task."""
    if view.compares and config.trainer == "gepa":
        raise ConfigError("the reward ranks the answers to a task: leave out trainer gepa")
    judged = "rule_judge_hybrid" in (config.reward or view.domain.default_reward or "") and view.answers.name == "prose"
    if not judged or config.judge.teacher is not None or config.judge.without_reference:
        return
    if missing := [task["id"] for task in (*data.train, *data.validation) if not task.get("answer")]:
        raise CommandError(f"{data.source}: {len(missing)} tasks have no answer, such as {missing[0]}; {NO_REFERENCE}")


def _check_values(tasks: Sequence[domains.Task], *, as_json: bool) -> None:
    """Raise an error for a task with a number that JSON has no form for. ``as_json``, as runners in other processes get
    them: with any value that it has none for.
    """
    for task in tasks:
        try:
            check_finite(task)
        except ValueError as error:
            raise domains.DataError(f"task {task['id']!r:.100}: {error}") from error
        for name, value in task.items() if as_json else ():
            try:
                pydantic_core.to_json(value)
            except ValueError as error:
                raise domains.DataError(
                    f"task {task['id']!r:.100}, column {name!r:.100}: {error}; other processes get it as JSON"
                ) from error


def _check_databases(config: RunConfig, data: domains.TaskData, domain: domains.Domain) -> None:
    """Runners read no database outside of the data's folders: raise an error if a task has one there."""
    folders = domains.database_folders(domain, config.data_dir)
    paths = {domain.database(task) for task in (*data.train, *data.validation)} - {""}
    if outside := sorted(path for path in paths if not domains.is_inside(path, folders)):
        raise domains.DataError(
            f"{len(outside)} of {len(paths)} databases are outside of the data's folder "
            f"({', '.join(map(str, folders))}), where runners may not read, such as {outside[0]}: copy them into it, "
            "or run the agents in the trainer's process, without an external store and with --runner-processes 0"
        )


def check_store_settings(address: str | None, token_file: str | None = None, wait_s: float = STORE_WAIT_S) -> None:
    """Check the store's address, also against ``AGL_MANAGED_STORE``: Agent Lightning's switch for a trainer's store.

    The store may start within ``wait_s`` seconds.
    """
    name = "AGL_MANAGED_STORE"
    value = os.environ.get(name, "").strip().lower()
    if value not in ("", *_YES, *_NO):
        raise CommandError(f"{name} is {value!r}; it is one of {', '.join((*_YES, *_NO))}")
    if value in _NO and address is None:
        raise CommandError(f"{name}={value} asks for an external store: give --external-store-address")
    if value in _YES and address is not None:
        raise CommandError(
            f"{name}={value} asks for a store in the trainer: leave out --external-store-address {address}"
        )
    if address is not None:
        on_wait = partial(say, err=True)
        check_store(address, token=token_for(address, token_file), timeout_s=wait_s, on_wait=on_wait)


def _with_learning_rate(config: RunConfig, folder: Path | None) -> tuple[RunConfig, str]:
    """The settings with a learning rate for the model's size, and a note about it."""
    if folder is None:
        raise ConfigError(f"the size of {config.model} is not known before its download: give learning_rate")
    with fast_import():
        from groundwire.train.policy.pretrained.model_files import count_stored_parameters
    try:
        parameters = count_stored_parameters(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the weights in {folder} cannot be read: {error}") from error
    rate = rl_learning_rate(parameters, lora=config.lora_rank > 0)
    note = f"learning_rate: {rate:g}, for {parameters / 1e6:,.1f} M parameters"
    return config.model_copy(update={"learning_rate": rate}), note


def with_resolved_paths(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """``given`` with the absolute paths of what these settings name, and of a domain that is a file."""
    return {**given, **{name: resolve_path(given[name], name) for name in ("domain", *names) if name in given}}


def resolve_path(value: str | None, name: str = "") -> str | None:
    """The absolute path of an existing folder, and of a file of tasks for the setting ``domain``; else ``value``.

    The link ``runs/latest`` changes when a run begins, and a run may be resumed from another working directory.
    """
    if value is None or value in (domains.names() if name == "domain" else NAMES):
        return value
    if not (is_file(value) if name == "domain" else Path(value).exists()):
        return value
    return str(Path(value).resolve())


def relative_path(path: Path) -> str:
    """``path`` relative to the working directory, if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)

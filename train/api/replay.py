"""Replays rollouts of a run: the agent runs again, and every call is answered from the record. No model is loaded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from groundwire.adapters.tracing.replay import Replay, ReplayedAttempt
from groundwire.adapters.tracing.wire.request import RefusedError
from groundwire.tools.files import read_json
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir, RunDirError
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import with_changes
from groundwire.train.config.run_config import AgentSettings, RunConfig
from groundwire.train.evaluation.metrics import RIGHT
from groundwire.train.evaluation.replayed import (
    Difference,
    TextsOfCall,
    call_difference,
    likeliest,
    outcome_difference,
)
from groundwire.train.evaluation.validation import choose_tasks, validation_deadline_s
from groundwire.train.job.job import NO_OBJECTS, Job, ModelEndpoint, Objects
from groundwire.train.job.prepare import prepare
from groundwire.train.policy.recorded import RecordEngine
from groundwire.train.policy.server import PolicyServer
from groundwire.train.report.token_text import tokenizer_folders
from groundwire.train.rollouts.runtime import MODEL_NAME, Upstream
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout

SETTINGS = (
    *AgentSettings.model_fields,
    *("data_dir", "group_column", "prompts", "n_runners", "runner_python"),
)
"""The settings that a replay may change."""
_OF_RUN = (
    *SETTINGS,
    *("model", "device", "temperature", "max_tokens", "max_model_len", "max_calls", "allow_shared", "seed"),
)
_AT_ONCE = 16
_OF_AGENT = ("backend", "agent_match", "agent_options")
"""What belongs to the agent of a run, and not to another one."""


@dataclass(frozen=True, kw_only=True)
class ReplayedRollout:
    """A rollout of a run, and how it went again."""

    recorded: Rollout
    again: Rollout
    difference: Difference | None
    """None if it went as recorded."""


def replay_job(run: RunDir, given: Mapping[str, Any], objects: Objects = NO_OBJECTS) -> Job:
    """The run's agent and reward, with the ``given`` settings."""
    stored, given = run.config(), {name: value for name, value in given.items() if value is not None}
    replaced = {*objects.names(), *given.keys() & {"agent", "reward"}, *(["tasks"] if "domain" in given else [])}
    if missing := sorted(stored.get("objects", {}).keys() - replaced):
        raise ConfigError(
            f"{run.path} was started by a script, with its own {', '.join(missing)}: name them, with "
            f"{', '.join(f'--{name}' for name in missing)}"
        )
    kept = {name: stored[name] for name in _OF_RUN if stored.get(name) is not None}
    if {"agent", "backend"} & given.keys() or "agent" in objects.names():
        kept = {name: value for name, value in kept.items() if name not in _OF_AGENT}
        kept["backend"] = "custom"
    kept["n_runners"] = min(kept.get("n_runners") or _AT_ONCE, _AT_ONCE)
    kept["runner_processes"] = int(bool(given.get("runner_python") or kept.get("runner_python")))
    config = RunConfig(**{**with_changes(kept, given), "retries": 0})
    return prepare(config, endpoint=ModelEndpoint("the record"), objects=objects)


def choose_rollouts(run: RunDir, *, rollout_id: str | None, failed: bool, count: int) -> tuple[list[str], int]:
    """The ids of the rollouts to replay, and how many the run has: the one whose id begins so, those that ``failed`` or
    were not right, or ``count``, spread over the run; 0 is all. Raises :class:`RunDirError` if there is none.
    """
    rollouts, _ = run.rollouts(("rollout_id", "status", "reward"))
    chosen = [rollout.rollout_id for rollout in rollouts]
    if rollout_id is not None:
        chosen = [name for name in chosen if name.startswith(rollout_id)]
        if not chosen:
            raise RunDirError(f"{run.path} has no rollout {rollout_id!r:.60}")
    elif failed:
        wrong = [rollout for rollout in rollouts if rollout.outcome.failure or (rollout.outcome.reward or 0.0) <= RIGHT]
        if not wrong:
            raise RunDirError(f"none of the {len(rollouts)} rollouts of {run.path} failed or was wrong")
        chosen = [rollout.rollout_id for rollout in wrong]
    else:
        chosen = choose_tasks(chosen, count)
    return chosen, len(rollouts)


def replay(
    job: Job, run: RunDir, chosen: Collection[str], *, on_end: Callable[[], None] = lambda: None
) -> Iterator[list[ReplayedRollout]]:
    """Run the ``chosen`` rollouts again; yields those of a step or validation at a time.

    Raises :class:`RunDirError` if their calls cannot be answered.
    """
    damaged: list[str] = []
    record = record_engine(run, job.config)
    engine: Any = record or Upstream(base_url="", model=MODEL_NAME)
    wanted, answers = set(chosen), Replay()
    tasks = {str(task["id"]): task for task in (*job.data.train, *job.data.validation)}
    with (
        TemporaryDirectory() as folder,
        job.runtime(engine, run=RunDir(Path(folder)), timer=StepTimer(), replay=answers) as runtime,
    ):
        for batch in run.rollout_batches(None, damaged):
            recorded = [rollout for rollout in batch if rollout.rollout_id in wanted]
            if not recorded:
                continue
            again = [request_again(rollout, job.config, tasks) for rollout in recorded]
            for request, rollout in zip(again, recorded, strict=True):
                check_record(run, rollout, has_tokenizer=record is not None)
                answers.add(request.rollout_id, rollout.rollout_id, rollout.calls)
            deadline_s = validation_deadline_s(job.config, len(again))
            runtime.run(again, deadline_s=deadline_s, on_end=on_end)
            yield [
                ReplayedRollout(
                    recorded=old,
                    again=new,
                    difference=difference_of(old, new, answers.attempts.get(new.rollout_id), record),
                )
                for old, new in zip(recorded, again, strict=True)
            ]
            for request in again:
                answers.forget(request.rollout_id)
    if damaged:
        raise RunDamagedError(damaged[0])


def request_again(recorded: Rollout, config: RunConfig, tasks: Mapping[str, Any]) -> Rollout:
    """The same rollout again."""
    task, own = recorded.task, tasks.get(str(recorded.task["id"]))
    if own is not None and json.loads(json.dumps(dict(own), default=str)) == task:
        task = own  # with values that JSON does not have
    sampling = {**recorded.sampling, "max_tokens": config.max_tokens, "seed": config.seed}
    return Rollout(task=task, group=recorded.group, mode=recorded.mode, step=recorded.step, sampling=sampling)


def record_engine(run: RunDir, config: RunConfig) -> RecordEngine | None:
    """What the replies of the run's own policy are written with; None without its tokenizer, as of an endpoint."""
    from groundwire.train.policy.pretrained.tokenizer import read_tokenizer

    for folder in tokenizer_folders(run):
        if (folder / "tokenizer_config.json").is_file():
            with suppress(Exception):  # transformers raises many types for damaged files: the next folder may be whole
                positions = read_json(folder / "config.json").get("max_position_embeddings") or config.max_model_len
                return RecordEngine(read_tokenizer(folder), max_model_len=min(positions, config.max_model_len))
    return None


def check_record(run: RunDir, rollout: Rollout, *, has_tokenizer: bool) -> None:
    """Raise :class:`RunDirError` if the calls of a rollout cannot be answered."""
    if any(not call.prompt_key or not call.reply_key for call in rollout.calls):
        raise RunDirError(
            f"{run.path} was written by an older version of groundwire, which kept too little of each call to answer "
            "it again: only runs of this version can be replayed"
        )
    if not has_tokenizer and any(not call.reply_body and call.response_ids for call in rollout.calls):
        folders = ", ".join(map(str, tokenizer_folders(run))) or "a checkpoint"
        raise RunDirError(f"{run.path} cannot be replayed without its tokenizer, which is not in {folders}")


def difference_of(
    recorded: Rollout, again: Rollout, attempt: ReplayedAttempt | None, engine: RecordEngine | None
) -> Difference | None:
    """What differs first; None if nothing does."""
    if attempt is None or not attempt.unrecorded:
        return outcome_difference(recorded, again, attempt)
    exchange, chat = attempt.unrecorded[0]
    ids: Sequence[int] = ()
    if engine is not None:
        with suppress(RefusedError):
            ids = asyncio.run(PolicyServer(engine).prompt_ids({**chat, "model": MODEL_NAME}))
    request = likeliest(attempt, exchange, ids)
    texts = TextsOfCall("", "", ())
    if engine is not None and request is not None:
        decode = engine.tokenizer.decode
        texts = TextsOfCall(decode(request.call.prompt_ids), decode(list(ids)), chat.get("messages") or ())
    return call_difference(attempt, exchange, request, texts)

"""Replays rollouts of a run: the agent runs again, and every call is answered from the record. No model is loaded,
unless it samples from a call on.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.replay import Replay, ReplayedAttempt
from groundwire.adapters.tracing.sampling import derive_seed
from groundwire.adapters.tracing.wire.request import RefusedError
from groundwire.tools.errors import CommandError
from groundwire.tools.files import read_json
from groundwire.tools.startup import fast_import
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
    with_race,
)
from groundwire.train.evaluation.run_reader import rollout_named
from groundwire.train.evaluation.validation import choose_tasks, validation_deadline_s
from groundwire.train.job.job import NO_OBJECTS, Job, ModelEndpoint, Objects
from groundwire.train.job.prepare import prepare
from groundwire.train.job.trained_model import newest_model, trained_model
from groundwire.train.policy import STARTER
from groundwire.train.policy.pretrained.locate import find_model, read_tokenizer
from groundwire.train.policy.recorded import RecordEngine
from groundwire.train.policy.server import PolicyServer
from groundwire.train.report.token_text import tokenizer_folders
from groundwire.train.rollouts.runtime import MODEL_NAME, Upstream
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout

_OF_RUN = (
    *AgentSettings.model_fields,
    *("data_dir", "group_column", "prompts", "n_runners", "runner_python", "model", "device", "temperature"),
    *("max_tokens", "max_model_len", "max_calls", "allow_shared", "seed"),
)
"""The settings of a run with which its rollouts run again."""
_AT_ONCE, _NAMED = 16, 3
_RECORD = ModelEndpoint("the record")
_KEY = "OPENAI_API_KEY"
_CUT = ("timeout", "no_result", "not_stored")
"""Failures that stop a rollout from outside. The agent, which has more time now, may go on where the record ends."""
_OF_AGENT = ("backend", "agent_match", "agent_options")
"""What belongs to the agent of a run, and not to another one."""


class Branch(NamedTuple):
    """A recorded rollout and the call from which on calls are sampled anew; None: all are from the record."""

    rollout: Rollout
    call: LLMCall | None = None
    number: int = 0
    """Of the sample, for its seed."""


@dataclass(frozen=True, kw_only=True)
class ReplayedRollout:
    """A rollout of a run, and how it went again."""

    recorded: Rollout
    again: Rollout
    difference: Difference | None
    """None if it went as recorded, up to the call from which on it was sampled."""
    replies: Mapping[tuple[str, int | None], Mapping[str, Any]]
    """The assistant's messages now, by the ``reply_key`` and choice of the recorded calls."""

    def reply(self, call: LLMCall) -> Mapping[str, Any]:
        """The assistant's message that answers a recorded call now; empty if the agent has not made it."""
        return self.replies[call.reply_key, call.choice]

    @property
    def is_success(self) -> bool | None:
        """Whether the reward says so; None if there is none, or the record was not followed."""
        reward = self.again.outcome.reward
        return None if self.difference or reward is None else reward > RIGHT

    @property
    def problem(self) -> str:
        """Why :attr:`is_success` is None."""
        outcome = self.again.outcome
        return self.difference.sentence if self.difference else f"{outcome.failure}: {outcome.message:.200}"


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
    return prepare(config, endpoint=_RECORD, objects=objects)


def branch_job(
    run: RunDir, given: Mapping[str, Any], *, base_url: str | None = None, objects: Objects = NO_OBJECTS
) -> Job:
    """As :func:`replay_job`, with a model that samples: the ``given`` one, one at ``base_url``, or the run's own."""
    model, endpoint = given.get("model"), ModelEndpoint(base_url, os.environ.get(_KEY)) if base_url else None
    if model is None and endpoint is not None:
        raise ConfigError(f"the endpoint {base_url} needs the name of its model: --model NAME")
    if model is None:
        model, endpoint = _own_model(run)
    elif endpoint is None:
        model = str((trained_model(model) or (model,))[0])
    job = replay_job(run, {**given, "model": model}, objects)
    if endpoint is None:
        find_model(model)
    return replace(job, endpoint=endpoint)


def _own_model(run: RunDir) -> tuple[str, ModelEndpoint | None]:
    """The model that a run ended with: its newest checkpoint, or the one that it did not train, and where that is."""
    stored = run.config()
    if url := stored.get("base_url") or stored.get("evaluation", {}).get("base_url"):
        return str(stored["model"]), ModelEndpoint(url, os.environ.get(_KEY))
    try:
        return str(newest_model(run)), None
    except RunDirError:
        return str(stored["model"]), None


def choose_rollouts(run: RunDir, *, rollout_id: str | None, failed: bool, count: int) -> tuple[list[str], int]:
    """The ids of the rollouts to replay, and how many the run has: the one whose id begins so, those that ``failed`` or
    were not right, or ``count``, spread over the run; 0 is all. Raises :class:`RunDirError` if there is none.
    """
    rollouts, _ = run.rollouts(("rollout_id", "status", "reward"))
    chosen = [rollout.rollout_id for rollout in rollouts]
    if rollout_id is not None:
        chosen = [rollout_named(run, rollout_id)]
    elif failed:
        wrong = [rollout for rollout in rollouts if rollout.outcome.failure or (rollout.outcome.reward or 0.0) <= RIGHT]
        if not wrong:
            raise RunDirError(f"none of the {len(rollouts)} rollouts of {run.path} failed or was wrong")
        chosen = [rollout.rollout_id for rollout in wrong]
    else:
        chosen = choose_tasks(chosen, count)
    return chosen, len(rollouts)


def find_call(run: RunDir, rollout_id: str, number: int) -> tuple[Rollout, LLMCall]:
    """A rollout of a run by the beginning of its id, and its call of this number in ``groundwire why``.

    Raises :class:`RunDirError` and :class:`CommandError` if there is none.
    """
    name = rollout_named(run, rollout_id)
    rollout = next(each for batch in run.rollout_batches(None, []) for each in batch if each.rollout_id == name)
    if not rollout.calls:
        raise CommandError(f"rollout {name} has no LLM call in its record, so none can be sampled anew")
    if not 1 <= number <= len(rollout.calls):
        agents = ", ".join(f"{place} {call.agent}".strip() for place, call in enumerate(rollout.calls, 1))
        raise CommandError(f"rollout {name} has no call {number}; its calls are {agents}")
    return rollout, rollout.calls[number - 1]


def replay(
    job: Job, run: RunDir, chosen: Collection[str], *, on_end: Callable[[], None] = lambda: None
) -> Iterator[list[ReplayedRollout]]:
    """Run the ``chosen`` rollouts again; yields those of a step or validation at a time.

    Raises :class:`RunDirError` if their calls cannot be answered.
    """
    damaged, wanted = list[str](), set(chosen)
    with Replayer(job, run) as replayer:
        for batch in run.rollout_batches(None, damaged):
            if recorded := [Branch(rollout) for rollout in batch if rollout.rollout_id in wanted]:
                yield replayer.run(recorded, on_end=on_end)
    if damaged:
        raise RunDamagedError(damaged[0])


class Replayer(ExitStack):
    """Runs the agent of a job again on rollouts of a run, as a context manager; its model samples from a call on.

    What is sampled is in no run and in no store, each of its calls is marked as part of a replay, and none is trained.
    """

    def __init__(self, job: Job, run: RunDir) -> None:
        super().__init__()
        self.job, self._run, self._answers = job, run, Replay()
        self._tasks = {str(task["id"]): task for task in (*job.data.train, *job.data.validation)}
        self._record = _record_engine(run, job.config)
        # Replies given for an endpoint, whose tokenizer is not known, are written with one that keeps every text.
        self._writer = self._record or RecordEngine(read_tokenizer(STARTER), max_model_len=job.config.max_model_len)
        if job.endpoint != _RECORD and (job.endpoint or (job.config.model, None) != _own_model(run)):
            self._answers.policy = PolicyServer(self._writer)
        self.samples = 0
        """How many rollouts were sampled from a call on."""
        where = f" at {job.endpoint.base_url}" if job.endpoint else ""
        self.model = f"{job.config.model}{where}"
        """Who samples, in words."""

    def __enter__(self) -> Replayer:
        folder = RunDir(Path(self.enter_context(TemporaryDirectory())))
        parts: dict[str, Any] = {"run": folder, "timer": StepTimer(), "replay": self._answers}
        if self.job.endpoint == _RECORD:
            runtime = self.job.runtime(self._record or Upstream(base_url="", model=MODEL_NAME), **parts)
        else:
            with fast_import():
                from groundwire.train.evaluation.evaluator import runtime_of
            runtime = runtime_of(self.job, **parts)
        self._runtime = self.enter_context(runtime)
        return self

    def temperature(self, rollout: Rollout) -> float:
        """That of a rollout; the one in training if the rollout was greedy."""
        return float(rollout.sampling.get("temperature") or self.job.config.temperature)

    def run(
        self, branches: Sequence[Branch], *, reply: str | None = None, on_end: Callable[[], None] = lambda: None
    ) -> list[ReplayedRollout]:
        """Run the agent again for each branch; ``reply`` answers its call, and other choices of it are as recorded.

        Raises :class:`RunDirError` if the recorded calls cannot be answered, and :class:`CommandError` if one choice of
        an endpoint would be.
        """
        requests = []
        for recorded, call, number in branches:
            _check(self._run, recorded, has_tokenizer=self._record is not None)
            request, answers = _request(recorded, self.job.config, self._tasks), list[LLMCall]()
            if call is not None:
                self.samples += 1
                seed = derive_seed(self.job.config.seed, "branch", recorded.rollout_id, call.sequence, number)
                sampling = {"temperature": self.temperature(recorded), "seed": seed}
                request.sampling = {**request.sampling, **sampling}
                answers = [] if reply is None else self._answers_with(reply, call, recorded)
            part: dict[str, Any] = {"start": call, "answers": answers, "is_cut": recorded.outcome.failure in _CUT}
            self._answers.add(request.rollout_id, recorded.rollout_id, recorded.calls, **part)
            requests.append(request)
        self._runtime.run(requests, deadline_s=validation_deadline_s(self.job.config, len(requests)), on_end=on_end)
        return [self._ended(branch, request) for branch, request in zip(branches, requests, strict=True)]

    def _ended(self, branch: Branch, again: Rollout) -> ReplayedRollout:
        attempt, difference = self._answers.attempts.get(again.rollout_id), None
        if branch.call is None or attempt is None or not attempt.has_left_record:
            difference = with_race(_difference(branch.rollout, again, attempt, self._record), attempt)
        now = {(call.reply_key, call.choice): call.reply for call in again.calls}
        keys = {r.call.reply_key: r.replay_key for r in (attempt.requests if attempt is not None else ())}
        recorded = branch.rollout.calls
        replies = {(c.reply_key, c.choice): now.get((keys.get(c.reply_key, ""), c.choice), {}) for c in recorded}
        self._answers.forget(again.rollout_id)
        return ReplayedRollout(recorded=branch.rollout, again=again, difference=difference, replies=replies)

    def written(self, call: LLMCall, message: Mapping[str, Any]) -> str:
        """The reply of a recorded call as :meth:`run` takes one: what the model wrote, or of an endpoint the same."""
        if self._record is not None and not call.reply_body:
            return str(self._record.tokenizer.decode(call.response_ids, skip_special_tokens=True))
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [{"name": each["name"], "arguments": json.loads(each["arguments"])} for each in functions]
        return "\n".join([message.get("content") or "", *(f"<tool_call>{json.dumps(c)}</tool_call>" for c in calls)])

    def _answers_with(self, text: str, call: LLMCall, rollout: Rollout) -> list[LLMCall]:
        """The choices of a request with another text for one of them."""
        choices = [other for other in rollout.calls if other.reply_key == call.reply_key]
        if len(choices) > 1 and choices[0].reply_body:
            raise CommandError(f"an endpoint sent {len(choices)} choices as one reply, so none of them can be replaced")
        tokenizer = self._writer.tokenizer
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        free: dict[str, Any] = {"status": 200, "error": "", "grammar": "", "finish_reason": "stop", "reply_body": ""}
        own = replace(call, **free, reply_key=uuid.uuid4().hex, response_ids=ids, logprobs=[0.0] * len(ids))
        return [own if choice is call else choice for choice in choices]


def replay_notes(job: Job, run: RunDir, *, differs: bool) -> list[str]:
    """What the record does not have, and what has changed since if something ``differs``, one sentence each."""
    config, notes = job.config, list[str]()
    if config.train_model:
        others = "their replies are not in the record, and their providers were asked again"
        notes.append(f"calls of models that --train-model {config.train_model} leaves out: {others}")
    if not differs:
        return notes
    changed = [
        name
        for name, value in run.config().items()
        if name in ("agent", "reward", "domain") and getattr(config, name) != value
    ]
    if changed:
        notes.append(f"not the run's own: {', '.join(f'{name} {getattr(config, name)}' for name in changed)}")
    file = Path((config.agent or "").rpartition(":")[0])
    written = (run.path / "config.json").stat().st_mtime
    files = [path for path in file.parent.glob("*.py") if path.stat().st_mtime > written] if file.is_file() else []
    if files:
        notes.append(f"changed since the run: {', '.join(sorted(map(str, files))[:_NAMED])}")
    return notes


def _request(recorded: Rollout, config: RunConfig, tasks: Mapping[str, Any]) -> Rollout:
    """The same rollout again."""
    task, own = recorded.task, tasks.get(str(recorded.task["id"]))
    if own is not None and json.loads(json.dumps(dict(own), default=str)) == task:
        task = own  # with values that JSON does not have
    sampling = {**recorded.sampling, "max_tokens": config.max_tokens, "seed": config.seed}
    return Rollout(task=task, group=recorded.group, mode=recorded.mode, step=recorded.step, sampling=sampling)


def _record_engine(run: RunDir, config: RunConfig) -> RecordEngine | None:
    """What the replies of the run's own policy are written with; None without its tokenizer, as of an endpoint."""
    for folder in tokenizer_folders(run):
        if (folder / "tokenizer_config.json").is_file():
            with suppress(Exception):  # transformers raises many types for damaged files: the next folder may be whole
                positions = read_json(folder / "config.json").get("max_position_embeddings") or config.max_model_len
                return RecordEngine(read_tokenizer(folder), max_model_len=min(positions, config.max_model_len))
    return None


def _check(run: RunDir, rollout: Rollout, *, has_tokenizer: bool) -> None:
    """Raise :class:`RunDirError` if the calls of a rollout cannot be answered."""
    if any(not call.prompt_key or not call.reply_key for call in rollout.calls):
        raise RunDirError(
            f"{run.path} was written by an older version of groundwire, which kept too little of each call to answer "
            "it again: only runs of this version can be replayed"
        )
    if not has_tokenizer and any(not (call.reply_body or call.choice) and call.response_ids for call in rollout.calls):
        folders = ", ".join(map(str, tokenizer_folders(run))) or "a checkpoint"
        raise RunDirError(f"{run.path} cannot be replayed without its tokenizer, which is not in {folders}")


def _difference(
    recorded: Rollout, again: Rollout, attempt: ReplayedAttempt | None, engine: RecordEngine | None
) -> Difference | None:
    if recorded.outcome.failure in _CUT and not (attempt.missing if attempt is not None else recorded.calls):
        return None
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

"""Samples what follows from a call of a recorded rollout: the calls before it come from the record.

The continuations are in no run and in no store, each of their calls is marked as part of a replay, and none is trained.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.replay import Replay
from groundwire.adapters.tracing.sampling import derive_seed
from groundwire.tools.errors import CommandError
from groundwire.tools.startup import fast_import
from groundwire.train.api.replay import (
    check_record,
    choose_rollouts,
    difference_of,
    record_engine,
    replay_job,
    request_again,
)
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.config.errors import ConfigError
from groundwire.train.evaluation.metrics import RIGHT
from groundwire.train.evaluation.replayed import Difference
from groundwire.train.evaluation.validation import validation_deadline_s
from groundwire.train.job.job import NO_OBJECTS, Job, ModelEndpoint, Objects
from groundwire.train.job.trained_model import newest_model, trained_model
from groundwire.train.policy import STARTER
from groundwire.train.policy.pretrained.locate import find_model
from groundwire.train.policy.pretrained.tokenizer import read_tokenizer
from groundwire.train.policy.recorded import RecordEngine
from groundwire.train.policy.server import PolicyServer
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout

_KEY = "OPENAI_API_KEY"


class Branch(NamedTuple):
    """Where a recorded rollout is left: the call from which on calls are sampled anew; None replays it as a whole."""

    rollout: Rollout
    call: LLMCall | None
    number: int = 0
    """Of the sample, for its seed."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What was sampled from a call on."""

    branch: Branch
    rollout: Rollout
    replies: Mapping[str, Mapping[str, Any]]
    """The assistant's messages in it, by the ``reply_key`` of the recorded calls."""
    difference: Difference | None
    """Why the agent did not come to the call, or how it differs from the record without one; else None."""

    @property
    def is_success(self) -> bool | None:
        """Whether the reward says so; None if there is none, or the agent did not come to the call."""
        reward = self.rollout.outcome.reward
        return None if self.difference or reward is None else reward > RIGHT

    @property
    def problem(self) -> str:
        """Why :attr:`is_success` is None."""
        outcome = self.rollout.outcome
        return self.difference.sentence if self.difference else f"{outcome.failure}: {outcome.message:.200}"


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


class Brancher(ExitStack):
    """Runs branches of the rollouts of a run, as a context manager, with a job of :func:`branch_job`."""

    def __init__(self, job: Job, run: RunDir) -> None:
        super().__init__()
        self.job, self._run, self._answers = job, run, Replay()
        self._tasks = {str(task["id"]): task for task in (*job.data.train, *job.data.validation)}
        self._record = record_engine(run, job.config)
        # Replies given for an endpoint, whose tokenizer is not known, are written with one that keeps every text.
        self._writer = self._record or RecordEngine(read_tokenizer(STARTER), max_model_len=job.config.max_model_len)
        if (job.config.model, job.endpoint) != _own_model(run) or job.endpoint is not None:
            self._answers.policy = PolicyServer(self._writer)
        self.samples = 0
        """How many continuations were sampled."""
        where = f" at {job.endpoint.base_url}" if job.endpoint else ""
        self.model = f"{job.config.model}{where}"
        """Who samples, in words."""

    def __enter__(self) -> Brancher:
        with fast_import():
            from groundwire.train.evaluation.evaluator import runtime_of

        folder = RunDir(Path(self.enter_context(TemporaryDirectory())))
        self._runtime = self.enter_context(runtime_of(self.job, run=folder, timer=StepTimer(), replay=self._answers))
        return self

    def temperature(self, rollout: Rollout) -> float:
        """That of a rollout; the one in training if the rollout was greedy."""
        return float(rollout.sampling.get("temperature") or self.job.config.temperature)

    def run(
        self, branches: Sequence[Branch], *, reply: str | None = None, on_end: Callable[[], None] = lambda: None
    ) -> list[Continuation]:
        """Run the agent again for each branch; ``reply`` answers its call. Raises as :func:`check_record`."""
        requests = []
        for recorded, call, number in branches:
            check_record(self._run, recorded, has_tokenizer=self._record is not None)
            request, answer = request_again(recorded, self.job.config, self._tasks), None
            if call is not None:
                self.samples += 1
                seed = derive_seed(self.job.config.seed, "branch", recorded.rollout_id, call.sequence, number)
                sampling = {"temperature": self.temperature(recorded), "seed": seed}
                request.sampling, answer = {**request.sampling, **sampling}, self._answer(call, reply)
            self._answers.add(request.rollout_id, recorded.rollout_id, recorded.calls, start=call, answer=answer)
            requests.append(request)
        self._runtime.run(requests, deadline_s=validation_deadline_s(self.job.config, len(requests)), on_end=on_end)
        return [self._ended(branch, request) for branch, request in zip(branches, requests, strict=True)]

    def _ended(self, branch: Branch, rollout: Rollout) -> Continuation:
        attempt = self._answers.attempts.get(rollout.rollout_id)
        difference = None
        if branch.call is None or attempt is None or not attempt.has_left_record:
            difference = difference_of(branch.rollout, rollout, attempt, self._record)
        messages = {call.reply_key: call.reply for call in rollout.calls if not call.choice}
        requests = attempt.requests if attempt is not None else ()
        replies = {request.call.reply_key: messages.get(request.replay_key, {}) for request in requests}
        self._answers.forget(rollout.rollout_id)
        return Continuation(branch=branch, rollout=rollout, replies=replies, difference=difference)

    def written(self, call: LLMCall, message: Mapping[str, Any]) -> str:
        """The reply of a recorded call as :meth:`run` takes one: what the model wrote, or of an endpoint the same."""
        if self._record is not None and not call.reply_body:
            return str(self._record.tokenizer.decode(call.response_ids, skip_special_tokens=True))
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [{"name": each["name"], "arguments": json.loads(each["arguments"])} for each in functions]
        return "\n".join([message.get("content") or "", *(f"<tool_call>{json.dumps(c)}</tool_call>" for c in calls)])

    def _answer(self, call: LLMCall, text: str | None) -> LLMCall | None:
        if text is None:
            return None
        tokenizer = self._writer.tokenizer
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        free: dict[str, Any] = {"status": 200, "error": "", "grammar": "", "finish_reason": "stop", "reply_body": ""}
        return replace(call, **free, reply_key=uuid.uuid4().hex, response_ids=ids, logprobs=[0.0] * len(ids))


def in_words(reasons: Iterable[str] | Mapping[str, int]) -> str:
    """What was left out, by its reasons."""
    return "; ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common(3))


def find_call(run: RunDir, rollout_id: str, number: int) -> tuple[Rollout, LLMCall]:
    """A rollout of a run by the beginning of its id, and its call of this number in ``groundwire why``.

    Raises :class:`RunDirError` and :class:`CommandError` if there is none.
    """
    names, _ = choose_rollouts(run, rollout_id=rollout_id, failed=False, count=0)
    if rollout_id not in names and len(names) > 1:
        raise RunDirError(f"{run.path} has {len(names)} rollouts that begin with {rollout_id!r:.60}")
    name = rollout_id if rollout_id in names else names[0]
    rollout = next(each for batch in run.rollout_batches(None, []) for each in batch if each.rollout_id == name)
    if not rollout.calls:
        raise CommandError(f"rollout {name} has no LLM call in its record, so none can be sampled anew")
    if not 1 <= number <= len(rollout.calls):
        agents = ", ".join(f"{place} {call.agent}".strip() for place, call in enumerate(rollout.calls, 1))
        raise CommandError(f"rollout {name} has no call {number}; its calls are {agents}")
    return rollout, rollout.calls[number - 1]

"""Samples what follows from a call of a recorded rollout: the calls before it come from the record.

The continuations are in no run and in no store, each of their calls is marked as part of a replay, and none is trained.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, NamedTuple

from groundwire.adapters.tracing.calls import LLMCall, pack_body, unpack_body
from groundwire.adapters.tracing.replay import Replay
from groundwire.adapters.tracing.sampling import derive_seed
from groundwire.adapters.tracing.wire.exchange import HttpExchange, read_exchange
from groundwire.tools.errors import CommandError
from groundwire.tools.startup import fast_import
from groundwire.train.api.replay import check_record, difference_of, record_engine, replay_job, request_again
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.config.errors import ConfigError
from groundwire.train.evaluation.metrics import RIGHT
from groundwire.train.evaluation.replayed import Difference
from groundwire.train.evaluation.validation import validation_deadline_s
from groundwire.train.job.job import NO_OBJECTS, Job, ModelEndpoint, Objects
from groundwire.train.job.trained_model import newest_model, trained_model
from groundwire.train.policy.pretrained.locate import find_model
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
    """The assistant's messages of the recorded calls and of the sampled one, by the ``reply_key`` of the record."""
    difference: Difference | None
    """Why the agent did not come to the call; None if it did."""

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


def own_model(run: RunDir) -> tuple[str, ModelEndpoint | None]:
    """The model that a run ended with: its newest checkpoint, or the one that it did not train, and where that is."""
    stored = run.config()
    url = stored.get("base_url") or stored.get("evaluation", {}).get("base_url")
    if url:
        return str(stored["model"]), ModelEndpoint(url, os.environ.get(_KEY))
    try:
        return str(newest_model(run)), None
    except RunDirError:
        return str(stored["model"]), None


def branch_job(
    run: RunDir, given: Mapping[str, Any], *, base_url: str | None = None, objects: Objects = NO_OBJECTS
) -> Job:
    """As :func:`replay_job`, with a model that samples: the ``given`` one, one at ``base_url``, or the run's own."""
    model, endpoint = own_model(run)
    if base_url is not None:
        if not (model := str(given.get("model") or "")):
            raise ConfigError(f"the endpoint {base_url} needs the name of its model: --model NAME")
        endpoint = ModelEndpoint(base_url, os.environ.get(_KEY))
    elif given.get("model") is not None:
        trained = trained_model(given["model"])
        model, endpoint = str(trained[0] if trained else given["model"]), None
    job = replay_job(run, {**given, "model": model}, objects)
    if endpoint is None:
        find_model(model)
    return replace(job, endpoint=endpoint)


class Brancher:
    """A context manager that runs branches of the rollouts of a run with a job of :func:`branch_job`.

    Raises :class:`ConfigError` if its model cannot be used.
    """

    def __init__(self, job: Job, run: RunDir) -> None:
        self._job, self._run, self._parts = job, run, ExitStack()
        self._tasks = {str(task["id"]): task for task in (*job.data.train, *job.data.validation)}
        self._record = record_engine(run, job.config)
        own, self._answers = own_model(run), Replay()
        if self._record is not None and (job.config.model, job.endpoint) != own:  # another tokenizer, or none here
            self._answers.policy = PolicyServer(self._record)
        self.samples = 0
        """How many continuations were sampled."""

    @property
    def seed(self) -> int:
        """Of all samples."""
        return self._job.config.seed

    @property
    def model(self) -> str:
        """Who samples, in words."""
        endpoint = self._job.endpoint
        return f"{self._job.config.model}{f' at {endpoint.base_url}' if endpoint else ''}"

    def __enter__(self) -> Brancher:
        with fast_import():
            from groundwire.train.evaluation.evaluator import runtime_of

        folder = self._parts.enter_context(TemporaryDirectory())
        runtime = runtime_of(self._job, run=RunDir(Path(folder)), timer=StepTimer(), replay=self._answers)
        self._runtime = self._parts.enter_context(runtime)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._parts.close()

    def temperature(self, rollout: Rollout) -> float:
        """That of a rollout; the one in training if the rollout was greedy."""
        return float(rollout.sampling.get("temperature") or self._job.config.temperature)

    def run(
        self, branches: Sequence[Branch], *, reply: str | None = None, on_end: Callable[[], None] = lambda: None
    ) -> list[Continuation]:
        """Run the agent again for each branch; ``reply`` answers its call. Raises as :func:`check_record`."""
        requests = []
        for branch in branches:
            check_record(self._run, branch.rollout, has_tokenizer=self._record is not None)
            request = request_again(branch.rollout, self._job.config, self._tasks)
            if branch.call is not None:
                place = branch.rollout.rollout_id, branch.call.sequence, branch.number
                seed = derive_seed(self._job.config.seed, "branch", *place)
                temperature = self.temperature(branch.rollout)
                request.sampling = {**request.sampling, "temperature": temperature, "seed": seed}
            recorded = branch.rollout
            given = None if reply is None or branch.call is None else self._given_reply(branch.call, reply)
            self._answers.add(request.rollout_id, recorded.rollout_id, recorded.calls, start=branch.call, reply=given)
            requests.append(request)
        deadline_s = validation_deadline_s(self._job.config, len(requests))
        self._runtime.run(requests, deadline_s=deadline_s, on_end=on_end)
        self.samples += sum(branch.call is not None for branch in branches)
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

    def written_reply(self, call: LLMCall) -> str:
        """A recorded reply as :meth:`run` takes one: the model's own text, or of an endpoint its message."""
        if call.reply_body or self._record is None:
            return _body_text(call)
        return str(self._record.tokenizer.decode(call.response_ids, skip_special_tokens=True))

    def _given_reply(self, call: LLMCall, text: str) -> LLMCall:
        answer = replace(call, status=200, error="", grammar="", finish_reason="stop", reply_key=uuid.uuid4().hex)
        if call.reply_body or self._record is None:
            answer.reply_body = pack_body(_chat_body(call, text))
            return answer
        tokenizer = self._record.tokenizer
        answer.response_ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        answer.logprobs = [0.0] * len(answer.response_ids)
        return answer


def in_words(reasons: Mapping[str, int]) -> str:
    """What was left out, by its reasons."""
    return "; ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common(3))


def find_rollout(run: RunDir, rollout_id: str) -> Rollout:
    """The rollout of a run whose id begins so. Raises :class:`RunDirError` if it is not one."""
    damaged = list[str]()
    names = [rollout.rollout_id for batch in run.rollout_batches(("rollout_id",), damaged) for rollout in batch]
    matches = [name for name in names if name.startswith(rollout_id)]
    if rollout_id not in matches and len(matches) != 1:
        problem = f"{len(matches)} rollouts that begin with" if matches else "no rollout"
        raise RunDirError(f"{run.path} has {problem} {rollout_id!r:.60}")
    name = rollout_id if rollout_id in matches else matches[0]
    return next(r for batch in run.rollout_batches(None, damaged) for r in batch if r.rollout_id == name)


def find_call(rollout: Rollout, number: int) -> LLMCall:
    """The call of a rollout that has this number in ``groundwire why``. Raises :class:`CommandError`."""
    calls = rollout.calls
    if not calls:
        raise CommandError(f"rollout {rollout.rollout_id} has no LLM call in its record: nothing can be sampled anew")
    if not 1 <= number <= len(calls):
        agents = ", ".join(f"{place} {call.agent}".strip() for place, call in enumerate(calls, 1))
        raise CommandError(f"rollout {rollout.rollout_id} has no call {number}; its calls are {agents}")
    return calls[number - 1]


def _body_text(call: LLMCall) -> str:
    """The message in the body of a recorded reply: its text, or JSON if it has tool calls."""
    if not call.reply_body:
        return ""
    body = unpack_body(call.reply_body)
    exchange = HttpExchange(rollout_id="", attempt_id="", body=body, streamed=_is_stream(body))
    message = read_exchange(exchange, 0, 0).reply
    return json.dumps(message, ensure_ascii=False) if message.get("tool_calls") else str(message.get("content") or "")


def _chat_body(call: LLMCall, text: str) -> bytes:
    """A chat completion, or a stream if the recorded one was. ``text`` may be a whole message, as JSON."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    with suppress(ValueError):
        if isinstance(parsed := json.loads(text), dict) and parsed.keys() & {"content", "tool_calls"}:
            message |= parsed
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": call.model}
    finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    if call.reply_body and _is_stream(unpack_body(call.reply_body)):
        calls = [{**call, "index": index} for index, call in enumerate(message.pop("tool_calls", ()))]
        delta = {**message, "tool_calls": calls} if calls else message
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
        return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return json.dumps({**head, "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


def _is_stream(body: bytes) -> bool:
    return not body.lstrip().startswith(b"{")

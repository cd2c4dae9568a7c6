"""Continuous batching: one thread of this process samples for many callers at once.

Requests join between two decode steps and leave when they finish, so an agent never waits for another one's reply.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from typing import Any

import torch

from groundwire.tools.secrets import say
from groundwire.train.policy.batch import Batch, DecoderBatch, OpenReply
from groundwire.train.policy.constraint import Constraints
from groundwire.train.policy.decoding.decoder import FAMILIES, computes, make_decoder
from groundwire.train.policy.errors import ContextLengthError, EngineClosedError, EngineError
from groundwire.train.policy.model import bf16_is_faster, keep_freed_memory, sampling_threads
from groundwire.train.policy.transformers_batch import TransformersBatch
from groundwire.train.policy.types import Completion, OnToken, Sampling
from groundwire.train.step_timer import StepTimer

SWITCH_INTERVAL_S = 2e-4
"""The interpreter's switch interval while an engine is open (Python's default is 5e-3)."""
GATHER_S = 0.005
"""An idle engine starts when no further request arrived for this long."""
MAX_WAIT_S = 0.1
"""The longest time that a request waits for others, to be read together with them."""


class _SwitchInterval:
    """The interpreter's switch interval, which is short while any engine is open."""

    def __init__(self) -> None:
        self._lock, self._engines, self._usual_s = threading.Lock(), 0, 0.0

    def count(self, change: int) -> None:
        """Note that an engine opened (1) or closed (-1)."""
        with self._lock:
            if not self._engines:
                self._usual_s = sys.getswitchinterval()
            self._engines += change
            sys.setswitchinterval(min(self._usual_s, SWITCH_INTERVAL_S) if self._engines else self._usual_s)


_switch_interval = _SwitchInterval()


class LocalEngine:
    """Continuous batching over one model.

    With a seed, a reply depends on the prompt, the sampling parameters and the weights only, because each request has
    its own random generator. Rounding remains: in a batch of another shape the last bits of a logit may differ, which
    changes about one sampled token in a million, and greedy tokens at ties.

    Args:
        model: a Hugging Face causal LM. Its weights are copied.
        tokenizer: only ``decode`` and ``eos_token_id`` are used, and the vocabulary for constrained replies.
        max_model_len: most tokens of prompt and reply together; at most the model's number of positions.
        max_batch: most requests that are decoded together; further ones wait.
        threads: torch's threads of a step; by default :func:`~groundwire.train.policy.model.sampling_threads`.
        bf16: matrix products and the cache in bfloat16; by default where that is faster.
        timer: attributes the time in which the engine works to ``sampling``.

    Raises:
        UnsupportedModelError: the model cannot be sampled token by token.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_model_len: int,
        max_batch: int = 128,
        threads: int | None = None,
        bf16: bool | None = None,
        timer: StepTimer | None = None,
    ) -> None:
        keep_freed_memory()
        self.tokenizer, self.max_model_len, self.max_batch = tokenizer, max_model_len, max_batch
        self.weights_version = 0
        self.generated_tokens = 0
        """Tokens sampled since the start."""
        bf16 = bf16_is_faster(model) if bf16 is None else bf16
        self._constraints = Constraints(model, tokenizer)
        self._batch: Batch
        if computes(model.config):
            decoder = make_decoder(model, max_positions=max_model_len, bf16=bf16)
            self._batch = DecoderBatch(decoder, tokenizer, self._constraints, max_requests=max_batch)
        else:
            without = f"without the cache of earlier prompts that {', '.join(FAMILIES)} have"
            say(f"model: {type(model).__name__} is sampled by transformers' forward pass, {without}", err=True)
            self._batch = TransformersBatch(model, tokenizer, self._constraints, bf16=bf16)
        self._threads = sampling_threads(model) if threads is None else threads
        self._timer = timer
        self._seeds = random.Random(0)
        self._waiting: deque[OpenReply] = deque()
        self._update: tuple[int, Future[None]] | None = None
        self._closing = False
        self._changed = threading.Condition()
        # Between a step's calls this thread needs the interpreter lock, which a busy event loop holds for this long.
        _switch_interval.count(1)
        self._thread = threading.Thread(target=self._run, name="policy-engine", daemon=True)
        self._thread.start()

    # Callers' interface, for any thread.

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, on_token: OnToken | None = None
    ) -> Future[Completion]:
        """See :meth:`groundwire.train.policy.types.Engine.submit`; ``on_token`` is called from the engine's thread."""
        prompt = tuple(prompt_ids)
        if not prompt:
            raise ValueError("the prompt has no tokens")
        available = self.max_model_len - len(prompt)
        if available < 1:
            raise ContextLengthError(len(prompt), self.max_model_len)
        max_tokens = available if sampling.max_tokens is None else min(available, sampling.max_tokens)
        constraint = self._constraints.start(sampling.grammar) if sampling.grammar else None
        with self._changed:
            self._require_open()
            seed = self._seeds.random() if sampling.seed is None else sampling.seed
            request = OpenReply(
                prompt_ids=prompt,
                sampling=sampling,
                max_tokens=max_tokens,
                random=random.Random(seed),
                on_token=on_token,
                constraint=constraint,
            )
            self._waiting.append(request)
            self._changed.notify()
        return request.future

    def sleep(self) -> None:
        """Keeps its memory: a cache of the next step has about the same size."""

    def update_weights(self, version: int) -> None:
        """Copy the model's present weights; blocks until the requests in the batch have finished with the old ones.

        Waiting and later requests are sampled with the new weights: no reply mixes two versions. Raises
        :class:`EngineClosedError`.
        """
        done: Future[None] = Future()
        with self._changed:
            self._require_open()
            if self._update is not None:
                raise EngineError(f"the update to weights version {self._update[0]} has not finished")
            self._update = (version, done)
            self._changed.notify()
        done.result()

    def close(self) -> None:
        """End the thread. Unfinished requests fail with :class:`EngineClosedError`. May be called again."""
        with self._changed:
            if not self._closing:
                _switch_interval.count(-1)
            self._closing = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _require_open(self) -> None:
        if self._closing:
            raise EngineClosedError("the engine is closed")

    # The engine's thread.

    def _run(self) -> None:
        idle = True
        while True:
            with self._changed:
                while not (self._closing or self._waiting or self._batch.requests or self._update):
                    idle = True
                    self._changed.wait()
                if self._closing:
                    break
            if idle:
                self._gather()
                # Per thread in OpenMP, but shared in MKL: a trainer that uses more threads sets its own number.
                torch.set_num_threads(self._threads)
                idle = False
            try:
                with torch.inference_mode(), self._timer.busy("sampling") if self._timer else nullcontext():
                    self._step()
            except Exception as error:
                _fail(self._batch.requests, _sampling_error(error))
                self._batch.requests = []
        closed = EngineClosedError("the engine was closed before the request finished")
        _fail([*self._batch.requests, *self._waiting], closed)
        if self._update:
            self._update[1].set_exception(closed)

    def _gather(self) -> None:
        """Wait while requests keep arriving: meanwhile this thread would only slow the agents down."""
        deadline, seen = time.perf_counter() + MAX_WAIT_S, -1
        while seen < len(self._waiting) < self.max_batch and time.perf_counter() < deadline:
            seen = len(self._waiting)
            time.sleep(GATHER_S)

    def _step(self) -> None:
        """Copy new weights if the batch is empty, admit requests, and decode one token for each."""
        if self._update and not self._batch.requests:
            self._copy_weights(*self._update)
        if not self._update and (arrived := self._admissible()):
            try:
                self._batch.add(arrived)
                self.generated_tokens += len(arrived)
            except Exception as error:  # the requests in the batch go on
                _fail(arrived, _sampling_error(error))
        self._answer_finished()
        if self._batch.requests:
            self._batch.decode()
            self.generated_tokens += len(self._batch)
            self._answer_finished()

    def _admissible(self) -> list[OpenReply]:
        """The waiting requests to admit now: none before they are worth a prefill, or one of them has waited long."""
        arrived: list[OpenReply] = []
        running = len(self._batch)
        with self._changed:
            if not self._waiting:
                return arrived
            waited = time.perf_counter() - self._waiting[0].arrived
            if running and len(self._waiting) < running // 2 and waited < MAX_WAIT_S:
                return arrived
            while self._waiting and running + len(arrived) < self.max_batch:
                request = self._waiting.popleft()
                if not request.future.cancelled():
                    arrived.append(request)
        return arrived

    def _copy_weights(self, version: int, done: Future[None]) -> None:
        try:
            self._batch.refresh_weights()
            self.weights_version = version
        except Exception as error:
            done.set_exception(EngineError(f"the update to weights version {version} failed: {error}"))
        else:
            done.set_result(None)
        finally:
            self._update = None

    def _answer_finished(self) -> None:
        for request in self._batch.remove_finished():
            request.weights_version = self.weights_version
            with suppress(InvalidStateError):  # cancelled meanwhile
                request.future.set_result(request)


def _fail(requests: Iterable[OpenReply], error: EngineError) -> None:
    for request in requests:
        with suppress(InvalidStateError):
            request.future.set_exception(error)


def _sampling_error(error: Exception) -> EngineError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return EngineError(f"sampling failed: {lines[0]}")

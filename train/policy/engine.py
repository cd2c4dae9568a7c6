"""Sampling for many callers at once, in one thread of this process.

Requests join between two decode steps and leave when they finish (continuous batching), so an agent never waits for
another one's answer. Rows of the cache stay packed: the last row moves into a finished one's place, so every step works
on one block of memory. The prompts of a group are read once and copied; the prompts of a rollout's turns share their
beginning, which is kept from one turn to the next.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from groundwire.tools.step_timer import StepTimer
from groundwire.train.policy.decoder import Decoder, sample_tokens
from groundwire.train.policy.errors import ContextLengthError, EngineClosedError, EngineError
from groundwire.train.policy.prefix_cache import PrefixCache
from groundwire.train.policy.types import Completion, EngineStats, Sampling

__all__ = ["Engine"]

PREFILL_TOKENS = 4096
"""Most tokens, padding included, that one prefill call reads: it bounds the memory of a crowd's arrival."""

SWITCH_S = 2e-4
"""The process's switch interval while an engine exists, in seconds (Python's own is 5e-3)."""


@dataclass(eq=False)
class _Row:
    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    random: random.Random
    on_token: Callable[[int, float], None] | None
    arrived: float = field(default_factory=time.perf_counter)
    future: Future[Completion] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    stopped_text: str | None = None
    finish: str | None = None


class Engine:
    """Continuous batching over one model.

    With ``seed``, a reply depends on the prompt, the sampling parameters and the weights only: each row draws from
    its own generator. What is left is rounding: in a batch of another shape a logit may differ in its last bits, and a
    token changes where that crosses the drawn number (about one draw in a million), or where a greedy choice is a tie.

    Args:
        model: a Hugging Face causal LM (:data:`groundwire.train.policy.decoder.SUPPORTED`); its weights are copied.
        tokenizer: only ``decode`` and ``eos_token_id`` are used.
        max_model_len: tokens that prompt and reply may have together; at most the model's own maximum.
        max_batch: requests decoded together; more wait.
        threads: torch threads of a step. With agents in the same process 1 is fastest on two cores: a second one spends
            its time waiting at barriers for a core that the agents hold.
        gather_s: an idle engine starts when no further request came for this long, in seconds.
        patience_s: no request waits longer than this, in seconds, for others to be read together with.
        prefix_cache_tokens: how many prompt tokens are kept for later prompts that begin alike.
        timer: attributes the time in which the engine works to ``sampling``.

    Raises:
        UnsupportedModelError: the architecture is not supported.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_model_len: int,
        max_batch: int = 128,
        threads: int = 1,
        gather_s: float = 0.005,
        patience_s: float = 0.1,
        prefix_cache_tokens: int = 32768,
        timer: StepTimer | None = None,
    ) -> None:
        own = getattr(model.config, "max_position_embeddings", None) or max_model_len
        if max_model_len > own:
            raise ValueError(f"max_model_len is {max_model_len}, but the model's positions end at {own}")
        self.max_model_len, self.max_batch = max_model_len, max_batch
        self.tokenizer = tokenizer
        self.weights_version = 0
        self._decoder = Decoder(model, max_positions=max_model_len)
        self._ends = _end_tokens(model, tokenizer)
        self._threads, self._gather_s, self._patience_s = threads, gather_s, patience_s
        self._prefixes = PrefixCache(prefix_cache_tokens)
        self._seeds = random.Random(0)
        self._stats = EngineStats()
        self._timer = timer
        self._rows: list[_Row] = []
        self._cache = self._decoder.cache(0, 0)
        self._waiting: deque[_Row] = deque()
        self._update: tuple[int, Future[None]] | None = None
        self._closing = False
        self._changed = threading.Condition()
        # Between a step's calls this thread needs the interpreter lock back; a busy event loop keeps it for this long.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread = threading.Thread(target=self._run, name="policy-engine", daemon=True)
        self._thread.start()

    # What callers use, from any thread.

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        on_token: Callable[[int, float], None] | None = None,
    ) -> Future[Completion]:
        """Queue a prompt. Cancelling the future takes the request out of the batch.

        ``on_token`` gets each token id and its log-probability from the engine's thread, and must return at once.

        Raises:
            ContextLengthError: there is no room for one sampled token.
            EngineClosedError: the engine was closed.
        """
        sampling = sampling or Sampling()
        prompt = tuple(prompt_ids)
        if not prompt:
            raise ValueError("the prompt has no tokens")
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise ContextLengthError(len(prompt), self.max_model_len)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        with self._changed:
            if self._closing:
                raise EngineClosedError("the engine is closed")
            seed = self._seeds.random() if sampling.seed is None else sampling.seed
            row = _Row(prompt, sampling, limit, random.Random(seed), on_token)
            self._waiting.append(row)
            self._changed.notify()
        return row.future

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """:meth:`submit`, awaited. Cancelling the task cancels the request."""
        return await asyncio.wrap_future(self.submit(prompt_ids, sampling))

    def update_weights(self, version: int) -> None:
        """Take the model's present weights; blocks until what is being decoded has finished with the old ones.

        Requests that wait, and those that come meanwhile, are answered by the new weights: no reply mixes two versions.

        Raises:
            EngineClosedError: the engine was closed.
        """
        done: Future[None] = Future()
        with self._changed:
            if self._closing:
                raise EngineClosedError("the engine is closed")
            if self._update is not None:
                raise EngineError(f"weights version {self._update[0]} is still being taken over")
            self._update = (version, done)
            self._changed.notify()
        done.result()

    def stats(self) -> EngineStats:
        """A copy of the sums so far."""
        return EngineStats(**vars(self._stats))

    def close(self) -> None:
        """End the thread. Requests that have not finished fail with :class:`EngineClosedError`. May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # The engine's own thread.

    def _run(self) -> None:
        idle = True
        while True:
            with self._changed:
                while not (self._closing or self._waiting or self._rows or self._update):
                    idle = True
                    self._changed.wait()
                if self._closing:
                    break
            if idle:
                self._gather()
                # Per thread in OpenMP, shared in MKL: a trainer with more threads sets its own before it works.
                torch.set_num_threads(self._threads)
                idle = False
            started = time.perf_counter()
            try:
                with torch.inference_mode(), self._timer.busy("sampling") if self._timer else nullcontext():
                    self._turn()
            except Exception as error:
                self._fail(self._rows, _failure(error))
                self._rows = []
            self._stats.busy_s += time.perf_counter() - started
        closed = EngineClosedError("the engine was closed before the request finished")
        self._fail([*self._rows, *self._waiting], closed)
        if self._update:
            self._update[1].set_exception(closed)

    def _gather(self) -> None:
        """Let a crowd arrive: while requests keep coming, agents make faster progress if this thread stays away."""
        until, seen = time.perf_counter() + self._patience_s, -1
        while seen < len(self._waiting) < self.max_batch and time.perf_counter() < until:
            seen = len(self._waiting)
            time.sleep(self._gather_s)

    def _due(self) -> bool:
        """Whether the next request should join now: a crowd large enough to be worth a prefill, or one that waited."""
        if not self._waiting:
            return False
        waited = time.perf_counter() - self._waiting[0].arrived
        return not self._rows or len(self._waiting) >= len(self._rows) // 2 or waited >= self._patience_s

    def _turn(self) -> None:
        """Take over weights if nothing is being decoded, let requests in, and decode one step."""
        if self._update and not self._rows:
            self._take_weights(*self._update)
        if not self._update:
            arrived: list[_Row] = []
            with self._changed:
                due = self._due()
                while due and self._waiting and len(self._rows) + len(arrived) < self.max_batch:
                    row = self._waiting.popleft()
                    if not row.future.cancelled():
                        arrived.append(row)
            if arrived:
                before = time.perf_counter()
                try:
                    self._admit(arrived)
                except Exception as error:  # those that are being decoded go on
                    self._rows = [row for row in self._rows if row not in arrived]
                    self._fail(arrived, _failure(error))
                self._stats.prefill_s += time.perf_counter() - before
        self._leave()
        if self._rows:
            self._decode()
            self._leave()

    def _take_weights(self, version: int, done: Future[None]) -> None:
        try:
            self._decoder.refresh()
            self._prefixes.clear()
            self.weights_version = version
        except Exception as error:
            done.set_exception(EngineError(f"weights version {version} could not be taken over: {error}"))
        else:
            done.set_result(None)
        finally:
            self._update = None

    def _admit(self, arrived: list[_Row]) -> None:
        """Read the prompts of ``arrived`` into the cache, each different one once, and draw their first tokens."""
        groups: dict[tuple[int, ...], list[_Row]] = {}
        for row in arrived:
            groups.setdefault(row.prompt, []).append(row)
        found = {prompt: self._prefixes.longest(prompt) for prompt in groups}
        # Shortest first: what is read together has one length, padding included.
        prompts = sorted(groups, key=lambda prompt: len(prompt) - found[prompt][0])
        first, total = len(self._rows), len(self._rows) + len(arrived)
        self._reserve(total, max(map(len, prompts)) + len(prompts[-1]))
        parts = []
        start = 0
        while start < len(prompts):
            stop = start + 1
            while stop < len(prompts):
                width = len(prompts[stop]) - found[prompts[stop]][0]
                if width * (stop + 1 - start) > PREFILL_TOKENS:
                    break
                stop += 1
            parts.append(self._read(prompts[start:stop], found, first + start))
            start = stop
        logits = torch.cat(parts)
        ordered = [groups[prompt][0] for prompt in prompts]
        source = list(range(len(prompts)))
        for i, prompt in enumerate(prompts):
            for row in groups[prompt][1:]:
                ordered.append(row)
                source.append(i)
        if len(ordered) > len(prompts):
            longest = max(map(len, prompts))
            copied = torch.tensor(source[len(prompts) :], device=self._decoder.device) + first
            self._cache[:, :, first + len(prompts) : total, :, :longest] = self._cache[:, :, copied, :, :longest]
            logits = logits[torch.tensor(source, device=logits.device)]
        for row in ordered:
            row.cached = found[row.prompt][0]
        for row in ordered[len(prompts) :]:
            row.cached = len(row.prompt)
        self._stats.requests += len(ordered)
        self._stats.prompt_tokens += sum(len(row.prompt) for row in ordered)
        self._stats.cached_prompt_tokens += sum(row.cached for row in ordered)
        self._rows += ordered
        self._draw(ordered, logits)

    def _read(self, prompts: list[tuple[int, ...]], found: dict[tuple[int, ...], Any], first: int) -> torch.Tensor:
        """Prefill ``prompts`` into the cache's rows from ``first`` on; the logits after each."""
        known = [found[prompt][0] for prompt in prompts]
        for i, prompt in enumerate(prompts):
            if known[i]:
                self._cache[:, :, first + i, :, : known[i]] = found[prompt][1][:, :, :, : known[i]]
        rest = [prompt[k:] for prompt, k in zip(prompts, known, strict=True)]
        width = max(map(len, rest))
        device = self._decoder.device
        ids = torch.tensor([[*part, *[0] * (width - len(part))] for part in rest], device=device)
        positions = torch.tensor(known, device=device)[:, None] + torch.arange(width, device=device)
        # Padding may run past the context's end; it is never looked at, so any place will do.
        positions.clamp_(max=self.max_model_len - 1)
        last = torch.tensor([len(part) - 1 for part in rest], device=device)
        span = min(max(known) + width, self.max_model_len)
        logits = self._decoder.logits(ids, positions, last, self._cache, first_row=first, span=span)
        for i, prompt in enumerate(prompts):
            if known[i] * 2 < len(prompt):
                self._prefixes.keep(prompt, self._cache[:, :, first + i, :, : len(prompt)])
        return logits

    def _decode(self) -> None:
        rows, device = self._rows, self._decoder.device
        lengths = [len(row.prompt) + len(row.tokens) for row in rows]
        span = max(lengths)
        self._reserve(len(rows), span)
        ids = torch.tensor([[row.tokens[-1]] for row in rows], device=device)
        positions = torch.tensor(lengths, device=device)[:, None] - 1
        last = torch.zeros(len(rows), dtype=torch.long, device=device)
        logits = self._decoder.logits(ids, positions, last, self._cache, first_row=0, span=span)
        self._stats.decode_steps += 1
        self._draw(rows, logits)

    def _draw(self, rows: list[_Row], logits: torch.Tensor) -> None:
        device = logits.device
        top_p = [row.sampling.top_p for row in rows]
        tokens, logprobs = sample_tokens(
            logits,
            torch.tensor([row.sampling.temperature for row in rows], device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            torch.tensor([row.random.random() for row in rows], dtype=torch.float64, device=device),
            any_top_p=min(top_p) < 1,
        )
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if token in self._ends or (row.sampling.stop and self._met_stop(row)):
                row.finish = "stop"
            elif len(row.tokens) >= row.limit:
                row.finish = "length"
            if row.on_token is not None:
                row.on_token(token, logprob)
        self._stats.generated_tokens += len(rows)

    def _met_stop(self, row: _Row) -> bool:
        text = self.detokenize(row.tokens)
        places = [at for at in (text.find(stop) for stop in row.sampling.stop) if at >= 0]
        if places:
            row.stopped_text = text[: min(places)]
        return bool(places)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _leave(self) -> None:
        """Answer the rows that are done, and pack the others at the cache's front."""
        rows = self._rows
        stay = [i for i, row in enumerate(rows) if row.finish is None and not row.future.cancelled()]
        if len(stay) == len(rows):
            return
        for row in rows:
            if row.finish is not None:
                self._answer(row)
        kept = len(stay)
        staying = set(stay)
        holes = [i for i in range(kept) if i not in staying]
        movers = [i for i in stay if i >= kept]
        if holes:
            span = max(len(rows[i].prompt) + len(rows[i].tokens) for i in movers)
            self._cache[:, :, holes, :, :span] = self._cache[:, :, movers, :, :span]
            for hole, mover in zip(holes, movers, strict=True):
                rows[hole] = rows[mover]
        self._rows = rows[:kept]

    def _answer(self, row: _Row) -> None:
        text = row.stopped_text if row.stopped_text is not None else self.detokenize(row.tokens)
        reply = Completion(
            row.prompt, row.tokens, row.logprobs, text, row.finish or "stop", self.weights_version, row.cached
        )
        with suppress(InvalidStateError):  # cancelled at this moment: nobody waits for it
            row.future.set_result(reply)

    def _fail(self, rows: Iterable[_Row], error: EngineError) -> None:
        for row in rows:
            with suppress(InvalidStateError):
                row.future.set_exception(error)

    def _reserve(self, rows: int, length: int) -> None:
        """Grow the cache, at least doubling what must grow, so that growing costs little in all."""
        length = min(length, self.max_model_len)
        old = self._cache
        has_rows, has_length = old.shape[2], old.shape[4]
        if rows <= has_rows and length <= has_length:
            return
        new_rows = has_rows if rows <= has_rows else min(self.max_batch, max(rows, 2 * has_rows))
        new_length = has_length if length <= has_length else min(self.max_model_len, max(length, 2 * has_length, 64))
        self._cache = self._decoder.cache(new_rows, new_length)
        self._cache[:, :, :has_rows, :, :has_length] = old


def _failure(error: Exception) -> EngineError:
    # TorchScript's errors begin with a traceback of their own; what happened is in the last line.
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return EngineError(f"sampling failed: {lines[-1].removeprefix('RuntimeError: ')}")


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    ends: set[int] = set()
    for source in (generation, model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        ends.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(ends)

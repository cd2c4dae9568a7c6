"""A larger starter, on a GPU: the same dialogues and layout, thirty to a hundred times the parameters, real questions.

It is for machines without a model hub, where the path from rollouts to new weights has to be shown on something. The
recipe is counted in minutes instead of steps, so it is not repeatable to the bit as the small one is. Dialogues are
made by processes on the CPU; real ones, where a folder of Spider is given, come from its training questions alone.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from groundwire.domains import Task
from groundwire.domains.spider.generate.lexicon import words
from groundwire.train.local.packing import Packed, Rows, lay_out, packed_logits, tree_mask
from groundwire.train.policy.model import new_policy
from groundwire.train.pretrain.corpus import Dialogues, Stage, dialogues, encode
from groundwire.train.pretrain.real import made_up_dialogues, real_dialogues
from groundwire.train.pretrain.tokenizer import train_tokenizer

__all__ = ["SIZES", "Step", "pretrain_larger"]

SIZES: dict[str, dict[str, int]] = {
    "30m": {"width": 512, "layers": 9, "heads": 8, "intermediate": 1408},
    "100m": {"width": 768, "layers": 14, "heads": 12, "intermediate": 2048},
    "300m": {"width": 1024, "layers": 24, "heads": 16, "intermediate": 2816},
    "1b": {"width": 2048, "layers": 20, "heads": 16, "intermediate": 5632},
    "3b": {"width": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "intermediate": 8192},
}
"""Layers of the larger models, by the parameters that they come to."""

_STAGES = (
    Stage(n_tables=(1, 1, 2), n_attributes=(2, 2, 3), mix={"easy": 0.8, "medium": 0.2}, writes=8),
    Stage(writes=8),
    Stage(writes=5, checks=1, rewrites=2),
)
_TOOLS = Stage(writes=3, checks=1, rewrites=1, tools=1.0)
_UNTIL = (0.1, 0.3, 1.0)
"""The share of the time at which each stage ends."""
_REAL = 0.35
"""From the second stage on: the share of items about real databases, where there are any."""
_CALLS = 0.1
"""From the second stage on: the share of the others whose agent calls its query tool."""
_MAX_TOKENS = 1536
_RECENT = 64
"""Batches that are kept to be read again."""


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What a process that makes dialogues needs to know."""

    tokenizer: PreTrainedTokenizerFast
    tasks: Sequence[Task]
    pool: Sequence[str]
    batch: int
    seed: int


@dataclass(frozen=True)
class Step:
    """What a step of the pretraining was like."""

    number: int
    """From 1."""
    loss: float
    gone: float
    """Share of the time that is over."""
    again: float
    """Share of the steps so far that read a batch again, because none was ready."""


def pretrain_larger(
    size: str,
    *,
    minutes: float,
    tasks: Sequence[Task] = (),
    names: Sequence[str] = (),
    batch: int = 64,
    workers: int | None = None,
    learning_rate: float = 3e-3,
    device: str = "cuda",
    seed: int = 0,
    on_step: Callable[[Step], None] = lambda _: None,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train a model of ``size`` for ``minutes``; ``tasks`` are real training questions to mix in.

    ``names`` are words of real schemas, put for one another in those dialogues and each an id of the vocabulary.
    ``workers`` processes make dialogues, by default one for each CPU but two. Where they are slower than the GPU, a
    step takes one of the last batches once more.
    """
    pool = sorted({*words(), *names})
    workers = workers or max(1, (os.cpu_count() or 1) - 2)
    tokenizer = _tokenizer(tasks, pool, seed)
    context = multiprocessing.get_context("forkserver")  # torch is imported once for all makers, and CUDA by none
    context.set_forkserver_preload([__name__])
    made, stage, stopped = context.Queue(maxsize=4 * workers), context.Value("i", 0), context.Event()
    makers = [
        context.Process(
            target=_make,
            args=(
                _Work(tokenizer=tokenizer, tasks=tasks, pool=pool, batch=batch, seed=seed * 1000 + each),
                *(made, stage, stopped),
            ),
            daemon=True,
        )
        for each in range(workers)
    ]
    for maker in makers:
        maker.start()
    model = new_policy(tokenizer, seed=seed, **SIZES[size]).to(device).train()
    optimizers = _optimizers(model, learning_rate)
    try:
        recent = deque[Any](maxlen=_RECENT)
        while len(recent) < _RECENT // 4:  # the clock starts when there is enough to learn from
            recent.append(made.get(timeout=300))
        chance, started, step, again = random.Random(seed), time.monotonic(), 0, 0
        while (gone := (time.monotonic() - started) / (60 * minutes)) < 1:
            stage.value = sum(gone >= end for end in _UNTIL)
            try:
                recent.append(made.get_nowait())
                arrays = recent[-1]
            except queue.Empty:
                if not all(maker.is_alive() for maker in makers):
                    raise RuntimeError("a process that makes dialogues has ended; its own error stands above") from None
                arrays, again = chance.choice(recent), again + 1
            rows = Rows(*(torch.from_numpy(each).to(device, non_blocking=True) for each in arrays))
            packed = Packed(rows.ids, rows.positions, tree_mask(rows.segment), rows.index, rows.targets, rows.branch)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
                loss = F.cross_entropy(packed_logits(model, packed), packed.targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rate = learning_rate * min(1.0, (step + 1) / 100) * min(1.0, 0.05 + 0.95 * (1 - gone) / 0.4)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            on_step(Step(step, loss.item(), gone, again / step))
    finally:
        stopped.set()
        for maker in makers:
            maker.terminate()
            maker.join()
    return model.eval().to("cpu"), tokenizer


def _make(work: _Work, made: Any, stage: Any, stopped: Any) -> None:
    """Put batches of rows (numpy, as :class:`Rows`) into the queue until told to stop."""
    torch.set_num_threads(1)
    rng = random.Random(work.seed)
    streams = [made_up_dialogues(rng, each, work.pool) for each in _STAGES]
    calls = dialogues(rng, _TOOLS)
    real = real_dialogues(rng, work.tasks, work.pool) if work.tasks else None

    def stream() -> Iterator[Dialogues]:
        while True:
            now = min(stage.value, len(_STAGES) - 1)
            if real is not None and now > 0 and rng.random() < _REAL:
                yield next(real)
            else:
                yield next(calls if now > 0 and rng.random() < _CALLS else streams[now])

    items = stream()
    while not stopped.is_set():
        pool = encode(work.tokenizer, list(itertools.islice(items, 4 * work.batch)))
        fitting = sorted((each for each in pool if _length(each) <= _MAX_TOKENS), key=_length)
        batches = [fitting[start : start + work.batch] for start in range(0, len(fitting), work.batch)]
        rng.shuffle(batches)
        for rows in batches:
            arrays = tuple(each.numpy() for each in lay_out(rows))
            while not stopped.is_set():
                try:
                    made.put(arrays, timeout=1.0)
                    break
                except queue.Full:
                    continue


def _length(sequence: tuple[list[int], list[Any]]) -> int:
    ids, branches = sequence
    return len(ids) + sum(len(tokens) for tokens, _ in branches)


def _tokenizer(tasks: Sequence[Task], pool: Sequence[str], seed: int) -> PreTrainedTokenizerFast:
    """The words of ``pool``, and what both corpora say often; pieces for the rest."""
    stage = Stage(invented=0.0, freedom=1.0, writes=8, checks=1, rewrites=1, tools=0.2)
    corpus = itertools.chain(
        itertools.islice(dialogues(random.Random(seed), stage), 800),
        itertools.islice(real_dialogues(random.Random(seed), tasks, pool), len(tasks) // 8) if tasks else (),
    )
    texts = (text for item in corpus for text in item.texts())
    return train_tokenizer(texts, words=pool, merges=3000, fold_case=True)


def _optimizers(model: LlamaForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """As the small starter's: Muon for the layers' matrices, AdamW for the embedding and the norms."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]

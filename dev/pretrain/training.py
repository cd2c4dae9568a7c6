"""Trains the starter policy from random weights.

It reads generated dialogues (:mod:`dev.pretrain.corpus`) for a fixed number of steps: a seed always gives
the same dialogues, and on a CPU the same checkpoint; on a GPU sums differ a little in each run, and checkpoints with
them. It stops early on purpose. With more steps the policy would answer nearly every generated question, and
reinforcement learning could not improve it; the model card says so, too.

It begins with exercises in copying, and the first databases have one or two tables: once copying is learned, on short
prompts, all else is learned faster. Muon (Jordan et al., 2024) reaches a loss in about two thirds of AdamW's steps.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dev.pretrain.corpus import Stage, dialogues, encode, prompt
from dev.pretrain.model import new_policy
from dev.pretrain.tokenizer import train_tokenizer
from dev.pretrain.turns import Dialogues
from dev.pretrain.wording import vocabulary
from dev.spider_data.lexicon import words
from groundwire.adapters.sql_agents.prompts import extract_sql, write
from groundwire.domains import Task
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.tools.schema import table_info
from groundwire.train.local.packing import pack, packed_logits
from groundwire.train.policy.attention import set_attention
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.types import Sampling

__all__ = ["STEPS", "accuracy", "new_tokenizer", "pretrain"]


class Part(NamedTuple):
    """A part of the schedule: ``steps`` steps of ``batch`` databases each."""

    steps: int
    batch: int
    stage: Stage


SCHEDULE = (
    Part(450, 24, Stage(drills=1.0, writes=6)),
    Part(
        330,
        16,
        Stage(
            n_tables=(1, 1, 2),
            n_attributes=(2, 2, 3),
            mix={"easy": 0.8, "medium": 0.2},
            writes=5,
            others=0.6,
            drills=0.25,
        ),
    ),
    Part(300, 14, Stage(writes=3, checks=6, rewrites=2, tools=0.4, others=0.6, drills=0.05)),
)
"""A check's verdict is few tokens, so there are many: with few, the policy does not learn what a query's error says."""
STEPS = 1000
"""The schedule stops early in its last part, so first queries are left to reinforcement learning."""
LEARNING_RATE = 4e-3
"""Of both optimizers; Muon scales it to AdamW's size (``match_rms_adamw``)."""
WARMUP_STEPS = 60
DECAY = 0.4
"""The last share of the schedule, in which the learning rate falls to a twentieth."""


def learning_rate(step: int) -> float:
    """The learning rate of a step, counted from 0."""
    steps = sum(part.steps for part in SCHEDULE)
    remaining = (steps - step) / (DECAY * steps)
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, 0.05 + 0.95 * remaining)


def new_tokenizer(*, seed: int = 0, databases: int = 800) -> PreTrainedTokenizerFast:
    """A tokenizer with the words of the lexicon and the frequent words of the corpus."""
    stage = Stage(invented=0.0, freedom=1.0, writes=8, checks=1, rewrites=1, tools=0.2, others=0.6)
    corpus = itertools.islice(dialogues(random.Random(seed), stage), databases)
    return train_tokenizer((text for item in corpus for text in item.texts()), words=[*words(), *vocabulary()])


def pretrain(
    *, seed: int = 0, device: str = "cpu", on_step: Callable[[float], None] | None = None
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train a new policy on ``device``; ``on_step`` is called with the loss of each step."""
    tokenizer = new_tokenizer(seed=seed)
    model = new_policy(tokenizer, seed=seed).to(device)
    set_attention(model)
    optimizers = _optimizers(model)
    model.train()
    for step, batch in enumerate(itertools.islice(_corpus(seed), STEPS)):
        packed = pack(encode(tokenizer, batch), device=device)
        loss = F.cross_entropy(packed_logits(model, packed), packed.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            optimizer.step()
            optimizer.zero_grad()
        if on_step:
            on_step(loss.item())
    return model.eval().cpu(), tokenizer


def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[Task], *, temperature: float = 0.0
) -> dict[str, float]:
    """Execution match of the first query, over all ``tasks`` and by ``subject_split`` and ``hardness``."""
    engine = LocalEngine(model, tokenizer, max_model_len=2048)
    futures = []
    for number, task in enumerate(tasks):
        schema = table_info(task["db_path"], example_values=0, show_keys=False).text
        prefix, question = tokenizer(list(prompt(schema, write("write", task["question"]))))["input_ids"]
        sampling = Sampling(temperature=temperature, max_tokens=64, seed=number)
        futures.append((task, engine.submit(prefix + question, sampling)))
    scores: dict[str, list[float]] = {}
    for task, future in futures:
        verdict = execution_match(extract_sql(future.result().text), task["query"], task["db_path"])
        for key in ("all", task.get("subject_split"), task.get("hardness")):
            if key:
                scores.setdefault(key, []).append(verdict.score)
    engine.close()
    return {key: sum(values) / len(values) for key, values in scores.items()}


def _corpus(seed: int) -> Iterator[list[Dialogues]]:
    for number, part in enumerate(SCHEDULE):
        stream = dialogues(random.Random(f"{seed}-{number}"), part.stage)
        yield from itertools.islice(_batches(stream, part.batch), part.steps)


def _batches(stream: Iterator[Dialogues], size: int) -> Iterator[list[Dialogues]]:
    """Batches of databases of similar length, because rows are padded to the longest; in random order."""
    order = random.Random(0)
    while True:
        items = sorted(itertools.islice(stream, size * 8), key=lambda item: len(item.prefix))
        batches = [items[i : i + size] for i in range(0, len(items), size)]
        order.shuffle(batches)
        yield from batches


def _optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]

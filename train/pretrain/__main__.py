"""The starter policy from random weights: ``python -m train.pretrain --out DIR``.

One run over generated dialogues (``groundwire.train.pretrain.corpus``), a fixed recipe counted in steps: the same seed
gives the same checkpoint on the same machine. It ends early on purpose. Twice the steps would answer nearly every
generated question and leave reinforcement learning nothing to show; the model card says so too.

What the recipe rests on: databases of one or two tables first, so that copying is learned on short prompts; Muon for
the matrices (Jordan et al., 2024), which reaches a loss in about two thirds of AdamW's steps; prefix-shared packing.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from groundwire.adapters.sql_agents.prompts import extract_sql, write_message
from groundwire.domains import Task, get
from groundwire.domains.spider.generate.lexicon import words
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.tools.schema import table_info
from groundwire.train.local.packing import pack, packed_logits
from groundwire.train.policy import STARTER
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.model import count_parameters, new_policy, save_policy
from groundwire.train.policy.types import Sampling
from groundwire.train.pretrain.corpus import Dialogues, Stage, dialogues, encode, prompt
from groundwire.train.pretrain.tokenizer import train_tokenizer

__all__ = ["RECIPE", "Recipe", "accuracy", "new_tokenizer", "pretrain"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some steps of one stage; ``batch`` databases a step."""

    steps: int
    batch: int
    stage: Stage


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that the checkpoint depends on, beside the seed."""

    parts: tuple[Part, ...]
    learning_rate: float = 4e-3
    """Of both optimizers; Muon's is scaled to AdamW's size (``match_rms_adamw``)."""
    warmup_steps: int = 60
    decay: float = 0.4
    """Share of the steps, at the end, over which the learning rate falls to a twentieth."""
    stop_after: int | None = None
    """End here, in the middle of the schedule: the starter is stopped early, not trained to a smaller end."""
    model: dict[str, int] = field(default_factory=dict)
    """Other sizes than :func:`groundwire.train.policy.model.new_policy` has by default."""

    @property
    def steps(self) -> int:
        """Steps that are made."""
        return min(self.planned, self.stop_after or self.planned)

    @property
    def planned(self) -> int:
        """Steps of the whole schedule."""
        return sum(part.steps for part in self.parts)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        left = (self.planned - step) / (self.decay * self.planned)
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * min(1.0, 0.05 + 0.95 * left)


_SMALL = Stage(
    n_tables=(1, 1, 2),
    n_attributes=(2, 2, 3),
    invented=0.9,
    mix={"easy": 0.8, "medium": 0.2},
    writes=5,
)
_WRITE = Stage(writes=4, tools=0.4)
_AGENT = Stage(writes=3, checks=1, rewrites=1, tools=0.4)

RECIPE = Recipe(
    parts=(
        Part(steps=310, batch=10, stage=_SMALL),
        Part(steps=190, batch=8, stage=_WRITE),
        # Forty of these are made before the stop: the starter has just met what follows a first query (a check, a
        # rewrite, a tool's rows) and uses it badly. What it is good for is left to reinforcement learning to find out.
        Part(steps=220, batch=8, stage=_AGENT),
    ),
    stop_after=540,
)


def new_tokenizer(*, seed: int = 0, databases: int = 800) -> PreTrainedTokenizerFast:
    """The vocabulary: the lexicon's words, and what the corpus says often."""
    stage = Stage(invented=0.0, freedom=1.0, writes=8, checks=1, rewrites=1, tools=0.2)
    corpus = itertools.islice(dialogues(random.Random(seed), stage), databases)
    return train_tokenizer((text for item in corpus for text in item.texts()), words=words())


def pretrain(
    recipe: Recipe = RECIPE,
    *,
    seed: int = 0,
    on_step: Callable[[int, float, LlamaForCausalLM, PreTrainedTokenizerFast], None] | None = None,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Run the recipe. ``on_step`` gets the step (from 1), its loss, the model and the tokenizer."""
    tokenizer = new_tokenizer(seed=seed)
    model = new_policy(tokenizer, seed=seed, **recipe.model)
    optimizers = _optimizers(model, recipe.learning_rate)
    model.train()
    for step, batch in enumerate(itertools.islice(_corpus(recipe, seed), recipe.steps)):
        packed = pack(encode(tokenizer, batch))
        loss = F.cross_entropy(packed_logits(model, packed), packed.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            optimizer.step()
            optimizer.zero_grad()
        if on_step:
            on_step(step + 1, loss.item(), model, tokenizer)
    return model.eval(), tokenizer


def accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Sequence[Task],
    *,
    temperature: float = 0.0,
    samples: int = 1,
) -> dict[str, float]:
    """Execution match of the write turn alone, over all ``tasks`` and by ``subject_split`` and ``hardness``."""
    was_training = model.training
    model.eval()
    engine = LocalEngine(model, tokenizer, max_model_len=1024)
    futures = []
    for number, task in enumerate(tasks):
        system = table_info(task["db_path"], example_values=0, show_keys=False).text
        prefix, context = tokenizer(list(prompt(system, write_message(task["question"]))))["input_ids"]
        for sample in range(samples):
            sampling = Sampling(temperature=temperature, max_tokens=64, seed=number * samples + sample)
            futures.append((task, engine.submit(prefix + context, sampling)))
    scores: dict[str, list[float]] = {}
    for task, future in futures:
        verdict = execution_match(extract_sql(future.result().text), task["query"], task["db_path"])
        for key in ("all", task.get("subject_split"), task.get("hardness")):
            if key:
                scores.setdefault(key, []).append(verdict.score)
    engine.close()
    model.train(was_training)
    return {key: sum(values) / len(values) for key, values in scores.items()}


def _corpus(recipe: Recipe, seed: int) -> Iterator[list[Dialogues]]:
    for number, part in enumerate(recipe.parts):
        stream = dialogues(random.Random(f"{seed}-{number}"), part.stage)
        yield from itertools.islice(_batches(stream, part.batch), part.steps)


def _batches(stream: Iterator[Dialogues], size: int, pool: int = 8) -> Iterator[list[Dialogues]]:
    """Batches of databases of like length, in random order: rows are padded to the longest."""
    order = random.Random(0)
    while True:
        items = sorted(itertools.islice(stream, size * pool), key=lambda item: len(item.prefix))
        batches = [items[i : i + size] for i in range(0, len(items), size)]
        order.shuffle(batches)
        yield from batches


def _optimizers(model: LlamaForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


if __name__ == "__main__":
    import typer

    from groundwire.tools.terminal import Version, progress, spinner

    def main(
        out: Annotated[Path, typer.Option(help="The folder for the checkpoint", file_okay=False)],
        seed: Annotated[int, typer.Option(help="Another seed, other weights")] = 0,
        threads: Annotated[int, typer.Option(help="Torch threads; another number rounds otherwise", min=1)] = 1,
        version: Version = False,
    ) -> None:
        """Make the starter policy from random weights."""
        torch.set_num_threads(threads)
        with progress("Pretraining", RECIPE.steps) as on_end:
            model, tokenizer = pretrain(seed=seed, on_step=lambda _, loss, *__: on_end(f"loss {loss:.2f}"))
        save_policy(model, tokenizer, out)
        card = STARTER / "README.md"
        if card.is_file() and card.parent.resolve() != out.resolve():
            shutil.copy(card, out)
        tasks = get("spider").load().validation
        typer.echo(f"{out}: {count_parameters(model):,} parameters, {len(tokenizer):,} token ids")
        for temperature in (0.0, 1.0):
            with spinner("measuring its first queries"):
                scores = accuracy(model, tokenizer, tasks, temperature=temperature)
            line = ", ".join(f"{name} {score:.1%}" for name, score in scores.items())
            typer.echo(f"write turn at temperature {temperature:g}: {line}")

    typer.run(main)

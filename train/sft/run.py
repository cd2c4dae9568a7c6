"""A supervised run, from the checked settings to the trained model and its accuracy."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from groundwire import domains
from groundwire.tools.errors import CommandError
from groundwire.tools.files import read_json
from groundwire.tools.terminal import progress, spinner
from groundwire.train.artifacts.atomic import atomic_write
from groundwire.train.artifacts.checkpoints import Checkpoints
from groundwire.train.config.errors import ConfigError
from groundwire.train.policy.model import check_device, load_policy
from groundwire.train.policy.pretrained import find_model
from groundwire.train.sft.accuracy import first_query_accuracy
from groundwire.train.sft.batches import Row, Step, make_rows, make_steps
from groundwire.train.sft.examples import Example, encode
from groundwire.train.sft.golds import GoldTurns, Question, check_golds, make_questions, write_turns
from groundwire.train.sft.settings import SFTSettings
from groundwire.train.sft.trainer import SFTTrainer

__all__ = ["run"]


def run(settings: SFTSettings, *, resume: Path | None, given: Mapping[str, Any]) -> Iterator[str]:
    """Train; yields lines for the user. Raises errors derived from :class:`groundwire.tools.errors.UserError`.

    ``resume`` is the folder of a run, whose settings are taken where none are ``given``.
    """
    if resume is not None:
        settings = _resumed_settings(resume, given)
    check_device(settings.device)
    domain = domains.get(settings.domain)
    data = domain.load(settings.data_dir)
    check_golds(domain, data)
    yield f"data: {data.source}"
    folder = resume or _new_folder(settings)
    checkpoints = Checkpoints(folder / "checkpoints")
    last = checkpoints.paths()[-1:] if resume else []
    with spinner("reading the model"):
        model, tokenizer = load_policy(last[0] if last else find_model(settings.model))
    _check_length(model, settings)
    encode(tokenizer, _example_turns(settings))  # a template that cannot write them is refused now
    held_out = _choose(data.validation, settings.val_tasks)
    with progress("Running the queries", len(data.train) + len(held_out)) as on_end:
        questions = make_questions(domain, data.train, settings, wrong=settings.later_turns > 0, on_end=on_end)
        held_out_questions = make_questions(domain, held_out, settings, wrong=False, on_end=on_end)
    source = GoldTurns(questions, settings)
    trainer = SFTTrainer(model.to(settings.device), tokenizer, settings, checkpoints=checkpoints)
    reader = _Reader(source, tokenizer, settings, trainer.tokens_per_forward)
    val_rows = reader.rows([turn for each in held_out_questions for turn in write_turns(each, settings)])
    if not reader.rows(source.turns(source.groups(0)[0], 0)) and not val_rows:
        raise ConfigError(
            f"no turn fits into max_model_len, {settings.max_model_len} tokens: give more, or a shorter schema "
            "(table_info_truncate)"
        )
    if last:
        trainer.load(torch.load(last[0] / "trainer.pt", map_location=settings.device, weights_only=True))
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", {"sft": settings.model_dump(mode="json")})
    yield f"run:  {folder}"
    yield f"      {len(questions):,} questions to learn, {len(held_out_questions):,} held out"
    try:
        yield from _train(trainer, reader, val_rows, folder, settings)
    except KeyboardInterrupt:
        trainer.save()
        raise CommandError(f"stopped; continue with python -m train.sft --resume {folder}", 130) from None
    trainer.save_model(folder / "model")
    yield f"model: {folder / 'model'}; {trainer.step} steps, {trainer.seconds:.0f} s"
    summary: dict[str, Any] = {"steps": trainer.step, "seconds": round(trainer.seconds, 1), "left_out": reader.left_out}
    if held_out_questions:
        with progress("Answering held-out questions", len(held_out_questions) * len(settings.backend)) as on_end:
            accuracy = first_query_accuracy(trainer.model, tokenizer, held_out_questions, settings, on_end=on_end)
        summary |= {"held_out": len(held_out_questions), "first_query_accuracy": accuracy}
        for backend, share in accuracy.items():
            yield f"execution accuracy of first queries, {backend}: {share:.3f} of {len(held_out_questions)}"
    _write_json(folder / "summary.json", summary)
    if reader.left_out:
        yield f"note: {reader.left_out:,} turns were longer than max_model_len, {settings.max_model_len} tokens"


def _train(
    trainer: SFTTrainer, reader: _Reader, val_rows: Sequence[Row], folder: Path, settings: SFTSettings
) -> Iterator[str]:
    lines: list[str] = []

    def on_step(metrics: dict[str, Any]) -> None:
        if metrics["step"] % settings.val_every == 0 and val_rows:
            metrics["held_out_loss"] = round(trainer.loss(val_rows), 4)
        with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        held_out = f"  held out {metrics['held_out_loss']:.3f}" if "held_out_loss" in metrics else ""
        text = f"step {metrics['step']}  loss {metrics['loss']:.3f}{held_out}  {metrics['seconds']:.0f} s"
        on_end(text)
        if held_out:
            print(text, flush=True)

    with progress("Training", reader.total) as on_end:
        trainer.train(reader.steps(trainer.groups), on_step)
    if trainer.step:
        trainer.save()
    if val_rows:
        lines.append(f"held-out loss: {trainer.loss(val_rows):.4f}")
    yield from lines


class _Reader:
    """Makes rows and steps of the training data."""

    def __init__(self, source: GoldTurns, tokenizer: Any, settings: SFTSettings, row_tokens: int) -> None:
        self._source, self._tokenizer, self._settings = source, tokenizer, settings
        self._row_tokens = row_tokens
        self.left_out = 0
        """Turns that were too long, so far."""
        self.total = max(1, math.ceil(settings.epochs * len(source.groups(0))))
        """Groups in the whole training."""

    def rows(self, turns: Any) -> list[Row]:
        examples: list[Example] = encode(self._tokenizer, turns)
        fitting = [each for each in examples if len(each) <= self._settings.max_model_len]
        self.left_out += len(examples) - len(fitting)
        return make_rows(fitting, self._row_tokens)

    def steps(self, first: int) -> Iterator[Step]:
        """The steps that begin with the group of number ``first``."""
        return make_steps(self._groups(first), self._settings.tokens_per_step, first=first, total=self.total)

    def _groups(self, first: int) -> Iterator[list[Row]]:
        epoch, groups = -1, []
        size = len(self._source.groups(0))
        for number in range(first, self.total):
            if number // size != epoch:
                epoch = number // size
                groups = self._source.groups(epoch)
            yield self.rows(self._source.turns(groups[number % size], epoch))


def _choose(tasks: Sequence[domains.Task], count: int) -> list[domains.Task]:
    """``count`` tasks (0: all), the same in every run."""
    from groundwire.train.evaluation.validation import choose_tasks

    return list(choose_tasks(list(tasks), count))


def _example_turns(settings: SFTSettings) -> Any:
    return write_turns(Question("", "", "How many?", "SELECT 1", "CREATE TABLE t ( a int )"), settings)


def _check_length(model: Any, settings: SFTSettings) -> None:
    positions = getattr(model.config, "max_position_embeddings", None) or settings.max_model_len
    if settings.max_model_len > positions:
        raise ConfigError(
            f"max_model_len is {settings.max_model_len}, and the model has {positions} positions: give less"
        )


def _new_folder(settings: SFTSettings) -> Path:
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{Path(settings.model).stem}-{settings.domain}"
    folder = Path(settings.output_dir) / name
    for number in range(2, 100):
        if not folder.exists():
            break
        folder = folder.with_name(f"{name}-{number}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {os.strerror(error.errno or 0)}; give another --output-dir"
        ) from error
    return folder


def _resumed_settings(folder: Path, given: Mapping[str, Any]) -> SFTSettings:
    try:
        stored = read_json(folder / "config.json")["sft"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{folder} is no run of train.sft: {error}") from error
    return SFTSettings(**{**stored, **given})


def _write_json(file: Path, value: Any) -> None:
    with atomic_write(file) as part:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""A supervised run, from the checked settings to the trained model and its accuracy."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from groundwire.tools.errors import CommandError
from groundwire.tools.files import read_json
from groundwire.tools.terminal import progress, spinner
from groundwire.train.artifacts.atomic import atomic_write
from groundwire.train.artifacts.checkpoints import Checkpoints
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.policy.decoder import check_supported
from groundwire.train.policy.model import check_device, load_policy
from groundwire.train.policy.pretrained import find_model
from groundwire.train.sft.accuracy import first_query_accuracy
from groundwire.train.sft.batches import Row, Step, make_rows, make_steps
from groundwire.train.sft.data import Groups, open_source
from groundwire.train.sft.examples import Example
from groundwire.train.sft.rollouts import with_run_settings
from groundwire.train.sft.trainer import SFTTrainer

__all__ = ["run"]


def run(settings: SFTSettings, *, resume: Path | None, given: Mapping[str, Any]) -> Iterator[str]:
    """Train; yields lines for the user. Raises errors derived from :class:`groundwire.tools.errors.UserError`.

    ``resume`` is the folder of a run, whose settings are taken where none are ``given``.
    """
    if resume is not None:
        settings = _resumed_settings(resume, given)
    elif settings.rollouts:
        settings = with_run_settings(settings, given)
    check_device(settings.device)
    source = open_source(settings)
    yield f"data: {source.name}"
    folder = resume or _new_folder(settings)
    checkpoints = Checkpoints(folder / "checkpoints")
    last = checkpoints.paths()[-1:] if resume else []
    with _deleted_if_empty(folder):
        with spinner("reading the model"):
            model, tokenizer = load_policy(last[0] if last else find_model(settings.model))
        check_supported(model)
        _check_length(model, settings)
        data = source.load(tokenizer)
        trainer = SFTTrainer(model.to(settings.device), tokenizer, settings, checkpoints=checkpoints)
        reader = _Reader(data.groups, tokenizer, settings, trainer.tokens_per_forward)
        reader.check_lengths()
        val_rows = reader.rows(data.held_out)
        if last:
            trainer.load(torch.load(last[0] / "trainer.pt", map_location=settings.device, weights_only=True))
    _write_json(folder / "config.json", {"sft": settings.model_dump(mode="json")})
    yield f"run:  {folder}"
    yield f"      {data.size}"
    try:
        yield from _train(trainer, reader, val_rows, folder, settings)
    except KeyboardInterrupt:
        trainer.save()
        raise CommandError(f"stopped; continue with python -m train.sft --resume {folder}", 130) from None
    trainer.save_model(folder / "model")
    yield f"model: {folder / 'model'}; {trainer.step} steps, {trainer.seconds:.0f} s"
    summary: dict[str, Any] = {"steps": trainer.step, "seconds": round(trainer.seconds, 1), "left_out": reader.left_out}
    if data.questions:
        with progress("Answering held-out questions", len(data.questions) * len(settings.backend)) as on_end:
            accuracy = first_query_accuracy(trainer.model, tokenizer, data.questions, settings, on_end=on_end)
        summary |= {"held_out": len(data.questions), "first_query_accuracy": accuracy}
        for backend, share in accuracy.items():
            yield f"execution accuracy of first queries, {backend}: {share:.3f} of {len(data.questions)}"
    _write_json(folder / "summary.json", summary)
    if reader.left_out:
        yield f"note: {reader.left_out:,} turns were longer than max_model_len, {settings.max_model_len} tokens"


def _train(
    trainer: SFTTrainer, reader: _Reader, val_rows: Sequence[Row], folder: Path, settings: SFTSettings
) -> Iterator[str]:
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
        yield f"held-out loss: {trainer.loss(val_rows):.4f}"


class _Reader:
    """Makes rows and steps of the training data."""

    def __init__(self, groups: Groups, tokenizer: Any, settings: SFTSettings, row_tokens: int) -> None:
        self._groups, self._tokenizer, self._settings = groups, tokenizer, settings
        self._row_tokens = row_tokens
        self.left_out = 0
        """Examples that were too long, so far."""
        self.total = max(1, math.ceil(settings.epochs * len(groups.groups(0))))
        """Groups in the whole training."""

    def check_lengths(self) -> None:
        """Raise :class:`ConfigError` if no example fits into ``max_model_len``."""
        if not any(self.rows(self._groups.examples(self._tokenizer, each, 0)) for each in self._groups.groups(0)):
            raise ConfigError(
                f"no turn fits into max_model_len, {self._settings.max_model_len} tokens: give more, or shorter "
                "prompts (table_info_truncate is the length of a schema)"
            )
        self.left_out = 0

    def rows(self, examples: Sequence[Example]) -> list[Row]:
        """The examples that fit, packed."""
        fitting = [each for each in examples if len(each) <= self._settings.max_model_len]
        self.left_out += len(examples) - len(fitting)
        return make_rows(fitting, self._row_tokens)

    def steps(self, first: int) -> Iterator[Step]:
        """The steps that begin with the group of number ``first``."""
        return make_steps(self._packed(first), self._settings.tokens_per_step, first=first, total=self.total)

    def _packed(self, first: int) -> Iterator[list[Row]]:
        epoch, groups = -1, self._groups.groups(0)
        for number in range(first, self.total):
            if number // len(groups) != epoch:
                epoch = number // len(groups)
                groups = self._groups.groups(epoch)
            yield self.rows(self._groups.examples(self._tokenizer, groups[number % len(groups)], epoch))


def _check_length(model: Any, settings: SFTSettings) -> None:
    positions = getattr(model.config, "max_position_embeddings", None) or settings.max_model_len
    if settings.max_model_len > positions:
        raise ConfigError(
            f"max_model_len is {settings.max_model_len}, and the model has {positions} positions: give less"
        )


def _new_folder(settings: SFTSettings) -> Path:
    learned = Path(settings.chats).stem if settings.chats else settings.domain
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{Path(settings.model).stem}-{learned}"
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


@contextmanager
def _deleted_if_empty(folder: Path) -> Iterator[None]:
    """Delete the folder if there is an error before anything is written to it."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            folder.rmdir()
        raise


def _resumed_settings(folder: Path, given: Mapping[str, Any]) -> SFTSettings:
    try:
        stored = read_json(folder / "config.json")["sft"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{folder} is no run of train.sft: {error}") from error
    return SFTSettings(**{**stored, **given})


def _write_json(file: Path, value: Any) -> None:
    with atomic_write(file) as part:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""A supervised run, from the checked settings to the trained model and its accuracy."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch

from groundwire.adapters.sql_agents.prompts import extract_sql
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.tools.errors import CommandError, machine_error
from groundwire.tools.files import parse_json, read_json
from groundwire.tools.secrets import say
from groundwire.tools.terminal import console, counted, progress, show_line, spinner
from groundwire.train.artifacts.checkpoints import Checkpoints, append_line
from groundwire.train.artifacts.run_dir import RunDir, new_folder
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.job.prepare import resolve_path
from groundwire.train.local.packing import Row
from groundwire.train.policy.chat.tool_formats import FORMATS
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.errors import ContextLengthError
from groundwire.train.policy.model import check_device, load_policy
from groundwire.train.policy.pretrained.locate import find_model
from groundwire.train.policy.pretrained.model_files import save_policy
from groundwire.train.policy.transformers_batch import check_sampling
from groundwire.train.policy.types import Sampling
from groundwire.train.sft.data.examples import Example, encode
from groundwire.train.sft.data.golds import GoldQuestion, write_turns
from groundwire.train.sft.data.load import Data, open_source, with_run_settings
from groundwire.train.sft.several_gpus import check_gpus, train_on_gpus
from groundwire.train.sft.trainer import SFTTrainer, Step, make_steps

_MAX_TOKENS = 96  # of a first query, for the accuracy


def run(settings: SFTSettings, *, resume: Path | None, given: Mapping[str, Any]) -> Generator[str, None, Path]:
    """Train; yields lines for the user, and returns the folder of the model.

    Raises errors derived from :class:`groundwire.tools.errors.UserError`.

    ``resume`` is the folder of a run, whose settings are taken where none are ``given``.
    """
    if resume is not None:
        settings = _resumed_settings(resume, given)
    elif settings.rollouts:
        settings = with_run_settings(settings, given)
    settings = _with_absolute_paths(settings)
    check_device(settings.device)
    if settings.gpus > 1:
        check_gpus(settings)
    name, load_data = open_source(settings)
    yield f"data: {name}"
    folder = resume or _new_folder(settings)
    checkpoints = Checkpoints(folder / "checkpoints")
    last = checkpoints.paths()[-1:] if resume else []
    with ExitStack() as stack:
        stack.callback(_delete_if_empty, folder)  # after an error before its settings are written
        with spinner("reading the model"):
            path = last[0] if last else find_model(settings.model)
            model, tokenizer = load_policy(path)
        check_sampling(model)
        if not tokenizer.chat_template:
            raise ConfigError(f"{path} has no chat template: use an instruct model, or set its chat_template")
        positions = getattr(model.config, "max_position_embeddings", None) or settings.max_model_len
        if settings.max_model_len > positions:
            length = f"max_model_len is {settings.max_model_len}"
            raise ConfigError(f"{length}, and the model has {positions} positions: give less")
        data = load_data(tokenizer)
        model = model.to(settings.device if settings.gpus == 1 else "cpu")
        trainer = SFTTrainer(model, tokenizer, settings, checkpoints=checkpoints)
        reader = _Reader(data, settings, trainer.rows)
        held_out = reader.fitting(data.held_out)
        val_rows = trainer.rows(held_out) if settings.gpus == 1 else []
        if last:
            trainer.load(torch.load(last[0] / "trainer.pt", map_location=settings.device, weights_only=True))
        if resume:
            if settings.gpus > 1:
                trainer.step = Checkpoints(folder / "verl").last_step()
            _rewind(folder, trainer)
        RunDir(folder).write_json("config.json", {"sft": settings.model_dump(mode="json")})
    yield f"run:  {folder}"
    yield f"      {data.size}"
    with _resume_hint(folder):
        with _reporting(folder) as report:
            if settings.gpus > 1:
                train_on_gpus(trainer, path, chain.from_iterable(reader.groups(0)), held_out, folder, report)
            else:
                trainer.train(reader.steps(trainer.groups), reader.total, val_rows, report)
        yield from _finish(trainer, data, val_rows, folder, reader.left_out)
        return folder / "model"


@contextmanager
def _resume_hint(folder: Path) -> Iterator[None]:
    """Say after what ends training how it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; continue with groundwire sft --resume {folder}") from None
    except Exception as error:
        if not (reason := machine_error(error)):
            raise
        raise CommandError(f"{reason}; continue with groundwire sft --resume {folder}", 1) from error


def train_and_print(
    settings: SFTSettings, *, resume: Path | None = None, given: Mapping[str, Any], quiet: bool = False
) -> Path:
    """As :func:`run`, and print its lines."""
    output, lines = console(quiet=quiet), run(settings, resume=resume, given=given)
    while True:
        try:
            show_line(output, next(lines))
        except StopIteration as end:
            return Path(end.value)


def _finish(trainer: SFTTrainer, data: Data, val_rows: Sequence[Row], folder: Path, left_out: int) -> Iterator[str]:
    settings = trainer.settings
    with Checkpoints(folder).write_folder("model") as part:
        save_policy(trainer.model, trainer.tokenizer, part)
    yield f"model: {folder / 'model'}; {counted(trainer.step, 'step')}, {trainer.seconds:.0f} s"
    summary: dict[str, Any] = {"steps": trainer.step, "seconds": round(trainer.seconds, 1), "left_out": left_out}
    if val_rows:
        summary["held_out_loss"] = round(trainer.loss(val_rows), 4)
        yield f"held-out loss: {summary['held_out_loss']:.4f}"
    if data.questions:
        with progress("Answering held-out questions", len(data.questions) * len(settings.backend)) as on_end:
            accuracy = _first_query_accuracy(trainer, data.questions, on_end)
        summary |= {"held_out": len(data.questions), "first_query_accuracy": accuracy}
        for backend, share in accuracy.items():
            yield f"execution accuracy of first queries, {backend}: {share:.3f} of {len(data.questions)}"
    RunDir(folder).write_json("summary.json", summary)
    if left_out:
        yield f"note: left out {counted(left_out, 'turn')} longer than max_model_len, {settings.max_model_len} tokens"


@contextmanager
def _reporting(folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    done = 0.0
    with progress("Training", 1) as advance:

        def report(metrics: dict[str, Any]) -> None:
            nonlocal done
            append_line(folder / "metrics.jsonl", json.dumps(metrics))
            held_out = f"  held out {metrics['held_out_loss']:.3f}" if "held_out_loss" in metrics else ""
            text = f"step {metrics['step']}  loss {metrics['loss']:.3f}{held_out}  {metrics['seconds']:.0f} s"
            advance(text, metrics["progress"] - done)
            done = metrics["progress"]
            if held_out:
                say(text)

        yield report


def _rewind(folder: Path, trainer: SFTTrainer) -> None:
    """Delete the metrics after the last checkpoint, whose next steps are repeated. The time goes on from the others."""
    with suppress(FileNotFoundError):
        kept = []
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, LookupError, TypeError):  # it was not written to its end
                if (metrics := parse_json(line))["step"] <= trainer.step:
                    kept.append(metrics)
        RunDir(folder).write_json_lines("metrics.jsonl", kept)
        if kept:
            trainer.seconds = kept[-1]["seconds"]


class _Reader:
    """Makes rows and steps of the training data. Raises :class:`ConfigError` if no example fits."""

    def __init__(self, data: Data, settings: SFTSettings, rows: Callable[[Sequence[Example]], list[Row]]) -> None:
        self._groups, self._settings, self._rows = data.groups, settings, rows
        self.left_out = 0  # examples that were longer than ``max_model_len``, so far
        groups = self._groups(0)
        self._epoch_groups = len(groups)
        self.total = max(1, math.ceil(settings.epochs * len(groups)))  # groups in the whole training
        if not any(self.fitting(make()) for make in groups):
            shorter = ", or shorter prompts (table_info_truncate is the length of a schema)"
            if settings.chats or settings.rollouts:
                shorter = ", or shorter chats" if settings.chats else ""
            raise ConfigError(f"no turn fits into max_model_len, {settings.max_model_len} tokens: give more{shorter}")
        self.left_out = 0

    def fitting(self, examples: Sequence[Example]) -> list[Example]:
        """The examples that fit into ``max_model_len``; the others are counted."""
        fitting = [example for example in examples if len(example) <= self._settings.max_model_len]
        self.left_out += len(examples) - len(fitting)
        return fitting

    def steps(self, first: int) -> Iterator[Step]:
        """The steps that begin with the group of number ``first``."""
        return make_steps(map(self._rows, self.groups(first)), self._settings.tokens_per_step, first=first)

    def groups(self, first: int) -> Iterator[list[Example]]:
        """The examples of each group of the training, from that of number ``first`` on."""
        epoch, skipped = divmod(first, self._epoch_groups)
        made = chain.from_iterable(map(self._groups, count(epoch)))
        return (
            self.fitting(make()) for _, make in zip(range(first, self.total), islice(made, skipped, None), strict=False)
        )


def _new_folder(settings: SFTSettings) -> Path:
    learned = Path(settings.chats).stem if settings.chats else settings.domain
    name = f"{Path(settings.model).stem}-{learned}"
    try:
        return new_folder(settings.output_dir, name)
    except OSError as error:
        folder, reason = Path(settings.output_dir) / name, os.strerror(error.errno or 0)
        raise ConfigError(f"{folder} cannot be made: {reason}; give another --output-dir") from error


def _delete_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _resumed_settings(folder: Path, given: Mapping[str, Any]) -> SFTSettings:
    try:
        stored = read_json(folder / "config.json", unique=True)["sft"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{folder} is no run of groundwire sft: {error}") from error
    RunDir(folder).check_links()
    return SFTSettings(**{**stored, **given})


def _with_absolute_paths(settings: SFTSettings) -> SFTSettings:
    """The settings as they are stored: a resumed run finds the same data and model, also from another folder.

    The link ``runs/latest`` leads to another run as soon as one begins.
    """
    names = ("model", "chats", "rollouts", "data_dir", "domain")
    return settings.model_copy(update={name: resolve_path(getattr(settings, name), name) for name in names})


def _first_query_accuracy(
    trainer: SFTTrainer, questions: Sequence[GoldQuestion], on_end: Callable[[], None]
) -> dict[str, float]:
    """The share of questions whose greedy first query has the gold query's rows, for each agent.

    A prompt that is too long counts as wrong.
    """
    settings, tokenizer = trainer.settings, trainer.tokenizer
    sampling = Sampling(temperature=0.0, max_tokens=_MAX_TOKENS)
    right = dict.fromkeys(settings.backend, 0.0)
    with closing(LocalEngine(trainer.model, tokenizer, max_model_len=settings.max_model_len)) as engine:
        futures = []
        for question in questions:
            examples = encode(tokenizer, write_turns(question, settings))
            for backend, example in zip(settings.backend, examples, strict=True):
                try:
                    futures.append((question, backend, engine.submit(example.prompt_ids, sampling)))
                except ContextLengthError:
                    on_end()
        for question, backend, future in futures:
            sql = _query(future.result().text, backend)
            right[backend] += execution_match(sql, question.gold, question.database).score
            on_end()
    return {backend: round(score / len(questions), 4) for backend, score in right.items()}


def _query(reply: str, backend: str) -> str:
    if backend == "langgraph":
        return extract_sql(reply)
    _, calls = FORMATS["hermes"].parse(reply, frozenset(["query_database_by_sql"]))
    try:
        return str(json.loads(calls[0]["function"]["arguments"])["sql"])
    except (LookupError, TypeError, ValueError):
        return ""

"""Supervised fine-tuning on several GPUs: verl's SFT trainer (FSDP) learns the same examples.

The examples of all epochs are written as token ids first. verl shuffles them and computes each with its own prompt:
replies do not share it, and a step has a number of examples, not of tokens.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groundwire.tools.errors import CommandError
from groundwire.tools.files import parse_json
from groundwire.tools.startup import child_python_path
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.policy.model import load_policy
from groundwire.train.sft.data.examples import Example
from groundwire.train.sft.trainer import (
    BETAS,
    CHECKPOINT_EVERY,
    MIN_RATE,
    VAL_EVERY,
    WARMUP_STEPS,
    WEIGHT_DECAY,
    SFTTrainer,
)
from groundwire.train.verl.hydra_config import INSTALL, attention_settings, count_gpus

_LOG_POLL_S = 1.0
_TOKENS_PER_GPU = 16384  # of one forward pass


def check_gpus(settings: SFTSettings) -> None:
    """Raise :class:`ConfigError` if verl cannot train on ``settings.gpus`` GPUs of this machine."""
    if settings.device != "cuda":
        raise ConfigError(f"gpus is {settings.gpus} and device {settings.device!r}: give --device cuda")
    if settings.time_limit_s is not None:
        raise ConfigError("time_limit_s is for one GPU: with several give epochs")
    if (count := count_gpus()) < settings.gpus:
        raise ConfigError(f"gpus is {settings.gpus}, and torch finds {count} here")
    if importlib.util.find_spec("verl") is None:
        raise ConfigError(f"several GPUs train with verl, which is not installed: {INSTALL}")


def train_on_gpus(
    trainer: SFTTrainer,
    model: Path,
    examples: Iterable[Example],
    held_out: list[Example],
    folder: Path,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Train the ``model`` of a folder with verl in other processes; ``trainer`` gets it and the number of steps.

    ``report`` gets the metrics of each step. A ``folder`` with checkpoints of verl is continued. Raises
    :class:`CommandError`.
    """
    settings, began = trainer.settings, time.monotonic() - trainer.seconds
    count, tokens = write_examples(folder / "verl" / "train.jsonl", examples)
    held_out_count, _ = write_examples(folder / "verl" / "held_out.jsonl", held_out)
    batch = settings.gpus * max(1, round(settings.tokens_per_step * count / max(1, tokens) / settings.gpus))
    batch = min(batch, count // settings.gpus * settings.gpus)
    if not batch:
        raise ConfigError(f"gpus is {settings.gpus}, and there are only {count} examples")
    values = verl_settings(settings, model=model, learning_rate=trainer.learning_rate, folder=folder, batch=batch)
    if held_out_count < batch:  # verl leaves out an incomplete batch
        values |= {"data.val_files": None, "trainer.test_freq": -1}

    def on_step(metrics: dict[str, Any]) -> None:
        trainer.step, trainer.seconds = metrics["step"], time.monotonic() - began
        progress = round(trainer.step / (count // batch), 4)
        report({**metrics, "progress": progress, "seconds": round(trainer.seconds, 2)})

    _run(values, folder, settings.gpus, on_step)
    saved = list((folder / "verl").glob("global_step_*/huggingface"))
    if not saved:
        raise CommandError(f"verl wrote no model: see {folder / 'verl.log'}")
    trained = max(saved, key=lambda path: int(path.parent.name.rpartition("_")[2]))
    trainer.model = load_policy(trained)[0].to(settings.device)


def verl_settings(
    settings: SFTSettings, *, model: Path, learning_rate: float, folder: Path, batch: int
) -> dict[str, Any]:
    """The dotted keys of verl's SFT trainer; ``+`` marks keys that verl's files do not have, as in Hydra."""
    values: dict[str, Any] = {
        "model.path": str(model.resolve()),
        "optim.lr": learning_rate,
        "optim.lr_scheduler_type": "cosine",
        "optim.min_lr_ratio": MIN_RATE,
        "optim.lr_warmup_steps": WARMUP_STEPS,
        "optim.weight_decay": WEIGHT_DECAY,
        "optim.betas": list(BETAS),
        "data.train_files": str((folder / "verl" / "train.jsonl").resolve()),
        "data.val_files": str((folder / "verl" / "held_out.jsonl").resolve()),
        "data.custom_cls.path": "pkg://groundwire.train.sft.several_gpus",
        "data.custom_cls.name": "TokenDataset",
        "data.train_batch_size": batch,
        "data.max_length": settings.max_model_len,
        "data.max_token_len_per_gpu": max(_TOKENS_PER_GPU, settings.max_model_len),
        "data.num_workers": 0,  # verl forks them from threads at each validation: some never answer
        "checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        "trainer.default_local_dir": str((folder / "verl").resolve()),
        "trainer.project_name": "groundwire",
        "trainer.experiment_name": folder.name,
        "trainer.logger": ["console", "file"],
        "trainer.total_epochs": 1,
        "trainer.seed": settings.seed,
        "trainer.save_freq": CHECKPOINT_EVERY,
        "trainer.test_freq": VAL_EVERY,
        "trainer.max_ckpt_to_keep": 2,
        "trainer.n_gpus_per_node": settings.gpus,
    }
    attention = attention_settings({}, model)
    return values | {key.replace("actor_rollout_ref.", ""): value for key, value in attention.items()}


def write_examples(file: Path, examples: Iterable[Example]) -> tuple[int, int]:
    """Write the examples; returns their number and that of their tokens."""
    file.parent.mkdir(parents=True, exist_ok=True)
    count, tokens = 0, 0
    with open(file, "w", encoding="utf-8") as lines:
        for example in examples:
            lines.write(json.dumps([example.prompt_ids, example.response_ids]) + "\n")
            count, tokens = count + 1, tokens + len(example)
    return count, tokens


class TokenDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """What verl reads, without padding: ``input_ids``, ``position_ids`` and ``loss_mask``, int64 [tokens]."""

    def __init__(self, parquet_files: Any, **_: Any) -> None:  # verl's name of the argument
        files = [parquet_files] if isinstance(parquet_files, str) else parquet_files
        self._lines = [line for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        prompt, reply = json.loads(self._lines[index])
        ids = torch.tensor(prompt + reply)
        mask = torch.tensor([0] * len(prompt) + [1] * len(reply))
        return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask}


def _run(values: dict[str, Any], folder: Path, gpus: int, on_step: Callable[[dict[str, Any]], None]) -> None:
    log, metrics = folder / "verl.log", folder / "verl.jsonl"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    environment = {**os.environ, "PYTHONPATH": child_python_path(), "VERL_FILE_LOGGER_PATH": str(metrics.resolve())}
    metrics.unlink(missing_ok=True)
    with open(log, "ab") as output:
        process = subprocess.Popen(  # noqa: S603
            [*launcher, "-m", "verl.trainer.sft_trainer", *overrides, f"hydra.run.dir={json.dumps(str(folder))}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        seen = 0

        def report(*, ended: bool) -> None:
            nonlocal seen
            steps = read_steps(metrics)
            complete = len(steps) if ended else max(seen, len(steps) - 1)  # a held-out loss may follow
            for step in steps[seen:complete]:
                on_step(step)
            seen = complete

        try:
            while process.poll() is None:
                report(ended=False)
                time.sleep(_LOG_POLL_S)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            report(ended=True)
    if process.returncode:
        raise CommandError(f"verl's SFT trainer ended with status {process.returncode}: see {log}")


def read_steps(file: Path) -> list[dict[str, Any]]:
    """The metrics of each finished step in verl's log."""
    steps: dict[int, dict[str, Any]] = {}
    names = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr": "learning_rate"}
    names |= {"train/global_tokens": "tokens", "val/loss": "held_out_loss"}
    with suppress(FileNotFoundError):
        for line in file.read_bytes().split(b"\n")[:-1]:
            entry = parse_json(line)
            step = steps.setdefault(entry["step"], {"step": entry["step"]})
            step |= {names[key]: value for key, value in entry["data"].items() if key in names}
    return list(steps.values())

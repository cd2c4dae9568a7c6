"""What a run begins with: the model it was given, or its own newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.policy import STARTER
from groundwire.train.policy.device import check_device
from groundwire.train.policy.errors import ModelUnreadableError
from groundwire.train.policy.model import load_policy

__all__ = ["InitialState", "load_initial_state"]


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """``state`` is the trainer's, None before the first checkpoint; ``note`` is what a user should be told."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    state: dict[str, Any] | None = None
    note: str = ""


def load_initial_state(config: RunConfig, run: RunDir) -> InitialState:
    """The model on ``config.device``. A checkpoint that cannot be read is set aside, and the one before is taken.

    Raises :class:`groundwire.train.config.errors.ConfigError` for a device or a model that cannot be used, and
    :class:`groundwire.train.artifacts.run_dir.RunDamagedError` where there are checkpoints and none of them can be
    read.
    """
    check_device(config.device)
    unreadable: list[tuple[Path, RunDamagedError]] = []
    for checkpoint in reversed(run.checkpoints.paths()):
        try:
            model, tokenizer, state = _checkpoint(checkpoint, config.device)
        except RunDamagedError as error:
            unreadable.append((checkpoint, error))
            continue
        notes = []
        for damaged, reason in unreadable:
            kept = run.checkpoints.rename_damaged(damaged)
            notes.append(f"{reason}: going on from {checkpoint.name}, and {damaged.name} is kept as {kept.name}")
        return InitialState(model=model.to(config.device), tokenizer=tokenizer, state=state, note="\n".join(notes))
    if unreadable:
        raise RunDamagedError(f"{unreadable[0][1]}, and there is no earlier checkpoint that can: start a new run")
    model, tokenizer = load_policy(STARTER if config.model == "starter" else Path(config.model))
    return InitialState(model=model.to(config.device), tokenizer=tokenizer)


def _checkpoint(folder: Path, device: str) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, dict[str, Any]]:
    try:
        model, tokenizer = load_policy(folder)
    except (FileNotFoundError, ModelUnreadableError) as error:
        raise RunDamagedError(str(error)) from error
    file = folder / "trainer.pt"
    try:
        return model, tokenizer, torch.load(file, map_location=device, weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch, zipfile and pickle each have errors of their own for a file that is not whole
        why = str(error).partition(". ")[0].strip() or type(error).__name__
        raise RunDamagedError(f"{file} cannot be loaded: {why}") from error

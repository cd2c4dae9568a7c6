"""The state that a run starts from: its newest checkpoint, or the model of its settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.policy import STARTER
from groundwire.train.policy.errors import ModelUnreadableError
from groundwire.train.policy.model import check_device, load_policy

__all__ = ["InitialState", "load_initial_state"]


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """A model with its tokenizer, and the trainer's state if they come from a checkpoint."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    state: dict[str, Any] | None = None
    note: str = ""
    """For the user: the damaged checkpoints that were renamed."""


def load_initial_state(config: RunConfig, run: RunDir) -> InitialState:
    """Load the model to ``config.device``. Damaged checkpoints are renamed, and the newest readable one is taken.

    Raises:
        ConfigError: the device or the model cannot be used.
        RunDamagedError: none of the run's checkpoints can be read.
    """
    check_device(config.device)
    unreadable: list[tuple[Path, RunDamagedError]] = []
    for checkpoint in reversed(run.checkpoints.paths()):
        try:
            model, tokenizer, state = _load_checkpoint(checkpoint, config.device)
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


def _load_checkpoint(folder: Path, device: str) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, dict[str, Any]]:
    try:
        model, tokenizer = load_policy(folder)
    except (FileNotFoundError, ModelUnreadableError) as error:
        raise RunDamagedError(str(error)) from error
    file = folder / "trainer.pt"
    try:
        return model, tokenizer, torch.load(file, map_location=device, weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch, zipfile and pickle raise many types for a damaged file
        reason = str(error).partition(". ")[0].strip() or type(error).__name__
        raise RunDamagedError(f"{file} cannot be loaded: {reason}") from error

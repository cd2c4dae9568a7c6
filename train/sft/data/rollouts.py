"""Accepted rollouts of a run: what the policy sampled where the reward was high (rejection sampling).

Yuan et al. 2023, "Scaling Relationship on Learning Mathematical Reasoning" (arXiv:2308.01825): several different
correct answers to each question are learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.sft_settings import FORMATS, SFTSettings
from groundwire.train.report.token_text import token_decoder
from groundwire.train.sft.data.examples import Example

__all__ = ["accepted_rollouts", "check_tokenizer", "with_run_settings"]

_FROM_RUN = (
    *("model", "domain", "data_dir", "prompt_profile", "table_info_truncate", "example_values", "show_keys"),
    "max_model_len",
)
_COLUMNS = ("mode", "step", "task_id", "status", "reward", "calls")


def with_run_settings(settings: SFTSettings, given: Mapping[str, Any]) -> SFTSettings:
    """``settings`` with the model, domain, agent and prompts of the run ``settings.rollouts`` where none are given."""
    config = RunDir.open(str(settings.rollouts)).config()
    stored = {name: config[name] for name in _FROM_RUN if name in config}
    if config.get("backend") in FORMATS:
        stored["backend"] = [config["backend"]]
    return SFTSettings(**{**settings.model_dump(), **stored, **given})


def accepted_rollouts(run: RunDir, *, min_reward: float, per_task: int) -> list[list[Example]]:
    """The calls of each task's accepted training rollouts, which differ in their replies.

    At most ``per_task`` (0: all) of a task: those with the highest rewards, of the latest steps. Validation rollouts
    are never learned. Raises :class:`ConfigError` if there are none, and for an evaluation.
    """
    if "evaluation" in run.config():
        raise ConfigError(f"{run.path} is an evaluation, which is never learned: give the folder of a train.run")
    rows, _ = run.rollouts(_COLUMNS, _COLUMNS)
    rows = [row for row in rows if row["mode"] == "train" and row["reward"] is not None and row["calls"]]
    rewards = [row["reward"] for row in rows]
    rows = [row for row in rows if row["reward"] >= min_reward]
    if not rows:
        best = f"the highest reward of {len(rewards):,} is {max(rewards):g}" if rewards else "it has none with calls"
        raise ConfigError(f"{run.path} has no training rollout with a reward of at least {min_reward:g}: {best}")
    tasks: dict[str, dict[Any, list[Example]]] = {}
    for row in sorted(rows, key=lambda each: (-each["reward"], -each["step"])):
        accepted = tasks.setdefault(row["task_id"], {})
        replies = tuple(tuple(call["response_ids"]) for call in row["calls"])
        if not per_task or len(accepted) < per_task:
            accepted.setdefault(replies, [Example(call["prompt_ids"], call["response_ids"]) for call in row["calls"]])
    return [[each for rollout in accepted.values() for each in rollout] for accepted in tasks.values()]


def check_tokenizer(run: RunDir, tokenizer: Any, model: str | Path) -> None:
    """Raise :class:`ConfigError` unless the token ids of ``run`` mean the same to ``model``."""
    if token_decoder(run).vocabulary != tokenizer.get_vocab():
        raise ConfigError(
            f"{run.path} has token ids of another tokenizer than that of {model}: learn with the run's own model "
            f"({run.config().get('model')})"
        )

"""A run's settings: one flat record.

The resolved record is written into the run directory, so a run can be resumed, repeated and compared from it alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from groundwire.rewards import JudgeSettings, JudgeSettingsError
from groundwire.train.config.errors import ConfigError

__all__ = ["TRACKERS", "RunConfig"]

TRACKERS = ("tensorboard", "wandb")

_AGENTS = (
    *(
        "trainer",
        "config",
        "backend",
        "domain",
        "reward",
        "max_turns",
        "table_info_truncate",
        "example_values",
        "show_keys",
    ),
    *("execution_truncate", "rollout_timeout_s", "judge"),
)

_LEAST = {
    **dict.fromkeys(("tasks_per_step", "max_turns", "table_info_truncate", "max_tokens", "max_model_len"), 1),
    **dict.fromkeys(("runner_processes", "proxy_port", "example_values", "execution_truncate", "retries"), 0),
    **dict.fromkeys(("val_tasks", "val_every", "val_every_tasks", "clip_low", "clip_high"), 0),
    "checkpoint_every": 1,
}
_POSITIVE = ("temperature", "learning_rate", "unresponsive_s", "rollout_timeout_s", "step_deadline_s")

_CHOICES = {"trainer": ("local", "verl"), "credit": ("broadcast", "last", "discount")}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every setting of ``python -m train.run``."""

    backend: str = "langgraph"
    agent: str | None = None
    """``module:function`` of an agent that is a function of yours (backend ``custom``)."""
    domain: str = "spider"
    reward: str | None = None
    """Name of the reward, or a sum (``0.9*a+0.1*b``); the domain's own by default."""
    judge: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the defaults of :class:`rewards.JudgeSettings`, for rewards that ask a judge."""
    config: str = "fast"
    model: str = "starter"
    """``starter`` (the checkpoint that ships with the project) or a folder in Hugging Face's format."""
    trainer: str = "local"
    """``local`` (embedded, in this process) or ``verl`` (on GPUs)."""
    track: Sequence[str] = ()
    """Where the figures of each step are sent, beside the run's own files: ``tensorboard``, ``wandb``."""
    device: str = "cpu"
    data_dir: str | None = None
    output_dir: str = "runs"
    seed: int = 0

    steps: int = 28
    tasks_per_step: int = 12
    group_size: int = 8
    """Rollouts per task and step: the group that a reward is compared with."""
    n_runners: int = 96
    runner_processes: int = 0
    """Processes that the runners are spread over; 0 keeps them in the trainer's own, which suits a small model."""
    external_store_address: str | None = None
    """A Lightning store in another process (``http://HOST:PORT``); by default it lives and ends with the run."""
    llm_proxy: bool = False
    """Accepted and without effect: LLM calls always go through the proxy."""
    unresponsive_s: float = 30.0
    """Silence after which a runner elsewhere loses its rollout to another."""
    proxy_host: str = "127.0.0.1"
    """Address of this machine at which runners on other machines reach the LLM proxy."""
    proxy_port: int = 0
    """Its port; 0 takes any that is free."""
    agent_match: str | None = None
    """Regular expression over agent names; only the calls of matching agents are trained. All by default."""
    max_turns: int = 2
    """Queries the agent may write for one question: the first and its rewrites."""
    table_info_truncate: int = 4000
    """Characters of the schema that the agent reads; cut on whole tables."""
    example_values: int = 0
    """Example values per column in the schema; the starter policy has never seen any."""
    show_keys: bool = False
    """Whether the schema shows primary and foreign keys; the starter policy has never seen any."""
    execution_truncate: int = 72
    """Characters of a query's result that the agent reads."""
    max_tokens: int = 64
    """Tokens that one reply may have."""
    max_model_len: int = 1024
    """Tokens that prompt and reply may have together."""

    temperature: float = 1.0
    val_temperature: float = 0.0
    val_tasks: int = 200
    """Validation questions before and after training (0 is all of them)."""
    val_every: int = 7
    """Steps between the shorter validations on the way (0 is never)."""
    val_every_tasks: int = 64

    credit: str = "broadcast"
    """Which calls of a rollout its reward is for: all (``broadcast``), the ``last``, or all with a ``discount``."""
    credit_discount: float = 0.9
    """With ``discount``: what each call counts less than the one after it."""

    learning_rate: float = 2e-4
    minibatches: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.3

    rollout_timeout_s: float = 60.0
    step_deadline_s: float = 300.0
    retries: int = 1
    checkpoint_every: int = 1
    """Steps between checkpoints, which is what a kill may lose."""

    verl: Mapping[str, Any] = field(default_factory=dict)
    """Settings of verl's own, by their dotted names; they win over a preset's."""

    def __post_init__(self) -> None:
        verl = self.trainer == "verl"  # there 0 steps are as many as the epochs have, and -1 is never
        least = dict(_LEAST, n_runners=int(self.external_store_address is None), steps=int(not verl))
        least |= {"checkpoint_every": -1, "val_every": -1} if verl else {}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(known)}")
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and not math.isfinite(value):  # nan is neither above nor below any bound
                raise ConfigError(f"{each.name} is {value}; it must be a finite number")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        elsewhere = self.external_store_address is not None
        for wrong, message in (
            (self.group_size < 2, f"group_size is {self.group_size}; a rollout needs another one to be compared with"),
            (self.val_temperature < 0, f"val_temperature is {self.val_temperature}; it must be 0 (greedy) or above"),
            (
                self.runner_processes and elsewhere,
                "runner_processes belong to a store that lives with the run: with another one, start train.runner",
            ),
            (
                self.credit != "broadcast" and self.trainer == "local",
                f"credit is {self.credit!r}, which the local trainer does not have: use --trainer verl",
            ),
            (
                not 0 < self.credit_discount <= 1,
                f"credit_discount is {self.credit_discount}; it must be above 0 and up to 1",
            ),
        ):
            if wrong:
                raise ConfigError(message)
        self.judge_settings()
        try:
            re.compile(self.agent_match or "")
        except re.error as error:
            raise ConfigError(f"agent_match {self.agent_match!r} is not a regular expression: {error}") from error

    def judge_settings(self) -> JudgeSettings:
        """The judge of this run. Raises :class:`ConfigError`."""
        try:
            judge = JudgeSettings.of(self.judge)
        except JudgeSettingsError as error:
            raise ConfigError(str(error)) from error
        if judge.model is not None and judge.deadline_s > self.rollout_timeout_s:
            # The store ends an attempt after twice the rollout's timeout, its verdict included.
            raise ConfigError(
                f"judge deadline_s is {judge.deadline_s:g}, and rollout_timeout_s {self.rollout_timeout_s:g}: "
                "a verdict may take as long as a rollout at most"
            )
        return judge

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values."""
        return asdict(self)

    def for_agents(self) -> dict[str, Any]:
        """What a runner elsewhere must know to make the same agents."""
        return {name: getattr(self, name) for name in _AGENTS}

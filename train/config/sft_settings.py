"""The settings of ``groundwire sft``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, model_validator

from groundwire.tools.settings import Settings, setting
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.gone import OF_SQL_AGENTS
from groundwire.train.config.run_config import split_names

_Format = Literal["langgraph", "openai-agents"]
FORMATS: tuple[str, ...] = get_args(_Format)
"""The agents whose prompts are trained on: text prompts, and tool calls."""

_data = partial(setting, panel="Data and model")
_prompt = partial(setting, panel="Prompts, as the agent sends them")
_training = partial(setting, panel="Training")
_measure = partial(setting, panel="Held-out data and output")


class SFTSettings(Settings):
    """Every setting of a supervised run."""

    model_config = ConfigDict(strict=True)
    error = ConfigError
    gone = OF_SQL_AGENTS

    model: str = _data("smollm2", "starter, smollm2, a folder in Hugging Face's format, a GGUF file or OWNER/MODEL")
    chats: str | None = _data(
        None, "Learn chats of this file, not gold queries: JSON lines with messages and tools", metavar="FILE"
    )
    rollouts: str | None = _data(None, "Learn accepted rollouts of this run, not gold queries", metavar="RUN_DIR")
    min_reward: float = _data(1.0, "Least reward of an accepted rollout")
    max_per_task: int = _data(4, "Most accepted rollouts of a task, the best; 0: all", ge=0)
    domain: str = _data("spider", "Domain whose gold queries are learned")
    data_dir: str | None = _data(None, "Folder with the domain's data; default: bundled", metavar="DIR")
    backend: Annotated[list[_Format], BeforeValidator(split_names)] = _data(
        lambda: ["langgraph"], "Whose turns: langgraph (text), openai-agents (tool calls), or both", metavar="NAME,NAME"
    )
    device: str = _data("cpu", "cpu, cuda, mps or xpu")
    gpus: int = _data(1, "Several train with verl, without shared prefixes", ge=1)
    seed: int = _data(0, "Seed of order, held-out part, wrong queries and changed schemas")

    agent_options: Mapping[str, Any] = _prompt(
        dict, "An option of the SQL agents, as in the later run", metavar="NAME=VALUE"
    )
    max_model_len: int = _prompt(2048, "Tokens of prompt and reply; longer turns are left out", ge=1)

    epochs: float = _training(2.0, "Passes over the training data", gt=0)
    time_limit_s: float | None = _training(None, "Seconds of training; the learning rate falls until then", gt=0)
    learning_rate: float | None = _training(None, "Highest learning rate; default: by the model's size", gt=0)
    tokens_per_step: int = _training(16384, "Tokens per step; a shared prompt counts once", ge=1)
    later_turns: float = _training(
        0.5, "Share of questions with turns after a first query: check, rewrite, end", ge=0, le=1
    )
    augment: float = _training(0.5, "Share of schemas with another order, fewer tables or other spellings", ge=0, le=1)

    val_tasks: int = _measure(200, "Held-out questions; 0: all. Of chats and rollouts at most a tenth", ge=0)
    output_dir: str = _measure("sft", "Folder for runs", metavar="DIR")

    @model_validator(mode="after")
    def _check(self) -> SFTSettings:
        if self.chats and self.rollouts:
            raise ConfigError(f"chats is {self.chats!r} and rollouts {self.rollouts!r}: give one of them")
        return self

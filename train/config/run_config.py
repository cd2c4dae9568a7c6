"""A run's settings: one flat record.

The resolved record is written into the run directory, so a run can be resumed, repeated and compared from it alone.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, model_validator

from groundwire.rewards import JudgeSettings
from groundwire.tools.files import first_error, read_json
from groundwire.tools.http.access_token import is_loopback
from groundwire.tools.secrets import mask_secrets
from groundwire.tools.settings import Settings, setting
from groundwire.tools.text import valid_texts
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.failures import failure_changes
from groundwire.train.config.gone import OF_RUN, OF_SQL_AGENTS

_PROMPTS = TypeAdapter(Annotated[dict[str, Annotated[str, Field(max_length=200_000)]], Field(min_length=1)])


def read_prompts(value: Any) -> Any:
    """The prompts by their names: ``value``, or the JSON object in the file of this name."""
    if not isinstance(value, str | Path):
        return valid_texts(value)
    try:
        prompts = read_json(Path(value), unique=True)
    except OSError as error:
        raise ConfigError(f"prompts: {value} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"prompts: {value} is not valid JSON: {error}") from error
    if problem := first_error(_PROMPTS, prompts):
        raise ConfigError(f'prompts: {value} must hold texts by their names, e.g. {{"system": "..."}}, but {problem}')
    return prompts


_HOST_PORT = re.compile(r"([^:]+|\[.*\]):(\d+)")  # not an IPv6 address without brackets
_Tracker = Literal["tensorboard", "wandb", "swanlab"]
TRACKERS: tuple[str, ...] = get_args(_Tracker)

_agent = partial(setting, panel="Agent")
_data = partial(setting, panel="Data, model and output")
_training = partial(setting, panel="Training")
_sampling = partial(setting, panel="Tasks and sampling")
_loss = partial(setting, panel="Loss and optimizer")
_validation = partial(setting, panel="Validation")
_gepa = partial(setting, panel="Prompt optimisation (--trainer gepa)")
_rollouts = partial(setting, panel="Rollouts")
_store = partial(setting, panel="Store and proxy")

AGENT_FUNCTIONS = ("agent_input", "agent_output", "agent_context", "agent_config")
"""The settings that are functions of an agent's author, beside the agent."""
SQL_AGENTS = ("langgraph", "openai-agents", "mcp")
"""Backends that, without an agent of the user's, run one of the project's."""
OF_PROCESSES = ("rollout_process", "agent_folder", "agent_env", "sealed")
"""How a runner runs rollouts: each has its own, as systems differ."""


def regular_expression(name: str, value: str | None) -> str | None:
    """``value``, the setting ``name``. Raises :class:`ConfigError`."""
    try:
        re.compile(value or "")
    except re.error as error:
        raise ConfigError(f"{name} {value!r} is not a regular expression: {error}") from None
    return value


def _check_port(host: str) -> str:
    if (address := _HOST_PORT.fullmatch(host)) and int(address[2]) > 65535:
        raise ConfigError(f"proxy_host is {host!r}; its port must be at most 65535")
    return host


def _no_number(domain: str) -> str:
    if domain.isdecimal():
        raise ConfigError(f"domain is {domain}: --tasks takes a file of tasks; how many are validated is --val-tasks")
    return domain


def split_names(value: Any) -> Any:
    """The different names in a text with commas, or in a list."""
    names = (name.strip() for name in value.split(",")) if isinstance(value, str) else value
    return list(dict.fromkeys(filter(None, names))) if isinstance(names, Iterable) else names


def _join_names(value: Any) -> Any:
    names = split_names(value)
    return ",".join(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else value


class AgentSettings(Settings):
    """The settings that agents use. A runner on another machine receives them with each rollout."""

    model_config = ConfigDict(strict=True)
    error = ConfigError
    gone = OF_SQL_AGENTS
    renamed = MappingProxyType({"tasks": "domain"})

    backend: str = _agent("langgraph", "Agent framework: langgraph, openai-agents, mcp, custom or a plugin's")
    agent: str | None = _agent(
        None,
        "Agent, function of the task, or function that makes the agent: MODULE:NAME, FILE.py:NAME, or . for "
        "this folder's",
        metavar="AGENT",
    )
    agent_input: str | None = _agent(None, "Makes the agent's input from the task", metavar="MODULE:NAME")
    agent_output: str | None = _agent(None, "Makes the answer from the agent's result", metavar="MODULE:NAME")
    agent_context: str | None = _agent(
        None, "Makes the context (dependencies) of the agent's run, from the task or nothing", metavar="MODULE:NAME"
    )
    agent_config: str | None = _agent(
        None, "Makes more arguments of the agent's run, as a dict, from the task or nothing", metavar="MODULE:NAME"
    )
    train_model: Annotated[str | None, AfterValidator(partial(regular_expression, "train_model"))] = _agent(
        None, "Train only the agent's models whose names match; others keep their provider", metavar="REGEX"
    )
    domain: Annotated[str, AfterValidator(_no_number)] = _agent(
        "spider",
        "Domain (spider, sqlite, bird, medical or a plugin's), or a file of your tasks (.jsonl, .csv)",
        flags=("--tasks",),
    )
    reward: str | None = _agent(
        None, "Its name, a function of yours, or a sum such as 0.9*a+0.1*b; default: the domain's"
    )
    judge: JudgeSettings = _agent(JudgeSettings, "Settings of the judge, for rewards that ask one", strict=False)
    agent_columns: Annotated[str, BeforeValidator(_join_names)] = _agent(
        "",
        "Columns for the agent although the reward reads them or they are named like a gold answer",
        metavar="NAME,NAME",
    )
    agent_options: Mapping[str, Any] = _agent(
        dict,
        "Keyword argument of the function that makes the agent, e.g. max_turns=3 of the SQL agents",
        metavar="NAME=VALUE",
    )
    rollout_process: Literal["fork", "spawn", "off"] = _rollouts(
        "fork" if sys.platform == "linux" else "spawn",
        "Process for each rollout: forked after the agent's import, or fresh (spawn); off: for agents without state",
    )
    agent_folder: Literal["copy", "empty", "shared"] = _rollouts(
        "copy", "Working folder of a rollout's process: a copy of this one (on write), empty, or shared"
    )
    agent_env: Annotated[str, BeforeValidator(_join_names)] = _rollouts(
        "", "Further variables of this environment for agents' processes, such as a tool's key", metavar="NAME,NAME"
    )
    sealed: bool = _rollouts(False, "Leave rollouts in forked processes no network but the model")
    rollout_timeout_s: float = _rollouts(60.0, "Seconds for one rollout, without its reward", gt=0)
    reward_timeout_s: float = _rollouts(120.0, "Seconds for the reward of a rollout, which fails after them", gt=0)
    failures: Annotated[str, BeforeValidator(failure_changes)] = _rollouts(
        "",
        "Other scores of failed rollouts: zero (the run's least reward), a number, or drop (none)",
        metavar="TYPE=drop",
    )

    @model_validator(mode="after")
    def _judge_in_time(self) -> AgentSettings:
        if self.judge.model is not None and self.judge.deadline_s > self.reward_timeout_s:
            raise ConfigError(
                f"judge deadline_s is {self.judge.deadline_s:g}, and reward_timeout_s {self.reward_timeout_s:g}: "
                "a verdict may take as long as a reward at most"
            )
        return self


class RunConfig(AgentSettings):
    """Every setting of ``groundwire run``."""

    gone = OF_SQL_AGENTS | OF_RUN

    config: str = _data(
        "fast", "Preset, or a .toml or .yaml file of settings, whose config names a preset", metavar="NAME|FILE"
    )
    trainer: Literal["local", "verl", "gepa"] = _training(
        "local", "local (this process), verl (GPUs), or gepa (optimises prompts)"
    )
    model: str = _data(
        "starter",
        "starter (bundled), smollm2, a folder in Hugging Face's format, a GGUF file, or OWNER/MODEL of the hub",
    )
    data_dir: str | None = _data(None, "Folder with the domain's data; default: bundled", metavar="DIR")
    group_column: str | None = _data(
        None, "Column whose values are held out whole; default: those named like db_id, document, group", metavar="NAME"
    )
    allow_shared: bool = _data(False, "Accept validation tasks that have questions of training tasks")
    gold_trust: str | None = _data(
        None, "File such as suspects.json: a training task stays with its gold's trust as probability", metavar="FILE"
    )
    output_dir: str = _data("runs", "Folder for run directories", metavar="DIR")
    prompts: Annotated[Mapping[str, str], BeforeValidator(read_prompts)] = _data(
        dict, "JSON file with the agent's named prompts, such as gepa's prompts.json", metavar="FILE"
    )
    device: str = _data("cpu", "cpu, cuda, mps or xpu")
    seed: int = _data(0, "Seed of sampling and task order")
    track: Annotated[list[_Tracker], BeforeValidator(split_names)] = _data(
        list, "Also send each step's metrics to tensorboard, wandb or swanlab", metavar="NAME,NAME"
    )

    otlp: str | None = _data(
        None, "Also send rollouts as traces to this OpenTelemetry collector (OTLP over HTTP)", metavar="URL"
    )

    steps: int = _training(36, "Training steps. 0, with verl: those of its epochs", ge=0)
    tasks_per_step: int = _sampling(12, "Tasks per training step", ge=1)
    group_size: int = _sampling(8, "Rollouts per task and step, whose rewards are compared", ge=2)
    sampling_budget: float = _sampling(
        1.0,
        "Above 1: replace groups with equal rewards, up to this many times a step's groups (dynamic sampling)",
        ge=1,
    )
    temperature: float = _sampling(1.0, "Sampling temperature in training", gt=0)
    minibatches: int = _training(2, "Optimizer updates per step", ge=1)
    credit: Literal["broadcast", "last", "discount", "turns"] = _training(
        "broadcast",
        "Who gets the reward: all calls (broadcast), the last, earlier ones less (discount); turns: each call"
        " its own return",
    )
    credit_discount: float = _training(
        1.0, "Factor from a call to the one before, of its return (turns) or weight (discount: 0.9)", gt=0, le=1
    )
    call_cost: float = _training(0.0, "Subtracted from the reward for each trained LLM call, in the update alone", ge=0)
    agent_match: Annotated[str | None, AfterValidator(partial(regular_expression, "agent_match"))] = _training(
        None, "Train only agents whose names match", flags=("--active-agent",), metavar="REGEX"
    )
    truncated: Literal["train", "mask", "zero"] = _training(
        "train",
        "Replies that max_tokens cut off: train, leave out of the loss (mask), or give the rollout the run's "
        "least reward (zero)",
    )
    checkpoint_every: int = _training(1, "Steps between checkpoints. -1, with verl: never", ge=-1)

    loss: Literal["token-mean", "sequence-mean", "dr-grpo", "gspo"] = _loss(
        "token-mean",
        "Clipped loss, mean over tokens or sequences; dr-grpo: constant divisor, advantages without deviation; gspo: "
        "ratio of sequences",
    )
    clip_high: float = _loss(0.3, "Upper clipping range of the probability ratio; the lower is 0.2", ge=0)
    kl_coef: float = _loss(0.0, "Weight of the KL divergence to the model at the start", ge=0)
    teacher: str | None = _loss(
        None,
        "On-policy distillation: a server with prompt_logprobs, vLLM or groundwire serve (key: OPENAI_API_KEY)",
        metavar="URL",
    )
    teacher_model: str | None = _loss(None, "Name of the teacher's model", metavar="NAME")
    teacher_weight: float = _loss(0.5, "The teacher's part in an advantage; 1: in place of the reward", gt=0, le=1)
    entropy_coef: float = _loss(0.0, "Weight of the entropy that is subtracted from the loss", ge=0)
    learning_rate: float | None = _loss(2e-4, "Learning rate", gt=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = _loss(
        "constant", "Learning rate after the warm-up; linear (local trainer) and cosine fall to 0 at the end"
    )
    warmup_steps: int = _loss(5, "Steps in which the learning rate rises", ge=0)
    lora_rank: int = _loss(0, "Rank of LoRA adapters beside frozen weights; 0: train the weights", ge=0)

    prompt_budget: int = _gepa(600, "Rollouts on training tasks, in all", ge=1)
    reflection_model: str | None = _gepa(
        None,
        "Model that writes prompts: LiteLLM's name, or NAME@URL of an OpenAI-compatible endpoint (key: OPENAI_API_KEY)",
        metavar="NAME[@URL]",
    )

    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto",
        "Of matrix products. auto: bf16 on CUDA, and on CPUs that have it from 20 M parameters",
        panel="Memory of the local trainer",
    )

    sampler: Literal["embedded", "vllm"] = setting(
        "embedded",
        "What samples for the local trainer. vllm: in a process beside it, on the same GPU",
        panel="Memory of the local trainer",
    )

    val_temperature: float = _validation(0.0, "0: greedy, before and after training also sampled", ge=0)
    val_tasks: int = _validation(200, "Validation questions, before and after training; 0: all", ge=0)
    val_every: int = _validation(
        9, "Steps between the shorter validations, of 64 questions. 0, with verl also -1: never", ge=-1
    )

    max_calls: int = _rollouts(
        0, "Most LLM calls of a rollout, which a further one fails (turn_limit). 0: no limit", ge=0
    )
    max_spans: int = _rollouts(
        100_000,
        "Most spans of a rollout, LLM calls included, of 10 KiB on average; a further one fails it (trace_limit)",
        ge=1,
    )
    n_runners: int = _rollouts(96, "Rollouts that run at once. 0: only in runners of an external store", ge=0)
    runner_processes: int | None = _rollouts(
        None,
        "Processes for agents. 0: the trainer's, with verl some of its own. Default: 1 beside the local trainer for a "
        "bundled agent, from 64 rollouts a step and two processors on, else 0",
        ge=0,
    )
    runner_python: str | None = _rollouts(
        None,
        "Python of the agent's environment, which has groundwire's base: agents and rewards run there",
        metavar="PYTHON",
    )
    max_tokens: int = _rollouts(64, "Tokens of one reply", ge=1)
    max_model_len: int = _rollouts(2048, "Tokens of prompt and reply together", ge=1)
    zero_attacks: bool = _rollouts(
        False, "Give answers that win with a known attack (groundwire audit --attack) the least reward"
    )
    retries: int = _rollouts(1, "Further attempts after a failure without fault of the policy", ge=0)

    external_store_address: str | None = _store(None, "Train through the store at http://HOST:PORT", metavar="URL")
    token_file: str | None = _store(
        None, "File with the store's token; default: GROUNDWIRE_TOKEN, else the user's own", metavar="FILE"
    )
    proxy_host: Annotated[str, AfterValidator(_check_port)] = _store(
        "127.0.0.1",
        "Address of this machine's LLM proxy for remote runners; without :PORT at a free port",
        metavar="HOST[:PORT]",
    )

    verl: Mapping[str, Any] = setting(dict, "Settings of verl's own, by their dotted names; they win over a preset's")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_other_values(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("runner_python") and not values.get("runner_processes"):
            values = {**values, "runner_processes": 1}
        if isinstance(values, dict) and values.get("credit") == "discount":
            values = {"credit_discount": 0.9, **values}
        return values

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        local, external = self.trainer != "verl", self.external_store_address is not None
        least = {"steps": 1, "val_every": 0, "checkpoint_every": 1} if local else {}
        for name, low in {**least, "n_runners": 0 if external else 1}.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if self.credit == "discount" and self.credit_discount == 1:
            raise ConfigError(
                "credit is discount with a credit_discount of 1: all calls would weigh the same, as with "
                "credit=broadcast; give a credit_discount below 1, such as 0.9"
            )
        if self.teacher is None and self.teacher_model:
            raise ConfigError(f"teacher_model is {self.teacher_model}: give its server, too: teacher=URL")
        if self.teacher is not None and not (self.teacher.startswith("http") and self.teacher_model):
            raise ConfigError(
                f"teacher is {self.teacher!r}, and teacher_model {self.teacher_model!r}: give a server's base URL, "
                "such as http://127.0.0.1:8000/v1, and the name of its model"
            )
        if self.teacher is not None and self.trainer == "gepa":
            raise ConfigError("teacher is for trainers that update a model: gepa optimises prompts")
        if self.runner_processes and external:
            name = "runner_python" if self.runner_python else "runner_processes"
            raise ConfigError(
                f"{name} is {getattr(self, name)}, but the store at {self.external_store_address} has its own "
                "runners: leave it out, and start groundwire runner in the agents' environment"
            )
        if self.trainer == "verl" and self.sampler != "embedded":
            raise ConfigError("sampler is for the local trainer: verl samples with actor_rollout_ref.rollout.name")
        if not local and self.precision != "auto":
            raise ConfigError(
                f"precision is {self.precision!r}, which only the local trainer has; use "
                "actor_rollout_ref.actor.fsdp_config.dtype=..., verl's own setting"
            )
        return self

    @property
    def scale_rewards(self) -> bool:
        """Whether advantages are divided by the standard deviation of the group: not by Dr. GRPO (Liu et al. 2025)."""
        return self.loss != "dr-grpo"

    @property
    def max_batch(self) -> int:
        """The most requests that the embedded engine decodes together: one of each rollout that runs at once."""
        return self.n_runners or 128

    @property
    def most_groups(self) -> int:
        """The most groups of a step: those after the first ``tasks_per_step`` replace groups that teach nothing."""
        return int(self.tasks_per_step * self.sampling_budget)

    @property
    def bf16(self) -> bool | None:
        """Whether matrix products are in bfloat16; None: where that is faster."""
        return None if self.precision == "auto" else self.precision == "bf16"

    @property
    def step_deadline_s(self) -> float:
        """Seconds that the rollouts of one step may take. Some wait for others, and may be tried again."""
        return 6 * self.rollout_timeout_s

    @property
    def proxy_address(self) -> tuple[str, int]:
        """The host and the port of the LLM proxy; port 0 takes a free one."""
        address = _HOST_PORT.fullmatch(self.proxy_host)
        return (address[1], int(address[2])) if address else (self.proxy_host, 0)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values."""
        return self.model_dump(mode="json")

    def for_agents(self) -> dict[str, Any]:
        """The values of :class:`AgentSettings` for runners, without what each has for itself."""
        own: Any = {**dict.fromkeys(("agent", *AGENT_FUNCTIONS, *OF_PROCESSES), True), "judge": {"cache"}}
        return self.model_dump(mode="json", include=set(AgentSettings.model_fields), exclude=own)

    def runner_options(self) -> list[str]:
        """The options with which ``groundwire runner`` runs the agents of this run."""
        options = {"backend": self.backend, "agent": self.agent, "domain": self.domain, "reward": self.reward}
        options |= {name.replace("_", "-"): getattr(self, name) for name in (*AGENT_FUNCTIONS, "train_model")}
        options |= {"data-dir": self.data_dir, "judge-model": self.judge.model, "judge-base-url": self.judge.base_url}
        store = urlsplit(self.external_store_address or "").hostname
        host, _ = self.proxy_address
        if host != store and not is_loopback(host):
            options["policy-host"] = host
        changed = self.judge.model_dump(mode="json", exclude_defaults=True, exclude={"model", "base_url"})
        pairs = [("judge", f"{name}={value}") for name, value in changed.items()]
        if self.agent is not None or self.backend not in SQL_AGENTS:  # else they come with each rollout
            pairs += [("agent-option", f"{name}={json.dumps(value)}") for name, value in self.agent_options.items()]
        for name in OF_PROCESSES[:3]:
            if name in self.model_fields_set:
                options[name.replace("_", "-")] = getattr(self, name)
        named = [(f"--{name}", value) for name, value in [*options.items(), *pairs] if value is not None]
        return [*(text for option in named for text in option), *["--sealed"] * self.sealed]

    def runner_command(self) -> str:
        """The command that starts a runner for this run, at its external store, for the user to read."""
        command = ["groundwire", "runner", "--external-store-address", str(self.external_store_address)]
        return mask_secrets(shlex.join([*command, *self.runner_options()]))

# Made by python -m dev.settings_page from groundwire.train.config.run_config and groundwire.train.config.sft_settings.
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

class Settings(TypedDict, total=False):
    backend: str | None
    agent_input: str | Callable[..., Any] | None
    agent_output: str | Callable[..., Any] | None
    agent_context: str | Callable[..., Any] | None
    agent_config: str | Callable[..., Any] | None
    train_model: str | None
    domain: str | None
    judge: Mapping[str, Any] | None
    agent_columns: str | None
    agent_options: Mapping[str, Any] | None
    rollout_process: Literal["fork", "spawn", "off"] | None
    agent_folder: Literal["copy", "empty", "shared"] | None
    agent_env: str | None
    sealed: bool | None
    rollout_timeout_s: float | None
    reward_timeout_s: float | None
    failures: str | None
    config: str | Path | None
    trainer: Literal["local", "verl", "gepa"] | None
    model: str | Path | None
    data_dir: str | Path | None
    group_column: str | None
    allow_shared: bool | None
    gold_trust: str | Path | None
    output_dir: str | Path | None
    prompts: Mapping[str, str] | Path | str | None
    device: str | None
    seed: int | None
    track: list[Literal["tensorboard", "wandb", "swanlab"]] | None
    otlp: str | None
    steps: int | None
    tasks_per_step: int | None
    group_size: int | None
    sampling_budget: float | None
    temperature: float | None
    minibatches: int | None
    credit: Literal["broadcast", "last", "discount", "turns"] | None
    credit_discount: float | None
    call_cost: float | None
    agent_match: str | None
    truncated: Literal["train", "mask", "zero"] | None
    checkpoint_every: int | None
    loss: Literal["token-mean", "sequence-mean", "dr-grpo", "gspo"] | None
    clip_high: float | None
    kl_coef: float | None
    teacher: str | None
    teacher_model: str | None
    teacher_weight: float | None
    entropy_coef: float | None
    learning_rate: float | None
    lr_schedule: Literal["constant", "linear", "cosine"] | None
    warmup_steps: int | None
    lora_rank: int | None
    prompt_budget: int | None
    reflection_model: str | None
    precision: Literal["auto", "fp32", "bf16"] | None
    sampler: Literal["embedded", "vllm"] | None
    val_temperature: float | None
    val_tasks: int | None
    val_every: int | None
    max_calls: int | None
    max_spans: int | None
    n_runners: int | None
    runner_processes: int | None
    runner_python: str | Path | None
    max_tokens: int | None
    max_model_len: int | None
    zero_attacks: bool | None
    retries: int | None
    external_store_address: str | None
    token_file: str | Path | None
    proxy_host: str | None
    verl: Mapping[str, Any] | None

class SFT(TypedDict, total=False):
    model: str | Path | None
    chats: str | Path | None
    rollouts: str | Path | None
    min_reward: float | None
    max_per_task: int | None
    domain: str | None
    data_dir: str | Path | None
    backend: list[Literal["langgraph", "openai-agents"]] | None
    device: str | None
    gpus: int | None
    seed: int | None
    agent_options: Mapping[str, Any] | None
    max_model_len: int | None
    epochs: float | None
    time_limit_s: float | None
    learning_rate: float | None
    tokens_per_step: int | None
    later_turns: float | None
    augment: float | None
    val_tasks: int | None
    output_dir: str | Path | None

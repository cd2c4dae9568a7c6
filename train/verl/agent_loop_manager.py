"""The agent loop manager that verl's V1 trainer is given (``agent_loop_manager_class``).

verl makes one in the process of its trainer, calls :meth:`RolloutManager.generate_sequences` with prompts and takes
finished groups out of TransferQueue (``verl/trainer/main_ppo.py``, ``verl/trainer/ppo/v1/``). Here the prompts become
rollouts in a Lightning store, and the same agents, proxy and rewards as on a laptop run them; nothing of verl's trainer
is replaced.
"""

from __future__ import annotations

import json
import logging
from typing import Any, ClassVar

from groundwire import domains
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.rollouts.factory import make_backend, make_reward
from groundwire.train.rollouts.runtime import RolloutRuntime
from groundwire.train.verl.engine import VerlEngine
from groundwire.train.verl.rollout_service import Prompt, RolloutService
from groundwire.train.verl.step_timer import VerlStepTimer
from groundwire.train.verl.transfer_queue import TransferQueueRows

__all__ = ["RolloutManager", "prompts_of"]

_SPAN_BYTES = 4 << 30  # spans are read when their rollout ends; nothing that is not read yet may be forgotten


class RolloutManager:
    """verl calls :meth:`create` once, then :meth:`generate_sequences` for every batch of prompts."""

    current: ClassVar[RolloutManager]
    """The one of this process: verl makes its sampler before it, and hands neither to the other."""

    def __init__(self, config: Any, llm_client: Any) -> None:
        from transformers import AutoTokenizer
        from verl.utils.fs import copy_to_local

        ours = config.groundwire
        self.config = _run_config(ours.config)
        self.run = RunDir.open(ours.run_dir)
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        self._rollouts = {"train": rollout.n, "val": rollout.val_kwargs.n}
        path = copy_to_local(model.tokenizer_path or model.path)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        if model.custom_chat_template:
            tokenizer.chat_template = model.custom_chat_template
        self.timer = VerlStepTimer()
        engine: Any = VerlEngine(  # it answers like the embedded one, as far as the servers ask
            llm_client, tokenizer, max_model_len=int(rollout.max_model_len), timer=self.timer, server=rollout.name
        )
        domain = domains.get(self.config.domain)
        stack = RolloutRuntime(
            engine=engine,
            backend=make_backend(self.config),
            domain=domain,
            reward=make_reward(self.config, domain),
            timer=self.timer,
            config=self.config,
            run=self.run,
            server={
                "tool_format": rollout.multi_turn.format,
                "template_options": dict(config.data.get("apply_chat_template_kwargs") or {}),
            },
            span_bytes=_SPAN_BYTES,
        )
        stack.__enter__()  # it lives as long as the process, which verl ends with the training
        self.service = RolloutService(
            stack=stack,
            queue=TransferQueueRows(self.config.domain),
            config=self.config,
            run=self.run,
            pad_id=int(tokenizer.eos_token_id or 0),
        )

    @classmethod
    def create(
        cls, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> RolloutManager:
        """What verl calls: ``config`` is its whole configuration, ``llm_client`` reaches its inference servers.

        Rewards come with the rollouts, so verl's reward workers stay idle. Raises ``ValueError`` for a teacher, which
        would have to see each row.
        """
        if teacher_client is not None:
            raise ValueError("distillation.enabled is set, but rollouts of agents have no teacher: turn it off")
        _quiet()
        if config.algorithm.adv_estimator == "groundwire_discount":
            from verl.trainer.ppo.core_algos import register_adv_est

            from groundwire.train.verl.credit_assignment import DISCOUNT, discounted_advantage

            register_adv_est(DISCOUNT)(discounted_advantage)
        RolloutManager.current = cls(config, llm_client)
        return RolloutManager.current

    def generate_sequences(self, prompts: Any) -> None:
        """Enqueue the rollouts of ``prompts`` (a TensorDict of verl's data set) and return."""
        self.service.submit(prompts_of(prompts, self._rollouts))

    def sampled(self, partition: str, step: int) -> dict[str, float]:
        """verl's trainer has the rollouts that it waited for. Returns the figures of what ended."""
        try:
            return self.service.take(partition, step, self.timer.sampling_ends(training=partition == "train"))
        finally:
            self.timer.update_begins()


def prompts_of(batch: Any, rollouts: dict[str, int]) -> list[Prompt]:
    """verl's batch, row by row. ``rollouts`` says how many each row of ``train`` and ``val`` wants."""
    names = set(batch.keys())
    validating = bool(_column(batch, "validate", 1)[0]) if "validate" in names else False
    partition, count = "val" if validating else "train", len(batch)
    steps = _column(batch, "global_steps", count)
    wanted = _column(batch, "__rollout_n__", count) if "__rollout_n__" in names else [rollouts[partition]] * count
    return [
        Prompt(uid=str(uid), task=json.loads(task), rollouts=int(n), step=int(step), partition=partition)
        for uid, task, n, step in zip(
            _column(batch, "uid", count), _column(batch, "task", count), wanted, steps, strict=True
        )
    ]


def _column(batch: Any, name: str, count: int) -> list[Any]:
    """A column's values: TensorDict keeps one value for all rows, a stack of values, or a tensor."""
    value = batch[name]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [getattr(each, "data", each) for each in value]
    return [getattr(value, "data", value)] * count


def _run_config(stored: Any) -> RunConfig:
    from omegaconf import OmegaConf

    return RunConfig(**OmegaConf.to_container(stored, resolve=False))


def _quiet() -> None:
    for name in ("agentlightning", "agentops", "LiteLLM", "httpx", "openai"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

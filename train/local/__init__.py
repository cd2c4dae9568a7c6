"""The embedded trainer: GRPO on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

from groundwire.tools.secrets import say
from groundwire.tools.startup import fast_import
from groundwire.tools.terminal import spinner
from groundwire.train.algorithms.model_size import MemoryPlan
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.validation import validation_missing
from groundwire.train.job.graceful_shutdown import GracefulShutdown
from groundwire.train.job.job import Job
from groundwire.train.job.trainer import Trainer, TrainingError
from groundwire.train.policy.errors import EngineError


class LocalTraining(Trainer):
    """``--trainer local``."""

    def check(self, job: Job) -> None:
        """Refuses, before the model is read, one that is larger than this machine's memory, and a sampler that is not
        here.
        """
        if job.config.sampler == "vllm":
            with spinner("starting"), fast_import():
                from groundwire.train.policy.vllm.engine import check_vllm
            check_vllm(job.config.device)
        if job.config.device == "cpu":
            with spinner("starting"), fast_import():
                from groundwire.train.local.memory_plan import check_host
            check_host(job.config)

    def train(self, job: Job, run: RunDir, callback: Any, shutdown: GracefulShutdown) -> None:
        with spinner("starting"), fast_import():
            from groundwire.train.local.trainer import LocalTrainer
        with ExitStack() as stack:  # a trainer that fails leaves no engine on the GPU
            vllm = stack.enter_context(closing(_start_vllm(job.config, run))) if job.config.sampler == "vllm" else None
            try:
                LocalTrainer(job, run=run, callback=callback, shutdown=shutdown, vllm=vllm).train()
            except EngineError as error:
                raise TrainingError(f"the sampler ended the run: {error}") from error

    def nothing_left(self, config: RunConfig, run: RunDir) -> str:
        """A message if no step and no validation is left, and the newest checkpoint can be read."""
        lines = run.metrics()
        message = super().nothing_left(config, run)
        if not message or (lines and validation_missing(config, lines[-1])):
            return ""
        with spinner("reading the newest checkpoint"), fast_import():
            from groundwire.train.policy.model import load_initial_state

            note = load_initial_state(config, run).note
        if note:  # the newest checkpoint that can be read is older
            say(f"note: {note}", err=True)
            return ""
        return message

    def plan_memory(self, config: RunConfig, available: int) -> tuple[MemoryPlan, Mapping[str, Any]]:
        from groundwire.train.local.memory_plan import plan_run

        return plan_run(config, available), {}


def _start_vllm(config: RunConfig, run: RunDir) -> Any:
    from groundwire.train.policy.pretrained.locate import find_model
    from groundwire.train.policy.vllm.engine import VLLMEngine

    return VLLMEngine(
        find_model(config.model),
        device=config.device,
        max_model_len=config.max_model_len,
        max_batch=config.max_batch,
        dtype="float32" if config.precision == "fp32" else "bfloat16",
        log=run.path / "vllm.log",
    )

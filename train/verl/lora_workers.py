"""verl's part of vLLM's workers, in runs with LoRA: vLLM's processes import it."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from groundwire.train.verl.patches import patch_vllm


class LoraWorkers(vLLMColocateWorkerExtension):
    """vLLM's worker becomes a subclass of it (its ``worker_extension_cls``)."""

    def __new__(cls, **options: Any) -> Any:
        """vLLM calls it for each worker, before the model is loaded."""
        patch_vllm()
        return super().__new__(cls, **options)

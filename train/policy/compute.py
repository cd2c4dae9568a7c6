"""How a model is computed on its device: the type of its matrix products, and the threads of the sampler."""

from __future__ import annotations

from typing import Any

import torch

from groundwire.train.policy.model import count_parameters

__all__ = ["bf16_is_faster", "sampling_threads"]

_LARGE = 20_000_000
"""Parameters of a model with which a CPU spends most of its time in matrix products."""
_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def bf16_is_faster(model: Any) -> bool:
    """Whether matrix products in bfloat16 are faster than in float32.

    They are on CUDA, and for a large model on a CPU with instructions for them.
    """
    if model.device.type != "cpu":
        return bool(model.device.type == "cuda")
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch does not know them
    return _is_large_on_cpu(model) and any(capabilities.get(name) for name in _INSTRUCTIONS)


def sampling_threads(model: Any) -> int:
    """The number of torch's threads that sample: all of them for a large model on a CPU, else one.

    With a small model a second thread would wait for the core that the agents use, if they run in the same process.
    """
    return torch.get_num_threads() if _is_large_on_cpu(model) else 1


def _is_large_on_cpu(model: Any) -> bool:
    return bool(model.device.type == "cpu") and count_parameters(model) >= _LARGE

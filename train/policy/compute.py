"""How a model is computed on its device: the type of its matrix products, and the threads that sample."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["bf16_is_faster", "sampling_threads"]

_LARGE = 20_000_000
"""From so many parameters on a CPU needs more time for matrix products than for everything around them."""
_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def bf16_is_faster(model: Any) -> bool:
    """Whether products in bfloat16 are: on CUDA, and for a large model on a CPU with instructions for them."""
    if model.device.type != "cpu":
        return bool(model.device.type == "cuda")
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch does not know them
    return _is_large(model) and any(capabilities.get(name) for name in _INSTRUCTIONS)


def sampling_threads(model: Any) -> int:
    """The torch threads of a step of the sampler, for a model on a CPU.

    All for a large model. With a small one a second thread waits at barriers for the core that the agents use, if they
    run in the same process.
    """
    return torch.get_num_threads() if _is_large(model) else 1


def _is_large(model: Any) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) >= _LARGE

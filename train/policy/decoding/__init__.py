"""A decoder's forward pass for sampling, on a CPU and on a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from groundwire.train.policy.decoding.decoder import Decoder

__all__ = ["make_decoder"]


def make_decoder(model: Any, *, max_positions: int, bf16: bool) -> Decoder:
    """The decoder for the model's device.

    The GPU's needs Triton, which comes with torch on Linux; without it the CPU's runs on the GPU.
    """
    if model.device.type == "cuda" and find_spec("triton"):
        from groundwire.train.policy.decoding.gpu_decoder import GPUDecoder

        return GPUDecoder(model, max_positions=max_positions, bf16=bf16)
    return Decoder(model, max_positions=max_positions, bf16=bf16)

"""Models with random weights for tests that look at the weights."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["small_model"]


def small_model(kind: Any, config: Any, **more: Any) -> Any:
    """A model of the class ``kind`` in evaluation mode, always with the same weights."""
    torch.manual_seed(3)
    return kind(
        config(
            vocab_size=339, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
            intermediate_size=64, max_position_embeddings=256, initializer_range=0.3, **more,
        )
    ).eval()  # fmt: skip

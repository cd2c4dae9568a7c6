"""A model's tokenizer, which is read without the model, and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder. Raises what transformers raises."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer("a word", add_special_tokens=False)  # with wrong settings it fails at its first use
    return tokenizer

"""The words behind a run's token ids, wherever the run keeps its tokenizer.

Reading a run must not depend on the model hub, on a GPU or on seconds of imports: the one file ``tokenizer.json`` is
read, of the newest checkpoint (with verl the run's ``model``), else of the model that the run started from. A run whose
tokenizer is nowhere on this machine is still read, in ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.policy import STARTER

__all__ = ["TokenDecoder", "vocabulary_of"]


class TokenDecoder:
    """Ids to text. ``file`` is a ``tokenizer.json``; None stands for a tokenizer that is not here."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._file))

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of tokens that no text is made of: a role's marker, the end of a turn."""
        if self._file is None:
            return frozenset()
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, what in added.items() if what.special)

    def text(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, markers included; empty where the tokenizer is not here."""
        if self._file is None or not ids:
            return ""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token(self, token_id: int) -> str:
        """One token as a reader wants to see it: its text, or its id where there is none."""
        return self.text([token_id]) or f"#{token_id}"

    def words(self, ids: Sequence[int]) -> list[str]:
        """Each token's part of the text: what it adds to the token before it, which may change how it is written."""
        return [self._after(before, token) for before, token in zip([None, *ids], ids, strict=False)]

    def _word(self, before: int | None, token: int) -> str:
        alone = self.token(token)
        if before is None:
            return alone
        first, both = self.text([before]), self.text([before, token])
        return both[len(first) :] if both.startswith(first) and self else alone

    @cached_property
    def _after(self) -> Callable[[int | None, int], str]:
        return lru_cache(maxsize=1 << 17)(self._word)

    def __bool__(self) -> bool:
        return self._file is not None


def vocabulary_of(run: RunDir) -> TokenDecoder:
    """The vocabulary of ``run``."""
    model = str(run.config().get("model", ""))
    folders = [*reversed(run.checkpoints.paths()), run.path / "model", STARTER if model == "starter" else Path(model)]
    return TokenDecoder(next((folder / "tokenizer.json" for folder in folders if _has(folder)), None))


def _has(folder: Path) -> bool:
    try:
        json.loads((folder / "tokenizer.json").read_bytes())
    except (OSError, ValueError):  # none, or one that a crash cut short
        return False
    return True

"""Decodes a run's token ids with the run's own tokenizer.

Only ``tokenizer.json`` is read: no model hub, GPU or slow import is needed. It comes from the newest checkpoint (with
verl from the run's ``model``), else from the model that the run started from. Without one, ids are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from groundwire.tools.files import read_json
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.policy import STARTER

__all__ = ["TokenDecoder", "token_decoder"]


class TokenDecoder:
    """Token ids to text. ``file`` is a ``tokenizer.json``; without one the decoder is false, and shows ids."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._file))

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of special tokens, such as the start and end of a turn."""
        if self._file is None:
            return frozenset()
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def text(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` with special tokens; empty without a tokenizer."""
        if self._file is None or not ids:
            return ""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token(self, token_id: int) -> str:
        """The text of one token, or ``#id`` if it has none."""
        return self.text([token_id]) or f"#{token_id}"

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds to the token before it, which can change its spelling."""
        return [self._piece(before, token_id) for before, token_id in zip([None, *ids], ids, strict=False)]

    @cached_property
    def _piece(self) -> Callable[[int | None, int], str]:
        return lru_cache(maxsize=1 << 17)(self._decode_piece)

    def _decode_piece(self, before: int | None, token_id: int) -> str:
        if before is None:
            return self.token(token_id)
        first, both = self.text([before]), self.text([before, token_id])
        return both[len(first) :] if both.startswith(first) and self else self.token(token_id)

    def __bool__(self) -> bool:
        return self._file is not None


def token_decoder(run: RunDir) -> TokenDecoder:
    """The decoder for the token ids of ``run``."""
    model = str(run.config().get("model", ""))
    folders = [*reversed(run.checkpoints.paths()), run.path / "model", STARTER if model == "starter" else Path(model)]
    files = (folder / "tokenizer.json" for folder in folders)
    return TokenDecoder(next((file for file in files if _is_json(file)), None))


def _is_json(file: Path) -> bool:
    try:
        read_json(file)
    except (OSError, ValueError):  # missing, or incomplete after a crash
        return False
    return True

"""Decodes a run's token ids with the run's own tokenizer.

Only ``tokenizer.json`` is read: no model hub, GPU or slow import is needed. It comes from the newest checkpoint (with
verl from the run's ``model``), else from the model that the run started from. Without one, ids are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from groundwire.tools.files import read_bytes
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.policy.pretrained.locate import local_folder


class TokenDecoder:
    """Token ids to text with the first readable file of ``files``; without one the decoder is false, and shows ids."""

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._piece = lru_cache(maxsize=1 << 17)(self._decode_piece)

    @cached_property
    def _tokenizer(self) -> Any:
        return next(filter(None, map(_read_tokenizer, self._files)), None)

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of special tokens, such as the start and end of a turn."""
        added = self._tokenizer.get_added_tokens_decoder() if self else {}
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids by their tokens; empty without a tokenizer."""
        return dict(self._tokenizer.get_vocab()) if self else {}

    def text(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` with special tokens; empty without a tokenizer."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if self and ids else ""

    def token(self, token_id: int) -> str:
        """The text of one token, or ``#id`` if it has none."""
        return self.text([token_id]) or f"#{token_id}"

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds to the token before it, which can change its spelling."""
        return [self._piece(before, token_id) for before, token_id in zip([None, *ids], ids, strict=False)]

    def _decode_piece(self, before: int | None, token_id: int) -> str:
        if before is None:
            return self.token(token_id)
        first, both = self.text([before]), self.text([before, token_id])
        return both[len(first) :] if both.startswith(first) and self else self.token(token_id)

    def __bool__(self) -> bool:
        return self._tokenizer is not None


def token_decoder(run: RunDir) -> TokenDecoder:
    """The decoder for the token ids of ``run``."""
    return TokenDecoder(*(folder / "tokenizer.json" for folder in tokenizer_folders(run)))


def tokenizer_folders(run: RunDir) -> list[Path]:
    """The folders that may have the run's tokenizer, the likeliest first."""
    folders = [*reversed(run.checkpoints.paths()), run.path / "model"]
    with suppress(ConfigError):  # the model that the run started from may be gone
        folders += filter(None, [local_folder(run.config().get("model", ""))])
    return folders


def _read_tokenizer(file: Path) -> Any:
    """None for a file that is missing, incomplete after a crash, or of another kind."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(read_bytes(file))
    except BaseException as error:  # tokenizers raises Exception, and PanicException, which is none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return None

"""Which tokens may come next in a constrained reply, computed by llguidance from a grammar and the tokens so far.

The engine masks the logits of all other tokens before the temperature, and training repeats this: the log-probabilities
of both are those of the constrained distribution. llguidance reads tokens as bytes, which :func:`_token_bytes` takes
from the tokenizer's vocabulary; its pre-tokenizer does not matter.

The starter's tokenizer needs more than bytes. Its punctuation may end with a glue character, which is removed together
with the space that begins the next token. So the table of tokens has two further parts: the words as they read after
glue, and each token with glue followed by each letter, because glue is only allowed where a letter may follow.
"""

from __future__ import annotations

import functools
import json
import re
import string
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from torch.nn.functional import pad
from transformers.convert_slow_tokenizer import bytes_to_unicode

from groundwire.train.policy.errors import ChatRequestError, EngineError
from groundwire.train.policy.grammar import to_lark

_GLUE = b"\x1f"
_REMOVES_GLUE = json.dumps({"Regex": "\x1f ?"})
_LETTERS = string.ascii_letters.encode()
_SPACE, _BYTE = "\u2581", re.compile("<0x[0-9A-F]{2}>")  # of SentencePiece


class Constraint:
    """The state of one reply. ``start`` is where its allowed tokens are in the table."""

    def __init__(self, tokens: _TokenTable, matcher: Any) -> None:
        self._tokens, self.matcher, self.start = tokens, matcher, 0

    def consume(self, token: int) -> None:
        """Continue the reply with ``token``. Raises :class:`EngineError` if the grammar does not allow it."""
        tokens, entry = self._tokens, self.start + token
        glued = token in tokens.glued
        if not glued or tokens.table[entry]:  # glue alone adds no text
            self.matcher.consume_token(entry)
        self.start = tokens.count if glued else 0
        if self.matcher.is_error():
            reason = self.matcher.get_error().partition("\n")[0]
            raise EngineError(f"the reply cannot go on with token {token} under its grammar: {reason}")


class Constraints:
    """Compiles grammars for one fast tokenizer, at the first constrained reply. For any thread.

    Of the ``model`` only the settings are used. With ``by_vllm`` the masks are those that vLLM samples with.
    """

    def __init__(self, model: Any, tokenizer: Any, *, by_vllm: bool = False) -> None:
        self.end_tokens = _end_tokens(model, tokenizer)
        """The ids that end a reply."""
        self._tokenizer, self._vocabulary = tokenizer, int(model.config.get_text_config().vocab_size)
        self._by_vllm = by_vllm
        self._compiled = LRUCache[str, Any](maxsize=64)
        self._lock = threading.Lock()

    def start(self, grammar: str) -> Constraint:
        """The constraint of a reply that has no token yet.

        Raises :class:`ChatRequestError` if llguidance cannot read the tokenizer or the grammar.
        """
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                from llguidance import LLMatcher

                matcher = LLMatcher(self._tokens.lookup, to_lark(grammar), log_level=0)
                if matcher.is_error():
                    raise ChatRequestError(f"replies cannot be constrained like this: {matcher.get_error()[:500]}")
                self._compiled[grammar] = matcher
            return Constraint(self._tokens, matcher.deep_copy())

    def allowed(self, constraints: Sequence[Constraint]) -> torch.Tensor:
        """bool [constraints, vocabulary]: the tokens that may come next; at least one in each row."""
        words = self._tokens.empty_masks(len(constraints))
        places = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
        # One call for all rows: each call acquires the interpreter lock once.
        self._tokens.executor.unsafe_compute_mask_ptr(places, words.ctypes.data, words.strides[0], len(words))
        masks = self._tokens.read_masks(words, [constraint.start for constraint in constraints])
        return unpack_masks(masks, self._vocabulary)

    def replay(self, grammar: str, token_ids: Sequence[int]) -> torch.Tensor:
        """The tokens that were allowed in place of each of ``token_ids``: masks for :func:`unpack_masks`.

        Raises :class:`EngineError` if the grammar does not allow one of them.
        """
        constraint, starts = self.start(grammar), []
        words = self._tokens.empty_masks(len(token_ids))
        for row, token in zip(words, token_ids, strict=True):
            constraint.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            starts.append(constraint.start)
            constraint.consume(token)
        masks = self._tokens.read_masks(words, starts)
        return pad(masks, (0, (self._vocabulary + 7) // 8 - masks.shape[1]))

    @functools.cached_property
    def _tokens(self) -> _TokenTable:
        if self._by_vllm:
            return _VllmTokens(self._tokenizer, self._vocabulary)
        return _TokenTable(self._tokenizer, self.end_tokens)


@functools.lru_cache(maxsize=2)  # the JSON of a tokenizer is megabytes
def removes_glue(tokenizer: Any) -> bool:
    """Whether tokens may end with glue, as the starter's."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and _REMOVES_GLUE in json.dumps(json.loads(backend.to_str())["decoder"])


class _TokenTable:
    """The table of tokens that llguidance matches. Empty entries are never allowed."""

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int]) -> None:
        from llguidance import LLExecutor, LLTokenizer, TokenizerWrapper

        self.table, decoder = _token_bytes(tokenizer, end_tokens)
        self.count = len(self.table)
        self.glued: list[int] = []
        if _REMOVES_GLUE in decoder:
            self.glued = [token for token, text in enumerate(self.table) if text.endswith(_GLUE)]
            words = [text.removeprefix(b" ") for text in self.table]
            self.table = [text.removesuffix(_GLUE) for text in self.table]
            self.table += [word if word[:1].isalpha() else b"" for word in words]
            self.table += [self.table[token] + bytes([letter]) for token in self.glued for letter in _LETTERS]
        wrapper = TokenizerWrapper(_ForLLGuidance(self.table, end_tokens))
        self.lookup = LLTokenizer(wrapper, n_vocab=len(self.table), eos_token=sorted(end_tokens))
        self.executor = LLExecutor(1)

    def empty_masks(self, rows: int) -> Any:
        """int32 [rows, words], a bit for each entry of the table."""
        return np.zeros((rows, (len(self.table) + 31) // 32), dtype=np.int32)

    def read_masks(self, words: Any, starts: Sequence[int]) -> torch.Tensor:
        """The tokens of the masks ``words``, uint8 [rows, bytes], read from each row's start in the table on."""
        packed = words.view(np.uint8)
        if self.glued:
            bits = np.unpackbits(packed, axis=1, bitorder="little")
            rows = bits[:, : self.count].copy()
            followed = bits[:, 2 * self.count : len(self.table)].reshape(len(bits), len(self.glued), len(_LETTERS))
            rows[:, self.glued] = followed.any(axis=2)
            for row, start in enumerate(starts):
                if start:
                    rows[row] = bits[row, start : start + self.count]
            packed = np.packbits(rows, axis=1, bitorder="little")
        return torch.from_numpy(packed)


class _VllmTokens(_TokenTable):
    """The table of vLLM (``vllm/v1/structured_output/backend_guidance.py``): only ``eos_token`` ends a reply."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        from llguidance import LLExecutor
        from llguidance.hf import from_tokenizer

        self.count = max(vocabulary, len(tokenizer))
        self.table, self.glued = [b""] * self.count, []
        self.lookup, self.executor = from_tokenizer(tokenizer, self.count), LLExecutor(1)


def unpack_masks(masks: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """bool [rows, vocabulary] of ``masks``, uint8 [rows, bytes] with a bit for each token, on the same device."""
    if masks.device.type == "cpu":  # 20 times as fast as torch
        bits = torch.from_numpy(np.unpackbits(masks.numpy(), axis=1, bitorder="little").view(np.bool_))
    else:
        bits = (masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=masks.device) & 1).flatten(1).bool()
    return pad(bits, (0, vocabulary - bits.shape[1]))


class _ForLLGuidance:
    """What llguidance takes for a tokenizer. Special tokens are those without a text, and those that end a reply."""

    bos_token_id = None

    def __init__(self, table: Sequence[bytes], end_tokens: frozenset[int]) -> None:
        self.eos_token_id = min(end_tokens)
        self.special_token_ids = [i for i, text in enumerate(table) if not text or i in end_tokens]
        special = set(self.special_token_ids)
        self.tokens = [f"<|{i}|>".encode() if i in special else text for i, text in enumerate(table)]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)  # only used to shorten what forced text is shown as, which nothing here does


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    ends: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        ends.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(ends)


def _token_bytes(tokenizer: Any, end_tokens: frozenset[int]) -> tuple[list[bytes], str]:
    """The bytes of each token, none for special ones; and the JSON of the decoder.

    Raises :class:`ChatRequestError` for an unknown kind of decoder.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.dumps(json.loads(backend.to_str())["decoder"]) if backend else "none"
    if '"ByteLevel"' in decoder:
        bytes_of = {character: bytes([byte]) for byte, character in bytes_to_unicode().items()}

        def read(token: str) -> bytes:
            return b"".join(bytes_of.get(character) or character.encode() for character in token)

    elif '"ByteFallback"' in decoder or '"Metaspace"' in decoder:

        def read(token: str) -> bytes:
            if _BYTE.fullmatch(token):
                return bytes([int(token[3:5], 16)])
            return token.replace(_SPACE, " ").encode()

    else:
        raise ChatRequestError(
            "response_format and tool_choice need a byte-level or SentencePiece tokenizer, but this model has a "
            f"{type(tokenizer).__name__} with the decoder {decoder[:200]}",
            param="response_format",
        )
    added = backend.get_added_tokens_decoder()
    table = [b""] * max(backend.get_vocab_size(), *(end + 1 for end in end_tokens))
    for text, token in backend.get_vocab().items():
        if token not in end_tokens and not (token in added and added[token].special):
            table[token] = text.encode() if token in added else read(text)
    return table, decoder

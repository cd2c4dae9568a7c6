"""The log-probabilities that a served model gives to the tokens of a prompt: a teacher's part of distillation."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from groundwire.train.algorithms.token_logprobs import Head, token_logprobs
from groundwire.train.policy.model import bf16_is_faster, load_policy

_TOKENS = 16384  # of rows computed together, with padding


class PromptScores:
    """The log-probabilities of token ids but the first, each after those before it, by the model of a folder.

    The model is read at the first use, beside the engine's, and computes in bfloat16 where the engine does.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._model: Any = None
        self._tokens = _TOKENS
        self._lock, self._waiting = threading.Lock(), deque[tuple[Sequence[int], Future[list[float]]]]()

    def __call__(self, ids: Sequence[int]) -> list[float]:
        """Rows that wait in several threads are computed together."""
        scores = Future[list[float]]()
        self._waiting.append((ids, scores))
        with self._lock:
            while not scores.done():
                self._compute_next()
        return scores.result()

    def _compute_next(self) -> None:
        """The rows that wait longest."""
        batch = [self._waiting.popleft()]
        width = len(batch[0][0])
        while self._waiting and (len(batch) + 1) * max(width, len(self._waiting[0][0])) <= self._tokens:
            batch.append(self._waiting.popleft())
            width = max(width, len(batch[-1][0]))
        try:
            for (_, scores), row in zip(batch, self._compute([ids for ids, _ in batch]), strict=True):
                scores.set_result(row)
        except torch.OutOfMemoryError as error:  # other programs use the GPU, too
            torch.cuda.empty_cache()
            if len(batch) == 1:
                batch[0][1].set_exception(error)
            else:
                self._tokens = len(batch) * width // 2
                self._waiting.extendleft(reversed(batch))
        except BaseException as error:  # each of the waiting threads raises it
            for _, scores in batch:
                if not scores.done():
                    scores.set_exception(error)

    def _compute(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        if self._model is None:
            model = load_policy(self._folder)[0].to(self._device)
            self._model, self._head, self._bf16 = model, Head(model), bf16_is_faster(model)
        lengths = [len(row) - 1 for row in rows]
        width = max(lengths) + 1
        # Padded at their ends, which no token sees.
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self._device)
        scored = torch.arange(width - 1, device=tokens.device) < torch.tensor(lengths, device=tokens.device)[:, None]
        with torch.inference_mode(), torch.autocast(tokens.device.type, torch.bfloat16, enabled=self._bf16):
            hidden = self._model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
            logprobs, _ = token_logprobs(self._head, hidden[scored], tokens[:, 1:][scored])
        return [row.tolist() for row in logprobs.split(lengths)]

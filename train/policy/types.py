"""Requests to the sampling engine and its replies."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Completion", "EngineStats", "Sampling"]


@dataclass(frozen=True)
class Sampling:
    """How a reply is drawn. ``max_tokens`` None means up to the end of the context, which also caps a larger number."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    session: str = ""
    """Whose request it is. Where there are several servers, a session keeps to one and finds its prompt cached."""


@dataclass(frozen=True)
class Completion:
    """A finished reply.

    ``token_ids`` are the sampled ones, the end token included where it was sampled. ``logprobs`` has one for each:
    ``log_softmax(logits / temperature)`` before ``top_p`` (at temperature 0: at temperature 1), natural logarithm.
    ``text`` has no special tokens and ends before the stop string, if one was met. ``cached_tokens`` of the prompt were
    not read again.
    """

    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    weights_version: int
    cached_tokens: int
    first_weights_version: int | None = None
    """Where the weights changed under the reply: those of its first token. ``weights_version`` wrote the last."""


@dataclass
class EngineStats:
    """Sums since the start. ``busy_s`` is the time in which the engine had something to do, in seconds."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    busy_s: float = 0.0

"""The interface between the policy server and the engine that samples for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

OnToken = Callable[[int, float], None]
"""Called with each sampled token id and its log-probability."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. A reply ends at the end of the context, also with a larger ``max_tokens`` or None."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Further ids that end a reply; they are not part of its text."""
    grammar: str = ""
    """What the reply must be (:mod:`groundwire.train.policy.grammar`); "" allows everything."""
    session: str = ""
    """The rollout that sends the request. All requests of a session go to one server, for its prefix cache."""


@dataclass(eq=False)
class Completion:
    """A reply. The engine fills it token by token; whoever asked for it reads it when it is finished."""

    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    """The sampled ids, including the end token if it was sampled."""
    logprobs: list[float] = field(default_factory=list)
    """One per sampled id: ``log_softmax(logits / temperature)`` of the tokens that the grammar allows, before
    ``top_p``; at 0, at temperature 1."""
    text: str = ""
    """Without special tokens, and cut before the stop string if one was sampled."""
    finish_reason: str = ""
    """``stop`` or ``length``; empty while it is sampled."""
    weights_version: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were taken from the prefix cache."""
    first_weights_version: int | None = None
    """If weights may change during a reply: those of its first token; ``weights_version`` is that of its last."""


class Engine(Protocol):
    """Samples replies to token ids: :class:`~groundwire.train.policy.engine.LocalEngine`, or verl's servers."""

    tokenizer: Any
    max_model_len: int
    weights_version: int

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, on_token: OnToken | None = None
    ) -> Future[Completion]:
        """Start a request. Cancelling the future cancels the request; ``on_token`` may be called from any thread.

        Raises errors derived from :class:`~groundwire.adapters.tracing.wire.request.RefusedError`.
        """

    def close(self) -> None:
        """Take no more requests, and end those that have not finished."""

"""Replies from the record of a rollout: what was sampled then, written as it was written then. No model is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.wire.exchange import CANCELLED, CLIENT_GONE
from groundwire.adapters.tracing.wire.request import RefusedError
from groundwire.train.policy.errors import ContextLengthError, EngineError
from groundwire.train.policy.types import Completion, Engine, OnToken, Sampling
from groundwire.train.policy.vllm.sampling import completion

_LEAVES_S = 5.0  # how much longer than in the record an agent may take to leave a stream
_REFUSED = 400


class RecordEngine:
    """The tokenizer of a record, as an engine that samples nothing (:class:`groundwire.train.policy.types.Engine`)."""

    weights_version = 0

    def __init__(self, tokenizer: Any, *, max_model_len: int) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, on_token: OnToken | None = None
    ) -> Future[Completion]:
        """Raises :class:`EngineError`: there is no model."""
        raise EngineError("the record of a rollout samples nothing")

    def close(self) -> None:
        """There is nothing to end."""


def recorded_reply(
    engine: Engine,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    recorded: Sequence[LLMCall],
    choice: int,
    on_token: OnToken | None,
) -> Future[Completion]:
    """The recorded reply of a choice. One that the agent left is not complete before it leaves it again.

    Raises :class:`RefusedError` as the recorded request did.
    """
    call = recorded[min(choice, len(recorded) - 1)]  # a request that failed has one
    future: Future[Completion] = Future()
    left = call.finish_reason == CANCELLED or call.status == CLIENT_GONE
    if call.failed and not left:
        if len(prompt_ids) >= engine.max_model_len:
            raise ContextLengthError(len(prompt_ids), engine.max_model_len)
        raise RefusedError(call.status if call.status >= _REFUSED else 500, call.error)
    if call.response_ids:
        reply = completion(
            engine.tokenizer,
            sampling,
            tuple(call.prompt_ids),
            list(zip(call.response_ids, call.logprobs, strict=True)),
            stopped=False,
            on_token=on_token,
            weights_version=call.weights_version or 0,
            first_weights_version=call.first_weights_version,
            cached_tokens=call.cached_tokens or 0,
        )
        reply.finish_reason = "stop" if call.finish_reason == "tool_calls" else call.finish_reason
    if not left:
        future.set_result(reply)
        return future

    def give_up() -> None:
        if not future.done():
            future.set_exception(EngineError("in the record the agent left this reply here"))

    asyncio.get_running_loop().call_later(call.ended - call.started + _LEAVES_S, give_up)
    return future

"""Spans in a Lightning store: ours are written, and those of Agent Lightning's own tracers are converted to ours.

Agent Lightning traces LLM calls in the runner (AgentOps) or in its LLM proxy (LiteLLM). Where our own proxy traced no
call, these become the same spans, and so the same triplets.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout, Span
from pydantic_core import PydanticSerializationError

from groundwire.adapters.tracing import LLMCall, semconv, to_span
from groundwire.adapters.tracing.sampling import attempt_sampling
from groundwire.adapters.tracing.spans import SpanRecord, SpansRefusedError, span_parts
from groundwire.adapters.tracing.wire.exchange import UNREADABLE, read_reply
from groundwire.tools.secrets import secret_masker
from groundwire.train.store.errors import StoreFailedError
from groundwire.train.store.wire import ENDED, span_fields

__all__ = ["LightningSpanSink", "lightning_span", "with_call_spans"]

_VLLM = "llm.hosted_vllm."
_AGENT_NAMES = (semconv.AGENT, "agent.name", "recipient_agent_type", "langchain.chain.type")


class LightningSpanSink:
    """A :class:`groundwire.adapters.tracing.spans.SpanSink` in front of ``store``."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store

    @cached_property
    def _mask(self) -> Callable[[str], str]:
        """Made with the first span: the proxy registers its API key after it is given this sink."""
        return secret_masker()

    async def sampling_of(self, rollout_id: str, attempt_id: str) -> Mapping[str, Any] | None:
        """The attempt's sampling parameters; None unless it is the rollout's last attempt, and has not ended."""
        rollout = await self._store.get_rollout_by_id(rollout_id)
        is_open = (
            isinstance(rollout, AttemptedRollout)
            and rollout.attempt.attempt_id == attempt_id
            and rollout.status not in ENDED
            and rollout.attempt.status not in ENDED
        )
        if not is_open:
            return None
        return attempt_sampling((rollout.metadata or {}).get("sampling"), rollout.attempt.sequence_id)

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One number for each (rollout id, attempt id), rising within an attempt."""
        with _refusals():
            return await self._store.get_many_span_sequence_ids(attempts)

    async def add_spans(self, spans: Sequence[SpanRecord]) -> None:
        """Store ``spans``; those that are stored already are skipped."""
        for part in span_parts(spans):
            with _refusals():
                await self._store.add_many_spans([lightning_span(span, self._mask) for span in part])


def lightning_span(span: SpanRecord, mask: Callable[[str], str] | None = None) -> Span:
    """``span`` as Agent Lightning stores it, without secrets; ``mask`` is a :func:`secret_masker` for many spans."""
    return Span(**span_fields(span, mask))


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if type(error) not in (ValueError, PydanticSerializationError):
            raise
        # Agent Lightning raises a plain ValueError for an unknown rollout or attempt.
        raise SpansRefusedError(str(error)) from error
    except StoreFailedError as error:  # tried often enough: it must not hold up the rollout until its deadline
        raise SpansRefusedError(str(error)) from error


def with_call_spans(spans: Sequence[Span]) -> list[Any]:
    """``spans`` with those of Agent Lightning's LLM calls in our format.

    If our own proxy traced any call, the spans stay as they are: it traced all of them.
    """
    if any(semconv.PROMPT_IDS in span.attributes for span in spans):
        return list(spans)
    by_id = {span.span_id: span for span in spans}
    return [to_span(_call(span, by_id)) if span.name in _READERS else span for span in spans]


def _call(span: Span, by_id: Mapping[str, Span]) -> LLMCall:
    try:
        reply = _READERS[span.name](span.attributes)
        fields = {**read_reply(reply), "model": str(reply["model"])}
    except (*UNREADABLE, SyntaxError) as error:
        fields = {"error": f"the span cannot be read: {type(error).__name__}: {error}"}
    return LLMCall(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        sequence=span.sequence_id,
        agent=_agent_name(span, by_id),
        started=span.start_time or 0.0,
        ended=span.end_time or 0.0,
        **fields,
    )


def _tracer_reply(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion in a span of the runner-side tracer."""
    choice = {
        "message": {"role": "assistant", "content": attributes.get("gen_ai.completion.0.content")},
        "token_ids": attributes.get("response_token_ids"),
        "logprobs": {"content": json.loads(attributes.get("logprobs.content", "[]"))},
        "finish_reason": attributes.get("gen_ai.completion.0.finish_reason"),
    }
    model, prompt_ids = attributes.get("gen_ai.request.model", ""), attributes.get("prompt_token_ids")
    return {"model": model, "prompt_token_ids": prompt_ids, "choices": [choice]}


def _proxy_reply(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion in a span of the LLM proxy, which writes lists as Python literals."""
    lists = {name: ast.literal_eval(attributes[_VLLM + name]) for name in ("prompt_token_ids", "choices")}
    return {"model": attributes.get(f"{_VLLM}model", ""), **lists}


_READERS = {"openai.chat.completion": _tracer_reply, "raw_gen_ai_request": _proxy_reply}


def _agent_name(span: Span, by_id: Mapping[str, Span]) -> str:
    """The name of the nearest agent among a span and its ancestors."""
    found: Span | None = span
    while found is not None:
        for name in _AGENT_NAMES:
            if value := found.attributes.get(name):
                return str(value)
        found = by_id.get(found.parent_id or "")
    return ""

"""LLM calls that Agent Lightning traced itself, in the runner (AgentOps) or in its LLM proxy (LiteLLM).

Where our own proxy traced no call, these are converted to the same spans, and so to the same triplets.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.types import Span

from groundwire.adapters.tracing import LLMCall, semconv, to_span
from groundwire.adapters.tracing.calls import check_ids, to_json

__all__ = ["with_call_spans"]

_VLLM = "llm.hosted_vllm."
_AGENT_NAMES = (semconv.AGENT, "agent.name", "recipient_agent_type", "langchain.chain.type")


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
        fields = _READERS[span.name](span.attributes)
    except (ValueError, SyntaxError, LookupError, TypeError, AttributeError, OverflowError) as error:
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


def _read_tracer(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": str(attributes.get("gen_ai.request.model", "")),
        "prompt_ids": check_ids(attributes.get("prompt_token_ids", ())),
        "response_ids": check_ids(attributes.get("response_token_ids", ())),
        "logprobs": _logprobs(json.loads(attributes.get("logprobs.content", "[]"))),
        "finish_reason": str(attributes.get("gen_ai.completion.0.finish_reason", "")),
    }


def _read_proxy(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Lists are Python literals there."""
    prompt_ids, choices, messages = (
        ast.literal_eval(str(attributes.get(f"{_VLLM}{name}", "[]")))
        for name in ("prompt_token_ids", "choices", "messages")
    )
    choice = choices[0] if choices else {}
    return {
        "model": str(attributes.get(f"{_VLLM}model", "")),
        "prompt_ids": check_ids(prompt_ids),
        "response_ids": check_ids(choice.get("token_ids") or ()),
        "logprobs": _logprobs((choice.get("logprobs") or {}).get("content") or ()),
        "finish_reason": str(choice.get("finish_reason") or ""),
        "messages_json": to_json(messages),
        "reply_json": to_json(choice.get("message") or {}),
    }


_READERS = {"openai.chat.completion": _read_tracer, "raw_gen_ai_request": _read_proxy}


def _logprobs(content: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(token["logprob"]) for token in content]


def _agent_name(span: Span, by_id: Mapping[str, Span]) -> str:
    """The name of the nearest agent among a span and its ancestors."""
    found: Span | None = span
    while found is not None:
        for name in _AGENT_NAMES:
            if value := found.attributes.get(name):
                return str(value)
        found = by_id.get(found.parent_id or "")
    return ""
